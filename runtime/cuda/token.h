// Decoding in one kernel: its blocks stay for a whole token and meet at barriers of the grid. Part of cuda.cu, whose
// ops do the same one by one.
//
// A token needs every weight once, in an order that is known from the start; only what they multiply has to be waited
// for. So each warp keeps `slots` pieces of weights on their way into its own part of shared memory, over the ends of
// products, attention and barriers as well, and memory never rests (compare Spector et al. 2025, "Look ma, no bubbles").
#pragma once

#ifndef SLOT_UNITS
#define SLOT_UNITS 4
#endif

enum {
    TEAM = WARPS + 1,   // warps of a block: WARPS multiply, and the last, which has no weights on their way, meets the grid
    UNITS = SLOT_UNITS, // 16-byte units that a lane has of a row in a slot
    SLOTS_MAX = 8,      // of a warp
    SLOT = ROWS * UNITS * 32 * sizeof(uint4), // bytes
};

// ---- copies to shared memory that go on by themselves. All lanes of a warp call these together

typedef unsigned long long Arrival; // an mbarrier; the host, which makes room for it, has to take it for as large

#ifndef BULK
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BULK 1
#else
#define BULK 0
#endif
#endif

#if BULK // from Hopper on the copy engine does it, at one lane's call, and reports to a barrier in shared memory

#ifndef CUDA_ON_CPU
static __device__ unsigned in_shared(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

static __device__ void expect_nothing(Arrival *a) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(a)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); // the copy engine has to see it
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ void expect(Arrival *a, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(a)), "r"(bytes) : "memory");
}

static __device__ void copy_bulk(void *to, const void *from, unsigned bytes, Arrival *a) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(in_shared(to)),
                 "l"(from), "r"(bytes), "r"(in_shared(a))
                 : "memory");
}

static __device__ bool has_come(Arrival *a, unsigned round) {
    unsigned done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(in_shared(a)), "r"(round)
                 : "memory");
    return done;
}
#endif

static __device__ void prepare(Arrival *a, int n) {
    for (int i = 0; i < n && threadIdx.x % 32 == 0; i++) expect_nothing(&a[i]);
    __syncwarp();
}

// Sends for `units` of each of two rows.
static __device__ void send(Arrival *a, uint4 *slot, const uint4 *row0, const uint4 *row1, int units) {
    __syncwarp(); // all have read what lay there
    if (threadIdx.x % 32 || !units) return;
    expect(a, 2 * units * sizeof(uint4));
    copy_bulk(slot, row0, units * sizeof(uint4), a);
    copy_bulk(slot + UNITS * 32, row1, units * sizeof(uint4), a);
}

// Waits for what was sent for in this round, even or odd, of the slots.
static __device__ void await(Arrival *a, unsigned round, int) {
    while (!has_come(a, round)) {}
}

#else // a lane copies for itself what it will read, and waits in the order of its calls

static __device__ void prepare(Arrival *, int) {}

static __device__ void send(Arrival *, uint4 *slot, const uint4 *row0, const uint4 *row1, int units) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        int unit = 32 * u + threadIdx.x % 32;
        if (unit >= units) break;
        __pipeline_memcpy_async(slot + unit, row0 + unit, sizeof(uint4));
        __pipeline_memcpy_async(slot + UNITS * 32 + unit, row1 + unit, sizeof(uint4));
    }
    __pipeline_commit();
}

static __device__ void await(Arrival *, unsigned, int slots) {
    __pipeline_wait_prior(slots - 1);
    __syncwarp(); // else the compiler may read the slot before
}
#endif

// ----

// The products of a layer, and the last one.
enum { QKV, OUT, GATE, DOWN, LOGITS, ROLES };

// A product, in pairs of rows: rows 2 i and 2 i + 1; of GATE, row i of w1 and of w3. Pointers are those of layer 0.
typedef struct {
    Mat w;                     // of QKV the rows of q, k and v, of GATE those of w1 and w3, as one matrix
    int units, pieces;         // of a row; pieces of 32 * UNITS of them at most
    int between;               // units from a pair's first row to the next pair's
    size_t apart;              // units from a pair's first row to its second
    int share, rest;           // pairs of each block, and how many blocks have one more
    int hop_pairs, hop_pieces; // from a piece to the one WARPS further on
    const float *norm;         // (cols,) weights of the RMSNorm before it, NULL where there is none
} Job;

typedef struct { size_t numbers, scales, cache; } Stride; // bytes from one layer to the next

typedef struct {
    Job jobs[ROLES];
    int n_layers, slots;
    Stride stride;
    Mat table;                   // token embedding
    Cache cache;
    int splits;                  // most blocks that share a head
    const float2 *rotation;
    float norm_eps;
    float *x, *q, *attended, *h; // (dim,), (dim,), (dim,), (hidden_dim,)
    float *pieces;               // of attention, where blocks share a head
    float *logits;               // (vocab_size,)
    Largest *largest;            // (gridDim.x,)
    int *best;                   // in the host's memory: index of the largest logit; -1 if one is not finite
    unsigned *arrived;           // at the grid's barrier
    int desk;                    // floats of xs, or of a Desk where that is larger
    int products;                // floats that a block's products of a job need at most
} Token;

// A block's shared memory, one after another.
typedef struct {
    uint4 *slots;      // (WARPS, slots, ROWS, UNITS, 32)
    float *xs;         // what a job multiplies, padded; a Desk in attention
    float *products;   // (pairs, pieces, 2) of the job
    float *sums;       // (TEAM,) of the squares of x; in the end each warp's Largest
    Arrival *arrivals; // (WARPS, slots)
} Shared;

static size_t shared_of(const Token &t) {
    return (size_t)t.slots * WARPS * (SLOT + sizeof(Arrival)) + sizeof(float) * (t.desk + t.products + 2 * TEAM);
}

// Asks for a line of 128 bytes to be brought from memory to the second-level cache.
static __device__ void prefetch(const void *line) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#else
    (void)line;
#endif
}

// All blocks meet; what they wrote before is seen by all after. Only one block's number differs from 1, such that the
// top bit of the sum turns when all have come (after CUDA's cooperative groups). The grid has to be on the GPU as a whole.
static __device__ void meet_grid(unsigned *arrived) {
    __syncthreads();
    if (threadIdx.x == 32 * WARPS) {
        __threadfence();
        unsigned before = atomicAdd(arrived, blockIdx.x ? 1u : 0x80000000u - (gridDim.x - 1));
        while (((before ^ *(volatile unsigned *)arrived) & 0x80000000u) == 0) __nanosleep(20);
        __threadfence();
    }
    __syncthreads();
}

// Where a warp is on its way through the products: it takes every WARPS-th piece of its block's share of all of them.
// Blocks that have one pair more than others take turns at it.
struct Cursor {
    int step;        // 4 * layer + role
    int role, layer; // layer 0 for LOGITS
    int first, n;    // pairs of this product that are the block's
    int pair, piece; // of those, and of its rows
    int turn;        // first block that has a pair more in the next product

    __device__ bool ended(const Token &t) const { return step > 4 * t.n_layers; }

    __device__ void enter(const Token &t, int next) {
        bool last = next >= 4 * t.n_layers;
        step = next, role = last ? LOGITS : next % 4, layer = last ? 0 : next / 4;
        const Job &job = t.jobs[role];
        int place = (int)blockIdx.x - turn, blocks = gridDim.x;
        if (place < 0) place += blocks;
        first = place * job.share + min(place, job.rest);
        n = job.share + (place < job.rest);
        turn += job.rest;
        if (turn >= blocks) turn -= blocks;
    }

    // To the piece that is so many pairs and pieces further on
    __device__ void advance(const Token &t, int pairs, int pieces) {
        pair += pairs, piece += pieces;
        if (piece >= t.jobs[role].pieces) piece -= t.jobs[role].pieces, pair++;
        while (!ended(t) && pair >= n) {
            int over = (pair - n) * t.jobs[role].pieces + piece;
            enter(t, step + 1);
            pair = over / t.jobs[role].pieces, piece = over % t.jobs[role].pieces;
        }
    }

    __device__ void next(const Token &t) { advance(t, t.jobs[role].hop_pairs, t.jobs[role].hop_pieces); }

    // The piece's first unit, of all rows; and how many follow to the end of the row. Where the number of rows is odd, the
    // last pair's second row is what lies behind, which the product of is not used
    __device__ size_t unit(const Job &job) const { return (size_t)(first + pair) * job.between + piece * 32 * UNITS; }
    __device__ int left(const Job &job) const { return job.units - piece * 32 * UNITS; }
};

// Sends for the weights at the cursor.
static __device__ void fetch(const Token &t, const Cursor &at, uint4 *slot, Arrival *arrival) {
    if (at.ended(t)) return send(arrival, NULL, NULL, NULL, 0);
    const Job &job = t.jobs[at.role];
    const uint4 *row = (const uint4 *)((const char *)job.w.data + at.layer * t.stride.numbers) + at.unit(job);
    send(arrival, slot, row, row + job.apart, min(at.left(job), 32 * UNITS));
}

// The scales of the weights at a cursor. They are too small to be sent for, and are loaded one piece ahead.
template <typename Scale> struct Scales {
    Scale of[UNITS][ROWS];

    template <Type type> __device__ void load(const Token &t, const Cursor &at) {
        if (at.ended(t)) return;
        const Job &job = t.jobs[at.role];
        int lane = threadIdx.x % 32, left = at.left(job);
        Mat w = job.w;
        w.scales = (const char *)w.scales + at.layer * t.stride.scales;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                size_t unit = at.unit(job) + r * job.apart + 32 * u + lane;
                if (32 * u + lane < left) of[u][r] = Format<type>::scale_at(w, unit * Format<type>::N);
            }
        }
    }
};

// The scales at a cursor, wherever it is: the matrix of the logits may be of another type than those of layers.
template <Type type, Type last, typename Scale>
static __device__ void load_scales(Scales<Scale> &scales, const Token &t, const Cursor &at) {
    if (type != last && at.role == LOGITS) scales.template load<last>(t, at);
    else scales.template load<type>(t, at);
}

// Adds up each lane's part of the product of a slot, of which `left` units are there, with the lane's first numbers x of
// xs. Where it is a whole one there are no branches between the loads.
template <Type type, bool whole>
static __device__ void multiply_slot(const uint4 *slot, const Scales<typename Format<type>::Scale> &scales, const float *x,
                                     int left, float sum[ROWS]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (!whole && 32 * u + lane >= left) break;
        typename Format<type>::Unit units[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) units[r] = Format<type>::unit(slot[(r * UNITS + u) * 32 + lane], scales.of[u][r]);
        multiply_units<type>(units, x + u * padded(32 * Format<type>::N), sum);
    }
}

template <Type type>
static __device__ void multiply_piece(const Job &job, const Cursor &at, const uint4 *slot,
                                      const Scales<typename Format<type>::Scale> &scales, const float *xs, float sum[ROWS]) {
    const int N = Format<type>::N;
    const float *x = xs + padded(threadIdx.x % 32 * N) + at.piece * padded(32 * UNITS * N);
    int left = at.left(job);
    if (left >= 32 * UNITS) multiply_slot<type, true>(slot, scales, x, left, sum);
    else multiply_slot<type, false>(slot, scales, x, left, sum);
}

// The warp's sum of a, for its lower half; of b, for its upper half.
static __device__ float half_warp_sums(float a, float b) {
    bool upper = threadIdx.x & 16;
    float x = (upper ? b : a) + __shfl_xor_sync(ALL_LANES, upper ? a : b, 16, 32);
    for (int i = 8; i > 0; i /= 2) x += __shfl_xor_sync(ALL_LANES, x, i, 32);
    return x;
}

// Brings what the job multiplies to shared memory. Where an RMSNorm comes first, its weights are in it and sums are those
// of the squares; the norm's own factor is left to the products.
static __device__ void load_x(const Token &t, const Cursor &at, int splits, const Shared &s) {
    enum { AT_ONCE = 4 }; // loads under way
    const float4 none = {0, 0, 0, 0}, one = {1, 1, 1, 1};
    int cols = t.jobs[at.role].w.cols, step = 32 * TEAM, head_dim = t.cache.head_dim;
    const float4 *from = (const float4 *)(at.role == OUT ? t.attended : at.role == DOWN ? t.h : t.x);
    const float4 *norm = (const float4 *)t.jobs[at.role].norm;
    if (norm) norm = (const float4 *)((const char *)norm + at.layer * t.stride.numbers);
    float4 x[AT_ONCE], w[AT_ONCE];
    float sum = 0;
    bool in_pieces = at.role == OUT && splits > 1;
    for (int i = threadIdx.x; in_pieces && i < cols; i += step)
        s.xs[padded(i)] = merge_pieces(t.pieces, i / head_dim, splits, i % head_dim);
    for (int i = threadIdx.x; !in_pieces && 4 * i < cols; i += AT_ONCE * step) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            bool there = 4 * (i + j * step) < cols;
            x[j] = there ? from[i + j * step] : none;
            w[j] = there && norm ? norm[i + j * step] : one;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            float4 y = {x[j].x * w[j].x, x[j].y * w[j].y, x[j].z * w[j].z, x[j].w * w[j].w};
            if (4 * (i + j * step) < cols) *(float4 *)(s.xs + padded(4 * (i + j * step))) = y;
            sum += x[j].x * x[j].x + x[j].y * x[j].y + x[j].z * x[j].z + x[j].w * x[j].w;
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = sum;
}

// Has what the step after this one needs besides weights brought nearer: an RMSNorm's weights, and the keys and values of
// the head that this block attends to first.
static __device__ void prefetch_for_next(const Token &t, const Cursor &at, const Cache &cache, int n) {
    Cursor next = {};
    next.enter(t, at.step + 1);
    const char *norm = next.ended(t) ? NULL : (const char *)t.jobs[next.role].norm;
    size_t bytes = sizeof(float) * t.jobs[LOGITS].w.cols, line = threadIdx.x * gridDim.x + blockIdx.x;
    if (norm && 128 * line < bytes) prefetch(norm + next.layer * t.stride.numbers + 128 * line); // all of it, by all blocks
    int h = blockIdx.x;
    if (at.role != QKV || h >= cache.n_heads) return;
    size_t head = (size_t)(h / (cache.n_heads / cache.n_kv_heads)) * cache.positions;
    size_t width = t.stride.cache / ((size_t)cache.n_kv_heads * cache.positions); // bytes
    for (size_t i = 128 * threadIdx.x; i < n * width; i += 128 * 32 * TEAM) {
        prefetch((const char *)cache.keys + head * width + i);
        prefetch((const char *)cache.values + head * width + i);
    }
}

// What becomes of the products a and b of a pair.
template <typename Number>
static __device__ Largest use_pair(const Token &t, int role, const Cache &cache, int pos, int pair, float a, float b) {
    Largest found = {-INFINITY, 0x7fffffff};
    int i = 2 * pair, head_dim = cache.head_dim, dim = cache.n_heads * head_dim, kv_dim = cache.n_kv_heads * head_dim;
    if (role == QKV) {
        bool is_q = i < dim, is_k = !is_q && i < dim + kv_dim;
        if (!is_q) i -= is_k ? dim : dim + kv_dim;
        if (is_q || is_k) turn(a, b, t.rotation[(size_t)pos * (head_dim / 2) + i % head_dim / 2]);
        if (is_q) put_pair(t.q + i, a, b);
        else put_pair((Number *)(is_k ? cache.keys : cache.values) + place_in_cache(cache, i, pos), a, b);
    } else if (role == GATE) {
        t.h[pair] = a / (1 + expf(-a)) * b;
    } else if (role == LOGITS) {
        bool two = i + 1 < t.jobs[LOGITS].w.rows;
        t.logits[i] = a;
        if (two) t.logits[i + 1] = b;
        found = finite(a, i);
        if (two) found = larger(found, finite(b, i + 1));
    } else { // dim is even, for head_dim is
        t.x[i] += a;
        t.x[i + 1] += b;
    }
    return found;
}

static __device__ float norm_scale(const Token &t, int dim, const float *sums) {
    float sum = 0;
    for (int i = 0; i < TEAM; i++) sum += sums[i];
    return 1 / sqrtf(sum / dim + t.norm_eps);
}

// Attention of all heads; a head's piece of positions by each block.
template <typename Number> static __device__ void attend_heads(const Token &t, const Cache &cache, int splits, int n, Desk *desk) {
    for (int i = blockIdx.x; i < cache.n_heads * splits; i += gridDim.x) {
        int h = i / splits, split = i % splits, d = threadIdx.x;
        Whole w = attend_head<Number, 4>(cache, t.q, h, split, splits, n, desk);
        if (d < cache.head_dim && splits > 1) leave_piece(t.pieces, h, split, splits, d, w);
        if (d < cache.head_dim && splits == 1) t.attended[h * cache.head_dim + d] = w.out / w.sum;
    }
}

// One token through the model, from its embedding to its logits and the largest of them. The grid has a block for each
// multiprocessor. The matrices of layers are of one type and lie alike in all of them; that of the logits is of type `last`.
template <Type type, Type last, typename Number>
static __global__ void __launch_bounds__(32 * TEAM, 1) whole_token(const __grid_constant__ Token t, int token, int pos) {
    LAUNCH_SHARED(start);
    Shared s;
    s.slots = (uint4 *)start;
    s.xs = start + (size_t)t.slots * WARPS * SLOT / sizeof(float);
    s.products = s.xs + t.desk;
    s.sums = s.products + t.products;
    s.arrivals = (Arrival *)(s.sums + 2 * TEAM);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = 0;
    unsigned round = 0; // of the slots, even or odd
    uint4 *slots = s.slots + (size_t)warp * t.slots * (SLOT / sizeof(uint4));
    Arrival *arrivals = s.arrivals + warp * t.slots;
    int n = pos + 1, splits = gridDim.x / t.cache.n_heads, most = (n + 32 * WARPS - 1) / (32 * WARPS);
    splits = max(1, min(min(splits, most), t.splits)); // one, until positions are more than a block's tiles

    Cursor now = {}, ahead;
    now.enter(t, 0);
    now.advance(t, warp / t.jobs[QKV].pieces, warp % t.jobs[QKV].pieces);
    if (warp == WARPS) now.step = 4 * t.n_layers + 1; // nothing to multiply
    ahead = now;
    if (warp < WARPS) prepare(arrivals, t.slots);
    for (int i = 0; i < t.slots; i++) {
        fetch(t, ahead, slots + i * (SLOT / sizeof(uint4)), &arrivals[i]);
        ahead.next(t);
    }
    Scales<typename Format<type>::Scale> scales;
    load_scales<type, last>(scales, t, now);
    for (int i = threadIdx.x; i < t.table.cols; i += 32 * TEAM) // every block writes the same
        *(volatile float *)&t.x[i] = number_at(t.table, (size_t)token * t.table.cols + i);
    __syncthreads();

    Largest largest = {-INFINITY, 0x7fffffff};
    Cursor at = {}; // the block's; a warp's may be ahead of it
    for (at.enter(t, 0); !at.ended(t); at.enter(t, at.step + 1)) {
        const Job &job = t.jobs[at.role];
        size_t cached = at.step / 4 * t.stride.cache;
        Cache cache = t.cache;
        cache.keys = (char *)cache.keys + cached, cache.values = (char *)cache.values + cached;
        if (at.role == OUT) {
            attend_heads<Number>(t, cache, splits, n, (Desk *)s.xs);
            meet_grid(t.arrived);
        }
        load_x(t, at, splits, s);
        prefetch_for_next(t, at, cache, n);
        __syncthreads();
        while (now.step == at.step) {
            Cursor then = now;
            Scales<typename Format<type>::Scale> following;
            float sum[ROWS] = {0};
            then.next(t);
            load_scales<type, last>(following, t, then);
            uint4 *from = slots + slot * (SLOT / sizeof(uint4));
            await(&arrivals[slot], round, t.slots);
            if (type != last && now.role == LOGITS) multiply_piece<last>(job, now, from, scales, s.xs, sum);
            else multiply_piece<type>(job, now, from, scales, s.xs, sum);
            float y = half_warp_sums(sum[0], sum[1]);
            if (lane % 16 == 0) s.products[2 * (now.pair * job.pieces + now.piece) + lane / 16] = y;
            fetch(t, ahead, from, &arrivals[slot]);
            ahead.next(t);
            now = then, scales = following;
            if (++slot == t.slots) slot = 0, round ^= 1;
        }
        __syncthreads();
        float scale = job.norm ? norm_scale(t, job.w.cols, s.sums) : 1;
        for (int i = threadIdx.x; i < at.n; i += 32 * TEAM) {
            float a = 0, b = 0;
            for (int j = i * job.pieces; j < (i + 1) * job.pieces; j++) a += s.products[2 * j], b += s.products[2 * j + 1];
            largest = larger(largest, use_pair<Number>(t, at.role, cache, pos, at.first + i, scale * a, scale * b));
        }
        if (at.role != LOGITS) meet_grid(t.arrived);
    }
    __syncthreads();
    largest = block_largest(largest, (Largest *)s.sums);
    if (threadIdx.x == 0) t.largest[blockIdx.x] = largest;
    meet_grid(t.arrived);
    if (blockIdx.x) return;
    largest = {-INFINITY, 0x7fffffff};
    for (int i = threadIdx.x; i < (int)gridDim.x; i += 32 * TEAM) largest = larger(largest, t.largest[i]);
    largest = block_largest(largest, (Largest *)s.sums);
    if (threadIdx.x == 0) *t.best = largest.index;
}
