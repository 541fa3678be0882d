// Decoding in one kernel: its blocks run for a whole token and synchronize at grid barriers. It
// computes what the ops compute one by one.
//
// A token needs every weight once, in an order that is known from the start; only the vectors that
// the weights multiply are not known yet. So each warp always keeps copies of the next `slots`
// pieces of weights to its part of shared memory in flight, even while it waits at a barrier,
// computes attention or finishes a product. Memory is never idle (compare Spector et al. 2025,
// "Look ma, no bubbles").
//
// The rows of a matrix are multiplied in groups of GROUP_ROWS. A piece is up to PIECE_BYTES bytes
// of each row of a group. A warp multiplies a piece in PIECE_STEPS steps: in each, lane 4 r + q
// multiplies 16 bytes of row r, so the four lanes of a row multiply 64.
#pragma once
#include "carried.cuh"
#include "products.cuh"
#include "sampling.cuh"

enum {
    // WARPS warps copy and multiply weights; the last one does neither and waits at the barriers
    BLOCK_WARPS = WARPS + 1,
    BLOCK_THREADS = 32 * BLOCK_WARPS,
    GROUP_ROWS = 8,
    PIECE_STEPS = 8,
    PIECE_BYTES = 64 * PIECE_STEPS,        // bytes of each row; fewer in a row's last piece
    SLOT_BYTES = GROUP_ROWS * PIECE_BYTES, // shared memory for one piece
    MAX_SLOTS = 8,                         // max slots of a warp
};

// ----------------------------------------------------------------------------
// The plan of a token

// The matrix products of a layer in order, and the model's last product.
enum { QKV, ATTENTION_OUT, GATE_UP, DOWN, LOGITS, N_ROLES };

typedef struct { unsigned char group, piece; } PieceIndex;

// How one of these products is divided among blocks and warps. A group is 8 consecutive rows, or
// for GATE_UP 4 rows of w1 and the same 4 rows of w3. Each block computes a range of groups. The
// range's pieces are numbered group by group: warp i takes pieces i, i + WARPS, and so on.
// Pointers are those of layer 0; other layers are at multiples of TokenPlan.stride.
typedef struct {
    Mat w;                   // QKV: wq, wk and wv as one matrix; GATE_UP: w1 and w3 as one matrix
    int row_bytes;           // bytes of a row of weights, without its scales
    int pieces;              // pieces of a group
    int group_stride;        // from a group's first row to the next group's: 8 rows; GATE_UP: 4
    int second_half;         // from a group's first row to its fifth: 4 rows; GATE_UP: hidden_dim
    int groups_per_block;    // groups that every block computes
    int extra_groups;        // number of blocks that compute one more
    PieceIndex first[WARPS]; // each warp's first piece in a block's range
    PieceIndex hop;          // distance from a warp's piece to its next one, WARPS later
    const float *norm;       // (cols,) weights of the RMSNorm before it, or NULL
} TokenProduct;

// Bytes from one layer to the next. `weights` is also the stride of the layers' RMSNorms, and
// `heads` that of HeadWeights.
typedef struct { size_t weights, scales, cache, heads; } LayerStride;

typedef struct {
    TokenProduct products[N_ROLES];
    int n_layers;
    int slots; // slots of each warp; 0: whole_token cannot run
    LayerStride stride;
    Mat table;              // token embedding
    LayerCache cache;       // of layer 0
    int max_splits;         // max blocks that share a head's positions
    HeadWeights heads;      // of layer 0
    bool complete_later;    // queries and keys get their norms and rotation after the barrier
    const float2 *rotation; // (positions, head_dim / 2): cosine and sine
    float norm_eps;
    float *x, *q, *attention_out, *h; // (dim,), (q_dim,), (q_dim,), (hidden_dim,)
    float *k;                         // (kv_dim,) of the token, if complete_later
    float *partials;                  // partial softmaxes, if blocks share a head
    float *logits;                    // (vocab_size,)
    Largest *largest;                 // (gridDim.x,) each block's largest logit
    int *best;         // in host memory: index of the largest logit, -1 if one is not finite
    unsigned *arrived; // the grid barrier's counter; 0 at first
    int x_floats;      // size of TokenShared.xs
    int sums_floats;   // size of TokenShared.row_sums
    // With CARRIED, the words replace x, q, attention_out, h, k and partials.
    CarriedWords words;
    unsigned epoch; // epoch of the vector before the token's first one
    int token;
} TokenPlan;

// A block's shared memory, one array after another.
typedef struct {
    char *slots;     // (WARPS, slots, SLOT_BYTES)
    float *xs;       // a product's input vector, padded; an AttentionScratch during attention
    float *row_sums; // (groups, pieces, GROUP_ROWS) of a product
    float *squares;  // (BLOCK_WARPS,) sums of squares of x; at the end Largest (BLOCK_WARPS,)
} TokenShared;

// Returns the bytes of TokenShared.
static size_t token_shared_bytes(const TokenPlan &t) {
    size_t floats = t.x_floats + t.sums_floats + 2 * BLOCK_WARPS;
    return (size_t)t.slots * WARPS * SLOT_BYTES + sizeof(float) * floats;
}

// ----------------------------------------------------------------------------
// The grid barrier

// Adds n to *counter. A thread that reads the sum with load_acquire sees what this thread wrote, or
// saw, before.
static __device__ void add_release(unsigned *counter, unsigned n) {
#ifdef __CUDA_ARCH__
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
#else
    __threadfence();
    atomicAdd(counter, n);
#endif
}

static __device__ unsigned load_acquire(unsigned *counter) {
    unsigned n;
#ifdef __CUDA_ARCH__
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
#else
    __nanosleep(20);
    n = *(volatile unsigned *)counter;
    __threadfence();
#endif
    return n;
}

enum { PHASE_BIT = 0x80000000u }; // flips whenever all blocks have arrived

// Waits until all blocks have called it. Writes before the barrier are visible to all blocks after
// it. The counter is never reset: block 0 adds PHASE_BIT - (blocks - 1), and each other block adds
// 1. Together they add PHASE_BIT, which flips the top bit (as in CUDA's cooperative groups). In the
// thread that waits, `phase` is the value of that bit before the barrier. All blocks of the grid
// must be resident on the GPU.
static __device__ void grid_barrier(unsigned *arrived, unsigned &phase) {
    __syncthreads();
    if (threadIdx.x == 32 * WARPS) { // the first thread of the last warp
        add_release(arrived, blockIdx.x ? 1u : PHASE_BIT - (gridDim.x - 1));
        while (((phase ^ load_acquire(arrived)) & PHASE_BIT) == 0) {}
        phase ^= PHASE_BIT;
    }
    __syncthreads();
}

// Ends a step whose results other blocks read. With CARRIED, they wait for the results themselves.
static __device__ void end_step(unsigned *arrived, unsigned &phase) {
    if (CARRIED) __syncthreads(); // the next step overwrites the block's shared memory
    else grid_barrier(arrived, phase);
}

// ----------------------------------------------------------------------------
// The block's share of each product, and the copies of its weights

// The groups of one product that this block computes. Some blocks compute one extra group. In the
// next product, the blocks that follow them do so, which keeps the work of all blocks about equal.
struct BlockShare {
    int step;        // 4 * layer + role
    int role, layer; // layer is 0 for LOGITS
    int first, n;    // the first group; number of groups
    int first_extra; // first block that computes an extra group of the next product

    __device__ bool is_past_end(const TokenPlan &t) const { return step > 4 * t.n_layers; }

    // Moves to step `next`, which must be the following one.
    __device__ void enter(const TokenPlan &t, int next) {
        bool is_last = next >= 4 * t.n_layers;
        step = next, role = is_last ? LOGITS : next % 4, layer = is_last ? 0 : next / 4;
        const TokenProduct &product = t.products[role];
        // this block's number if the blocks are counted from first_extra
        int rank = (int)blockIdx.x - first_extra, blocks = gridDim.x;
        if (rank < 0) rank += blocks;
        first = rank * product.groups_per_block + min(rank, product.extra_groups);
        n = product.groups_per_block + (rank < product.extra_groups);
        first_extra += product.extra_groups;
        if (first_extra >= blocks) first_extra -= blocks;
    }
};

// With CARRIED: returns the epoch of the vector that the product of this step multiplies. The
// product's result has the next epoch. See carried.cuh for the vectors of a layer. Attention
// computes one of them without being a step, so the layer's later steps add 1.
static __device__ unsigned epoch_of(const TokenPlan &t, int step) {
    return t.epoch + LAYER_VECTORS * (step / 4) + step % 4 + (step % 4 > QKV);
}

// Points to the next piece of weights that a warp will copy: every WARPS-th piece of the block's
// shares of all products, one after another. It is `slots` pieces ahead of the multiplication.
struct PieceCursor : BlockShare {
    int group, piece; // index of the group in the share, and of the piece in the group
    const char *data; // the product's weights in its layer
    // copies of the TokenProduct's fields; last_row = w.rows - 1
    int group_stride, row_bytes, pieces, hop_groups, hop_pieces, last_row, second_half;

    // Moves to the warp's first piece of step `next`, or of the first later step in which it has
    // one.
    __device__ void begin(const TokenPlan &t, int next) {
        do {
            enter(t, next++);
            PieceIndex start = t.products[role].first[threadIdx.x / 32];
            group = start.group, piece = start.piece;
        } while (!is_past_end(t) && group >= n);
        const TokenProduct &product = t.products[role];
        data = (const char *)product.w.data + layer * t.stride.weights;
        group_stride = product.group_stride, row_bytes = product.row_bytes;
        pieces = product.pieces, hop_groups = product.hop.group, hop_pieces = product.hop.piece;
        last_row = product.w.rows - 1, second_half = product.second_half;
    }

    __device__ void advance(const TokenPlan &t) {
        group += hop_groups, piece += hop_pieces;
        if (piece >= pieces) piece -= pieces, group++;
        if (group >= n) begin(t, step + 1);
    }
};

// Starts the copy of 16 bytes to shared memory, or of zeros if `exists` is false.
static __device__ void copy_16_async(char *to, const char *from, bool exists) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     (unsigned)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
#else
    __pipeline_memcpy_async(to, from, sizeof(uint4), exists ? 0 : sizeof(uint4));
#endif
}

// Returns the offset in a slot of the 16 bytes of row r that lane 4 r + q multiplies in step j. A
// step is 64 bytes of each row. In odd steps, row r is stored in the place of row r ^ 1. So there
// are no bank conflicts when eight lanes write 128 bytes of a row (two steps), nor when eight lanes
// read 64 bytes of each of two rows.
static __device__ int slot_offset(int j, int r, int q) {
    return 64 * GROUP_ROWS * j + 64 * (r ^ j % 2) + 16 * q;
}

// Starts the copy of the cursor's piece to a slot, commits it and advances the cursor. After the
// last piece it commits an empty copy, because multiply_share waits for all commits but the last
// slots - 1. Eight lanes copy 128 bytes of a row at a time. Rows beyond the matrix's last row
// repeat that row; their sums are not used.
static __device__ void copy_piece_async(const TokenPlan &t, PieceCursor &at, char *slot) {
    __syncwarp(); // all lanes have read the slot
    if (!at.is_past_end(t)) {
        int lane = threadIdx.x % 32, row = at.group_stride * (at.first + at.group) + lane / 8;
        int begin = at.piece * PIECE_BYTES + lane % 8 * 16;
        // a row of the group's first half, and its counterpart in the second half
        const char *rows[] = {
            at.data + (size_t)min(row, at.last_row) * at.row_bytes + begin,
            at.data + (size_t)min(row + at.second_half, at.last_row) * at.row_bytes + begin};
        char *to = slot + slot_offset(lane % 8 / 4, lane / 8, lane % 4);
        if (at.row_bytes - at.piece * PIECE_BYTES >= PIECE_BYTES) {
#pragma unroll
            for (int i = 0; i < PIECE_STEPS; i++)
                copy_16_async(to + slot_offset(i / 2 * 2, i % 2 * 4, 0), rows[i % 2] + i / 2 * 128,
                              true);
        } else {
#pragma unroll
            for (int i = 0; i < PIECE_STEPS; i++) {
                bool exists = begin + i / 2 * 128 < at.row_bytes;
                copy_16_async(to + slot_offset(i / 2 * 2, i % 2 * 4, 0),
                              exists ? rows[i % 2] + i / 2 * 128 : at.data, exists);
            }
        }
        at.advance(t);
    }
    __pipeline_commit();
}

// ----------------------------------------------------------------------------
// Multiplying a piece on the tensor cores

// d += a b, where a is 16 by 16, b 16 by 8 and d 16 by 8 (PTX: mma.m16n8k16). Lane 4 i + q holds:
//   a[0], a[2]   elements 2 q, 2 q + 1 and 2 q + 8, 2 q + 9 of row i of a
//   a[1], a[3]   the same of row i + 8
//   b.x, b.y     the same elements of column i of b
//   d[0], d[1]   columns 2 q and 2 q + 1 of row i of d; d[2], d[3] the same of row i + 8
// Lane 4 i + q has eight weights w0 to w7, all from row i of the group. They fill its parts of two
// rows of a: w0, w1, w4 and w5 are in row i, and w2, w3, w6 and w7 in row i + 8. Some columns of b
// hold the x for w0, w1, w4 and w5: only row i of d is used in these columns. Other columns hold
// the x for w2, w3, w6 and w7: only row i + 8 of d is used in those.
template <bool bf16>
static __device__ void multiply_eight(float d[4], const uint32_t a[4], const uint2 &b) {
#ifdef CUDA_ON_CPU
    tensor_product<bf16>(d, a, b.x, b.y);
#elif __CUDA_ARCH__ >= 800
    if (bf16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#endif
}

static __device__ uint32_t bits_of(__half2 pair) { return *(uint32_t *)&pair; }
static __device__ __half2 halves_of(uint32_t bits) { return *(__half2 *)&bits; }

// Rounds two numbers to bfloat16, to nearest. The first is the lower half of the result.
static __device__ uint32_t to_bfloats(float a, float b) {
    uint32_t pair = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
#elif defined(CUDA_ON_CPU)
    pair = to_bfloat(a) | to_bfloat(b) << 16;
#endif
    return pair;
}

// A float as the sum of two 16-bit floats, the second of which is the first's rounding error.
// Together they have 16 significant bits in bfloat16, and 22 in half precision, where |x| may be up
// to 4 million.
//   split(a, b, parts)    writes the first parts of a and b to parts[0], the second to parts[1]
//   join(first, second)   returns a product with x, given the products with its two parts
template <bool bf16> struct SplitFloat;

template <> struct SplitFloat<true> {
    static __device__ void split(float a, float b, uint32_t *parts) {
        parts[0] = to_bfloats(a, b);
        parts[1] = to_bfloats(a - __uint_as_float(parts[0] << 16),
                              b - __uint_as_float(parts[0] & 0xffff0000u));
    }
    static __device__ float join(float first, float second) { return first + second; }
};

template <> struct SplitFloat<false> { // scaled: half precision has a small range
    static __device__ void split(float a, float b, uint32_t *parts) {
        a /= 64, b /= 64;
        __half2 first = to_halves(a, b);
        float2 rounded = __half22float2(first);
        parts[0] = bits_of(first);
        parts[1] = bits_of(to_halves((a - rounded.x) * 2048, (b - rounded.y) * 2048));
    }
    static __device__ float join(float first, float second) {
        return 64 * first + 64 / 2048.0f * second;
    }
};

// Converts the four bytes of `word` to two pairs in half precision and subtracts `zero`. The half
// with the bits 0x6400 is 1024, and with 0x6400 + byte it is 1024 + byte.
static __device__ void bytes_to_half_pairs(uint32_t word, float zero, uint32_t *pairs) {
    __half2 offset = __floats2half2_rn(1024 + zero, 1024 + zero);
    pairs[0] = bits_of(__hsub2(halves_of(__byte_perm(word, 0x64646464u, 0x4140)), offset));
    pairs[1] = bits_of(__hsub2(halves_of(__byte_perm(word, 0x64646464u, 0x4342)), offset));
}

// LaneProduct<type> is a lane's part of a row's product with x.
//   N        weights that the lane multiplies in a step: 16 bytes
//   SCALES   words of two scales each that the lane holds for a piece
//   multiply(w, x, j, scales)   adds step j; x points to the N numbers that w multiplies
//   sum()    returns the lane's part; those of lanes 4 r to 4 r + 3 add up to row r's product
//
// On the tensor cores, each eight x become four columns of b in multiply_eight (see store_x):
//   0, 1   first and second parts (see SplitFloat) of the x for row r of a
//   2, 3   first and second parts of the x for row r + 8 of a
// In lane 4 r + q, d has columns 2 q and 2 q + 1. So lane 4 r gets the sums in columns 0 and 1 (row
// r of d), and lane 4 r + 1 those in columns 2 and 3 (row r + 8).
//
// With 16-bit weights, columns 4 to 7 of b are zeros. With Q8_0 and Q4_0, sums of weights with
// different scales must stay apart. The weights that share a scale are a scale block: columns 0 to
// 3 hold the x of one scale block, columns 4 to 7 those of another, and both hold zeros for all
// other weights. Lanes 4 r and 4 r + 1 get the sums of the first scale block, lanes 4 r + 2 and
// 4 r + 3 those of the second.
template <Type type> struct LaneProduct;

// Returns column l / 4 % 4 (for lane l) of the eight numbers from x[8 * eight] on, or zeros.
static __device__ uint2 load_column(const float *x, int eight, bool is_needed) {
    uint2 zeros = {0, 0};
    return is_needed ? *(const uint2 *)(x + 8 * eight + threadIdx.x % 16 / 4 * 2) : zeros;
}

// Returns the sum that this lane gets of its row: see LaneProduct.
template <typename Parts> static __device__ float lane_sum(const float d[4]) {
    return threadIdx.x % 2 ? Parts::join(d[2], d[3]) : Parts::join(d[0], d[1]);
}

template <bool bf16> struct SixteenBitProduct {
    enum { N = 8, SCALES = 0 };
    typedef SplitFloat<bf16> Parts;
    float sums[2][4]; // for even and odd steps, so that two chains of additions can overlap
    __device__ void multiply(const uint4 &w, const float *x, int j, const uint32_t *) {
        const uint32_t words[] = {w.x, w.y, w.z, w.w};
        multiply_eight<bf16>(sums[j % 2], words, load_column(x, 0, threadIdx.x % 32 < 16));
    }
    __device__ float sum() const {
        return threadIdx.x % 4 < 2 ? lane_sum<Parts>(sums[0]) + lane_sum<Parts>(sums[1]) : 0;
    }
};
template <> struct LaneProduct<BF16> : SixteenBitProduct<true> {};
template <> struct LaneProduct<F16> : SixteenBitProduct<false> {};

// Returns the scale of the sums that this lane gets (see LaneProduct), out of the two that lane
// `from` holds in `pair`: lanes 4 r and 4 r + 1 get the first, lanes 4 r + 2 and 4 r + 3 the
// second.
static __device__ float scale_from_lane(uint32_t pair, int from) {
    float2 both = __half22float2(halves_of(__shfl_sync(ALL_LANES, pair, from)));
    return threadIdx.x % 4 < 2 ? both.x : both.y;
}

template <> struct LaneProduct<Q8_0> {
    enum { N = 16, SCALES = 2 * PIECE_STEPS / 8 };
    typedef SplitFloat<false> Parts;
    float total;
    __device__ void multiply(const uint4 &w, const float *x, int j, const uint32_t *scales) {
        // whether this lane's column of b is for the scale block of the lane's weights
        bool is_mine = threadIdx.x % 32 / 16 == threadIdx.x % 4 / 2;
        uint32_t a[8];
        float d[4] = {0};
        bytes_to_half_pairs(w.x ^ 0x80808080u, 128, a),
            bytes_to_half_pairs(w.y ^ 0x80808080u, 128, a + 2);
        bytes_to_half_pairs(w.z ^ 0x80808080u, 128, a + 4);
        bytes_to_half_pairs(w.w ^ 0x80808080u, 128, a + 6);
        multiply_eight<false>(d, a, load_column(x, 0, is_mine));
        multiply_eight<false>(d, a + 4, load_column(x, 1, is_mine));
        float scale = scale_from_lane(scales[j % 2], threadIdx.x % 32 / 4 * 4 + j / 2);
        total += scale * lane_sum<Parts>(d);
    }
    __device__ float sum() const { return total; }
};

template <> struct LaneProduct<Q4_0> {
    enum { N = 32, SCALES = 4 * PIECE_STEPS / 8 };
    typedef SplitFloat<false> Parts;
    float total;
    __device__ void multiply(const uint4 &w, const float *x, int j, const uint32_t *scales) {
        const uint32_t words[] = {w.x, w.y, w.z, w.w};
        uint32_t a[2][8]; // low nibbles (elements 0 to 15 of a scale block), high nibbles
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bytes_to_half_pairs(words[i] & 0x0f0f0f0fu, 8, a[0] + 2 * i);
            bytes_to_half_pairs(words[i] >> 4 & 0x0f0f0f0fu, 8, a[1] + 2 * i);
        }
#pragma unroll
        for (int p = 0; p < 2; p++) { // lanes 4 r to 4 r + 3 have a scale block each: two per pass
            bool is_mine = threadIdx.x % 4 == 2 * p + threadIdx.x % 32 / 16;
            float d[4] = {0};
#pragma unroll
            for (int i = 0; i < 4; i++)
                multiply_eight<false>(d, a[i / 2] + i % 2 * 4, load_column(x, i, is_mine));
            int from = threadIdx.x % 32 / 4 * 4 + j / 2;
            total += scale_from_lane(scales[j % 2 * 2 + p], from) * lane_sum<Parts>(d);
        }
    }
    __device__ float sum() const { return total; }
};

template <> struct LaneProduct<F32> { // without tensor cores
    enum { N = 4, SCALES = 0 };
    float total;
    __device__ void multiply(const uint4 &w, const float *x, int, const uint32_t *) {
        const float *four = (const float *)&w;
        float4 y = *(const float4 *)x;
        total += four[0] * y.x + four[1] * y.y + four[2] * y.z + four[3] * y.w;
    }
    __device__ float sum() const { return total; }
};

// Loads this lane's scales of a piece, two in each word of `pairs`: lane 4 r + q holds those of row
// r in steps 2 q and 2 q + 1. Scales are too small for asynchronous copies; they are loaded one
// piece ahead instead.
template <Type type>
static __device__ void load_scales(const TokenPlan &t, const BlockShare &at, int group, int piece,
                                   uint32_t *pairs) {
    const int LANE_SCALES = 2 * LaneProduct<type>::SCALES; // scales that this lane loads
    if (LANE_SCALES == 0 || group >= at.n) return;
    const TokenProduct &product = t.products[at.role];
    int r = threadIdx.x % 32 / 4, blocks = product.w.cols / 32;
    int block = piece * 4 * LANE_SCALES + threadIdx.x % 4 * LANE_SCALES; // the first one
    const uint16_t *scales =
        (const uint16_t *)((const char *)product.w.scales + at.layer * t.stride.scales);
    int row = product.group_stride * (at.first + group) + r % 4 + (r < 4 ? 0 : product.second_half);
    scales += (size_t)min(row, product.w.rows - 1) * blocks;
#pragma unroll
    for (int i = 0; i < LANE_SCALES; i += 2) {
        uint32_t a = block + i < blocks ? __ldg(scales + block + i) : 0;
        uint32_t b = block + i + 1 < blocks ? __ldg(scales + block + i + 1) : 0;
        pairs[i / 2] = a | b << 16;
    }
}

// Multiplies the first `steps` steps of the piece in `slot` by x. Writes the rows' sums to y (8,).
template <Type type>
static __device__ void multiply_piece(const char *slot, const float *x, int steps,
                                      const uint32_t *scales, float *y) {
    int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    LaneProduct<type> lane = {};
    auto step = [&](int j) {
        const uint4 &w = *(const uint4 *)(slot + slot_offset(j, r, q));
        lane.multiply(w, x + (4 * j + q) * LaneProduct<type>::N, j, scales);
    };
    if (steps == PIECE_STEPS) {
#pragma unroll
        for (int j = 0; j < PIECE_STEPS; j++) step(j);
    } else {
#pragma unroll
        for (int j = 0; j < PIECE_STEPS; j++)
            if (j < steps) step(j);
    }
    float sum = lane.sum();
    for (int i = 1; i < 4; i *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, i);
    if (q == 0) y[r] = sum;
}

// ----------------------------------------------------------------------------
// The parts of a product: its x, the multiplication, its results

// Stores x (8,) from xs[i] on, in the form that LaneProduct<type> reads: as floats for F32,
// otherwise as four columns of two words.
template <Type type> static __device__ void store_x(float *xs, int i, const float x[8]) {
    if constexpr (type == F32) memcpy(xs + i, x, 8 * sizeof(float));
    else {
        uint32_t parts[4][2];
#pragma unroll
        for (int k = 0; k < 4; k++)
            LaneProduct<type>::Parts::split(x[2 * k], x[2 * k + 1], parts[k]);
        *(uint4 *)(xs + i) = {parts[0][0], parts[2][0], parts[0][1], parts[2][1]};
        *(uint4 *)(xs + i + 4) = {parts[1][0], parts[3][0], parts[1][1], parts[3][1]};
    }
}

enum { MAX_STEP_COLS = 128 }; // columns of a step of Q4_0, which has the most: 64 bytes

// Returns cols, rounded up to whole steps of any type. load_x fills the rest of x with zeros.
static __host__ __device__ int padded_cols(int cols) {
    return (cols + MAX_STEP_COLS - 1) / MAX_STEP_COLS * MAX_STEP_COLS;
}

// With CARRIED: receives elements i to i + 7 of the vector that the product multiplies, x (8,). The
// embedding is not sent: every block reads it from the table.
static __device__ void receive_x(const TokenPlan &t, const BlockShare &at, int splits, int i,
                                 float *x) {
    const CarriedWords &words = t.words;
    unsigned epoch = epoch_of(t, at.step);
    if (at.step == 0)
        for (int j = 0; j < 8; j++) {
            float number = element_at(t.table, (size_t)t.token * t.table.cols + i + j);
#pragma unroll
            for (int k = 0; k < 8; k++) // constant indices keep x in registers
                x[k] = k == j ? number : x[k];
        }
    else if (at.role == ATTENTION_OUT && splits > 1)
        receive_merged(words.attended, t.cache.head_dim, splits, i, epoch, x);
    else if (at.role == ATTENTION_OUT) receive<4>(words.attended + i, epoch, x);
    else receive<4>((at.role == DOWN ? words.h : words.x) + i, epoch, x);
}

// Copies the vector that the product multiplies to s.xs. An RMSNorm before the product is computed
// in two parts: here x is multiplied by its weights, and the warps' sums of squares are stored to
// s.squares; finish_products multiplies the results by the factor that norm_scale computes from
// them.
template <Type type>
static __device__ void load_x(const TokenPlan &t, const BlockShare &at, int splits,
                              const TokenShared &s) {
    const float4 zeros = {0, 0, 0, 0}, ones = {1, 1, 1, 1};
    const TokenProduct &product = t.products[at.role];
    int cols = product.w.cols, head_dim = t.cache.head_dim, end = padded_cols(cols);
    const float *source = at.role == ATTENTION_OUT ? t.attention_out : at.role == DOWN ? t.h : t.x;
    const float4 *from = (const float4 *)source, *norm = NULL;
    if (product.norm)
        norm = (const float4 *)((const char *)product.norm + at.layer * t.stride.weights);
    float sum = 0;
    if (CARRIED && at.n == 0) return; // see carried.cuh: the block must not wait for x
    for (int i = 8 * threadIdx.x; i < end; i += 8 * BLOCK_THREADS) {
        float4 x[2] = {zeros, zeros}, w[2] = {ones, ones};
        auto load_norm = [&] { w[0] = norm[i / 4], w[1] = norm[i / 4 + 1]; };
        if (CARRIED && i < cols && norm) load_norm(); // in flight while the block waits for x
        if (CARRIED && i < cols) receive_x(t, at, splits, i, (float *)x);
        else if (i < cols && at.role == ATTENTION_OUT && splits > 1)
            for (int j = 0; j < 8; j++) { // eight numbers may belong to two heads
                int head = (i + j) / head_dim;
                float merged = merge_partials(t.partials, head, splits, (i + j) % head_dim);
#pragma unroll
                for (int k = 0; k < 8; k++) // constant indices keep x in registers
                    ((float *)x)[k] = k == j ? merged : ((float *)x)[k];
            }
        else if (i < cols) x[0] = from[i / 4], x[1] = from[i / 4 + 1];
        if (!CARRIED && i < cols && norm) load_norm();
        float y[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float number = ((float *)x)[j];
            sum += number * number, y[j] = number * ((float *)w)[j];
        }
        store_x<type>(s.xs, i, y);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) s.squares[threadIdx.x / 32] = sum;
}

// The scales of a warp's first piece of a product, which are loaded before the barrier that the
// product waits for. Sized for Q4_0, which has the most.
struct FirstScales { uint32_t pairs[LaneProduct<Q4_0>::SCALES]; };

template <Type type>
static __device__ void load_first_scales(const TokenPlan &t, const BlockShare &at,
                                         FirstScales &first) {
    PieceIndex start = t.products[at.role].first[threadIdx.x / 32];
    load_scales<type>(t, at, start.group, start.piece, first.pairs);
}

// Multiplies the block's share of a product, for weights of this type. As soon as a slot is free,
// it starts the copy of the next piece of weights to it, even if that piece belongs to a later
// product. first: see FirstScales. slot: index of the warp's slot with its next piece, updated.
template <Type type>
static __device__ void multiply_share(const TokenPlan &t, const BlockShare &at,
                                      const TokenShared &s, const FirstScales &first,
                                      PieceCursor &ahead, int &slot) {
    const TokenProduct &product = t.products[at.role];
    int warp = threadIdx.x / 32;
    int group = product.first[warp].group, piece = product.first[warp].piece;
    int pieces = product.pieces, row_bytes = product.row_bytes;
    int hop_groups = product.hop.group, hop_pieces = product.hop.piece;
    int end = at.n * pieces, slots = t.slots;
    char *warp_slots = s.slots + (size_t)warp * slots * SLOT_BYTES;
    uint32_t scales[LaneProduct<type>::SCALES + 1], next_scales[LaneProduct<type>::SCALES + 1];
    for (int k = 0; k < LaneProduct<type>::SCALES; k++) scales[k] = first.pairs[k];
    for (int i = warp; i < end; i += WARPS) {
        char *from = warp_slots + slot * SLOT_BYTES;
        int steps = min((int)PIECE_STEPS, (row_bytes - piece * PIECE_BYTES + 63) / 64);
        const float *x = s.xs + piece * (4 * PIECE_STEPS * LaneProduct<type>::N);
        group += hop_groups, piece += hop_pieces;
        if (piece >= pieces) piece -= pieces, group++;
        load_scales<type>(t, at, group, piece, next_scales);
        __pipeline_wait_prior(slots - 1); // waits for all copies but those to the other slots
        __syncwarp();                     // what other lanes copied is visible
        multiply_piece<type>(from, x, steps, scales, s.row_sums + i * GROUP_ROWS);
        copy_piece_async(t, ahead, from);
        for (int k = 0; k < LaneProduct<type>::SCALES; k++) scales[k] = next_scales[k];
        if (++slot == slots) slot = 0;
    }
}

// Prefetches to the L2 cache the norm weights and rotation that complete_heads reads in a layer.
static __device__ void prefetch_head_weights(const TokenPlan &t, int layer, int pos) {
    int bytes = (int)sizeof(float) * t.cache.head_dim, i = 128 * threadIdx.x;
    const char *q_norm = (const char *)t.heads.q_norm, *k_norm = (const char *)t.heads.k_norm;
    if (i >= bytes) return;
    if (q_norm) prefetch_line(q_norm + layer * t.stride.heads + i);
    if (k_norm) prefetch_line(k_norm + layer * t.stride.heads + i);
    prefetch_line((const char *)(t.rotation + (size_t)pos * (t.cache.head_dim / 2)) + i);
}

// Prefetches to the L2 cache what the next step needs besides its matrix: the weights of an
// RMSNorm, and before attention, the norm weights and rotation of heads and the keys and values
// that head blockIdx.x attends to in the first n positions.
static __device__ void prefetch_for_next(const TokenPlan &t, const BlockShare &at,
                                         const LayerCache &cache, int n) {
    bool logits_follow = at.role == DOWN && at.layer + 1 == t.n_layers;
    const TokenProduct &next = t.products[logits_follow ? LOGITS : (at.role + 1) % 4];
    size_t bytes = sizeof(float) * t.products[LOGITS].w.cols; // bytes of a norm's weights
    size_t line = threadIdx.x * gridDim.x + blockIdx.x;       // the blocks share the lines
    if (next.norm && at.role != LOGITS && 128 * line < bytes) {
        const char *norm = (const char *)next.norm;
        int layer = logits_follow ? 0 : at.layer + at.role / DOWN; // after DOWN: the next layer
        prefetch_line(norm + layer * t.stride.weights + 128 * line);
    }
    int h = blockIdx.x;
    if (at.role == QKV && t.complete_later && h == 0) prefetch_head_weights(t, at.layer, n - 1);
    if (at.role != QKV || h >= cache.n_heads) return;
    size_t head = (size_t)(h / (cache.n_heads / cache.n_kv_heads)) * cache.positions;
    size_t width = t.stride.cache / ((size_t)cache.n_kv_heads * cache.positions); // bytes
    for (size_t i = first_position(cache, n) * width + 128 * threadIdx.x; i < n * width;
         i += 128 * BLOCK_THREADS) {
        prefetch_line((const char *)cache.keys + head * width + i);
        prefetch_line((const char *)cache.values + head * width + i);
    }
}

// Products are finished in pairs of rows: a row of w1 and the same row of w3 for GATE_UP, otherwise
// two consecutive rows.
struct RowPair {
    float a, b;     // the two products
    float2 operand; // QKV: cosine and sine, or biases; ATTENTION_OUT, DOWN: elements of x to add
};

// Returns the first row of the block's pair i; for GATE_UP, the row of w1.
static __device__ int first_row_of_pair(const BlockShare &at, int i) {
    return at.role == GATE_UP ? GROUP_ROWS / 2 * at.first + i : GROUP_ROWS * at.first + 2 * i;
}

// Returns the biases of rows `row` and `row` + 1 of queries, keys and values; zeros without biases.
static __device__ float2 load_biases(const TokenPlan &t, int layer, int row) {
    int q_dim = t.cache.n_heads * t.cache.head_dim, kv_dim = t.cache.n_kv_heads * t.cache.head_dim;
    bool is_q = row < q_dim, is_k = !is_q && row < q_dim + kv_dim;
    const float *biases = is_q ? t.heads.bq : is_k ? t.heads.bk : t.heads.bv;
    if (!biases) return {0, 0};
    if (!is_q) row -= is_k ? q_dim : q_dim + kv_dim;
    biases = (const float *)((const char *)biases + layer * t.stride.heads);
    return *(const float2 *)(biases + row);
}

// With CARRIED: receives elements `row` and `row` + 1 of x as it was before the layer's attention
// or feed-forward. The same thread later overwrites them with the sum.
static __device__ float2 receive_operand(const TokenPlan &t, const BlockShare &at, int row) {
    size_t first = (size_t)t.token * t.table.cols + row; // in the embedding table
    if (at.step == ATTENTION_OUT)
        return {element_at(t.table, first), element_at(t.table, first + 1)};
    // DOWN multiplies the vector after x (h), ATTENTION_OUT the second one after x
    unsigned epoch = epoch_of(t, at.step) - (at.role == DOWN ? 1 : 2);
    float x[2];
    receive<1>(t.words.x + row, epoch, x);
    return {x[0], x[1]};
}

// Loads the operand of the block's pair i: the cosine and sine of its rotation, its biases if the
// rotation comes later, or the elements of x that it is added to.
static __device__ float2 load_operand(const TokenPlan &t, const BlockShare &at, int pos, int i) {
    int row = first_row_of_pair(at, i), half = t.cache.head_dim / 2;
    if (i >= GROUP_ROWS / 2 * at.n || row >= t.products[at.role].w.rows) return {0, 0};
    if (at.role == GATE_UP || at.role == LOGITS) return {0, 0};
    if (CARRIED && at.role != QKV) return receive_operand(t, at, row);
    if (at.role != QKV) return *(const float2 *)(t.x + row);
    if (t.complete_later) return load_biases(t, at.layer, row);
    return t.rotation[(size_t)pos * half + row / 2 % half];
}

// The cache of a layer, and the position of the token.
struct CacheSlot {
    LayerCache cache;
    int pos;
};

// Stores the results of the pair whose first row is i. If they are logits, returns the larger one.
template <typename CacheType>
static __device__ Largest finish_pair(const TokenPlan &t, const BlockShare &at,
                                      const CacheSlot &slot, int i, const RowPair &pair) {
    const LayerCache &cache = slot.cache;
    Largest found = {-INFINITY, 0x7fffffff}; // less than any logit
    int head_dim = cache.head_dim, q_dim = cache.n_heads * head_dim;
    int kv_dim = cache.n_kv_heads * head_dim, role = at.role, row = i;
    unsigned epoch = epoch_of(t, at.step) + 1;
    float a = pair.a, b = pair.b;
    if (role == QKV) {
        bool is_q = i < q_dim, is_k = !is_q && i < q_dim + kv_dim, later = t.complete_later;
        if (!is_q) i -= is_k ? q_dim : q_dim + kv_dim;
        if (later) a += pair.operand.x, b += pair.operand.y;
        else if (is_q || is_k) rotate_pair(a, b, pair.operand);
        if (CARRIED) send_pair(t.words.qkv + row, a, b, epoch);
        else if (is_q) store_pair(t.q + i, a, b);
        else if (is_k && later) store_pair(t.k + i, a, b);
        else {
            CacheType *cached = (CacheType *)(is_k ? cache.keys : cache.values);
            store_pair(cached + cache_index(cache, i, slot.pos), a, b);
        }
    } else if (role == GATE_UP) {
        if (CARRIED) send(t.words.h + i, swiglu(a, b), epoch);
        else t.h[i] = swiglu(a, b);
    } else if (role == LOGITS) {
        bool has_second = i + 1 < t.products[LOGITS].w.rows;
        t.logits[i] = a;
        if (has_second) t.logits[i + 1] = b;
        found = checked_logit(a, i);
        if (has_second) found = larger_of(found, checked_logit(b, i + 1));
    } else { // dim is even: rows are multiples of 32
        if (CARRIED) send_pair(t.words.x + i, pair.operand.x + a, pair.operand.y + b, epoch);
        else store_pair(t.x + i, pair.operand.x + a, pair.operand.y + b);
    }
    return found;
}

// Adds up the pieces' sums of each row of the block, multiplies by `scale`, and stores the results.
// If they are logits, returns the largest one that this thread stored. `operand` is that of the
// thread's first pair.
template <typename CacheType>
static __device__ Largest finish_products(const TokenPlan &t, const BlockShare &at,
                                          const CacheSlot &slot, const float *row_sums, float scale,
                                          float2 operand) {
    const TokenProduct &product = t.products[at.role];
    bool gated = at.role == GATE_UP;
    Largest largest = {-INFINITY, 0x7fffffff};
    int rows = gated ? product.w.rows / 2 : product.w.rows;
    int distance = gated ? GROUP_ROWS / 2 : 1; // from the first row of a pair to its second
    for (int i = threadIdx.x; i < GROUP_ROWS / 2 * at.n; i += BLOCK_THREADS) {
        const float *y = row_sums + (i / 4 * product.pieces) * GROUP_ROWS;
        y += gated ? i % 4 : 2 * (i % 4);
        float a = 0, b = 0;
#pragma unroll 4
        for (int j = 0; j < product.pieces; j++)
            a += y[j * GROUP_ROWS], b += y[j * GROUP_ROWS + distance];
        int row = first_row_of_pair(at, i);
        if (row < rows) {
            RowPair pair = {scale * a, scale * b, operand};
            largest = larger_of(largest, finish_pair<CacheType>(t, at, slot, row, pair));
        }
        operand = load_operand(t, at, slot.pos, i + BLOCK_THREADS);
    }
    return largest;
}

// Returns the factor of an RMSNorm over dim numbers, given the warps' sums of their squares.
static __device__ float norm_scale(const TokenPlan &t, int dim, const float *squares) {
    float sum = 0;
    for (int i = 0; i < BLOCK_WARPS; i++) sum += squares[i];
    return 1 / sqrtf(sum / dim + t.norm_eps);
}

// Completes a head of queries or keys, `raw` (head_dim,): applies RMSNorm, unless `norm`
// (head_dim,) is NULL, and the rotation by angles (head_dim / 2,): cosines and sines. Writes the
// head to `out`, in shared memory. Called by one warp.
static __device__ void complete_head(const TokenPlan &t, const float *raw, const float *norm,
                                     const float2 *angles, float *out) {
    int lane = threadIdx.x % 32, head_dim = t.cache.head_dim, half = head_dim / 2;
    bool halves = t.cache.rope_halves;
    float sum = 0;
    for (int i = lane; norm && i < head_dim; i += 32) sum += raw[i] * raw[i];
    float scale = 1 / sqrtf(warp_sum(sum) / head_dim + t.norm_eps);
    for (int i = lane; i < half; i += 32) {
        int first = halves ? i : 2 * i, second = halves ? i + half : 2 * i + 1;
        float a = raw[first], b = raw[second];
        if (norm) a *= scale * norm[first], b *= scale * norm[second];
        rotate_pair(a, b, angles[i]);
        out[first] = a, out[second] = b;
    }
}

static __device__ uint32_t cache_word(float a) { return __float_as_uint(a); }
static __device__ uint32_t cache_word(float a, float b) { return bits_of(to_halves(a, b)); }

// Writes a key or value, vector (head_dim,) in shared memory, to the cache of KV head `head`: `to`
// is cache.keys or cache.values. Called by one warp. All blocks that attend with the head write the
// same vector, so no block has to wait for another. The writes are volatile, because plain writes
// by several blocks would be a data race.
template <typename CacheType>
static __device__ void store_in_cache(const LayerCache &cache, void *to, int head, int pos,
                                      const float *vector) {
    const int N = sizeof(uint32_t) / sizeof(CacheType); // numbers per word
    size_t at = cache_index(cache, head * cache.head_dim, pos);
    volatile uint32_t *words = (volatile uint32_t *)((CacheType *)to + at);
    for (int i = threadIdx.x % 32; i < cache.head_dim / N; i += 32) {
        if constexpr (N == 1) words[i] = cache_word(vector[i]);
        else words[i] = cache_word(vector[2 * i], vector[2 * i + 1]);
    }
}

// Returns a pointer to the weights of layer `layer`, given that of layer 0, which may be NULL.
static __device__ const float *head_weights_of(const TokenPlan &t, const float *first, int layer) {
    return first ? (const float *)((const char *)first + layer * t.stride.heads) : NULL;
}

// Completes query head h, and the key that it attends to at the token's position, in a warp each.
template <typename CacheType>
static __device__ void complete_heads(const TokenPlan &t, const LayerCache &cache, int layer, int h,
                                      int pos, AttentionScratch *scratch) {
    int warp = threadIdx.x / 32, head_dim = cache.head_dim;
    int kv_head = h / (cache.n_heads / cache.n_kv_heads);
    const float2 *angles = t.rotation + (size_t)pos * (head_dim / 2);
    if (warp == 0) {
        complete_head(t, t.q + h * head_dim, head_weights_of(t, t.heads.q_norm, layer), angles,
                      scratch->query);
        for (int d = head_dim + threadIdx.x; d < cache.width; d += 32) scratch->query[d] = 0;
    } else if (warp == 1) {
        complete_head(t, t.k + kv_head * head_dim, head_weights_of(t, t.heads.k_norm, layer),
                      angles, scratch->key);
        __syncwarp();
        store_in_cache<CacheType>(cache, cache.keys, kv_head, pos, scratch->key);
    }
}

// With CARRIED: receives the query of head part.h and completes it. If the token's position is in
// the block's part, also receives its key and value, completes the key, and writes both to the
// cache, where attend_block reads them. Query, key and value have a warp each. scratch->outs is
// free until attend_block.
template <typename CacheType>
static __device__ void receive_head(const TokenPlan &t, const LayerCache &cache, int layer,
                                    const HeadSplit &part, AttentionScratch *scratch) {
    enum { QUERY, KEY, VALUE };
    int what = threadIdx.x / 32, lane = threadIdx.x % 32, head_dim = cache.head_dim;
    int kv_head = part.h / (cache.n_heads / cache.n_kv_heads), pos = part.n - 1;
    if (what > VALUE || (what != QUERY && !has_last_position(part))) return;
    int heads_before = what == QUERY ? 0 : cache.n_heads + (what - KEY) * cache.n_kv_heads;
    int head = heads_before + (what == QUERY ? part.h : kv_head); // index in all heads of qkv
    bool later = t.complete_later && what != VALUE;
    float *out = what == QUERY ? scratch->query : what == KEY ? scratch->key : scratch->outs;
    float *raw = later ? scratch->outs + (1 + what) * MAX_HEAD_DIM : out;
    for (int d = 2 * lane; d < head_dim; d += 64)
        receive<1>(t.words.qkv + head * head_dim + d, epoch_of(t, 4 * layer + QKV) + 1, raw + d);
    __syncwarp(); // all lanes have received their parts of the head
    if (later) {
        const float *norm = what == QUERY ? t.heads.q_norm : t.heads.k_norm;
        complete_head(t, raw, head_weights_of(t, norm, layer),
                      t.rotation + (size_t)pos * (head_dim / 2), out);
        __syncwarp();
    }
    if (what == QUERY)
        for (int d = head_dim + lane; d < cache.width; d += 32) out[d] = 0;
    else
        store_in_cache<CacheType>(cache, what == KEY ? cache.keys : cache.values, kv_head, pos,
                                  out);
}

// Attends with all heads to the first n positions, or the last `window` of them. Each head's
// positions are cut into `splits` parts; the blocks share the parts of all heads.
template <typename CacheType>
static __device__ void attend_heads(const TokenPlan &t, const LayerCache &cache, int layer,
                                    int splits, int n, AttentionScratch *scratch) {
    for (int i = blockIdx.x; i < cache.n_heads * splits; i += gridDim.x) {
        int h = i / splits, d = threadIdx.x;
        HeadSplit part = {h, i % splits, splits, first_position(cache, n), n};
        if (CARRIED) {
            if (i >= (int)gridDim.x) __syncthreads(); // the block has finished its previous head
            receive_head<CacheType>(t, cache, layer, part, scratch);
        } else if (t.complete_later) complete_heads<CacheType>(t, cache, layer, h, n - 1, scratch);
        else load_query(cache, t.q, h, scratch);
        HeadPartial mine = attend_block<CacheType, 4>(cache, part, scratch);
        if (CARRIED) {
            unsigned epoch = epoch_of(t, 4 * layer + ATTENTION_OUT);
            if (d < cache.head_dim)
                send_attended(t.words.attended, part, cache.head_dim, d, mine, epoch);
            continue;
        }
        if (d < cache.head_dim && splits > 1) store_partial(t.partials, part, d, mine);
        if (d < cache.head_dim && splits == 1)
            t.attention_out[h * cache.head_dim + d] = mine.out / mine.sum;
    }
}

// Computes one token, from its embedding to its logits and the largest of them. The layers'
// matrices are of one type and have the same layout in all layers; the output matrix is of type
// `last`. Grid: one block per multiprocessor, launched cooperatively; block: BLOCK_WARPS warps.
template <Type type, Type last, typename CacheType>
static __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    whole_token(const __grid_constant__ TokenPlan t, int token, int pos) {
    LAUNCH_SHARED(start);
    TokenShared s;
    s.slots = (char *)start;
    s.xs = start + (size_t)t.slots * WARPS * SLOT_BYTES / sizeof(float);
    s.row_sums = s.xs + t.x_floats;
    s.squares = s.row_sums + t.sums_floats;
    int warp = threadIdx.x / 32, slot = 0;
    // PHASE_BIT cannot flip before this block arrives, so all blocks read the same bit.
    unsigned phase = *(volatile unsigned *)t.arrived;

    int n = pos + 1, splits = gridDim.x / t.cache.n_heads;
    int parts = (n - first_position(t.cache, n) + SPLIT_POSITIONS - 1) / SPLIT_POSITIONS;
    splits = max(1, min(min(splits, parts), t.max_splits));

    PieceCursor ahead = {};
    if (warp < WARPS) {
        ahead.begin(t, 0);
        for (int i = 0; i < t.slots; i++)
            copy_piece_async(t, ahead, s.slots + ((size_t)warp * t.slots + i) * SLOT_BYTES);
    }
    // Every block writes the same embedding, so no block waits for another. The writes are
    // volatile, because plain writes by several blocks would be a data race.
    for (int i = threadIdx.x; !CARRIED && i < t.table.cols; i += BLOCK_THREADS)
        *(volatile float *)&t.x[i] = element_at(t.table, (size_t)token * t.table.cols + i);
    __syncthreads();

    Largest largest = {-INFINITY, 0x7fffffff};
    FirstScales scales = {};
    BlockShare at = {};
    at.enter(t, 0);
    if (warp < WARPS) load_first_scales<type>(t, at, scales);
    for (;;) {
        const TokenProduct &product = t.products[at.role];
        size_t offset = at.layer * t.stride.cache;
        CacheSlot cached = {t.cache, pos};
        cached.cache.keys = (char *)cached.cache.keys + offset;
        cached.cache.values = (char *)cached.cache.values + offset;
        if (at.role == ATTENTION_OUT) {
            attend_heads<CacheType>(t, cached.cache, at.layer, splits, n, (AttentionScratch *)s.xs);
            end_step(t.arrived, phase);
        }
        bool is_other_type = type != last && at.role == LOGITS;
        is_other_type ? load_x<last>(t, at, splits, s) : load_x<type>(t, at, splits, s);
        float2 operand = load_operand(t, at, pos, threadIdx.x);
        prefetch_for_next(t, at, cached.cache, n);
        __syncthreads();
        if (warp < WARPS)
            is_other_type ? multiply_share<last>(t, at, s, scales, ahead, slot)
                          : multiply_share<type>(t, at, s, scales, ahead, slot);
        __syncthreads();
        float scale = product.norm ? norm_scale(t, product.w.cols, s.squares) : 1;
        largest = larger_of(largest,
                            finish_products<CacheType>(t, at, cached, s.row_sums, scale, operand));
        if (at.role == LOGITS) break;
        at.enter(t, at.step + 1);
        bool is_last_type = at.role == LOGITS;
        if (warp < WARPS)
            is_last_type ? load_first_scales<last>(t, at, scales)
                         : load_first_scales<type>(t, at, scales);
        end_step(t.arrived, phase);
    }

    // The largest logit of each block, then of all blocks.
    __syncthreads();
    largest = block_largest(largest, (Largest *)s.squares);
    if (threadIdx.x == 0) t.largest[blockIdx.x] = largest;
    grid_barrier(t.arrived, phase);
    if (blockIdx.x) return;
    largest = {-INFINITY, 0x7fffffff};
    for (int i = threadIdx.x; i < (int)gridDim.x; i += BLOCK_THREADS)
        largest = larger_of(largest, t.largest[i]);
    largest = block_largest(largest, (Largest *)s.squares);
    if (threadIdx.x == 0) *t.best = largest.index;
}
