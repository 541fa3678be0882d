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

#ifndef BULK
#define BULK 1
#endif

#if BULK // the copy engine. An Arrival that lies outside of its room is found here
typedef unsigned long long Arrival;

static inline void expect_nothing(Arrival *a) { *a = 0, cuda_on_cpu::expect_nothing(a); }
static inline void expect(Arrival *a, unsigned bytes) { cuda_on_cpu::expect(a, bytes); }
static inline void copy_bulk(void *to, const void *from, unsigned bytes, Arrival *a) { cuda_on_cpu::copy_bulk(to, from, bytes, a); }
static inline bool has_come(Arrival *a, unsigned round) { return cuda_on_cpu::wait_for_arrival(a, round), true; }
#endif
