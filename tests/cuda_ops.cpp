// Compares every op of the GPU's Backend with the CPU's on random models whose sizes leave
// remainders in every kernel. The CPU's weights are the same numbers in float32. Prints one line
// for each model and type: the largest difference of each op, relative to the largest number
// expected. The exit code is 1 if a difference is too large.
//
// Usage: cuda_ops SEED MODELS   ops and whole tokens of MODELS random models of each type
//        cuda_ops N             whole tokens of the first N of SHAPES, in each type
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <map>
#include <string>
#include <vector>
#include "../runtime/backend.h"

extern "C" {
// from runtime/cpu/kernels.h and runtime/cpu/weights.h
const struct Kernels *llamac_choose_kernels(const char *name);
void llamac_floats(const struct Kernels *, float *out, const Mat *, int r, int c, int n);
}

static uint32_t state;

static uint32_t random_bits() {
    return state = state * 1664525 + 1013904223, state >> 8 ^ state << 20;
}
static int random_below(int n) { return (int)(random_bits() % n); }
static float random_float() { return (int32_t)random_bits() / 2147483648.0f; }

// ---- matrices: random bytes of a type, and the same numbers in float32

struct Matrix {
    std::vector<uint8_t> bytes, scales;
    std::vector<float> floats;
    Mat mat, float_mat;
};

static float power_of_two(int e) { return ldexpf(1, e); }

// Appends a number in F32, F16 or BF16, with random bits in the whole of its mantissa.
static void add_number(Matrix &m, Type type) {
    int mantissa = random_below(1 << (type == BF16 ? 7 : 10)), exponent = random_below(8),
        sign = random_below(2);
    float f = power_of_two(exponent - 8) * (1 + mantissa / (type == BF16 ? 128.0f : 1024.0f))
              * (sign ? -1 : 1);
    if (type == F32) f = random_float() / 8; // keeps attention's scores, and their rounding, small
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (type == BF16) bits >>= 16;
    if (type == F16) bits = sign << 15 | (exponent - 8 + 15) << 10 | mantissa;
    m.bytes.insert(m.bytes.end(), (uint8_t *)&bits, (uint8_t *)&bits + (type == F32 ? 4 : 2));
    m.floats.push_back(f);
}

// Writes a random half-precision number of the order of 2^exponent to p.
static void write_half(uint8_t *p, int exponent, bool negative) {
    uint16_t half = negative << 15 | (exponent + random_below(3) + 15) << 10 | random_below(1024);
    memcpy(p, &half, 2);
}

// Appends a block of random bytes in a quantized type, with scales that make small numbers. In a
// type with several scales per block, these multiply the numbers by up to 127.
static void add_block(Matrix &m, Type type) {
    BlockSize size = block_size(type);
    bool large = size.numbers == 256, has_min = type == Q4_1 || type == Q5_1;
    size_t at = m.bytes.size();
    for (int i = 0; i < size.bytes; i++) m.bytes.push_back((uint8_t)random_bits());
    uint8_t *block = &m.bytes[at];
    write_half(block + (type == Q6_K ? 208 : 0), large ? -14 : type == Q8_0 ? -13 : -9, false);
    if (has_min) write_half(block + 2, -6, true);
    if (type == Q4_K || type == Q5_K) write_half(block + 2, -12, false);
}

// Appends n numbers in INT8_GROUPS.
static void add_groups(Matrix &m, size_t n, int group) {
    for (size_t i = 0; i < n; i++) {
        if (i % group == 0) {
            float scale = (1.5f + random_float()) / 256;
            m.scales.insert(m.scales.end(), (uint8_t *)&scale, (uint8_t *)&scale + 4);
        }
        float scale;
        memcpy(&scale, &m.scales[m.scales.size() - 4], 4);
        m.bytes.push_back(random_bits());
        m.floats.push_back(scale * (int8_t)m.bytes.back());
    }
}

static void make(Matrix &m, Type type, int rows, int cols, int group) {
    size_t n = (size_t)rows * cols;
    bool grouped = type == INT8_GROUPS, blocks = block_size(type).numbers > 1;
    if (blocks && cols % 32) type = F16, blocks = false; // as export.py does
    if (blocks && cols % block_size(type).numbers) type = Q5_0;
    if (grouped) add_groups(m, n, group);
    size_t bytes = blocks ? n / block_size(type).numbers * block_size(type).bytes : 0;
    while (m.bytes.size() < bytes) add_block(m, type);
    while (!blocks && m.floats.size() < n) add_number(m, type);
    m.mat = {
        type, rows, cols, m.bytes.data(), grouped ? m.scales.data() : NULL, grouped ? group : 0,
        NULL};
    if (blocks) m.floats.resize(n);
    for (int r = 0; blocks && r < rows; r++)
        llamac_floats(llamac_choose_kernels(NULL), &m.floats[(size_t)r * cols], &m.mat, r, 0, cols);
    m.float_mat = {F32, rows, cols, m.floats.data(), NULL, 0, NULL};
}

// ---- a model for both backends: in its type for the GPU, in float32 for the CPU

struct Pair {
    std::vector<Matrix> matrices;
    std::vector<Layer> layers[2];
    std::vector<double> frequencies;
    Model model[2]; // GPU, CPU
};

struct Weighting {
    Type type;
    int group;          // of INT8_GROUPS
    bool mixed;         // wv of all layers but the first is in BF16
    bool biases, norms; // of queries, keys and values
};

static void make_pair(Pair &p, const Config &c, const Weighting &weighting) {
    Type type = weighting.type;
    bool biases = weighting.biases, norms = weighting.norms;
    p.matrices.resize(3 + 14 * c.n_layers);
    p.frequencies.resize(c.head_dim / 2);
    for (int i = 0; i < c.head_dim / 2; i++) p.frequencies[i] = pow(10000, -2.0 * i / c.head_dim);
    size_t used = 0;
    auto add = [&](Type t, int rows, int cols, auto place) {
        Matrix &m = p.matrices[used++];
        make(m, t, rows, cols, weighting.group);
        place(p.model[0].weights) = m.mat;
        place(p.model[1].weights) = m.float_mat;
    };
    for (int i = 0; i < 2; i++) {
        p.layers[i].resize(c.n_layers);
        p.model[i] = {};
        p.model[i].config = c, p.model[i].weights.layers = p.layers[i].data(),
        p.model[i].weights.frequencies = p.frequencies.data();
    }
    add(type, c.vocab_size, c.dim, [](Weights &w) -> Mat & { return w.token_embedding; });
    add(F32, 1, c.dim, [](Weights &w) -> Mat & { return w.norm; });
    // export.py writes it like this
    add(type == Q4_0 ? Q8_0 : type, c.vocab_size, c.dim,
        [](Weights &w) -> Mat & { return w.output; });
    for (int l = 0; l < c.n_layers; l++) {
        add(F32, 1, c.dim, [=](Weights &w) -> Mat & { return w.layers[l].attention_norm; });
        add(type, c.q_dim, c.dim, [=](Weights &w) -> Mat & { return w.layers[l].wq; });
        add(type, c.kv_dim, c.dim, [=](Weights &w) -> Mat & { return w.layers[l].wk; });
        add(l && weighting.mixed ? BF16 : type, c.kv_dim, c.dim,
            [=](Weights &w) -> Mat & { return w.layers[l].wv; });
        add(type, c.dim, c.q_dim, [=](Weights &w) -> Mat & { return w.layers[l].wo; });
        add(F32, 1, c.dim, [=](Weights &w) -> Mat & { return w.layers[l].ffn_norm; });
        add(type, c.hidden_dim, c.dim, [=](Weights &w) -> Mat & { return w.layers[l].w1; });
        add(type, c.hidden_dim, c.dim, [=](Weights &w) -> Mat & { return w.layers[l].w3; });
        add(type, c.dim, c.hidden_dim, [=](Weights &w) -> Mat & { return w.layers[l].w2; });
        if (biases) add(F32, 1, c.q_dim, [=](Weights &w) -> Mat & { return w.layers[l].bq; });
        if (biases) add(F32, 1, c.kv_dim, [=](Weights &w) -> Mat & { return w.layers[l].bk; });
        if (biases) add(F32, 1, c.kv_dim, [=](Weights &w) -> Mat & { return w.layers[l].bv; });
        if (norms) add(F32, 1, c.head_dim, [=](Weights &w) -> Mat & { return w.layers[l].q_norm; });
        if (norms) add(F32, 1, c.head_dim, [=](Weights &w) -> Mat & { return w.layers[l].k_norm; });
    }
}

// ---- arrays with the same numbers in both backends

struct Array {
    Backend *gpu, *cpu;
    size_t n;
    float *on_gpu, *on_cpu;

    Array(Backend *gpu, Backend *cpu, size_t n) : gpu(gpu), cpu(cpu), n(n) {
        on_gpu = gpu->alloc(gpu, n), on_cpu = cpu->alloc(cpu, n);
        fill();
    }
    void fill() {
        for (size_t i = 0; i < n; i++) on_cpu[i] = random_float();
        cudaMemcpy(on_gpu, on_cpu, n * sizeof(float), cudaMemcpyHostToDevice);
        cudaDeviceSynchronize();
    }
    double difference() {
        std::vector<float> found(n);
        cudaDeviceSynchronize();
        cudaMemcpy(found.data(), on_gpu, n * sizeof(float), cudaMemcpyDeviceToHost);
        return compare(found.data(), on_cpu, n);
    }
    static double compare(const float *found, const float *expected, size_t n) {
        double worst = 0, largest = 1e-30;
        for (size_t i = 0; i < n; i++) {
            double d = fabs((double)found[i] - expected[i]);
            worst = d <= worst ? worst : isnan(d) ? INFINITY : d;
            largest = fmax(largest, fabs(expected[i]));
        }
        return worst / largest;
    }
};

enum { PADDING = 64 }; // max tokens that the ops may compute beyond those of a pass

// Both backends, and a sequence of each.
struct Both {
    Backend *gpu, *cpu;
    Cache *on_gpu, *on_cpu;
};

static float found[160 * 150]; // logits of the GPU

static int failures;
static std::map<std::string, double> worst; // largest difference of each op of a model

static void report(const char *op, double difference, double max) {
    worst[op] = fmax(worst[op], difference);
    if (!(difference <= max)) failures++, printf(" [%s: more than %.0e]", op, max);
}

// A batch of T tokens of one sequence, all of whose logits are wanted.
struct OneRun {
    std::vector<int> all;
    Run run;
    Batch batch;

    OneRun(Cache *cache, const int *tokens, int T, int pos, float *logits) : all(T) {
        for (int i = 0; i < T; i++) all[i] = i;
        run = {cache, 0, T, pos};
        batch = {tokens, T, &run, 1, all.data(), T, logits, NULL};
    }
};

// Computes attention of T tokens from position pos on.
static void attend(Backend *b, Cache *cache, int layer, const Layer *l, float *y, const float *x,
                   int pos, int T) {
    OneRun one(cache, NULL, T, pos, NULL);
    b->attention(b, &one.batch, layer, l, y, x);
}

// Calls the ops of a batch as llama.c does.
static void call_ops(Backend *b, const Model &m, float *x, float *y, const Batch &batch) {
    const Weights &w = m.weights;
    int T = batch.T, n = batch.n_wanted;
    b->embed(b, x, &w.token_embedding, batch.tokens, T);
    for (int l = 0; l < m.config.n_layers; l++) {
        const Layer &layer = w.layers[l];
        b->attention(b, &batch, l, &layer, y, x);
        b->add_product(b, x, &layer.wo, y, T);
        b->feed_forward(b, &layer, x, T);
    }
    if (n > 0 && n < T) b->gather(b, x, batch.wanted, n);
    if (n > 0 && batch.hidden_states) b->hidden_states(b, batch.hidden_states, &w.norm, x, n);
    else if (n > 0) b->logits(b, batch.logits, &w.norm, &w.output, x, n);
}

// Returns one or more of the rows 0 to n - 1, ascending.
static std::vector<int> random_rows(int n) {
    std::vector<int> rows;
    int kept = 1 + random_below(n);
    for (int i = 0; i < n; i++)
        if (random_below(n - i) < kept - (int)rows.size()) rows.push_back(i);
    return rows;
}

// The CPU's ops in calls of at most MAX_T tokens: x (T, dim), y (T, q_dim).
struct Cpu {
    Backend *b;
    Cache *cache;
    const Config &config;
    static constexpr int MAX_T = 100;

    template <typename F> static void in_chunks(int T, F call) {
        for (int t = 0; t < T; t += MAX_T) call(t, T - t < MAX_T ? T - t : MAX_T);
    }
    void embed(float *x, const Mat *table, const int *tokens, int T) {
        in_chunks(T, [&](int t, int n) {
            b->embed(b, x + (size_t)t * config.dim, table, tokens + t, n);
        });
    }
    void add_product(float *x, const Mat *w, const float *y, int T) {
        in_chunks(T, [&](int t, int n) {
            b->add_product(b, x + (size_t)t * w->rows, w, y + (size_t)t * w->cols, n);
        });
    }
    void feed_forward(const Layer *l, float *x, int T) {
        in_chunks(T, [&](int t, int n) { b->feed_forward(b, l, x + (size_t)t * config.dim, n); });
    }
    void attention(int layer, const Layer *l, float *y, const float *x, int pos, int T) {
        in_chunks(T, [&](int t, int n) {
            attend(b, cache, layer, l, y + (size_t)t * config.q_dim, x + (size_t)t * config.dim,
                   pos + t, n);
        });
    }
    void logits(float *out, const Mat *norm, const Mat *output, const float *x, int T) {
        in_chunks(T, [&](int t, int n) {
            b->logits(b, out + (size_t)t * output->rows, norm, output, x + (size_t)t * config.dim,
                      n);
        });
    }
    void hidden_states(float *out, const Mat *norm, const float *x, int T) {
        in_chunks(T, [&](int t, int n) {
            b->hidden_states(b, out + (size_t)t * config.dim, norm, x + (size_t)t * config.dim, n);
        });
    }
};

// Compares the ops on the last layer's weights, called outside begin and end in a random order, for
// T tokens from position pos on.
static void compare_ops(Pair &p, const Both &both, int T, int pos) {
    Backend *g = both.gpu, *c = both.cpu;
    const Config &cf = p.model[0].config;
    const Weights &gw = p.model[0].weights, &cw = p.model[1].weights;
    int l = cf.n_layers - 1;
    Cpu cpu = {c, both.on_cpu, cf};
    Layer &gl = gw.layers[l], &cl = cw.layers[l];
    Array x(g, c, (size_t)T * cf.dim), y(g, c, (size_t)T * cf.q_dim);
    double exact = 1e-5, product = T == 1 ? 1e-5 : 2e-3; // tensor cores round x to half precision
    std::vector<int> tokens(T);
    printf(" T=%d@%d", T, pos);
    for (int &token : tokens) token = random_below(cf.vocab_size);
    g->embed(g, x.on_gpu, &gw.token_embedding, tokens.data(), T);
    cpu.embed(x.on_cpu, &cw.token_embedding, tokens.data(), T);
    report("embed", x.difference(), 1e-7);
    for (int i = 0, op = random_below(3); i < 3; i++, op = (op + 1) % 3) {
        x.fill(), y.fill();
        if (op == 0) {
            g->add_product(g, x.on_gpu, &gl.wo, y.on_gpu, T);
            cpu.add_product(x.on_cpu, &cl.wo, y.on_cpu, T);
            report("add product", x.difference(), product);
        } else if (op == 1) {
            g->feed_forward(g, &gl, x.on_gpu, T);
            cpu.feed_forward(&cl, x.on_cpu, T);
            report("feed forward", x.difference(), product);
        } else {
            attend(g, both.on_gpu, l, &gl, y.on_gpu, x.on_gpu, pos, T);
            cpu.attention(l, &cl, y.on_cpu, x.on_cpu, pos, T);
            // Half precision costs 2e-3 in the products before attention, 1e-3 in attention itself.
            bool in_float = gl.wk.type == F32 && gl.wv.type == F32;
            report("attention", y.difference(), in_float ? exact : 3e-3);
        }
    }
    x.fill();
    std::vector<int> rows = random_rows(T);
    g->gather(g, x.on_gpu, rows.data(), (int)rows.size());
    c->gather(c, x.on_cpu, rows.data(), (int)rows.size());
    report("gather", x.difference(), 0);
    x.fill();

    size_t n = (size_t)T * cf.vocab_size;
    std::vector<float> expected(n);
    g->logits(g, found, &gw.norm, &gw.output, x.on_gpu, T);
    cpu.logits(expected.data(), &cw.norm, &cw.output, x.on_cpu, T);
    report("logits", Array::compare(found, expected.data(), n), product);
    std::vector<float> states(T * (size_t)cf.dim), expected_states(states.size());
    g->hidden_states(g, states.data(), &gw.norm, x.on_gpu, T);
    cpu.hidden_states(expected_states.data(), &cw.norm, x.on_cpu, T);
    report("hidden states", Array::compare(states.data(), expected_states.data(), states.size()),
           1e-5);
    if (T > 1) return;
    g->logits(g, NULL, &gw.norm, &gw.output, x.on_gpu, 1);
    int best = g->choose(g, 0, 0, 0), largest = 0;
    for (int i = 1; i < cf.vocab_size; i++)
        if (found[i] > found[largest]) largest = i;
    if (best != largest) failures++, printf(" largest=%d(expected %d)", best, largest);
    float bad = random_below(2) ? NAN : INFINITY;
    cudaMemcpy(x.on_gpu + random_below(cf.dim), &bad, sizeof bad, cudaMemcpyHostToDevice);
    cudaDeviceSynchronize();
    g->logits(g, NULL, &gw.norm, &gw.output, x.on_gpu, 1);
    if (g->choose(g, 0, 0, 0) != -1)
        failures++, printf(" choose misses a logit that is not finite");
}

// Fills the caches of all layers at positions 0 to n - 1.
static void fill_cache(Pair &p, const Both &both, int n) {
    Backend *g = both.gpu, *c = both.cpu;
    const Config &cf = p.model[0].config;
    for (int l = 0; l < cf.n_layers; l++)
        for (int pos = 0, T; pos < n; pos += T) {
            T = n - pos < 100 ? n - pos : 100;
            Array x(g, c, (size_t)T * cf.dim), y(g, c, (size_t)T * cf.q_dim);
            attend(g, both.on_gpu, l, &p.model[0].weights.layers[l], y.on_gpu, x.on_gpu, pos, T);
            attend(c, both.on_cpu, l, &p.model[1].weights.layers[l], y.on_cpu, x.on_cpu, pos, T);
        }
}

// Compares a random program: an embedding, then ops in any order on the x and y that earlier ones
// computed.
static void compare_program(Pair &p, const Both &both, int T, int pos) {
    Backend *g = both.gpu, *c = both.cpu;
    const Config &cf = p.model[0].config;
    const Weights &gw = p.model[0].weights, &cw = p.model[1].weights;
    Array x(g, c, (size_t)T * cf.dim), y(g, c, (size_t)T * cf.q_dim);
    std::vector<int> tokens(T);
    Cpu cpu = {c, both.on_cpu, cf};
    for (int &token : tokens) token = random_below(cf.vocab_size);
    g->embed(g, x.on_gpu, &gw.token_embedding, tokens.data(), T);
    cpu.embed(x.on_cpu, &cw.token_embedding, tokens.data(), T);
    for (int n = 2 + random_below(5); n > 0; n--) {
        int op = random_below(4), l = random_below(cf.n_layers);
        Layer &gl = gw.layers[l], &cl = cw.layers[l];
        if (op == 0)
            attend(g, both.on_gpu, l, &gl, y.on_gpu, x.on_gpu, pos, T),
                cpu.attention(l, &cl, y.on_cpu, x.on_cpu, pos, T);
        if (op == 1)
            g->add_product(g, x.on_gpu, &gl.wo, y.on_gpu, T),
                cpu.add_product(x.on_cpu, &cl.wo, y.on_cpu, T);
        if (op == 2)
            g->add_product(g, y.on_gpu, &gl.wq, x.on_gpu, T),
                cpu.add_product(y.on_cpu, &cl.wq, x.on_cpu, T);
        if (op == 3) g->feed_forward(g, &gl, x.on_gpu, T), cpu.feed_forward(&cl, x.on_cpu, T);
    }
    // up to six ops round to half precision
    report("program", fmax(x.difference(), y.difference()), 1e-2);
}

// Computes a batch as llama.c does. Returns whether the backend asked for its ops to be called.
static bool forward(Backend *b, const Model &m, float *x, float *y, const Batch &batch) {
    bool by_ops = !b->begin || b->begin(b, &batch);
    if (by_ops) call_ops(b, m, x, y, batch);
    if (b->end) b->end(b);
    return by_ops;
}

static int in_one_kernel; // models whose tokens were computed by whole_token

// Compares n tokens from position pos on with the CPU's. The GPU computes the first one op by op,
// then again by whole_token or a recording, and the two are compared as well.
static void compare_tokens(Pair &p, const Both &both, int pos, int n) {
    Backend *g = both.gpu, *c = both.cpu;
    const Config &cf = p.model[0].config;
    std::vector<float> expected(cf.vocab_size), ops;
    Array x(g, c, cf.dim), y(g, c, cf.q_dim);
    const Layer &last = p.model[0].weights.layers[cf.n_layers - 1];
    bool in_float = last.wk.type == F32 && last.wv.type == F32; // false: in half precision
    double max = in_float ? 1e-4 : 5e-3;
    fill_cache(p, both, pos);
    printf(" token@%d", pos);
    for (int i = 0, token; i < n; i++) {
        token = random_below(cf.vocab_size);
        OneRun on_gpu(both.on_gpu, &token, 1, pos + i, found);
        OneRun on_cpu(both.on_cpu, &token, 1, pos + i, expected.data());
        if (i == 0) {
            call_ops(g, p.model[0], x.on_gpu, y.on_gpu, on_gpu.batch);
            ops.assign(found, found + cf.vocab_size);
        }
        bool by_ops = forward(g, p.model[0], x.on_gpu, y.on_gpu, on_gpu.batch);
        in_one_kernel += i == 0 && !by_ops;
        forward(c, p.model[1], x.on_cpu, y.on_cpu, on_cpu.batch);
        report("token", Array::compare(found, expected.data(), expected.size()), max);
        if (i == 0) report("token beside ops", Array::compare(found, ops.data(), ops.size()), 1e-4);
    }
}

// Compares three passes of T tokens with the CPU's. The GPU computes them op by op, by a recording
// and by the same recording again. They differ in the tokens, in those whose logits are wanted, and
// in the memory for the logits. Then compares three passes that compute hidden states instead.
static void compare_passes(Pair &p, const Both &both, int T, int pos) {
    Backend *g = both.gpu, *c = both.cpu;
    const Config &cf = p.model[0].config;
    Array x(g, c, (size_t)(T + PADDING) * cf.dim), y(g, c, (size_t)(T + PADDING) * cf.q_dim);
    bool in_float = p.model[0].weights.layers[0].wk.type == F32;
    std::vector<int> tokens(T), wanted = random_rows(T);
    printf(" pass=%d/%d@%d", (int)wanted.size(), T, pos);
    for (int i = 0; i < 6; i++) {
        bool states = i >= 3;
        size_t n = wanted.size() * (states ? cf.dim : cf.vocab_size);
        std::vector<float> rows(n), expected(n);
        for (int &token : tokens) token = random_below(cf.vocab_size);
        for (size_t j = 0; i && j < wanted.size(); j++) // one token later, where there is room
            if (wanted[j] + 1 < (j + 1 < wanted.size() ? wanted[j + 1] : T)) wanted[j]++;
        OneRun on_gpu(both.on_gpu, tokens.data(), T, pos, rows.data());
        OneRun on_cpu(both.on_cpu, tokens.data(), T, pos, expected.data());
        for (Batch *batch : {&on_gpu.batch, &on_cpu.batch})
            batch->wanted = wanted.data(), batch->n_wanted = (int)wanted.size();
        for (Batch *batch : {&on_gpu.batch, &on_cpu.batch})
            if (states) batch->hidden_states = batch->logits, batch->logits = NULL;
        forward(g, p.model[0], x.on_gpu, y.on_gpu, on_gpu.batch);
        forward(c, p.model[1], x.on_cpu, y.on_cpu, on_cpu.batch);
        report(states ? "hidden states" : "pass", Array::compare(rows.data(), expected.data(), n),
               in_float ? 1e-4 : 1e-2);
    }
}

// Compares batches of up to three sequences, which grow until their positions are used up. Every
// fourth batch has runs of several tokens. The others have runs of one token, which the GPU
// computes op by op, by a recording and by the same recording again.
static void compare_batches(Pair &p, const Both &both, int positions) {
    enum { SEQUENCES = 3, ROUNDS = 7, MAX_RUN = 33 };
    Backend *backends[] = {both.gpu, both.cpu};
    const Config &cf = p.model[0].config;
    const Layer &last = p.model[0].weights.layers[cf.n_layers - 1];
    bool in_float = p.model[0].weights.layers[0].wk.type == F32 && last.wv.type == F32;
    const size_t room = SEQUENCES * MAX_RUN + PADDING;
    Array x(both.gpu, both.cpu, room * cf.dim), y(both.gpu, both.cpu, room * cf.q_dim);
    Cache *caches[SEQUENCES][2];
    int lengths[SEQUENCES] = {0};
    for (auto &of_sequence : caches)
        for (int i = 0; i < 2; i++) {
            of_sequence[i] = backends[i]->new_cache(backends[i]);
            if (!of_sequence[i]) printf("no memory for a cache\n"), exit(2);
        }
    printf(" batches=");
    for (int round = 0; round < ROUNDS; round++) {
        std::vector<Run> runs[2];
        int T = 0, first = random_below(SEQUENCES);
        for (int i = 0; i < SEQUENCES; i++) {
            int s = (first + i) % SEQUENCES, room = positions - lengths[s], n = 1;
            if (round % 4 == 0) n = 1 + random_below(random_below(2) ? MAX_RUN : 3);
            n = std::min(n, room);
            if (n == 0 || random_below(8) == 0) continue;
            for (int j = 0; j < 2; j++) {
                runs[j].push_back({caches[s][j], T, n, lengths[s]});
                backends[j]->reserve(backends[j], caches[s][j], lengths[s], n);
            }
            T += n, lengths[s] += n;
        }
        if (T == 0) continue;
        std::vector<int> tokens(T), wanted = random_rows(T);
        for (int &token : tokens) token = random_below(cf.vocab_size);
        size_t n = wanted.size() * cf.vocab_size;
        std::vector<float> rows[2] = {std::vector<float>(n), std::vector<float>(n)};
        for (int j = 0; j < 2; j++) {
            // clang-format off
            Batch batch = {tokens.data(), T, runs[j].data(), (int)runs[j].size(),
                           wanted.data(), (int)wanted.size(), rows[j].data(), NULL};
            // clang-format on
            forward(backends[j], p.model[j], j ? x.on_cpu : x.on_gpu, j ? y.on_cpu : y.on_gpu,
                    batch);
        }
        printf("%d/%d,", (int)runs[0].size(), T);
        report("batch", Array::compare(rows[0].data(), rows[1].data(), n), in_float ? 1e-4 : 1e-2);
    }
    for (auto &of_sequence : caches)
        for (int i = 0; i < 2; i++) backends[i]->free_cache(backends[i], of_sequence[i]);
}

// Opens both backends and a sequence of each, with room for all positions.
static Both open_both(Pair &p, int positions) {
    llamac_error error;
    Both both;
    Opening opening = {};
    opening.positions = positions, opening.n_threads = 1;
    opening.kernels = llamac_choose_kernels(NULL);
    const char *wrong = llamac_cuda_open(&both.gpu, &p.model[0], &opening, &error);
    if (!wrong) wrong = llamac_cpu_open(&both.cpu, &p.model[1], &opening);
    if (wrong) printf("%s\n", wrong), exit(2);
    both.on_gpu = both.gpu->new_cache(both.gpu), both.on_cpu = both.cpu->new_cache(both.cpu);
    if (!both.on_gpu || !both.gpu->reserve(both.gpu, both.on_gpu, 0, positions) || !both.on_cpu
        || !both.cpu->reserve(both.cpu, both.on_cpu, 0, positions))
        printf("no memory for the caches\n"), exit(2);
    return both;
}

static void close_both(const Both &both) {
    for (auto &op : worst) printf(" %s %.0e", op.first.c_str(), op.second);
    printf("\n");
    worst.clear();
    if (both.gpu->failure(both.gpu)) failures++, printf("%s\n", both.gpu->failure(both.gpu));
    both.gpu->free_cache(both.gpu, both.on_gpu);
    both.cpu->free_cache(both.cpu, both.on_cpu);
    both.gpu->close(both.gpu);
    both.cpu->close(both.cpu);
}

static void compare_models(Type type) {
    int head = 2 * (1 + random_below(40)), heads = 1 + random_below(2),
        groups = 1 + random_below(2);
    // One model in four has rows that are not a multiple of 32.
    if (random_below(4)) head = 32 * (1 + random_below(random_below(4) ? 3 : 8));
    bool large_blocks = block_size(type).numbers == 256;
    if (large_blocks) head = 256 / (heads * groups);
    Config c = {};
    bool other = random_below(2); // unlike Llama: q_dim != dim, RoPE in halves, biases, norms
    c.n_kv_heads = heads, c.n_heads = heads * groups, c.head_dim = head;
    c.q_dim = c.n_heads * head, c.kv_dim = heads * head,
    c.dim = other && random_below(2) ? 32 * (1 + random_below(5)) : c.q_dim;
    c.rope_halves = other, c.rope_scale = other && random_below(2) ? 1.2f : 1;
    c.hidden_dim = random_below(4) ? 32 * (1 + random_below(10)) : 1 + random_below(200);
    if (large_blocks) c.dim = 256, c.hidden_dim = 256 * (1 + random_below(2));
    c.n_layers = 1 + random_below(2), c.vocab_size = 1 + random_below(150), c.seq_len = 600;
    c.norm_eps = 1e-5f;
    int group = random_below(3) ? 16 << random_below(4) : 1 + random_below(100);
    int longest = type == INT8_GROUPS ? 80 : 600; // matmul_any is slow
    int positions = 1 + random_below(random_below(4) ? 80 : longest),
        T = 1 + random_below(positions < 160 ? positions : 160);
    if (positions >= 160 && random_below(2))
        T = 129 + random_below(32); // more than a tile's tokens
    if (random_below(2)) c.window = 1 + random_below(positions);
    Pair p;
    bool norms = other && random_below(2), biases = other && random_below(2);
    make_pair(p, c, {type, group, random_below(3) == 0, biases, norms});
    printf("type %d group %d dim %d heads %d/%d hidden %d vocab %d positions %d window %d", type,
           group, c.dim, c.n_heads, c.n_kv_heads, c.hidden_dim, c.vocab_size, positions, c.window);
    Both both = open_both(p, positions);
    int last = random_below(positions - T + 1);
    compare_ops(p, both, T, 0);
    fill_cache(p, both, last);
    compare_ops(p, both, T, last);
    compare_program(p, both, T, last);
    compare_passes(p, both, std::min(T, Cpu::MAX_T), last);
    fill_cache(p, both, positions - 1);
    compare_ops(p, both, 1, positions - 1);
    int n = positions < 3 ? positions : 3;
    compare_tokens(p, both, positions - n, n);
    compare_batches(p, both, positions);
    close_both(both);
}

// Models from tiny to wide, so that a warp of whole_token multiplies from zero to many pieces of a
// product; the number depends on the number of multiprocessors. The second is train.py's default.
static const struct {
    int dim, heads, kv_heads, hidden, layers, vocab;
    int head_dim; // 0: dim / heads
    bool halves, biases, norms;
} SHAPES[] = {{32, 1, 1, 32, 1, 5, 0, false, false, false},
              {64, 2, 2, 192, 2, 1536, 0, false, false, false},
              {96, 3, 1, 256, 1, 3000, 0, false, false, false},
              {288, 6, 6, 768, 1, 700, 0, false, false, false},
              {512, 8, 4, 1376, 1, 300, 0, false, false, false},
              {96, 6, 2, 160, 3, 200, 0, true, true, false}, // Qwen2
              {64, 4, 2, 96, 3, 200, 32, true, false, true}, // Qwen3: heads wider than x
              {96, 16, 2, 64, 2, 50, 18, true, true, true},
              {64, 2, 1, 64, 2, 50, 0, false, true, true}};

static void compare_shape(Type type, int number) {
    auto shape = SHAPES[number];
    Config c = {};
    c.dim = shape.dim, c.n_heads = shape.heads, c.n_kv_heads = shape.kv_heads,
    c.head_dim = shape.head_dim ? shape.head_dim : c.dim / c.n_heads;
    c.rope_halves = shape.halves;
    c.q_dim = c.n_heads * c.head_dim, c.kv_dim = c.n_kv_heads * c.head_dim, c.rope_scale = 1,
    c.hidden_dim = shape.hidden, c.n_layers = shape.layers;
    c.vocab_size = shape.vocab, c.seq_len = 40, c.norm_eps = 1e-5f;
    Pair p;
    make_pair(p, c, {type, 32, false, shape.biases, shape.norms});
    printf("type %d dim %d heads %d/%d of %d layers %d vocab %d", type, c.dim, c.n_heads,
           c.n_kv_heads, c.head_dim, c.n_layers, c.vocab_size);
    Both both = open_both(p, c.seq_len);
    compare_tokens(p, both, 33, 2);
    close_both(both);
}

static const Type TYPES[] = {F32, F16, BF16, Q8_0, Q4_0, INT8_GROUPS};
// Their tokens are not computed in one kernel.
static const Type OPS_TYPES[] = {Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K};

static void start_random(int number) {
    state = number;
    for (int j = 0; j < 4; j++) random_bits();
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3)
        return fprintf(stderr, "Usage: cuda_ops SEED MODELS, or cuda_ops N\n"), 2;
    bool shapes = argc == 2;
    int models = atoi(argv[argc - 1]), seed = shapes ? 1 : atoi(argv[1]);
    for (int i = 0; i < models; i++) {
        for (Type type : TYPES) {
            start_random(1000 * seed + i + 77 * type);
            shapes ? compare_shape(type, i) : compare_models(type);
        }
        for (Type type : OPS_TYPES) {
            start_random(1000 * seed + i + 77 * type);
            if (!shapes) compare_models(type);
        }
    }
    if (failures) printf("%d differences are too large\n", failures);
    printf("tokens of %d models in one kernel\n", in_one_kernel);
    return failures > 0 || (models > 1 && in_one_kernel == 0);
}
