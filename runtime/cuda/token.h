// Decoding in one kernel: its blocks stay for a whole token and meet at barriers of the grid. Part of cuda.cu, whose
// ops do the same one by one.
//
// A token needs every weight once, in an order that is known from the start; only what they multiply has to be waited
// for. So each warp keeps `slots` pieces of weights on their way into its own part of shared memory, over the ends of
// products, attention and barriers as well, and memory never rests (compare Spector et al. 2025, "Look ma, no bubbles").
#pragma once

enum {
    TEAM = WARPS + 1,    // warps of a block: WARPS multiply, and the last, which has no weights on their way, meets the grid
    OCTET = 8,           // rows that a warp multiplies together
    SPAN = 512,         // bytes of each of them in a slot, but for a row's end
    SLOTS_MAX = 8,       // of a warp
    SLOT = OCTET * (SPAN + 64), // bytes, for the widest of Lane::APART
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

// Sends for `bytes` of a row, each of the first lanes for its own; they come to lie `apart` bytes from each other.
static __device__ void send(Arrival *a, char *slot, const char *row, int bytes, int apart) {
    int lane = threadIdx.x % 32;
    if (lane == 0 && bytes) expect(a, OCTET * bytes);
    __syncwarp(); // that, and all have read what lay there
    if (lane < OCTET && bytes) copy_bulk(slot + lane * apart, row, bytes, a);
}

// Waits for what was sent for in this round, even or odd, of the slots.
static __device__ void await(Arrival *a, unsigned round, int) {
    while (!has_come(a, round)) {}
}

#else // lanes copy together, and each waits for its own part in the order of its calls

static __device__ void prepare(Arrival *, int) {}

static __device__ void send(Arrival *, char *slot, const char *row, int bytes, int apart) {
    int at = threadIdx.x % 32 * sizeof(uint4);
    __syncwarp(); // all have read what lay there
#pragma unroll
    for (int r = 0; r < OCTET; r++) {
        const char *from = (const char *)__shfl_sync(ALL_LANES, (unsigned long long)row, r, 32);
        if (at < bytes) __pipeline_memcpy_async(slot + r * apart + at, from + at, sizeof(uint4));
    }
    __pipeline_commit();
}

static __device__ void await(Arrival *, unsigned, int slots) {
    __pipeline_wait_prior(slots - 1);
    __syncwarp(); // for the others' parts
}
#endif

// ----

// The products of a layer, and the last one.
enum { QKV, OUT, GATE, DOWN, LOGITS, ROLES };

// A product, by groups of 8 rows; of GATE, 4 of w1 and the same 4 of w3. Pointers are those of layer 0.
typedef struct {
    Mat w;                      // of QKV the rows of q, k and v, of GATE those of w1 and w3, as one matrix
    int row_bytes, pieces;      // of a row; pieces of SPAN bytes at most
    int apart;                  // bytes from a row to the next in a slot
    int share, rest;            // groups of each block, and how many blocks have one more
    int hop_groups, hop_pieces; // from a piece to the one WARPS further on
    const float *norm;          // (cols,) weights of the RMSNorm before it, NULL where there is none
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
    char *slots;       // (WARPS, slots, SLOT)
    float *xs;         // what a job multiplies, as its Lane takes it; a Desk in attention
    float *products;   // (groups, pieces, 8) of the job
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

// Adds n to *arrived after all that this thread has seen or written, which whoever reads the sum by `arrivals` sees after.
static __device__ void arrive(unsigned *arrived, unsigned n) {
#ifdef __CUDA_ARCH__
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(arrived), "r"(n) : "memory");
#else
    __threadfence();
    atomicAdd(arrived, n);
#endif
}

static __device__ unsigned arrivals(unsigned *arrived) {
    unsigned n;
#ifdef __CUDA_ARCH__
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(arrived) : "memory");
#else
    __nanosleep(20);
    n = *(volatile unsigned *)arrived;
    __threadfence();
#endif
    return n;
}

enum { MET = 0x80000000u }; // the bit that turns whenever all blocks have met

// All blocks meet; what they wrote before is seen by all after. Only one block's number differs from 1, such that the
// top bit of the sum turns when all have come (after CUDA's cooperative groups). `before` is that bit, for the last warp's
// first lane. The grid has to be on the GPU as a whole.
static __device__ void meet_grid(unsigned *arrived, unsigned &before) {
    __syncthreads();
    if (threadIdx.x == 32 * WARPS) {
        arrive(arrived, blockIdx.x ? 1u : MET - (gridDim.x - 1));
        while (((before ^ arrivals(arrived)) & MET) == 0) {}
        before ^= MET;
    }
    __syncthreads();
}

// Where a warp is on its way through the products: it takes every WARPS-th piece of its block's share of all of them.
// Blocks that have one pair more than others take turns at it.
struct Cursor {
    int step;        // 4 * layer + role
    int role, layer; // layer 0 for LOGITS
    int first, n;    // groups of this product that are the block's
    int group, piece; // of those, and of its rows
    int turn;        // first block that has a group more in the next product

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

    // To the piece that is so many groups and pieces further on
    __device__ void advance(const Token &t, int groups, int pieces) {
        group += groups, piece += pieces;
        if (piece >= t.jobs[role].pieces) piece -= t.jobs[role].pieces, group++;
        while (!ended(t) && group >= n) {
            int over = (group - n) * t.jobs[role].pieces + piece;
            enter(t, step + 1);
            group = over / t.jobs[role].pieces, piece = over % t.jobs[role].pieces;
        }
    }

    __device__ void next(const Token &t) { advance(t, t.jobs[role].hop_groups, t.jobs[role].hop_pieces); }

    // Row r of 8; behind the last one it is that again, whose product is not used
    __device__ int row(const Job &job, int r) const {
        int g = first + group, half = job.w.rows / 2;
        return role != GATE ? min(OCTET * g + r, job.w.rows - 1) : min(OCTET / 2 * g + r % 4, half - 1) + (r < 4 ? 0 : half);
    }
    // Bytes of the piece in a row
    __device__ int left(const Job &job) const { return min(job.row_bytes - piece * SPAN, (int)SPAN); }
};

// Sends for the weights at the cursor.
static __device__ void fetch(const Token &t, const Cursor &at, char *slot, Arrival *arrival) {
    if (at.ended(t)) return send(arrival, NULL, NULL, 0, 0);
    const Job &job = t.jobs[at.role];
    const char *layer = (const char *)job.w.data + at.layer * t.stride.numbers;
    const char *row = layer + (size_t)at.row(job, threadIdx.x % OCTET) * job.row_bytes + at.piece * SPAN;
    send(arrival, slot, row, at.left(job), job.apart);
}

// ---- what a warp does with a piece: 8 rows by up to 512 bytes. Lane 4 r + q reads a quarter of each step of row r

// Of the tensor cores' product of 16 by 16 and 16 by 8 numbers, d += a b, of which 8 rows of a are 0: lane 4 i + q has numbers
// 2 q and 2 q + 1, and those 8 further on, of row i of a and of column i of b, and columns 2 q and 2 q + 1 of row i of d.
template <bool bf16> static __device__ void multiply_parts(float d[2], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
#ifdef CUDA_ON_CPU
    tensor_product<bf16>(d, a0, a1, b0, b1);
#elif __CUDA_ARCH__ >= 800
    float none[2]; // rows 8 to 15 of d
    if (bf16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %9, %9};"
            : "+f"(d[0]), "+f"(d[1]), "=f"(none[0]), "=f"(none[1])
            : "r"(a0), "r"(0), "r"(a1), "r"(b0), "r"(b1), "f"(0.0f));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %9, %9};"
            : "+f"(d[0]), "+f"(d[1]), "=f"(none[0]), "=f"(none[1])
            : "r"(a0), "r"(0), "r"(a1), "r"(b0), "r"(b1), "f"(0.0f));
#endif
}

static __device__ uint32_t bits_of(__half2 pair) { return *(uint32_t *)&pair; }

// x as parts in 16 bits that a tensor core multiplies one beside the other: what of a part is lost, the next one has.
template <bool bf16> struct Split;

template <> struct Split<true> { // exact, but for the tiniest numbers
    enum { PARTS = 3 };
    static __device__ float weight(int part) { return part < PARTS; }
    static __device__ void of(float x, uint16_t *parts) {
        for (int p = 0; p < PARTS; p++) {
            parts[p] = __float_as_uint(x) >> 16;
            x -= __uint_as_float((uint32_t)parts[p] << 16); // not a number, if x is not finite
        }
    }
};

template <> struct Split<false> { // 22 bits, up to 4 million
    enum { PARTS = 2 };
    static __device__ float weight(int part) { return part == 0 ? 64 : part == 1 ? 64 / 2048.0f : 0; }
    static __device__ void of(float x, uint16_t *parts) {
        __half high = to_half(x / 64), low = to_half((x / 64 - __half2float(high)) * 2048);
        memcpy(&parts[0], &high, 2), memcpy(&parts[1], &low, 2);
    }
};

// Numbers from one part of x to the next, of cols: parts begin in different banks.
static __host__ __device__ int part_of(int cols) { return cols % 64 ? cols : cols + 32; }

// Four bytes as two pairs in half precision, less `zero`. A byte under 1024 in half precision is that plus the byte.
static __device__ void bytes_to_halves(uint32_t word, float zero, uint32_t *pairs) {
    __half2 offset = __floats2half2_rn(1024 + zero, 1024 + zero);
    for (int i = 0; i < 2; i++) {
        uint32_t bits = __byte_perm(word, 0x64646464u, i ? 0x4342 : 0x4140);
        pairs[i] = bits_of(__hsub2(*(__half2 *)&bits, offset));
    }
}

// A Lane is what one lane does, by the type of the weights. Of a step it reads BYTES of its row, and the numbers x that they
// belong to; `apart` are the bytes between rows in a slot such that lanes read from different banks.
template <Type type> struct Lane;

template <bool bf16> struct Sixteen { // bits
    enum { STEP = 64, APART = SPAN + 64, BLOCKS = 0 };
    typedef Split<bf16> Parts;
    static __device__ void multiply(const char *row, const uint16_t *x, bool has_x, int j, const uint32_t *, float y[2][2]) {
        int q = threadIdx.x % 4;
        uint4 w = *(const uint4 *)(row + STEP * j + 16 * q), a = {0, 0, 0, 0};
        if (has_x) a = *(const uint4 *)(x + 32 * j + 8 * q);
        multiply_parts<bf16>(y[0], a.x, a.y, w.x, w.y);
        multiply_parts<bf16>(y[1], a.z, a.w, w.z, w.w);
    }
};
template <> struct Lane<BF16> : Sixteen<true> {};
template <> struct Lane<F16> : Sixteen<false> {};

// The scales of block j of rows 2 q and 2 q + 1, which lanes 8 q and the next, 8 q + 4 and the next have, BLOCKS / 4 each.
template <int BLOCKS> static __device__ float2 scales_of(const uint32_t *scales, int j) {
    const int EACH = BLOCKS / 4;
    int q = threadIdx.x % 4, lane = 8 * q + j / EACH;
    uint32_t pairs[2] = {__shfl_sync(ALL_LANES, scales[j % EACH / 2], lane, 32),
                         __shfl_sync(ALL_LANES, scales[j % EACH / 2], lane + 4, 32)};
    float2 a = __half22float2(*(__half2 *)&pairs[0]), b = __half22float2(*(__half2 *)&pairs[1]);
    return j % 2 ? make_float2(a.y, b.y) : make_float2(a.x, b.x);
}

template <> struct Lane<Q8_0> {
    enum { STEP = 32, APART = SPAN + 32, BLOCKS = SPAN / STEP };
    typedef Split<false> Parts;
    static __device__ void multiply(const char *row, const uint16_t *x, bool has_x, int j, const uint32_t *scales, float y[2][2]) {
        int q = threadIdx.x % 4;
        uint2 w = *(const uint2 *)(row + STEP * j + 8 * q);
        uint4 a = {0, 0, 0, 0};
        uint32_t pairs[4];
        float sum[2] = {0};
        if (has_x) a = *(const uint4 *)(x + 32 * j + 8 * q);
        bytes_to_halves(w.x ^ 0x80808080u, 128, pairs);
        bytes_to_halves(w.y ^ 0x80808080u, 128, pairs + 2);
        multiply_parts<false>(sum, a.x, a.y, pairs[0], pairs[1]);
        multiply_parts<false>(sum, a.z, a.w, pairs[2], pairs[3]);
        float2 scale = scales_of<BLOCKS>(scales, j);
        y[0][0] += scale.x * sum[0], y[0][1] += scale.y * sum[1];
    }
};

template <> struct Lane<Q4_0> {
    enum { STEP = 16, APART = SPAN + 16, BLOCKS = SPAN / STEP };
    typedef Split<false> Parts;
    static __device__ void multiply(const char *row, const uint16_t *x, bool has_x, int j, const uint32_t *scales, float y[2][2]) {
        int q = threadIdx.x % 4;
        uint32_t w = *(const uint32_t *)(row + STEP * j + 4 * q), pairs[4];
        uint2 low = {0, 0}, high = {0, 0};
        float sum[2] = {0};
        if (has_x) low = *(const uint2 *)(x + 32 * j + 4 * q), high = *(const uint2 *)(x + 32 * j + 16 + 4 * q);
        bytes_to_halves(w & 0x0f0f0f0fu, 8, pairs);
        bytes_to_halves(w >> 4 & 0x0f0f0f0fu, 8, pairs + 2);
        multiply_parts<false>(sum, low.x, low.y, pairs[0], pairs[1]);
        multiply_parts<false>(sum, high.x, high.y, pairs[2], pairs[3]);
        float2 scale = scales_of<BLOCKS>(scales, j);
        y[0][0] += scale.x * sum[0], y[0][1] += scale.y * sum[1];
    }
};

// The scales of a piece, two of them in a word: lane 4 r + q has those of a quarter of the blocks of row r. They are too small
// to be sent for, and are loaded one piece ahead.
template <int BLOCKS> struct Scales {
    uint32_t pairs[BLOCKS / 8 + !BLOCKS];

    template <Type type> __device__ void load(const Token &t, const Cursor &at) {
        const int N = Lane<type>::BLOCKS;
        if (N == 0 || at.ended(t)) return;
        const Job &job = t.jobs[at.role];
        int block = at.piece * N + threadIdx.x % 4 * (N / 4), blocks = job.w.cols / 32;
        const uint16_t *row = (const uint16_t *)((const char *)job.w.scales + at.layer * t.stride.scales);
        row += (size_t)at.row(job, threadIdx.x % 32 / 4) * blocks;
#pragma unroll
        for (int i = 0; i < N / 4; i += 2) {
            uint32_t a = block + i < blocks ? __ldg(row + block + i) : 0,
                     b = block + i + 1 < blocks ? __ldg(row + block + i + 1) : 0;
            pairs[i / 2] = a | b << 16;
        }
    }
};

// The scales at a cursor, wherever it is: the matrix of the logits may be of another type than those of layers.
template <Type type, Type last, typename S> static __device__ void load_scales(S &scales, const Token &t, const Cursor &at) {
    if (type != last && at.role == LOGITS) scales.template load<last>(t, at);
    else scales.template load<type>(t, at);
}

template <> struct Lane<F32> {
    enum { STEP = 64, APART = SPAN + 64, BLOCKS = 0 };
};

static __device__ void multiply_floats(const char *slot, const float *xs, int left, int piece, float *y) {
    int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const float4 *w = (const float4 *)(slot + r * Lane<F32>::APART) + q, *x = (const float4 *)xs + piece * (SPAN / 16) + q;
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < left / 16; i += 4) sum += w[i].x * x[i].x + w[i].y * x[i].y + w[i].z * x[i].z + w[i].w * x[i].w;
    for (int i = 1; i < 4; i *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, i, 32);
    if (q == 0) y[r] = sum;
}

// The products of a piece with x go to y (8,).
template <Type type, int BLOCKS>
static __device__ void multiply_piece(const char *slot, const float *xs, int cols, int left, int piece,
                                      const Scales<BLOCKS> &scales, float *y) {
    if constexpr (type == F32) return multiply_floats(slot, xs, left, piece, y);
    else {
        typedef Lane<type> L;
        int lane = threadIdx.x % 32, part = lane / 4, q = lane % 4, steps = left / L::STEP;
        const char *row = slot + part * L::APART;
        bool has_x = part < L::Parts::PARTS;
        const uint16_t *x = (const uint16_t *)xs + part * part_of(cols) + piece * (SPAN / L::STEP * 32);
        float sum[2][2] = {{0}};
        if (left == SPAN) {
#pragma unroll
            for (int j = 0; j < SPAN / L::STEP; j++) L::multiply(row, x, has_x, j, scales.pairs, sum);
        } else {
#pragma unroll
            for (int j = 0; j < SPAN / L::STEP; j++) // so many that each lane's scales have fixed places
                if (j < steps) L::multiply(row, x, has_x, j, scales.pairs, sum);
        }
        float weight = L::Parts::weight(part), a = weight * (sum[0][0] + sum[1][0]), b = weight * (sum[0][1] + sum[1][1]);
        for (int i = 4; i < 4 * L::Parts::PARTS; i *= 2)
            a += __shfl_xor_sync(ALL_LANES, a, i, 32), b += __shfl_xor_sync(ALL_LANES, b, i, 32);
        if (lane < 4) *(float2 *)(y + 2 * q) = make_float2(a, b);
    }
}

// Where a product takes four numbers of x from, the first of which is number i of cols.
template <Type type> static __device__ void put_four(float *xs, int cols, int i, const float4 &x) {
    if constexpr (type == F32) *(float4 *)(xs + i) = x;
    else {
        typedef typename Lane<type>::Parts Parts;
        uint16_t parts[4][Parts::PARTS];
        Parts::of(x.x, parts[0]), Parts::of(x.y, parts[1]), Parts::of(x.z, parts[2]), Parts::of(x.w, parts[3]);
#pragma unroll
        for (int p = 0; p < Parts::PARTS; p++)
            *(uint2 *)((uint16_t *)xs + p * part_of(cols) + i) = {parts[0][p] | (uint32_t)parts[1][p] << 16,
                                                                  parts[2][p] | (uint32_t)parts[3][p] << 16};
    }
}

// Floats that x takes there, and bytes between the rows of a slot.
static size_t floats_of(Type type, int cols) {
    int parts = type == BF16 ? (int)Split<true>::PARTS : (int)Split<false>::PARTS;
    return type == F32 ? cols : parts * part_of(cols) / 2;
}

static int apart_of(Type type) { return type == Q8_0 ? (int)Lane<Q8_0>::APART : type == Q4_0 ? (int)Lane<Q4_0>::APART : (int)Lane<F32>::APART; }

// Brings what the job multiplies to shared memory. Where an RMSNorm comes first, its weights are in it and sums are those
// of the squares; the norm's own factor is left to the products.
template <Type type> static __device__ void load_x(const Token &t, const Cursor &at, int splits, const Shared &s) {
    enum { AT_ONCE = 4 }; // loads under way
    const float4 none = {0, 0, 0, 0}, one = {1, 1, 1, 1};
    int cols = t.jobs[at.role].w.cols, step = 32 * TEAM, head_dim = t.cache.head_dim;
    const float4 *from = (const float4 *)(at.role == OUT ? t.attended : at.role == DOWN ? t.h : t.x);
    const float4 *norm = (const float4 *)t.jobs[at.role].norm;
    if (norm) norm = (const float4 *)((const char *)norm + at.layer * t.stride.numbers);
    float4 x[AT_ONCE], w[AT_ONCE];
    float sum = 0;
    bool in_pieces = at.role == OUT && splits > 1;
    for (int i = 4 * threadIdx.x; in_pieces && i < cols; i += 4 * step) { // a head's width is even, so two of them may meet in four
        float4 y;
        for (int j = 0; j < 4; j++) ((float *)&y)[j] = merge_pieces(t.pieces, (i + j) / head_dim, splits, (i + j) % head_dim);
        put_four<type>(s.xs, cols, i, y);
    }
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
            if (4 * (i + j * step) < cols) put_four<type>(s.xs, cols, 4 * (i + j * step), y);
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

// The rows of pair i of a block's: of GATE, row and row of w1 and w3, of others a row and the next.
static __device__ int row_of_pair(const Cursor &at, int i) {
    return at.role == GATE ? OCTET / 2 * at.first + i : OCTET * at.first + 2 * i;
}

// What a pair's products come together with, brought ahead of them: the angle of its rotation, or what they are added to.
static __device__ float2 beside_pair(const Token &t, const Cursor &at, int pos, int i) {
    int row = row_of_pair(at, i), half = t.cache.head_dim / 2;
    if (i >= OCTET / 2 * at.n || row >= t.jobs[at.role].w.rows || at.role == GATE || at.role == LOGITS) return {0, 0};
    return at.role == QKV ? t.rotation[(size_t)pos * half + row / 2 % half] : *(const float2 *)(t.x + row);
}

// What becomes of the products a and b of a pair.
template <typename Number>
static __device__ Largest use_pair(const Token &t, int role, const Cache &cache, int pos, int i, float a, float b, float2 beside) {
    Largest found = {-INFINITY, 0x7fffffff};
    int head_dim = cache.head_dim, dim = cache.n_heads * head_dim, kv_dim = cache.n_kv_heads * head_dim;
    if (role == QKV) {
        bool is_q = i < dim, is_k = !is_q && i < dim + kv_dim;
        if (!is_q) i -= is_k ? dim : dim + kv_dim;
        if (is_q || is_k) turn(a, b, beside);
        if (is_q) put_pair(t.q + i, a, b);
        else put_pair((Number *)(is_k ? cache.keys : cache.values) + place_in_cache(cache, i, pos), a, b);
    } else if (role == GATE) {
        t.h[i] = a / (1 + expf(-a)) * b;
    } else if (role == LOGITS) {
        bool two = i + 1 < t.jobs[LOGITS].w.rows;
        t.logits[i] = a;
        if (two) t.logits[i + 1] = b;
        found = finite(a, i);
        if (two) found = larger(found, finite(b, i + 1));
    } else { // dim is even, for head_dim is
        put_pair(t.x + i, beside.x + a, beside.y + b);
    }
    return found;
}

// What becomes of all the block's products of a job, `scale` times each; the largest of its logits.
template <typename Number>
static __device__ Largest use_products(const Token &t, const Cursor &at, const Cache &cache, int pos, const float *products,
                                       float scale, float2 beside) {
    const Job &job = t.jobs[at.role];
    Largest largest = {-INFINITY, 0x7fffffff};
    int rows = at.role == GATE ? job.w.rows / 2 : job.w.rows, far = at.role == GATE ? OCTET / 2 : 1;
    for (int i = threadIdx.x; i < OCTET / 2 * at.n; i += 32 * TEAM) {
        const float *y = products + (i / 4 * job.pieces) * OCTET + (at.role == GATE ? i % 4 : 2 * (i % 4));
        float a = 0, b = 0;
#pragma unroll 4
        for (int j = 0; j < job.pieces; j++) a += y[j * OCTET], b += y[j * OCTET + far];
        int row = row_of_pair(at, i);
        if (row < rows) largest = larger(largest, use_pair<Number>(t, at.role, cache, pos, row, scale * a, scale * b, beside));
        beside = beside_pair(t, at, pos, i + 32 * TEAM);
    }
    return largest;
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
    s.slots = (char *)start;
    s.xs = start + (size_t)t.slots * WARPS * SLOT / sizeof(float);
    s.products = s.xs + t.desk;
    s.sums = s.products + t.products;
    s.arrivals = (Arrival *)(s.sums + 2 * TEAM);
    int warp = threadIdx.x / 32, slot = 0;
    unsigned round = 0; // of the slots, even or odd
    unsigned met = *(volatile unsigned *)t.arrived; // before the grid can have met
    char *slots = s.slots + (size_t)warp * t.slots * SLOT;
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
        fetch(t, ahead, slots + i * SLOT, &arrivals[i]);
        ahead.next(t);
    }
    Scales<(int)Lane<type>::BLOCKS> scales;
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
            meet_grid(t.arrived, met);
        }
        bool other = type != last && at.role == LOGITS;
        other ? load_x<last>(t, at, splits, s) : load_x<type>(t, at, splits, s);
        float2 beside = beside_pair(t, at, pos, threadIdx.x);
        prefetch_for_next(t, at, cache, n);
        __syncthreads();
        while (now.step == at.step) {
            Cursor then = now;
            Scales<(int)Lane<type>::BLOCKS> following;
            then.next(t);
            load_scales<type, last>(following, t, then);
            char *from = slots + slot * SLOT;
            float *y = s.products + (now.group * job.pieces + now.piece) * OCTET;
            await(&arrivals[slot], round, t.slots);
            if (other) multiply_piece<last>(from, s.xs, job.w.cols, now.left(job), now.piece, scales, y);
            else multiply_piece<type>(from, s.xs, job.w.cols, now.left(job), now.piece, scales, y);
            fetch(t, ahead, from, &arrivals[slot]);
            ahead.next(t);
            now = then, scales = following;
            if (++slot == t.slots) slot = 0, round ^= 1;
        }
        __syncthreads();
        float scale = job.norm ? norm_scale(t, job.w.cols, s.sums) : 1;
        largest = larger(largest, use_products<Number>(t, at, cache, pos, s.products, scale, beside));
        if (at.role != LOGITS) meet_grid(t.arrived, met);
    }
    __syncthreads();
    largest = block_largest(largest, (Largest *)s.sums);
    if (threadIdx.x == 0) t.largest[blockIdx.x] = largest;
    meet_grid(t.arrived, met);
    if (blockIdx.x) return;
    largest = {-INFINITY, 0x7fffffff};
    for (int i = threadIdx.x; i < (int)gridDim.x; i += 32 * TEAM) largest = larger(largest, t.largest[i]);
    largest = block_largest(largest, (Largest *)s.sums);
    if (threadIdx.x == 0) *t.best = largest.index;
}
