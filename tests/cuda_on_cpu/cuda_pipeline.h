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

#if BULK // the copy engine: what reports to an Arrival is done when that is waited for; its round then changes
#include <map>

typedef unsigned long long Arrival;
struct Flight { uint32_t round, expected; std::vector<cuda_on_cpu::Copy> copies; };

inline std::map<Arrival *, Flight> flights;

static inline void expect_nothing(Arrival *a) { *a = 0, flights[a] = {}; } // an Arrival that lies outside is found here
static inline void expect(Arrival *a, unsigned bytes) { flights.at(a).expected += bytes; }

static inline void copy_bulk(void *to, const void *from, unsigned bytes, Arrival *a) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16) cuda_on_cpu::fail("a copy that is not aligned");
    flights.at(a).copies.push_back({to, from, bytes});
}

static inline bool has_come(Arrival *a, unsigned round) {
    Flight &f = flights.at(a);
    if (f.round == round) {
        uint32_t bytes = 0;
        for (auto &copy : f.copies) memcpy(copy.to, copy.from, copy.n), bytes += copy.n;
        if (bytes == 0 || bytes != f.expected) cuda_on_cpu::fail("copies that were not expected, or not sent for");
        f = {round ^ 1, 0, {}};
    }
    return true;
}
#endif
