// The internal interface between sequences (llama.c) and the files that keep them (state.c).
#ifndef LLAMAC_STATE_H
#define LLAMAC_STATE_H

#include "model.h"

// The model and the backend that a saved sequence belongs to.
typedef struct {
    const Model *model; // with its weights in host memory
    Backend *backend;
    int positions; // max tokens of a sequence
} StateOwner;

// A saved sequence that has been checked. It points into the bytes of its file.
typedef struct {
    const int *tokens; // (n,)
    int n;
    const uint8_t *blocks; // the keys and values, see state.c
} SavedState;

// Writes the file of a sequence: n tokens and their keys and values in the cache.
bool llamac_write_state(const char *path, const StateOwner *, const Cache *, const int *tokens,
                        int n, Error *);

// Reads the bytes of a file, to be freed. Reads only the first bytes of a file of another program,
// which llamac_check_state then refuses.
uint8_t *llamac_read_state(const char *path, size_t *size, Error *);

// Checks the bytes of a file, which must be aligned to 4 bytes. Allocates nothing.
bool llamac_check_state(const uint8_t *bytes, size_t size, const StateOwner *, SavedState *,
                        Error *);

// Copies the keys and values to a cache whose first n positions are reserved.
void llamac_restore_cache(const SavedState *, const StateOwner *, Cache *);

#endif
