// The internal interface between engines (llama.c) and the sampler (sampler.c).
#ifndef LLAMAC_SAMPLER_H
#define LLAMAC_SAMPLER_H

#include "bytes.h"
#include "cpu/kernels.h"

static const char not_finite[] = "the logits are not finite; the weights of the model are broken";

typedef struct {
    float p;
    int token;
} Candidate;

// The memory of the sampler. It belongs to an engine.
typedef struct {
    const Kernels *kernels;
    int vocab_size;
    float *p;              // (vocab_size,) changed logits, then probabilities
    Candidate *candidates; // (vocab_size,)
    int *counts;           // (vocab_size,) occurrences of tokens; all 0 between calls
} SamplerMemory;

// Allocates the memory. Returns false if there is not enough; free it in both cases.
bool llamac_new_sampler_memory(SamplerMemory *, const Kernels *, int vocab_size);
void llamac_free_sampler_memory(SamplerMemory *);

// Fails if a field of the sampler is out of range.
bool llamac_check_sampler(const llamac_sampler *, int vocab_size, Error *);

// Returns whether the sampler takes the most likely token: if the temperature is 0, or so small
// that its reciprocal is infinite.
bool llamac_is_greedy(const llamac_sampler *);

// Returns whether the sampler uses only what Backend.choose supports: temperature, topp and state.
bool llamac_is_plain(const llamac_sampler *);

// Returns a uniform number in [0, 1) and advances the state.
float llamac_random(llamac_sampler *);

// Samples from logits (vocab_size,), which stay unchanged. tokens (n,): the tokens before the
// sampled one, for the penalties. Returns -1 after a failure.
int llamac_draw(const SamplerMemory *, llamac_sampler *, const float *logits, const int *tokens,
                int n, Error *);

#endif
