// The threads of a GPU as fibers that take turns at barriers and shuffles.
//
// With RACES, the kernels are compiled with ThreadSanitizer, and this file tells it what CUDA
// orders: accesses before and after a barrier, a fence around an atomic, or a wait for copies. It
// reports no other order, since neither shuffles nor lanes in lockstep order memory (CUDA C++
// Programming Guide). So ThreadSanitizer finds any two accesses that a GPU might do in the other
// order.
//
// This file itself is compiled without sanitizers, for speed. It asks AddressSanitizer about
// the memory that it copies for kernels, if the program is compiled with it.
#include "cuda_runtime.h"
#include <ucontext.h>
#include <memory>

extern "C" __attribute__((weak)) void *__asan_region_is_poisoned(void *, size_t);

#ifdef RACES
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_read_range(void *, unsigned long);
extern "C" void __tsan_write_range(void *, unsigned long);
extern "C" void __tsan_java_init(unsigned long from, unsigned long size);
extern "C" void __tsan_java_alloc(unsigned long from, unsigned long size);
extern "C" char __bss_start, _end;

// Here, __shared__ variables are statics, which all blocks share. Tells ThreadSanitizer that those
// of a new block are new memory.
static void renew_shared() {
    static unsigned long from = ((unsigned long)&__bss_start + 7) & ~7ul,
                         size = ((unsigned long)&_end & ~7ul) - from;
    static bool known = (__tsan_java_init(from, size), true);
    if (known) __tsan_java_alloc(from, size);
}
#else // without ThreadSanitizer
enum { __tsan_switch_to_fiber_no_sync };
static inline void *__tsan_create_fiber(unsigned) { return NULL; }
static inline void *__tsan_get_current_fiber() { return NULL; }
static inline void __tsan_switch_to_fiber(void *, unsigned) {}
static inline void __tsan_acquire(void *) {}
static inline void __tsan_release(void *) {}
static inline void __tsan_read_range(void *, unsigned long) {}
static inline void __tsan_write_range(void *, unsigned long) {}
static inline void renew_shared() {}
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

void *launch_shared;

// ---- stacks that take turns. ucontext would do the same with two system calls per turn

#ifdef __x86_64__
typedef void *Context;

// Saves this stack's registers and restores the other's.
__attribute__((naked, noinline)) static void turn_to(Context *, Context *) {
    __asm__("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15; mov %rsp, (%rdi);"
            "mov (%rsi), %rsp; pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}

static void prepare(Context *c, char *stack, size_t size, void (*start)()) {
    void **top = (void **)((uintptr_t)(stack + size) / 16 * 16);
    top[-2] = (void *)start; // the return address
    *c = top - 8;
}
#else
typedef ucontext_t Context;

static void turn_to(Context *from, Context *to) { swapcontext(from, to); }

static void prepare(Context *c, char *stack, size_t size, void (*start)()) {
    getcontext(c);
    c->uc_stack.ss_sp = stack, c->uc_stack.ss_size = size;
    makecontext(c, start, 0);
}
#endif

// ---- threads, warps, blocks

struct Barrier {
    unsigned members = 0, arrived = 0, generation = 0;
    char order[2]; // ThreadSanitizer's handles, for even and odd generations
};
struct Warp {
    Barrier barrier, shuffle;
    uint64_t slots[2][32];
};
struct Block {
    dim3 index;
    Barrier barrier;
    std::vector<Warp> warps;
    void *shared;
};
struct Copy {
    void *to;
    const void *from;
    size_t n;
};
struct Fiber {
    Context context;
    std::unique_ptr<char[]> memory; // its stack
    void *watched = NULL;           // ThreadSanitizer's handle
    Block *block;
    int thread;
    bool done;
    Barrier *waits;                        // NULL if it can run
    unsigned generation;                   // of that barrier when it arrived
    std::vector<std::vector<Copy>> copies; // unfinished groups; the last is not yet committed
    std::vector<void *> seen;              // rounds of the atomics since the last fence
    bool fenced;                           // since its last atomic
};

static std::vector<Fiber> fibers;
static Context scheduler;
static void *scheduler_watched;
static int current;
static const std::function<void()> *body;

static Fiber &me() { return fibers[current]; }
static Warp &warp() { return me().block->warps[me().thread / 32]; }

void fail(const char *what) {
    fprintf(stderr, "cuda_on_cpu: %s (block %u,%u thread %d)\n", what, blockIdx.x, blockIdx.y,
            me().thread);
    abort();
}

void rest() {
    __tsan_switch_to_fiber(scheduler_watched, __tsan_switch_to_fiber_no_sync);
    turn_to(&me().context, &scheduler);
}

static void open_if_all_came(Barrier &b) {
    if (b.members && b.arrived == b.members) b.arrived = 0, b.generation++;
}

static void meet(Barrier &b, bool orders) {
    unsigned generation = me().generation = b.generation;
    me().waits = &b;
    if (orders) __tsan_release(&b.order[generation % 2]); // no fiber is two generations ahead
    b.arrived++;
    open_if_all_came(b);
    if (b.generation != generation) me().waits = NULL;
    else rest();
    if (orders) __tsan_acquire(&b.order[generation % 2]);
}

void meet_block() { meet(me().block->barrier, true); }
void meet_warp() { meet(warp().barrier, true); }

uint64_t exchange_bits(uint64_t bits, int lane) {
    Warp &w = warp();
    unsigned turn = w.shuffle.generation % 2;
    w.slots[turn][me().thread % 32] = bits;
    meet(w.shuffle, false);
    return w.slots[turn][lane];
}

// ---- atomics and fences
// A fence and an atomic of one thread, and a later atomic and a fence of another thread that reads
// the result of the first atomic, order memory: accesses before the first fence come before
// accesses after the last one. Atomics of one round of a grid's barrier read the same top bit.

static char *round_of(void *p, uint32_t found) { return (char *)p + (found >> 31); }

void note_atomic(void *p, uint32_t before) {
    if (me().fenced) __tsan_release(round_of(p, before));
    me().fenced = false;
    me().seen.push_back(round_of(p, before));
}

void fence() {
    for (void *order : me().seen) __tsan_acquire(order);
    me().seen.clear();
    me().fenced = true;
}

#ifdef RACES
// GCC calls these for volatile accesses (--param=tsan-distinguish-volatile=1). A thread that has
// waited for the top bit to flip has seen all atomics of the previous round.
extern "C" void __tsan_volatile_read4(void *p) {
    me().seen.assign(1, round_of(p, ~*(uint32_t *)p));
}
extern "C" void __tsan_volatile_write4(void *) {} // several threads may write the same value
// A word of 8 bytes carries its own data: it may be read while it is written, and orders no other
// accesses.
extern "C" void __tsan_volatile_read8(void *) {}
extern "C" void __tsan_volatile_write8(void *) {}
#endif

// ---- asynchronous copies, which are done only when they are waited for, or at once

static void do_copy(const Copy &c) { // ThreadSanitizer was told of the copy when it was started
    for (size_t i = 0; i < c.n; i++) ((volatile char *)c.to)[i] = ((const char *)c.from)[i];
}

static void check_range(const void *p, size_t n) {
    if (__asan_region_is_poisoned && __asan_region_is_poisoned((void *)p, n))
        fail("a copy beyond the end of its memory");
}

static Copy start_copy(void *to, const void *from, size_t n, size_t alignment) {
    if (((uintptr_t)to | (uintptr_t)from | n) % alignment) fail("a copy that is not aligned");
    check_range(to, n), check_range(from, n);
    __tsan_read_range((void *)from, n);
    __tsan_write_range(to, n);
    return {to, from, n};
}

void copy_async(void *to, const void *from, size_t n) {
    static const char *early = getenv("CUDA_ON_CPU_EARLY_COPIES");
    Copy copy = start_copy(to, from, n, n);
    if (early) do_copy(copy);
    else me().copies.back().push_back(copy);
}
void commit_copies() { me().copies.emplace_back(); }

void wait_for_copies(size_t groups) {
    auto &copies = me().copies;
    for (; copies.size() - 1 > groups; copies.erase(copies.begin()))
        for (Copy &copy : copies.front()) do_copy(copy);
}

// ---- grids

// ThreadSanitizer's handles: the host's accesses before a launch come before those of the kernel,
// and these come before the host's next accesses.
static char begun, ended;

static void enter() {
    __tsan_acquire(&begun);
    (*body)();
    __tsan_release(&ended);
    me().done = true;
    for (Barrier *b : {&me().block->barrier, &warp().barrier, &warp().shuffle})
        b->members--, open_if_all_came(*b);
    rest();
}

static std::vector<int> turns(int n) {
    static const char *order = getenv("CUDA_ON_CPU_ORDER");
    static const bool backward = order && *order == '1', shuffled = order && *order == '2';
    static uint32_t state = 1;
    std::vector<int> all(n);
    for (int i = 0; i < n; i++) all[i] = backward ? n - 1 - i : i;
    for (int i = n - 1; i > 0 && shuffled; i--)
        std::swap(all[i], all[(state = state * 1664525 + 1013904223) % (i + 1)]);
    return all;
}

// CUDA_ON_CPU_ORDER=3: one of the blocks that run together gets no turns for 2048 rounds, then the
// next one. On a GPU, a block may be slower than others by any amount of time.
static bool starves(size_t block, size_t blocks, unsigned long round) {
    static const char *order = getenv("CUDA_ON_CPU_ORDER");
    return order && *order == '3' && blocks > 1 && block == round / 2048 % blocks;
}

static const size_t STACK = 64 << 10;

static void prepare_fiber(Fiber &f, Block *block, int thread) {
    if (!f.memory) f.memory.reset(new char[STACK]);
    if (!f.watched) f.watched = __tsan_create_fiber(0); // expensive, so it is reused
    f.block = block, f.thread = thread, f.done = false, f.waits = NULL, f.fenced = false;
    f.copies.assign(1, {});
    f.seen.clear();
    prepare(&f.context, f.memory.get(), STACK, enter);
    block->warps[thread / 32].barrier.members++;
    block->warps[thread / 32].shuffle.members++;
}

// Runs blocks, in the fibers from `first` on.
static void run_blocks(std::vector<Block> &blocks, int threads, int first) {
    int n = (int)blocks.size() * threads;
    if ((int)fibers.size() < first + n) fibers.resize(first + n);
    renew_shared();
    for (Block &b : blocks)
        b.barrier.members = threads, b.warps.assign((threads + 31) / 32, Warp());
    for (int i = 0; i < n; i++) prepare_fiber(fibers[first + i], &blocks[i / threads], i % threads);
    __tsan_release(&begun);
    static unsigned long round;
    for (int left = n; left > 0; round++) {
        bool moved = false;
        for (int i : turns(n)) {
            Fiber &f = fibers[first + i];
            if (f.done || (f.waits && f.waits->generation == f.generation)) continue;
            moved = true;
            if (starves(i / threads, blocks.size(), round)) continue;
            f.waits = NULL;
            current = first + i, threadIdx = dim3(f.thread), blockIdx = f.block->index,
            launch_shared = f.block->shared;
            __tsan_switch_to_fiber(f.watched, __tsan_switch_to_fiber_no_sync);
            turn_to(&scheduler, &f.context);
            left -= f.done;
        }
        if (!moved) fail("a barrier that not all threads reach");
    }
}

void run_grid(dim3 grid, dim3 threads, size_t shared, bool together,
              const std::function<void()> &kernel) {
    unsigned n = grid.x * grid.y * grid.z, at_once = together ? n : 1;
    unsigned sets = std::max(2u, 1024 / threads.x); // blocks that do not share fibers
    if (n == 0 || threads.x == 0 || threads.x > 1024) fail("an impossible launch");
    gridDim = grid, blockDim = threads, body = &kernel,
    scheduler_watched = __tsan_get_current_fiber();
    std::vector<int> order = turns(n);
    std::vector<void *> memory;
    for (unsigned first = 0; first < n; first += at_once) {
        std::vector<Block> blocks(at_once);
        for (unsigned i = 0; i < at_once; i++) {
            unsigned at = order[first + i];
            blocks[i].index = dim3(at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y);
            void *room = NULL;
            if (posix_memalign(&room, 128, shared)) fail("no memory");
            memory.push_back(room);
            blocks[i].shared = memset(memory.back(), 0xff, shared);
        }
        run_blocks(blocks, threads.x, first % sets * threads.x);
    }
    __tsan_acquire(&ended);
    for (void *m : memory) free(m);
}

} // namespace cuda_on_cpu
