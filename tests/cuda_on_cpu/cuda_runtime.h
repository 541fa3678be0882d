// The part of CUDA that runtime/cuda/ uses, on the CPU: the same kernels run under sanitizers,
// without a GPU.
//
// Threads are fibers that take turns (fibers.cpp). Results must not depend on the order of the
// turns (CUDA_ON_CPU_ORDER=0, 1, 2, 3: forward, backward, shuffled, one block slower than others).
// Blocks run one after another; those of a cooperative launch run together, so its kernel must use
// LAUNCH_SHARED instead of __shared__. Memory that CUDA leaves uninitialized is filled with NaN.
// The work of a stream is done when the host waits for it, and not before. Timing and caches are
// not emulated.
//
// Other environment variables: CUDA_ON_CPU_MULTIPROCESSORS, CUDA_ON_CPU_SHARED (bytes of shared
// memory of a block), CUDA_ON_CPU_MEMORY (free bytes), CUDA_ON_CPU_ALLOCATIONS (how many succeed),
// CUDA_ON_CPU_NO_DEVICE, CUDA_ON_CPU_REFUSES ("together": cooperative launches, "recording"),
// CUDA_ON_CPU_CALLS (how many calls on streams succeed before one fails; all calls after it fail,
// as they do after an error in a kernel), CUDA_ON_CPU_EARLY_COPIES (asynchronous copies of a kernel
// are done when they are started, not when they are waited for).
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#define CUDA_ON_CPU
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// For code that accesses no memory of kernels: sanitizers would only cost time.
#define UNWATCHED __attribute__((no_sanitize("address"), no_sanitize("undefined")))
#define LAUNCH_SHARED(name) float *name = (float *)cuda_on_cpu::launch_shared

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 { uint32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu { // fibers.cpp

extern void *launch_shared;
void run_grid(dim3 grid, dim3 threads, size_t shared, bool together,
              const std::function<void()> &body);
void fail(const char *what);
void rest();
void meet_block();
void meet_warp();
void fence();
void note_atomic(void *p, uint32_t before);      // notes an atomicAdd to *p, which was `before`
uint64_t exchange_bits(uint64_t bits, int lane); // returns that lane's bits
void copy_async(void *to, const void *from, size_t n);
void commit_copies();
void wait_for_copies(size_t groups);

template <typename T> UNWATCHED T exchange(T value, int lane) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange_bits(bits, lane);
    memcpy(&value, &bits, sizeof value);
    return value;
}

} // namespace cuda_on_cpu

template <typename T> T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
    return cuda_on_cpu::exchange(value, (threadIdx.x % 32) ^ mask);
}
template <typename T> T __shfl_sync(unsigned, T value, int lane, int = 32) {
    return cuda_on_cpu::exchange(value, lane);
}
static inline void __syncwarp(unsigned = 0xffffffff) { cuda_on_cpu::meet_warp(); }
static inline void __syncthreads() { cuda_on_cpu::meet_block(); }
static inline void __nanosleep(unsigned) { cuda_on_cpu::rest(); }
using std::max;
using std::min;
static inline void __threadfence() { cuda_on_cpu::fence(); }
template <typename T> T atomicAdd(T *p, T n) {
    T before = __atomic_fetch_add(p, n, __ATOMIC_RELAXED);
    return cuda_on_cpu::note_atomic(p, (uint32_t)before), before;
}
template <typename T> T __ldg(const T *p) {
    if ((uintptr_t)p % sizeof(T)) cuda_on_cpu::fail("a load that is not aligned");
    return *p;
}
static inline uint32_t __float_as_uint(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}
static inline float __uint_as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++)
        out |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return out;
}

// ---- half precision

struct __half { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };

static inline float __half2float(__half h) {
    int sign = h.bits >> 15, exponent = h.bits >> 10 & 31, mantissa = h.bits & 1023;
    float f = exponent == 31 ? (mantissa ? NAN : INFINITY)
              : exponent     ? __uint_as_float((exponent + 112) << 23 | mantissa << 13)
                             : mantissa * 0x1p-24f;
    return sign ? -f : f;
}

static inline __half __float2half(float f) { // to nearest, ties to even
    uint16_t sign = signbit(f) ? 0x8000 : 0;
    f = fabsf(f);
    if (isnan(f)) return {0x7fff};
    if (f >= 65520) return {(uint16_t)(sign | 0x7c00)};
    int exponent = f < 0x1p-14f ? -14 : ilogbf(f);
    int units = (int)rintf(ldexpf(f, 10 - exponent)); // of 2^(exponent - 10)
    // If rounding carries out of the mantissa, the sum increments the exponent.
    return {(uint16_t)(sign | ((exponent + 14) * 1024 + units))};
}

static inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
static inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
static inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half(x), __float2half(y)};
}
static inline __half2 __hsub2(__half2 a, __half2 b) {
    return __floats2half2_rn(__half2float(a.x) - __half2float(b.x),
                             __half2float(a.y) - __half2float(b.y));
}
static inline __half __hadd(__half x, __half y) {
    return __float2half(__half2float(x) + __half2float(y));
}
static inline __half __hmul(__half x, __half y) {
    return __float2half(__half2float(x) * __half2float(y));
}
static inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
static inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }

// ---- the runtime

enum cudaError_t {
    cudaSuccess,
    cudaErrorNotSupported,
    cudaErrorMemoryAllocation,
    cudaErrorInsufficientDriver,
    cudaErrorNoDevice,
    cudaErrorNotReady,
    cudaErrorLaunchFailure
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum {
    cudaStreamNonBlocking,
    cudaEventDisableTiming,
    cudaStreamCaptureModeThreadLocal,
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaLaunchAttributeCooperative
};

typedef std::vector<std::function<void()>> *cudaGraph_t, *cudaGraphExec_t;
typedef int cudaStream_t, cudaEvent_t;
struct cudaLaunchAttribute {
    int id;
    struct { int cooperative; } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
struct cudaDeviceProp {
    char name[32];
    int major, minor, multiProcessorCount, cooperativeLaunch;
    size_t sharedMemPerBlockOptin;
};
struct cudaFuncAttributes { size_t sharedSizeBytes; };

namespace cuda_on_cpu {
// While an Own exists, the emulation allocates host memory for itself. Tests that let allocations
// of the backend fail leave these alone.
inline int owns;
struct Own {
    Own() { owns++; }
    ~Own() { owns--; }
};
inline cudaGraph_t capture;
inline int multiprocessors() {
    const char *s = getenv("CUDA_ON_CPU_MULTIPROCESSORS");
    return s ? atoi(s) : 12;
}
inline size_t shared_memory() {
    const char *s = getenv("CUDA_ON_CPU_SHARED");
    return s ? strtoull(s, NULL, 10) : 227 << 10;
}
inline size_t free_memory() {
    const char *s = getenv("CUDA_ON_CPU_MEMORY");
    return s ? strtoull(s, NULL, 10) : (size_t)1 << 30;
}

// Returns whether the driver refuses something, as it may if processes share a GPU (MPS).
inline bool refuses(const char *what) {
    const char *s = getenv("CUDA_ON_CPU_REFUSES");
    return s && strstr(s, what);
}
// Returns whether an allocation succeeds: the first CUDA_ON_CPU_ALLOCATIONS ones do.
inline bool allocates() {
    static int times;
    const char *s = getenv("CUDA_ON_CPU_ALLOCATIONS");
    return !s || times++ < atoi(s);
}

// The size of each block of device memory, and the sum of all sizes, in bytes.
inline std::map<void *, size_t> sizes;
inline size_t allocated_bytes;
inline void forget(void *block) {
    allocated_bytes -= sizes[block];
    sizes.erase(block);
}

// Calls on streams that succeed before one fails; negative: none fails.
inline int calls_left = getenv("CUDA_ON_CPU_CALLS") ? atoi(getenv("CUDA_ON_CPU_CALLS")) : -1;
inline bool broken; // a call has failed, so all later ones fail

// Submitted work runs when the host waits for it. The default stream's work runs at once.
inline std::deque<std::function<void()>> stream;
inline size_t submitted, done;
inline std::vector<size_t> events; // `submitted` when each was recorded
// Each kernel's limit of dynamic shared memory, in bytes.
inline std::map<const void *, size_t> shared_limits;
inline int graphs; // number of graphs that can be launched now

// Returns the result of a call on a stream. After a failure, the submitted work is lost.
inline cudaError_t call() {
    broken = broken || calls_left == 0;
    if (calls_left > 0) calls_left--;
    if (broken) stream.clear(), done = submitted;
    return broken ? cudaErrorLaunchFailure : cudaSuccess;
}

inline cudaError_t submit(std::function<void()> work) {
    if (call()) return cudaErrorLaunchFailure;
    if (capture) capture->push_back(work);
    else stream.push_back(work), submitted++;
    return cudaSuccess;
}

inline cudaError_t wait(size_t until) {
    Own own;
    if (capture && !broken) fail("waiting in a capture");
    if (call()) return cudaErrorLaunchFailure;
    for (; done < until; stream.pop_front()) done++, stream.front()();
    return cudaSuccess;
}
} // namespace cuda_on_cpu

static inline const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorNotSupported       ? "operation not supported"
           : e == cudaErrorMemoryAllocation ? "out of memory"
           : e == cudaErrorLaunchFailure    ? "unspecified launch failure"
                                            : "no CUDA-capable device is detected";
}
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaGetDeviceCount(int *n) {
    *n = !getenv("CUDA_ON_CPU_NO_DEVICE");
    return *n ? cudaSuccess : cudaErrorNoDevice;
}
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
static inline cudaError_t cudaDeviceSynchronize() {
    return cuda_on_cpu::wait(cuda_on_cpu::submitted);
}
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    *p = {"CPU", 9, 0, cuda_on_cpu::multiprocessors(), 1, cuda_on_cpu::shared_memory()};
    return cudaSuccess;
}
static inline cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = cuda_on_cpu::free_memory();
    *free = *total - std::min(*total, cuda_on_cpu::allocated_bytes);
    return cudaSuccess;
}
template <typename F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, F) {
    *a = {0};
    return cudaSuccess;
}
template <typename F> cudaError_t cudaFuncSetAttribute(F kernel, int, int n) {
    cuda_on_cpu::Own own;
    cuda_on_cpu::shared_limits[(const void *)kernel] = (size_t)n;
    return cudaSuccess;
}
template <typename F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, F, int, size_t) {
    *n = 1;
    return cudaSuccess;
}

template <typename T> cudaError_t cudaMalloc(T **p, size_t n) {
    cuda_on_cpu::Own own;
    *p = cuda_on_cpu::allocates() && !cuda_on_cpu::broken ? (T *)malloc(n) : NULL;
    if (!*p) return cudaErrorMemoryAllocation;
    memset(*p, 0xff, n);
    cuda_on_cpu::allocated_bytes += cuda_on_cpu::sizes[*p] = n;
    return cudaSuccess;
}
static inline cudaError_t cudaFree(void *p) {
    cudaError_t status = cuda_on_cpu::wait(cuda_on_cpu::submitted);
    cuda_on_cpu::forget(p);
    free(p);
    return status;
}
static inline cudaError_t cudaMallocHost(void **p, size_t n) {
    cudaError_t status = cudaMalloc(p, n);
    if (*p) cuda_on_cpu::forget(*p); // host memory is not counted
    return status;
}
static inline cudaError_t cudaFreeHost(void *p) {
    free(p);
    return cudaSuccess;
}
static inline cudaError_t cudaMemset(void *p, int value, size_t n) {
    memset(p, value, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) {
    memcpy(to, from, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind,
                                          cudaStream_t) {
    cuda_on_cpu::Own own;
    return cuda_on_cpu::submit([=] { memcpy(to, from, n); });
}
static inline cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from,
                                            size_t from_pitch, size_t width, size_t height,
                                            cudaMemcpyKind, cudaStream_t) {
    cuda_on_cpu::Own own;
    if (width > to_pitch || width > from_pitch) cuda_on_cpu::fail("rows wider than their pitch");
    return cuda_on_cpu::submit([=] {
        for (size_t i = 0; i < height; i++)
            memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    });
}
static inline cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t) {
    cuda_on_cpu::Own own;
    return cuda_on_cpu::submit([=] { memset(p, value, n); });
}
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, int) {
    *s = 1;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cuda_on_cpu::wait(cuda_on_cpu::submitted);
}
static inline cudaError_t cudaEventCreate(cudaEvent_t *e) {
    cuda_on_cpu::Own own;
    *e = (int)cuda_on_cpu::events.size();
    cuda_on_cpu::events.push_back(0);
    return cudaSuccess;
}
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, int) {
    return cudaEventCreate(e);
}
static inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
    cuda_on_cpu::events.at(e) = cuda_on_cpu::submitted;
    return cudaSuccess;
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    return cuda_on_cpu::wait(cuda_on_cpu::events.at(e));
}
static inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t e) {
    *ms = 1;
    return cuda_on_cpu::events.at(e) > cuda_on_cpu::done ? cudaErrorNotReady : cudaSuccess;
}
static inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

static inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) {
    cuda_on_cpu::Own own;
    if (cuda_on_cpu::refuses("recording")) return cudaErrorNotSupported;
    if (cuda_on_cpu::call()) return cudaErrorLaunchFailure;
    cuda_on_cpu::capture = new std::vector<std::function<void()>>;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *g) {
    *g = cuda_on_cpu::capture, cuda_on_cpu::capture = NULL;
    if (cuda_on_cpu::call()) delete *g, *g = NULL;
    return *g ? cudaSuccess : cudaErrorLaunchFailure;
}
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g,
                                               unsigned long long) {
    cuda_on_cpu::Own own;
    if (cuda_on_cpu::call()) return cudaErrorLaunchFailure;
    *e = new std::vector<std::function<void()>>(*g);
    cuda_on_cpu::graphs++;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    delete g;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
    delete e;
    cuda_on_cpu::graphs--;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t) {
    cuda_on_cpu::Own own;
    if (cuda_on_cpu::call()) return cudaErrorLaunchFailure;
    for (auto &work : *e) cuda_on_cpu::stream.push_back(work), cuda_on_cpu::submitted++;
    return cudaSuccess;
}

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A... args) {
    cuda_on_cpu::Own own;
    std::tuple<P...> values(args...);
    dim3 grid = config->gridDim, threads = config->blockDim;
    size_t shared = config->dynamicSmemBytes;
    bool together = config->numAttrs && config->attrs->id == cudaLaunchAttributeCooperative;
    if (together && cuda_on_cpu::refuses("together")) return cudaErrorNotSupported;
    auto limit = cuda_on_cpu::shared_limits.find((const void *)kernel);
    if (shared > (limit == cuda_on_cpu::shared_limits.end() ? 48 << 10 : limit->second))
        cuda_on_cpu::fail("more shared memory than the kernel may have");
    return cuda_on_cpu::submit([=] {
        cuda_on_cpu::run_grid(grid, threads, shared, together, [=] { std::apply(kernel, values); });
    });
}
