// Copies to shared memory that go on by themselves.
#pragma once
#include "cuda_runtime.h"

// Of n bytes the last `zeros` are not read, but zero.
static inline void __pipeline_memcpy_async(void *to, const void *from, size_t n, size_t zeros = 0) {
    static const float4 none = {};
    if (zeros % n) cuda_on_cpu::fail("a copy that is zero in part");
    cuda_on_cpu::copy_async(to, zeros ? &none : from, n);
}
static inline void __pipeline_commit() { cuda_on_cpu::commit_copies(); }
static inline void __pipeline_wait_prior(size_t groups) { cuda_on_cpu::wait_for_copies(groups); } // all but the last of so many
