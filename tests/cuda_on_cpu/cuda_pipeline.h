// Asynchronous copies to shared memory.
#pragma once
#include "cuda_runtime.h"

// Copies n bytes; the last `zeros` of them become zero and are not read. They must be all or none.
static inline void __pipeline_memcpy_async(void *to, const void *from, size_t n, size_t zeros = 0) {
    static const float4 none = {};
    if (zeros % n) cuda_on_cpu::fail("a copy that is zero in part");
    cuda_on_cpu::copy_async(to, zeros ? &none : from, n);
}
static inline void __pipeline_commit() { cuda_on_cpu::commit_copies(); }
// Waits for all groups of copies but the last `groups`.
static inline void __pipeline_wait_prior(size_t groups) { cuda_on_cpu::wait_for_copies(groups); }
