// A min-heap of 64-bit keys, for the merges of sentencepiece's BPE (tokenizer.c) and of byte-level
// BPE (bpe.c). The upper half of a key is the priority of a merge (the lowest number is merged
// first), the lower half the index of its left part. So of equal priorities the leftmost is first.
#ifndef LLAMAC_HEAP_H
#define LLAMAC_HEAP_H

#include "bytes.h"

typedef struct {
    uint64_t *keys; // the lowest is keys[0]
    int n, capacity;
    bool failed; // there was not enough memory
} Heap;

static inline void push(Heap *h, uint64_t key) {
    if (h->n == h->capacity) {
        int capacity = 2 * h->capacity + 64;
        uint64_t *larger = resize(h->keys, capacity, sizeof *larger);
        if (!larger) {
            h->failed = true;
            return;
        }
        h->keys = larger, h->capacity = capacity;
    }
    int i = h->n++;
    for (; i > 0 && key < h->keys[(i - 1) / 2]; i = (i - 1) / 2) h->keys[i] = h->keys[(i - 1) / 2];
    h->keys[i] = key;
}

// Removes the lowest key and returns it. The heap must not be empty.
static inline uint64_t pop(Heap *h) {
    uint64_t *keys = h->keys, top = keys[0], last = keys[--h->n];
    int i = 0;
    for (int child; (child = 2 * i + 1) < h->n; i = child) {
        if (child + 1 < h->n && keys[child + 1] < keys[child]) child++;
        if (keys[child] >= last) break;
        keys[i] = keys[child];
    }
    keys[i] = last;
    return top;
}

#endif
