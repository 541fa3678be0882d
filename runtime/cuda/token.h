// Decoding in one kernel: its blocks stay for a whole token and meet at barriers of the grid. Part of cuda.cu, whose
// ops do the same one by one.
//
// A token needs every weight once, in an order that is known from the start; only what they multiply has to be waited
// for. So each warp keeps `slots` pieces of weights on their way into its own part of shared memory, over the ends of
// products, attention and barriers as well, and memory never rests (compare Spector et al. 2025, "Look ma, no bubbles").
#pragma once

enum {
    TEAM = WARPS + 1, // warps of a block: WARPS multiply, and the last, which has no weights on their way, meets the grid
    OCTET = 8,        // rows that a warp multiplies together
    STEPS = 8,        // of a piece. In a step lane 4 r + q multiplies 16 bytes of row r, behind those of the lanes before
    SPAN = 64 * STEPS,      // bytes of each row in a piece, but for a row's end
    SLOT = OCTET * SPAN,    // bytes of a piece in shared memory
    SLOTS_MAX = 8,          // of a warp
};

// The products of a layer, and the last one.
enum { QKV, OUT, GATE, DOWN, LOGITS, ROLES };

// A product, by groups of 8 rows; of GATE, 4 of w1 and the same 4 of w3. Pointers are those of layer 0.
typedef struct {
    Mat w;                      // of QKV the rows of q, k and v, of GATE those of w1 and w3, as one matrix
    int row_bytes, pieces;      // of a row; pieces of SPAN bytes at most
    int rows, fifth;            // from a group to the next; from a group's first row to its fifth
    int share, rest;            // groups of each block, and how many blocks have one more
    struct { unsigned char group, piece; } first[WARPS], hop; // each warp's first piece of a block; from a piece to its next
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
    float *xs;         // what a job multiplies, padded; a Desk in attention
    float *products;   // (groups, pieces, 8) of the job
    float *sums;       // (TEAM,) of the squares of x; in the end each warp's Largest
} Shared;

static size_t shared_of(const Token &t) {
    return (size_t)t.slots * WARPS * SLOT + sizeof(float) * (t.desk + t.products + 2 * TEAM);
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

// A product, and which of its groups are the block's. Blocks that have one more than others take turns at it.
struct Share {
    int step;        // 4 * layer + role
    int role, layer; // layer 0 for LOGITS
    int first, n;    // groups
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
};

// Where a warp is on its way through all products: it takes every WARPS-th piece of its block's share of each.
struct Cursor : Share {
    int group, piece;      // of the share, and of its rows
    const char *data;      // of the product in its layer
    int rows, row_bytes, pieces, hop_groups, hop_pieces, last, fifth; // of the job; the last row

    __device__ void begin(const Token &t, int next) {
        do {
            enter(t, next++);
            group = t.jobs[role].first[threadIdx.x / 32].group, piece = t.jobs[role].first[threadIdx.x / 32].piece;
        } while (!ended(t) && group >= n);
        const Job &job = t.jobs[role];
        data = (const char *)job.w.data + layer * t.stride.numbers;
        rows = job.rows, row_bytes = job.row_bytes, pieces = job.pieces, hop_groups = job.hop.group, hop_pieces = job.hop.piece;
        last = job.w.rows - 1, fifth = job.fifth;
    }

    __device__ void next(const Token &t) {
        group += hop_groups, piece += hop_pieces;
        if (piece >= pieces) piece -= pieces, group++;
        if (group >= n) begin(t, step + 1);
    }
};

// Copies 16 bytes to shared memory, for the thread that asks; 0 where `there` is false. They come in the order of commits.
static __device__ void copy_unit(char *to, const char *from, bool there) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
#else
    __pipeline_memcpy_async(to, from, sizeof(uint4), there ? 0 : sizeof(uint4));
#endif
}

// Where the 16 bytes of row r for lane 4 r + q lie in a slot, in step j. Rows change places in every other step: then what comes
// from eight lanes, 128 bytes of a row, goes to different banks, as does what eight lanes read.
static __device__ int place_of(int j, int r, int q) { return 64 * OCTET * j + 64 * (r ^ j % 2) + 16 * q; }

// Sends for the weights at the cursor, and goes on to the next. Eight lanes copy 128 bytes of a row at a time. Rows behind a
// matrix's last are that again, whose product is not used.
static __device__ void fetch(const Token &t, Cursor &at, char *slot) {
    __syncwarp(); // all have read what lay there
    if (!at.ended(t)) {
        int lane = threadIdx.x % 32, row = at.rows * (at.first + at.group) + lane / 8, begin = at.piece * SPAN + lane % 8 * 16;
        const char *rows[] = {at.data + (size_t)min(row, at.last) * at.row_bytes + begin,
                              at.data + (size_t)min(row + at.fifth, at.last) * at.row_bytes + begin};
        char *to = slot + place_of(lane % 8 / 4, lane / 8, lane % 4);
        if (at.row_bytes - at.piece * SPAN >= SPAN) {
#pragma unroll
            for (int i = 0; i < STEPS; i++) copy_unit(to + place_of(i / 2 * 2, i % 2 * 4, 0), rows[i % 2] + i / 2 * 128, true);
        } else {
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                bool there = begin + i / 2 * 128 < at.row_bytes;
                copy_unit(to + place_of(i / 2 * 2, i % 2 * 4, 0), there ? rows[i % 2] + i / 2 * 128 : at.data, there);
            }
        }
        at.next(t);
    }
    __pipeline_commit();
}

// ---- what a warp does with a piece

// Of the tensor cores' product of 16 by 16 and 16 by 8 numbers, d += a b: lane 4 i + q has numbers 2 q, 2 q + 1 and 2 q + 8,
// 2 q + 9 of row i of a (a[0], a[2]) and of row i + 8 (a[1], a[3]), and of column i of b (b.x, b.y); of row i of d columns 2 q and
// 2 q + 1, then those of row i + 8. Here a row of weights is both i and i + 8: eight numbers that follow each other, of which every
// other pair is in a row. What these are multiplied by is in columns of its own, and the rest of d is not used.
template <bool bf16> static __device__ void multiply_eight(float d[4], const uint32_t a[4], const uint2 &b) {
#ifdef CUDA_ON_CPU
    tensor_product<bf16>(d, a, b.x, b.y);
#elif __CUDA_ARCH__ >= 800
    if (bf16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#endif
}

static __device__ uint32_t bits_of(__half2 pair) { return *(uint32_t *)&pair; }
static __device__ __half2 halves_of(uint32_t bits) { return *(__half2 *)&bits; }

// Two numbers in bfloat16, to nearest; the first is the lower half.
static __device__ uint32_t to_bfloats(float a, float b) {
    uint32_t pair = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
#elif defined(CUDA_ON_CPU)
    pair = bfloat(a) | bfloat(b) << 16;
#endif
    return pair;
}

// x as two parts in 16 bits, the second of which is what the first lacks: 16 bits of it in bfloat16, 22 in half precision, where
// x goes up to 4 million.
template <bool bf16> struct Split;

template <> struct Split<true> {
    static __device__ void of(float a, float b, uint32_t *parts) {
        parts[0] = to_bfloats(a, b);
        parts[1] = to_bfloats(a - __uint_as_float(parts[0] << 16), b - __uint_as_float(parts[0] & 0xffff0000u));
    }
    static __device__ float whole(float first, float second) { return first + second; }
};

template <> struct Split<false> {
    static __device__ void of(float a, float b, uint32_t *parts) {
        a /= 64, b /= 64;
        __half2 first = to_halves(a, b);
        float2 rounded = __half22float2(first);
        parts[0] = bits_of(first), parts[1] = bits_of(to_halves((a - rounded.x) * 2048, (b - rounded.y) * 2048));
    }
    static __device__ float whole(float first, float second) { return 64 * first + 64 / 2048.0f * second; }
};

// Four bytes as two pairs in half precision, less `zero`. A byte under 1024 in half precision is that plus the byte.
static __device__ void bytes_to_halves(uint32_t word, float zero, uint32_t *pairs) {
    __half2 offset = __floats2half2_rn(1024 + zero, 1024 + zero);
    pairs[0] = bits_of(__hsub2(halves_of(__byte_perm(word, 0x64646464u, 0x4140)), offset));
    pairs[1] = bits_of(__hsub2(halves_of(__byte_perm(word, 0x64646464u, 0x4342)), offset));
}

// A Lane is what one does in a step, by the type of the weights: it multiplies N of them, `w`, with the x at their place, of which
// it brings column lane / 4 % 4 of each eight: the numbers of row i, their second parts, then those of row i + 8. So lanes 4 r and
// 4 r + 1 have the sums of row r, one beside the other. Where weights have scales, x of other blocks is 0 in a column: blocks have four
// each, and row r's sums are in lanes 4 r + 2 b and 4 r + 2 b + 1, for b = 0, 1.
template <Type type> struct Lane;

static __device__ uint2 column_of(const float *x, int eight, bool there) {
    uint2 none = {0, 0};
    return there ? *(const uint2 *)(x + 8 * eight + threadIdx.x % 16 / 4 * 2) : none;
}

// A lane's part of row r's sum.
template <typename Parts> static __device__ float part_of(const float d[4]) {
    return threadIdx.x % 2 ? Parts::whole(d[2], d[3]) : Parts::whole(d[0], d[1]);
}

template <bool bf16> struct Sixteen { // bits
    enum { N = 8, SCALES = 0 };
    typedef Split<bf16> Parts;
    float sums[2][4];
    __device__ void multiply(const uint4 &w, const float *x, int j, const uint32_t *) {
        const uint32_t words[] = {w.x, w.y, w.z, w.w};
        multiply_eight<bf16>(sums[j % 2], words, column_of(x, 0, threadIdx.x % 32 < 16));
    }
    __device__ float sum() const { return threadIdx.x % 4 < 2 ? part_of<Parts>(sums[0]) + part_of<Parts>(sums[1]) : 0; }
};
template <> struct Lane<BF16> : Sixteen<true> {};
template <> struct Lane<F16> : Sixteen<false> {};

// Of the scales of two blocks that lie in lane `from`, this lane's.
static __device__ float scale_of(uint32_t pair, int from) {
    float2 both = __half22float2(halves_of(__shfl_sync(ALL_LANES, pair, from, 32)));
    return threadIdx.x % 4 < 2 ? both.x : both.y;
}

template <> struct Lane<Q8_0> {
    enum { N = 16, SCALES = 2 * STEPS / 8 };
    typedef Split<false> Parts;
    float total;
    __device__ void multiply(const uint4 &w, const float *x, int j, const uint32_t *scales) {
        bool mine = threadIdx.x % 32 / 16 == threadIdx.x % 4 / 2; // of two blocks
        uint32_t a[8];
        float d[4] = {0};
        bytes_to_halves(w.x ^ 0x80808080u, 128, a), bytes_to_halves(w.y ^ 0x80808080u, 128, a + 2);
        bytes_to_halves(w.z ^ 0x80808080u, 128, a + 4), bytes_to_halves(w.w ^ 0x80808080u, 128, a + 6);
        multiply_eight<false>(d, a, column_of(x, 0, mine));
        multiply_eight<false>(d, a + 4, column_of(x, 1, mine));
        total += scale_of(scales[j % 2], threadIdx.x % 32 / 4 * 4 + j / 2) * part_of<Parts>(d);
    }
    __device__ float sum() const { return total; }
};

template <> struct Lane<Q4_0> {
    enum { N = 32, SCALES = 4 * STEPS / 8 };
    typedef Split<false> Parts;
    float total;
    __device__ void multiply(const uint4 &w, const float *x, int j, const uint32_t *scales) {
        const uint32_t words[] = {w.x, w.y, w.z, w.w};
        uint32_t a[2][8]; // the lower halves of the bytes, which are numbers 0 to 15, and the upper ones
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bytes_to_halves(words[i] & 0x0f0f0f0fu, 8, a[0] + 2 * i);
            bytes_to_halves(words[i] >> 4 & 0x0f0f0f0fu, 8, a[1] + 2 * i);
        }
#pragma unroll
        for (int p = 0; p < 2; p++) { // two blocks of four
            bool mine = threadIdx.x % 4 == 2 * p + threadIdx.x % 32 / 16;
            float d[4] = {0};
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_eight<false>(d, a[i / 2] + i % 2 * 4, column_of(x, i, mine));
            total += scale_of(scales[j % 2 * 2 + p], threadIdx.x % 32 / 4 * 4 + j / 2) * part_of<Parts>(d);
        }
    }
    __device__ float sum() const { return total; }
};

template <> struct Lane<F32> {
    enum { N = 4, SCALES = 0 };
    float total;
    __device__ void multiply(const uint4 &w, const float *x, int, const uint32_t *) {
        const float *four = (const float *)&w;
        float4 y = *(const float4 *)x;
        total += four[0] * y.x + four[1] * y.y + four[2] * y.z + four[3] * y.w;
    }
    __device__ float sum() const { return total; }
};

// The scales of a piece, two of them in a word: lane 4 r + q has those of a quarter of the blocks of row r. They are too small
// to be sent for, and are loaded one piece ahead.
template <Type type> static __device__ void load_scales(const Token &t, const Share &at, int group, int piece, uint32_t *pairs) {
    const int EACH = 2 * Lane<type>::SCALES; // of a lane
    if (EACH == 0 || group >= at.n) return;
    const Job &job = t.jobs[at.role];
    int r = threadIdx.x % 32 / 4, blocks = job.w.cols / 32, block = piece * 4 * EACH + threadIdx.x % 4 * EACH;
    const uint16_t *row = (const uint16_t *)((const char *)job.w.scales + at.layer * t.stride.scales);
    row += (size_t)min(job.rows * (at.first + group) + r % 4 + (r < 4 ? 0 : job.fifth), job.w.rows - 1) * blocks;
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        uint32_t a = block + i < blocks ? __ldg(row + block + i) : 0, b = block + i + 1 < blocks ? __ldg(row + block + i + 1) : 0;
        pairs[i / 2] = a | b << 16;
    }
}

// The products of a piece go to y (8,).
template <Type type>
static __device__ void multiply_piece(const char *slot, const float *x, int steps, const uint32_t *scales, float *y) {
    int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    Lane<type> lane = {};
    auto step = [&](int j) {
        lane.multiply(*(const uint4 *)(slot + place_of(j, r, q)), x + (4 * j + q) * Lane<type>::N, j, scales);
    };
    if (steps == STEPS) {
#pragma unroll
        for (int j = 0; j < STEPS; j++) step(j);
    } else {
#pragma unroll
        for (int j = 0; j < STEPS; j++)
            if (j < steps) step(j);
    }
    float sum = lane.sum();
    for (int i = 1; i < 4; i *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, i, 32);
    if (q == 0) y[r] = sum;
}

// Where products take x from: eight numbers, or the columns that their parts make, from number i on.
template <Type type> static __device__ void put_eight(float *xs, int i, const float x[8]) {
    if constexpr (type == F32) memcpy(xs + i, x, 8 * sizeof(float));
    else {
        uint32_t parts[4][2];
#pragma unroll
        for (int k = 0; k < 4; k++) Lane<type>::Parts::of(x[2 * k], x[2 * k + 1], parts[k]);
        *(uint4 *)(xs + i) = {parts[0][0], parts[2][0], parts[0][1], parts[2][1]};
        *(uint4 *)(xs + i + 4) = {parts[1][0], parts[3][0], parts[1][1], parts[3][1]};
    }
}

// Numbers that a step goes on by, of any type: x has zeros up to a multiple of it.
enum { STEP_MOST = 128 };
static __host__ __device__ int whole_steps(int cols) { return (cols + STEP_MOST - 1) / STEP_MOST * STEP_MOST; }

// Brings what the job multiplies to shared memory. Where an RMSNorm comes first, its weights are in it and sums are those
// of the squares; the norm's own factor is left to the products.
template <Type type> static __device__ void load_x(const Token &t, const Share &at, int splits, const Shared &s) {
    const float4 none = {0, 0, 0, 0}, one = {1, 1, 1, 1};
    const Job &job = t.jobs[at.role];
    int cols = job.w.cols, head_dim = t.cache.head_dim, end = whole_steps(cols);
    const float4 *from = (const float4 *)(at.role == OUT ? t.attended : at.role == DOWN ? t.h : t.x);
    const float4 *norm = job.norm ? (const float4 *)((const char *)job.norm + at.layer * t.stride.numbers) : NULL;
    float sum = 0;
    for (int i = 8 * threadIdx.x; i < end; i += 8 * 32 * TEAM) {
        float4 x[2] = {none, none}, w[2] = {one, one};
        if (i < cols && at.role == OUT && splits > 1)
            for (int j = 0; j < 8; j++) { // two heads may meet in eight numbers
                float number = merge_pieces(t.pieces, (i + j) / head_dim, splits, (i + j) % head_dim);
#pragma unroll
                for (int k = 0; k < 8; k++) ((float *)x)[k] = k == j ? number : ((float *)x)[k]; // so that x stays in registers
            }
        else if (i < cols) x[0] = from[i / 4], x[1] = from[i / 4 + 1];
        if (i < cols && norm) w[0] = norm[i / 4], w[1] = norm[i / 4 + 1];
        float y[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float number = ((float *)x)[j];
            sum += number * number, y[j] = number * ((float *)w)[j];
        }
        put_eight<type>(s.xs, i, y);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = sum;
}

// The block's products of a job, of weights of this type.
template <Type type>
static __device__ void multiply_share(const Token &t, const Share &at, const Shared &s, Cursor &ahead, int &slot) {
    const Job &job = t.jobs[at.role];
    int warp = threadIdx.x / 32, group = job.first[warp].group, piece = job.first[warp].piece, pieces = job.pieces;
    int row_bytes = job.row_bytes, hop_groups = job.hop.group, hop_pieces = job.hop.piece, end = at.n * pieces, wait = t.slots;
    char *slots = s.slots + (size_t)warp * t.slots * SLOT;
    uint32_t scales[Lane<type>::SCALES + 1], following[Lane<type>::SCALES + 1];
    load_scales<type>(t, at, group, piece, scales);
    for (int i = warp; i < end; i += WARPS) {
        char *from = slots + slot * SLOT;
        int steps = min((int)STEPS, (row_bytes - piece * SPAN + 63) / 64);
        const float *x = s.xs + piece * (4 * STEPS * Lane<type>::N);
        group += hop_groups, piece += hop_pieces;
        if (piece >= pieces) piece -= pieces, group++;
        load_scales<type>(t, at, group, piece, following);
        __pipeline_wait_prior(wait - 1);
        __syncwarp(); // for what other lanes have copied
        multiply_piece<type>(from, x, steps, scales, s.products + i * OCTET);
        fetch(t, ahead, from);
        for (int k = 0; k < Lane<type>::SCALES; k++) scales[k] = following[k];
        if (++slot == wait) slot = 0;
    }
}

// Has what the step after this one needs besides weights brought nearer: an RMSNorm's weights, and the keys and values of
// the head that this block attends to first.
static __device__ void prefetch_for_next(const Token &t, const Share &at, const Cache &cache, int n) {
    bool last = at.role == DOWN && at.layer + 1 == t.n_layers;
    const Job &next = t.jobs[last ? LOGITS : (at.role + 1) % 4];
    size_t bytes = sizeof(float) * t.jobs[LOGITS].w.cols, line = threadIdx.x * gridDim.x + blockIdx.x;
    if (next.norm && at.role != LOGITS && 128 * line < bytes) // all of it, by all blocks
        bring_line((const char *)next.norm + (last ? 0 : at.layer + at.role / DOWN) * t.stride.numbers + 128 * line);
    int h = blockIdx.x;
    if (at.role != QKV || h >= cache.n_heads) return;
    size_t head = (size_t)(h / (cache.n_heads / cache.n_kv_heads)) * cache.positions;
    size_t width = t.stride.cache / ((size_t)cache.n_kv_heads * cache.positions); // bytes
    for (size_t i = 128 * threadIdx.x; i < n * width; i += 128 * 32 * TEAM) {
        bring_line((const char *)cache.keys + head * width + i);
        bring_line((const char *)cache.values + head * width + i);
    }
}

// The first row of pair i of a block's: of GATE that of w1, the other one is w3's; of others a row and the next.
static __device__ int row_of_pair(const Share &at, int i) {
    return at.role == GATE ? OCTET / 2 * at.first + i : OCTET * at.first + 2 * i;
}

// What a pair's products come together with, brought ahead of them: the angle of its rotation, or what they are added to.
static __device__ float2 beside_pair(const Token &t, const Share &at, int pos, int i) {
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
        t.h[i] = swiglu(a, b);
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
static __device__ Largest use_products(const Token &t, const Share &at, const Cache &cache, int pos, const float *products,
                                       float scale, float2 beside) {
    const Job &job = t.jobs[at.role];
    bool gate = at.role == GATE;
    Largest largest = {-INFINITY, 0x7fffffff};
    int rows = gate ? job.w.rows / 2 : job.w.rows, far = gate ? OCTET / 2 : 1;
    for (int i = threadIdx.x; i < OCTET / 2 * at.n; i += 32 * TEAM) {
        const float *y = products + (i / 4 * job.pieces) * OCTET + (gate ? i % 4 : 2 * (i % 4));
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
    int warp = threadIdx.x / 32, slot = 0;
    unsigned met = *(volatile unsigned *)t.arrived; // before the grid can have met
    int n = pos + 1, splits = gridDim.x / t.cache.n_heads, most = (n + 32 * WARPS - 1) / (32 * WARPS);
    splits = max(1, min(min(splits, most), t.splits)); // one, until positions are more than a block's tiles

    Cursor ahead = {};
    if (warp < WARPS) {
        ahead.begin(t, 0);
        for (int i = 0; i < t.slots; i++) fetch(t, ahead, s.slots + ((size_t)warp * t.slots + i) * SLOT);
    }
    for (int i = threadIdx.x; i < t.table.cols; i += 32 * TEAM) // every block writes the same
        *(volatile float *)&t.x[i] = number_at(t.table, (size_t)token * t.table.cols + i);
    __syncthreads();

    Largest largest = {-INFINITY, 0x7fffffff};
    Share at = {};
    for (at.enter(t, 0); !at.ended(t); at.enter(t, at.step + 1)) {
        const Job &job = t.jobs[at.role];
        size_t cached = at.layer * t.stride.cache;
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
        if (warp < WARPS) other ? multiply_share<last>(t, at, s, ahead, slot) : multiply_share<type>(t, at, s, ahead, slot);
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
