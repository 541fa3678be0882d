// The next token, chosen on the GPU: the largest logit, or a random token as run.c's sampler would
// draw it.
#pragma once
#include "common.cuh"

// ----------------------------------------------------------------------------
// The largest logit

// A logit and its token; index is -1 if any logit seen so far is not finite.
typedef struct {
    float value;
    int index;
} Largest;

static __device__ Largest larger_of(Largest a, Largest b) { // the first of equals
    if (a.index < 0 || b.index < 0) return {0, -1};
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

static __device__ Largest checked_logit(float value, int index) {
    return {value, fabsf(value) < INFINITY ? index : -1};
}

// Returns, in thread 0, the largest of all threads of a block. shared (warps of the block,).
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

// Writes to *best the index of the largest of x (n,), the first of equals, or -1 if any is not
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

// A token's probability relative to the likeliest token's, in units of 2^-MASS_BITS. Sums of whole
// numbers do not depend on their order.
typedef unsigned long long Mass;

enum { SAMPLER_THREADS = 1024, BINS = 1024, MASS_BITS = 40 };

typedef struct {
    const float *logits; // (n,)
    int n;
    float max_logit;
    float scale; // 1 / temperature
} Distribution;

// The probability of a token relative to the likeliest one's.
static __device__ float relative_probability(const Distribution &p, float logit) {
    return expf((logit - p.max_logit) * p.scale);
}

static __device__ Mass to_mass(float probability) {
    return (Mass)(probability * (float)((Mass)1 << MASS_BITS));
}

// Calls use(relative probability) for all tokens, each in one thread of the block. A thread loads
// several logits before it uses the first.
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
    for (int far = 1; far < 32; far *= 2) {
        Mass other = __shfl_sync(ALL_LANES, x, lane >= far ? lane - far : lane);
        x += lane >= far ? other : 0;
    }
    return x;
}

// Returns, in thread i, the sum of x of threads 0 to i. shared (SAMPLER_THREADS / 32,).
static __device__ Mass block_prefix_sum(Mass x, Mass *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_prefix_sum(x);
    __syncthreads(); // all threads have read `shared`
    if (lane == 31) shared[warp] = x;
    __syncthreads();
    for (int i = 0; i < warp; i++) x += shared[i];
    return x;
}

// Finds the relative probability at which the mass of the likeliest tokens first exceeds `target`,
// when they are added from the likeliest down. Returns its bits, and in *above the mass of all
// tokens that are likelier still. Tokens with less mass than min_mass are ignored.
// The bits are found 10 at a time, by a histogram of the masses over their possible values.
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
        uint32_t prefix = found;
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
        if (sum - mine <= target && target < sum)
            found = prefix << 10 | bin, mass_above = sum - mine;
        __syncthreads();
    }
    *above = mass_above;
    return found;
}

// Writes to *token the first token at which the running sum exceeds `target`. The sum is of the
// tokens' masses, or if `bits` is not 0, counts the tokens whose relative probability has these
// bits. Each warp has one range of tokens. shared (SAMPLER_THREADS / 32,).
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
    __syncthreads(); // all threads have read `shared`
    if (lane == 31) shared[warp] = mine;
    __syncthreads();
    for (int i = 0; i < warp; i++) sum += shared[i];
    if (target < sum || target >= sum + shared[warp]) return; // the token is in another range
    for (int i = first; i < end; i += 32) {
        Mass x = term(i + lane), until = sum + warp_prefix_sum(x);
        if (until - x <= target && target < until) *token = i + lane;
        sum = __shfl_sync(ALL_LANES, until, 31);
        if (target < sum) break;
    }
}

// Draws a token as run.c's sampler does: from all tokens, or if topp is in (0, 1), from the fewest
// likeliest ones whose probabilities sum to more than topp. `best` is the token with the largest
// logit; coin in [0, 1). p.max_logit need not be set. Grid: 1; block: SAMPLER_THREADS threads.
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

    // Tokens below this mass cannot be among the likeliest, whatever the others are.
    Mass min_mass = p.n > 1 ? (Mass)((1 - (double)topp) / (p.n - 1) * total) : 0;
    Mass limit = (Mass)((double)topp * total);
    uint32_t bits = find_threshold(p, min_mass, limit, &above, shared);
    // The mass of the likeliest tokens; of those at the threshold, only as many as are needed.
    Mass one = to_mass(__uint_as_float(bits)), kept = above + ((limit - above) / one + 1) * one;
    Mass target = (Mass)((double)coin * kept);
    // The drawn token's relative probability, then which of the tokens that share it.
    bits = find_threshold(p, min_mass, target, &above, shared);
    one = to_mass(__uint_as_float(bits));
    find_token(p, bits, (target - above) / one, token, shared);
}
