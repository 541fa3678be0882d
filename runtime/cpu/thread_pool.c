// The thread pool. thread_pool.h describes how workers share a step.
#include "../os.h"
#include "thread_pool.h"

enum {
    SLICES = 16,          // max slices of a share
    MIN_SLICE = 30000,    // min multiplications of a slice, except for the first and the last one
    GROUP = 4,            // max workers per leaf of the barrier's tree, max children per other node
    PAUSES = 4,           // pauses of a waiting worker between two readings of the clock
    HELP_AFTER = 200,     // nanoseconds from the first reading until a waiting worker helps others
    YIELD_AFTER = 20000,  // nanoseconds between two yields of the core to other threads
    SLEEP_AFTER = 200000, // nanoseconds until a worker without steps sleeps
    MIN_WORK = 20000,     // min multiplications per step of a list, on average, to share the list
};

// ----------------------------------------------------------------------------
// Waiting

// Waits are limited by time, because a pause takes 10 to 50 nanoseconds, depending on the model of
// the processor. The clock is the processor's own counter: reading it takes about 20 nanoseconds
// and never needs a system call, unlike clock_gettime on some virtual machines.

// PAUSE lets the other threads of the core run, saves energy, and keeps speculative loads of the
// awaited cache line from delaying its owner. On ARM, `yield` does nothing in most processors, and
// `isb` takes about as long as the pause of x86.
#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
static uint64_t ticks(void) { return __builtin_ia32_rdtsc(); }
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("isb" ::: "memory")
static uint64_t ticks(void) {
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
}
#else
#define PAUSE() (void)0
static uint64_t ticks(void) { return (uint64_t)(llamac_seconds() * 1e9); }
#endif

// Returns the ticks per second, measured for 20 microseconds.
static double measure_ticks(void) {
    double begin = llamac_seconds(), end;
    uint64_t first = ticks();
    do end = llamac_seconds();
    while (end - begin < 20e-6);
    return (ticks() - first) / (end - begin);
}

// Returns the ticks per second: the median of three measurements, because the system may suspend
// the thread between two readings of the clocks.
static double ticks_per_second(void) {
    double a = measure_ticks(), b = measure_ticks(), c = measure_ticks();
    double low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

// State of a worker's wait for another thread, all zero when the wait begins.
typedef struct {
    unsigned pauses;
    uint64_t last;    // ticks at the last reading of the clock
    uint64_t waited;  // ticks between the first reading and the last one
    uint64_t yielded; // `waited` when the core was last yielded
} Wait;

// Executes one pause. At every PAUSES-th call, updates w->waited and returns true. Yields the core
// to other threads during long waits, because the awaited thread may need it. A long time between
// two readings of the clock means that the system had suspended this worker, and perhaps the
// awaited thread too, so it does not count as waiting.
static bool pause_briefly(const ThreadPool *pool, Wait *w) {
    PAUSE();
    if (++w->pauses % PAUSES) return false;
    uint64_t now = ticks(), since = now - w->last;
    w->last = now;
    if (since < pool->yield_ticks) w->waited += since; // false at the first reading, too
    if (w->waited - w->yielded >= pool->yield_ticks) {
        w->yielded = w->waited;
        llamac_yield();
    }
    return true;
}

// ----------------------------------------------------------------------------
// Slices and the barrier

// Computes which of n items are share i: items begin..end-1.
static void share_of(int n, int n_threads, int i, int *begin, int *end) {
    *begin = (int)((int64_t)n * i / n_threads);
    *end = (int)((int64_t)n * (i + 1) / n_threads);
}

// Returns the first item of a slice of the share begin..end-1, or `end` for slice SLICES. The first
// slices are large and the last ones small, so that all workers finish at nearly the same time. No
// slice is larger than a quarter of the share, because a slow core may be late with it.
static int slice_start(int begin, int end, int slice) {
    // how much of the share is left where each slice begins, in 1/64 of the share
    static const uint8_t left[SLICES + 1] = {64, 48, 44, 40, 36, 32, 28, 24, 20,
                                             17, 14, 11, 8,  6,  4,  2,  0};
    return end - (int)((int64_t)(end - begin) * left[slice] / 64);
}

// Returns the end of the slices that a worker takes together, starting with `slice`: they have at
// least MIN_SLICE multiplications, or are the last ones of the share begin..end-1.
static int next_slice(const Step *step, int begin, int end, int slice) {
    int first_item = slice_start(begin, end, slice);
    do slice++;
    while (slice < SLICES
           && (slice_start(begin, end, slice) - first_item) * step->cost < MIN_SLICE);
    return slice;
}

// Adds n finished slices of share i to the barrier. The worker that completes a node continues
// with its parent. Each worker releases its results and acquires those of the workers before it, so
// that a worker that sees the root complete sees the results of all.
static void count_finished(ThreadPool *pool, unsigned step, int i, unsigned n) {
    for (Node *node = &pool->workers[i / GROUP].node; node; node = node->parent, n = 1) {
        unsigned before = atomic_fetch_add_explicit(&node->finished, n, memory_order_acq_rel);
        if (before + n != (step + 1) * node->per_step) return;
    }
}

// Takes slices of share i of this worker's step until all are taken, and runs them.
//
// `taken` counts the share's taken slices from the start of the pool, SLICES per step. It reaches
// end_slice when the last slice of this step is taken, and exceeds it when other workers have begun
// the next step.
//
// The caller may replace pool->steps and pool->first once the step is over. The step is not over
// while this worker has a slice that it has not finished. So it takes a slice first, a single one,
// and only then reads the step, whose cost determines how many of the next slices to take together.
static void take_slices(Worker *self, int i) {
    ThreadPool *pool = self->pool;
    atomic_uint *taken = &pool->workers[i].taken;
    unsigned slice = atomic_load(taken), end_slice = (self->step + 1) * SLICES, done = 0;
    const Step *step = NULL;
    int begin, end;
    while ((int)(end_slice - slice) > 0) {
        int at = slice % SLICES, next = step ? next_slice(step, begin, end, at) : at + 1;
        if (!atomic_compare_exchange_weak(taken, &slice, slice - at + next)) continue;
        if (!step) {
            step = &pool->steps[self->step - pool->first];
            share_of(step->n, pool->n_threads, i, &begin, &end);
        }
        int first_item = slice_start(begin, end, at), end_item = slice_start(begin, end, next);
        if (first_item < end_item) step->task(self, step->args, first_item, end_item);
        slice += next - at, done += next - at;
    }
    if (done) count_finished(pool, self->step, i, done);
}

// Returns whether a node has counted everything of this step and of all steps before it.
static bool is_complete(const Node *node, unsigned step) {
    unsigned finished = atomic_load_explicit(&node->finished, memory_order_acquire);
    return (int)(finished - (step + 1) * node->per_step) >= 0;
}

// Takes slices of the shares that one leaf counts, unless they are all finished.
static void help(Worker *self, int leaf) {
    ThreadPool *pool = self->pool;
    if (is_complete(&pool->workers[leaf].node, self->step)) return;
    int me = (int)(self - pool->workers);
    for (int i = 1; i <= GROUP; i++) {
        int share = leaf * GROUP + (me + i) % GROUP;
        if (share != me && share < pool->n_threads) take_slices(self, share);
    }
}

// Runs this worker's share of its step, waits until the whole step is finished, and moves on to the
// next step. Helps the others only if they are late: reading their `taken` sooner would take its
// cache line away from them. For the same reason, helps each group once, and one group at a time:
// the barrier of many workers takes longer than HELP_AFTER even if none of them is late.
static void run_step(Worker *self) {
    ThreadPool *pool = self->pool;
    int me = (int)(self - pool->workers), leaves = (pool->n_threads + GROUP - 1) / GROUP;
    self->prepared = false; // this worker's buffers still hold activations of an earlier step
    take_slices(self, me);
    Wait wait = {0};
    for (int helped = 0; !is_complete(pool->root, self->step);) {
        if (pause_briefly(pool, &wait) && wait.waited >= pool->help_ticks && helped < leaves)
            help(self, (me / GROUP + helped++) % leaves);
    }
    self->step++;
}

// Links the barrier's tree, level by level: the leaves are the nodes of the first workers, their
// parents those of the next ones. The root has one child, so that it is written once per step while
// the workers read it. But if there is only one leaf, it is the root itself: for few workers, a
// second node would take longer.
static void link_nodes(ThreadPool *pool) {
    Worker *level = pool->workers;
    unsigned per_child = SLICES; // what a child adds in a step
    int children = pool->n_threads, max_of_root = GROUP;
    for (;;) {
        int n = (children + GROUP - 1) / GROUP;
        bool is_root = children <= max_of_root;
        for (int i = 0; i < n; i++) {
            int left = children - i * GROUP;
            level[i].node.per_step = per_child * (left < GROUP ? left : GROUP);
            level[i].node.parent = is_root ? NULL : &level[n + i / GROUP].node;
        }
        if (is_root) break;
        level += n, children = n, per_child = max_of_root = 1;
    }
    pool->root = &level->node;
}

// ----------------------------------------------------------------------------
// Lists of steps

// Returns whether the worker has steps to run or must return. A worker first adds itself to
// `sleepers`, then loads `goal` and `stopping` here. The caller first stores `goal` or `stopping`,
// then loads `sleepers`. All of these are sequentially consistent, so either the worker sees the
// new value, or the caller sees the sleeper and wakes it.
static bool has_work(const Worker *w) {
    return atomic_load(&w->pool->goal) != w->step || atomic_load(&w->pool->stopping);
}

static void run_worker(void *arg) {
    Worker *self = arg;
    ThreadPool *pool = self->pool;
    Wait idle = {0};
    while (!atomic_load_explicit(&pool->stopping, memory_order_acquire)) {
        while (self->step != atomic_load_explicit(&pool->goal, memory_order_acquire))
            run_step(self), idle = (Wait){0};
        pause_briefly(pool, &idle);
        if (idle.waited < pool->sleep_ticks) continue;
        llamac_lock(&pool->idle);
        atomic_fetch_add(&pool->sleepers, 1);
        while (!has_work(self)) llamac_sleep(&pool->idle);
        atomic_fetch_sub(&pool->sleepers, 1);
        llamac_unlock(&pool->idle);
        idle = (Wait){0};
    }
}

// Wakes all sleepers. The lock keeps the signal from arriving between a worker's check of has_work
// and its wait.
static void wake(ThreadPool *pool) {
    if (!atomic_load(&pool->sleepers)) return;
    llamac_lock(&pool->idle);
    llamac_wake_all(&pool->idle);
    llamac_unlock(&pool->idle);
}

void llamac_thread_pool_run(ThreadPool *pool) {
    Worker *self = pool->workers;
    int64_t work = 0;
    for (int i = 0; i < pool->n_steps; i++) work += pool->steps[i].n * pool->steps[i].cost;
    if (pool->n_threads == 1 || work < (int64_t)MIN_WORK * pool->n_steps) {
        for (const Step *step = pool->steps; step < pool->steps + pool->n_steps; step++) {
            self->prepared = false;
            step->task(self, step->args, 0, step->n);
        }
        return;
    }
    pool->first = self->step;
    atomic_store(&pool->goal, self->step + pool->n_steps);
    wake(pool);
    for (int i = 0; i < pool->n_steps; i++) run_step(self);
}

void llamac_thread_pool_start(ThreadPool *pool, int n_threads) {
    llamac_open_monitor(&pool->idle);
    double ticks_per_nanosecond = n_threads > 1 ? ticks_per_second() * 1e-9 : 1;
    pool->help_ticks = (uint64_t)(HELP_AFTER * ticks_per_nanosecond);
    pool->yield_ticks = (uint64_t)(YIELD_AFTER * ticks_per_nanosecond);
    pool->sleep_ticks = (uint64_t)(SLEEP_AFTER * ticks_per_nanosecond);
    Worker *w = pool->workers + 1;
    while (w < pool->workers + n_threads && llamac_start_thread(&w->thread, run_worker, w)) w++;
    pool->n_threads = (int)(w - pool->workers);
    link_nodes(pool); // the workers see the tree once they see the first goal
}

void llamac_thread_pool_stop(ThreadPool *pool) {
    atomic_store(&pool->stopping, true);
    wake(pool);
    for (int i = 1; i < pool->n_threads; i++) llamac_join_thread(&pool->workers[i].thread);
    if (!pool->n_threads) return; // the pool was never started
    llamac_close_monitor(&pool->idle);
}
