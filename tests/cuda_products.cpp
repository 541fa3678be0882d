// Compares products of prompts on emulated tensor cores (tests/cuda_on_cpu) with sums in double
// precision of the same numbers, rounded to half precision. Only the order of additions differs, so
// a tolerance of 1e-5 suffices. It finds errors that the tolerances of cuda_ops would hide. Prints
// a hash of the bits of each product: programs that differ only in RAW_STAGES print the same
// hashes.
//
// Usage: cuda_products SEED CASES, the number of cases of each type
#include <cuda_runtime.h>
#include <algorithm>
#include <vector>
// the headers have functions that are unused here
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../runtime/cuda/launch_products.cuh"

static uint32_t state;

static uint32_t random_bits() {
    return state = state * 1664525 + 1013904223, state >> 8 ^ state << 20;
}
static int random_below(int n) { return (int)(random_bits() % n); }

// Memory of its exact size, whose end AddressSanitizer guards.
template <typename T> struct Array {
    T *data;
    size_t n;
    explicit Array(size_t n) : n(n) { cudaMalloc(&data, n * sizeof(T)); }
    Array(const Array &) = delete;
    ~Array() { cudaFree(data); }
};

// Writes a random half-precision number of the order of 2^exponent to p.
static void write_half(uint8_t *p, int exponent) {
    uint16_t bits = (random_below(2) << 15 | (exponent + 15) << 10) + random_below(2048);
    memcpy(p, &bits, 2);
}

// A matrix in the device's layout (formats.cuh): random bits, with scales that make small numbers.
struct Matrix {
    Array<uint8_t> values, scales;
    Mat mat;

    static size_t bytes_of_values(Type type, size_t n) {
        return type == F16 || type == BF16 ? 2 * n : type == Q8_0 ? n : n / 2;
    }
    // Rounded up as upload.cuh does: the GPU reads words.
    static size_t bytes_of_scales(Type type, size_t n) {
        return (n / 32 * scale_bytes(type) / 8 + 3) / 4 * 4;
    }

    Matrix(Type type, int rows, int cols)
        : values(bytes_of_values(type, (size_t)rows * cols)),
          scales(bytes_of_scales(type, (size_t)rows * cols)) {
        const bool is_16_bit = type == F16 || type == BF16, large = has_large_blocks(type);
        for (size_t i = 0; i < values.n; i++) values.data[i] = (uint8_t)random_bits();
        for (size_t i = 0; i < scales.n; i++) scales.data[i] = (uint8_t)random_bits();
        for (size_t i = 0; i < values.n && is_16_bit; i += 2) {
            if (type == F16) write_half(&values.data[i], -4);
            else values.data[i + 1] = (random_bits() & 128) | 61; // of the order of 2^-5 or 2^-4
        }
        int record = scale_bytes(type) / (large ? 1 : 8);
        for (size_t i = 0; record && i + record <= scales.n; i += record) {
            write_half(&scales.data[i], large ? -14 : type == Q8_0 ? -10 : -6);
            if (record > 2) write_half(&scales.data[i + 2], large ? -12 : -4);
        }
        mat = {type, rows, cols, values.data, scales.n ? scales.data : NULL, 0, NULL};
    }
};

static double rounded(float x) { return __half2float(to_half(x)); }

// Returns x (T, cols) w^T in double precision, with x and w rounded to half precision.
static std::vector<double> multiply(const Mat &w, const float *x, int T) {
    std::vector<double> out((size_t)T * w.rows), row(w.cols), xs((size_t)T * w.cols);
    for (size_t i = 0; i < xs.size(); i++) xs[i] = rounded(x[i]);
    for (int r = 0; r < w.rows; r++) {
        for (int i = 0; i < w.cols; i++) row[i] = rounded(element_at(w, (size_t)r * w.cols + i));
        for (int t = 0; t < T; t++)
            for (int i = 0; i < w.cols; i++)
                out[(size_t)t * w.rows + r] += row[i] * xs[(size_t)t * w.cols + i];
    }
    return out;
}

static int failures;

static void compare(const Array<float> &found, const std::vector<double> &expected) {
    double worst = 0, largest = 1e-30;
    uint32_t hash = 2166136261u; // FNV-1a
    for (size_t i = 0; i < found.n; i++) {
        double d = fabs(found.data[i] - expected[i]);
        worst = d <= worst ? worst : isnan(d) ? INFINITY : d;
        largest = fmax(largest, fabs(expected[i]));
        hash = (hash ^ __float_as_uint(found.data[i])) * 16777619u;
    }
    bool is_right = worst <= 1e-5 * largest;
    failures += !is_right;
    printf(" %08x", hash);
    if (!is_right) printf(" (off by %.0e)", worst / largest);
}

// Computes random products: up to three matrices of the same x, or SwiGLU of two.
static void compare_products(Cuda *c, Type type) {
    const bool gated = random_below(3) == 0, accumulate = !gated && random_below(2);
    const int cols = has_large_blocks(type) ? 256 * (1 + random_below(3))
                                            : 32 * (1 + random_below(24)),
              T = 2 + random_below(random_below(2) ? 40 : 300), n = gated ? 2 : 1 + random_below(3);
    int rows = 1 + random_below(300);
    std::vector<Matrix *> matrices;
    std::vector<Array<float> *> outs;
    Array<float> x((size_t)T * cols);
    Array<__half> half_x(x.n);
    for (size_t i = 0; i < x.n; i++) x.data[i] = (int32_t)random_bits() / 2147483648.0f;
    c->half_x = half_x.data;
    Products products = {};
    printf("type %d: T %d, cols %d,%s%s rows", type, T, cols, gated ? " gated" : "",
           accumulate ? " added" : "");
    for (; products.n < n; products.n++) {
        if (!gated) rows = 1 + random_below(300);
        matrices.push_back(new Matrix(type, rows, cols));
        outs.push_back(new Array<float>((size_t)T * rows));
        for (size_t i = 0; i < outs.back()->n; i++) outs.back()->data[i] = (float)random_below(3);
        products.list[products.n] = {outs.back()->data, matrices.back()->mat, accumulate};
        printf(" %d", rows);
    }
    std::vector<std::vector<double>> expected;
    for (int i = 0; i < n; i++) {
        expected.push_back(multiply(matrices[i]->mat, x.data, T));
        for (size_t j = 0; accumulate && j < outs[i]->n; j++) expected[i][j] += outs[i]->data[j];
    }
    for (size_t j = 0; gated && j < outs[0]->n; j++)
        expected[0][j] *= expected[1][j] / (1 + exp(-expected[0][j]));
    if (!launch_tensor(c, products, x.data, T, gated)) failures++, printf(" [no room for a tile]");
    cudaDeviceSynchronize();
    for (int i = 0; i < (gated ? 1 : n); i++) compare(*outs[i], expected[i]);
    printf("\n");
    for (Matrix *m : matrices) delete m;
    for (Array<float> *out : outs) delete out;
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "Usage: cuda_products SEED CASES\n"), 2;
    cudaDeviceProp device;
    cudaGetDeviceProperties(&device, 0);
    Cuda c = {};
    c.multiprocessors = device.multiProcessorCount, c.max_shared = device.sharedMemPerBlockOptin;
    Array<float> partials(2 * (size_t)c.multiprocessors * TILE_SHAPES[0].rows
                          * TILE_SHAPES[0].tokens);
    Array<unsigned> counters(c.multiprocessors);
    cudaMemset(counters.data, 0, counters.n * sizeof(unsigned));
    c.partials = partials.data, c.counters = counters.data;
    for (Type type : {F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K})
        for (int i = 0; i < atoi(argv[2]); i++) {
            state = 1000 * atoi(argv[1]) + i + 77 * type;
            for (int j = 0; j < 4; j++) random_bits();
            compare_products(&c, type);
        }
    if (has_failed(&c)) failures++, printf("%s\n", c.failure);
    if (failures) printf("%d products are wrong\n", failures);
    return failures > 0;
}
