// Chooses the next token on the GPU: the one with the largest logit, or a random one, drawn as in
// sampler.c.
#pragma once
#include "common.cuh"

// ----------------------------------------------------------------------------
// The largest logit

// A logit and its token; index is -1 if this logit, or one compared with it, is not finite.
typedef struct {
    float value;
    int index;
} Largest;

// Returns the larger of two logits, or the first of equal ones.
static __device__ Largest larger_of(Largest a, Largest b) {
    if (a.index < 0 || b.index < 0) return {0, -1};
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

static __device__ Largest checked_logit(float value, int index) {
    return {value, fabsf(value) < INFINITY ? index : -1};
}

// Returns, in thread 0, the largest of all threads' `mine`. shared (warps of the block,).
static __device__ Largest block_largest(Largest mine, Largest *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 16; i > 0; i /= 2) {
        float value = __shfl_xor_sync(ALL_LANES, mine.value, i);
        mine = larger_of(mine, {value, __shfl_xor_sync(ALL_LANES, mine.index, i)});
    }
    if (lane == 0) shared[warp] = mine;
    __syncthreads();
    for (int i = 1; i < (int)blockDim.x / 32 && threadIdx.x == 0; i++)
        mine = larger_of(mine, shared[i]);
    return mine;
}

// Writes to *best the index of the largest of x (n,), the first of equal ones, or -1 if any is not
// finite. Grid: 1; block: 1024 threads.
static __global__ void __launch_bounds__(1024) find_largest(int *best, const float *x, int n) {
    __shared__ Largest shared[32];
    Largest mine = {-INFINITY, n};
    for (int i = threadIdx.x; i < n; i += 1024) mine = larger_of(mine, checked_logit(x[i], i));
    mine = block_largest(mine, shared);
    if (threadIdx.x == 0) *best = mine.index;
}

// ----------------------------------------------------------------------------
// Sampling, by one block

// A token's probability relative to the likeliest token's, in units of 2^-MASS_BITS. Threads add
// masses in no fixed order. Sums of integers do not depend on the order, so the same random number
// (coin) always draws the same token.
typedef unsigned long long Mass;

enum { SAMPLER_THREADS = 1024, BINS = 1024, MASS_BITS = 40 };

typedef struct {
    const float *logits; // (n,)
    int n;
    float max_logit;
    float scale; // 1 / temperature
} Distribution;

// Returns the probability of a token relative to the likeliest token's: at most 1.
static __device__ float relative_probability(const Distribution &p, float logit) {
    return expf((logit - p.max_logit) * p.scale);
}

static __device__ Mass to_mass(float probability) {
    return (Mass)(probability * (float)((Mass)1 << MASS_BITS));
}

// Calls use(relative probability) once for each token; each thread of the block takes a part of the
// tokens. A thread loads BATCH logits before it uses the first, so that it waits for memory once.
template <typename F> static __device__ void for_each_token(const Distribution &p, F use) {
    enum { BATCH = 8 };
    for (int i = threadIdx.x; i < p.n; i += BATCH * SAMPLER_THREADS) {
        float logits[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) logits[j] = p.logits[min(i + j * SAMPLER_THREADS, p.n - 1)];
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (i + j * SAMPLER_THREADS < p.n) use(relative_probability(p, logits[j]));
    }
}

// Returns, in lane i, the sum of x of lanes 0 to i.
static __device__ Mass warp_prefix_sum(Mass x) {
    int lane = threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
        Mass other = __shfl_sync(ALL_LANES, x, lane >= step ? lane - step : lane);
        x += lane >= step ? other : 0;
    }
    return x;
}

// Returns, in thread i, the sum of x of threads 0 to i. shared (SAMPLER_THREADS / 32,).
static __device__ Mass block_prefix_sum(Mass x, Mass *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_prefix_sum(x);
    __syncthreads(); // all threads have read `shared` after its last use
    if (lane == 31) shared[warp] = x;
    __syncthreads();
    for (int i = 0; i < warp; i++) x += shared[i];
    return x;
}

// Adds up the masses of the tokens from the likeliest down, and returns the relative probability of
// the token with which the sum first exceeds `target`, as the bits of a float. Writes to *above the
// mass of all tokens that are likelier than that. Ignores tokens with less mass than min_mass.
//
// Uses a radix select instead of a sort: floats from 0 to 1 are ordered as their bits, of which 30
// matter. Each of three rounds finds the next 10 bits, by a histogram of the masses of those tokens
// whose bits begin with the ones found so far.
static __device__ uint32_t find_threshold(const Distribution &p, Mass min_mass, Mass target,
                                          Mass *above, Mass *shared) {
    __shared__ Mass bins[BINS], mass_above;
    __shared__ uint32_t found;
    int me = threadIdx.x;
    __syncthreads(); // all threads have read the results of an earlier call
    if (me == 0) found = 0, mass_above = 0;
    for (int shift = 20; shift >= 0; shift -= 10) {
        bins[me] = 0;
        __syncthreads();
        uint32_t prefix = found; // the bits above the next 10
        Mass before = mass_above;
        for_each_token(p, [&](float probability) {
            uint32_t bits = __float_as_uint(probability);
            Mass mass = to_mass(probability);
            if (mass >= min_mass && mass && bits >> shift >> 10 == prefix)
                atomicAdd(&bins[bits >> shift & (BINS - 1)], mass);
        });
        __syncthreads();
        int bin = BINS - 1 - me; // the likeliest first
        Mass mine = bins[bin], sum = before + block_prefix_sum(mine, shared);
        if (sum - mine <= target && target < sum) // one thread: the sum passes target in its bin
            found = prefix << 10 | bin, mass_above = sum - mine;
        __syncthreads();
    }
    *above = mass_above;
    return found;
}

// Adds up a term for each token, in their order. Writes to *token the token with which the sum
// first exceeds `target`. If `bits` is 0, a token's term is its mass. Otherwise the term is 1 for
// tokens whose relative probability has these bits, and 0 for the others, so *token becomes the
// token with index `target` among those with these bits.
// Each warp adds up one range of tokens. shared (SAMPLER_THREADS / 32,).
static __device__ void find_token(const Distribution &p, uint32_t bits, Mass target, int *token,
                                  Mass *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int range = (p.n + SAMPLER_THREADS - 1) / SAMPLER_THREADS * 32;
    int first = warp * range, end = min(first + range, p.n);
    auto term = [&](int i) {
        float probability = i < end ? relative_probability(p, p.logits[i]) : 0;
        return !bits ? to_mass(probability) : (Mass)(__float_as_uint(probability) == bits);
    };
    Mass mine = 0, sum = 0;
    for (int i = first + lane; i < end; i += 32) mine += term(i);
    mine = warp_prefix_sum(mine);
    __syncthreads(); // all threads have read `shared` after its last use
    if (lane == 31) shared[warp] = mine;
    __syncthreads();
    for (int i = 0; i < warp; i++) sum += shared[i];
    if (target < sum || target >= sum + shared[warp]) return; // the token is in another range
    for (int i = first; i < end; i += 32) {
        Mass x = term(i + lane), sum_with = sum + warp_prefix_sum(x);
        if (sum_with - x <= target && target < sum_with) *token = i + lane;
        sum = __shfl_sync(ALL_LANES, sum_with, 31);
        if (target < sum) break;
    }
}

// Draws a token from the distribution: from all tokens, or if topp is in (0, 1), from the smallest
// set of most likely ones whose probabilities sum to more than topp (top-p, Holtzman 2019). best:
// the token with the largest logit (not -1), also the result if find_token finds none; coin: a
// random number in [0, 1). Sets p.max_logit itself.
// Grid: 1; block: SAMPLER_THREADS threads.
static __global__ void __launch_bounds__(SAMPLER_THREADS)
    sample_token(int *token, Distribution p, int best, float topp, float coin) {
    __shared__ Mass shared[SAMPLER_THREADS / 32], all;
    p.max_logit = p.logits[best];
    Mass total = 0, above;
    for_each_token(p, [&](float probability) { total += to_mass(probability); });
    total = block_prefix_sum(total, shared);
    if (threadIdx.x == SAMPLER_THREADS - 1) all = total, *token = best;
    __syncthreads();
    total = all;
    bool is_truncated = topp > 0 && topp < 1;
    if (!is_truncated) return find_token(p, 0, (Mass)((double)coin * total), token, shared);

    // At most n - 1 tokens have less mass than this, together less than (1 - topp) * total. So the
    // set is complete without them, as in sample_unfiltered of sampler.c.
    Mass min_mass = p.n > 1 ? (Mass)((1 - (double)topp) / (p.n - 1) * total) : 0;
    Mass limit = (Mass)((double)topp * total);
    uint32_t bits = find_threshold(p, min_mass, limit, &above, shared);
    // The mass of the set, which contains only as many as are needed of the tokens that share its
    // smallest probability.
    Mass one = to_mass(__uint_as_float(bits)), kept = above + ((limit - above) / one + 1) * one;
    Mass target = (Mass)((double)coin * kept);
    // Finds the drawn token's relative probability, then the token among those that share it.
    bits = find_threshold(p, min_mass, target, &above, shared);
    one = to_mass(__uint_as_float(bits));
    find_token(p, bits, (target - above) / one, token, shared);
}
