// Copies to shared memory that are done when they are waited for, and not before.
#pragma once
#include "cuda_runtime.h"

static inline void __pipeline_memcpy_async(void *to, const void *from, size_t n) {
    if ((uintptr_t)to % n || (uintptr_t)from % n) cuda_on_cpu::fail("a copy that is not aligned");
    cuda_on_cpu::me().copies.back().push_back({to, from, n});
}

static inline void __pipeline_commit() { cuda_on_cpu::me().copies.emplace_back(); }

static inline void __pipeline_wait_prior(size_t groups) { // all but the last of so many
    auto &copies = cuda_on_cpu::me().copies;
    while (copies.size() - 1 > groups) {
        for (auto &copy : copies.front()) memcpy(copy.to, copy.from, copy.n);
        copies.erase(copies.begin());
    }
}

#ifndef BULK
#define BULK 1
#endif

#if BULK // the copy engine: what reports to an Arrival is done when that is waited for; its round then changes.
#include <map>

struct alignas(8) Arrival { uint32_t round, bytes; };

inline std::map<Arrival *, std::vector<cuda_on_cpu::Copy>> engine;

static inline void expect_nothing(Arrival *a) { *a = {0, 0}, engine[a].clear(); }
static inline void expect(Arrival *a, unsigned bytes) { a->bytes += bytes; }

static inline void copy_bulk(void *to, const void *from, unsigned bytes, Arrival *a) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16) cuda_on_cpu::fail("a copy that is not aligned");
    engine[a].push_back({to, from, bytes});
}

static inline bool has_come(Arrival *a, unsigned round) {
    if (a->round == round) {
        uint32_t bytes = 0;
        for (auto &copy : engine[a]) memcpy(copy.to, copy.from, copy.n), bytes += copy.n;
        if (bytes == 0 || bytes != a->bytes) cuda_on_cpu::fail("copies that were not expected, or not sent for");
        engine[a].clear();
        *a = {round ^ 1, 0};
    }
    return true;
}
#endif
