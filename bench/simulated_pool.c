// Runs the thread pool's own code on simulated cores, and counts how often cache lines move.
//   cc -O2 -I runtime/cpu -DPOOL='"PATH/thread_pool.c"' bench/simulated_pool.c
//   simulated_pool THREADS ITEMS ITEM_NS SLOW SLOWNESS SPREAD_NS
//
// Each worker is a coroutine with its own clock; the worker with the lowest clock runs until its
// next access to an atomic variable. So the result is the same on every machine. The memory model:
// a line is in the cache of the core that has written it, or of several cores that have read it.
// Accesses from other cores take MOVE_NS and count as a move, and a line moves to one core at a
// time. If the writer and others have the line, a write takes as long, and counts as an
// invalidation.
//
// Prints the moves and invalidations per step, and how many nanoseconds longer a step takes than
// with an ideal division of the items. The first SLOW workers take SLOWNESS times as long for an
// item. Before each step, each worker is late by up to SPREAD_NS, by a fixed random sequence.
#define _GNU_SOURCE 1 // ucontext
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <pthread.h>
#include <sched.h>

enum {
    MAX_WORKERS = 64,
    STACK = 1 << 16,
    STEPS = 200,
    WARM_UP = 20,  // first steps, which are not counted
    HIT_NS = 4,    // access to a line in the worker's own cache
    MOVE_NS = 70,  // access to a line of another core
    READ_NS = 10,  // interval between reads of a line by two cores, if no core writes it
    PAUSE_NS = 20,
    CLOCK_NS = 15,
};

typedef struct { uintptr_t address; uint64_t sharers; int owner; double free_at; } Line;

static Line lines[4 * MAX_WORKERS + 64];
static int n_lines, running, n_workers;
static ucontext_t contexts[MAX_WORKERS], scheduler;
static double clocks[MAX_WORKERS];
static bool ended[MAX_WORKERS], counting;
static long moves, invalidations;

static void let_others_run(void) { swapcontext(&contexts[running], &scheduler); }

static Line *line_at(const volatile void *p) {
    uintptr_t address = (uintptr_t)p / 64;
    for (int i = 0; i < n_lines; i++)
        if (lines[i].address == address) return &lines[i];
    lines[n_lines] = (Line){address, 0, -1, 0};
    return &lines[n_lines++];
}

// Accounts for one access of the running worker. line->sharers: bits of the caches that hold the
// line; line->owner: the worker that made the latest access, if that was a write, otherwise -1.
static int touch(const volatile void *p, bool writes) {
    let_others_run();
    Line *line = line_at(p);
    uint64_t me = 1ull << running;
    double *clock = &clocks[running];
    bool has = line->sharers & me, alone = line->sharers == me;
    if (has && (!writes || alone)) {
        *clock += HIT_NS;
    } else {
        if (*clock < line->free_at) *clock = line->free_at;
        *clock += MOVE_NS;
        bool shared = !writes && line->owner < 0;
        line->free_at = shared ? *clock - MOVE_NS + READ_NS : *clock;
        if (counting) *(has ? &invalidations : &moves) += 1;
    }
    line->sharers = writes ? me : line->sharers | me;
    line->owner = writes ? running : -1;
    return 0;
}

static void pause_simulated(void) { clocks[running] += PAUSE_NS; }
static uint64_t ticks_simulated(void) { return (uint64_t)(clocks[running] += CLOCK_NS); }
static int yield_simulated(void) { return 0; }
static int create_simulated(void) { return 0; }
static double seconds_simulated;

// Replace the atomic operations and calls of thread_pool.c by those of the simulation.
#undef atomic_load
#undef atomic_store
#undef atomic_fetch_add
#undef atomic_fetch_sub
#undef atomic_load_explicit
#undef atomic_store_explicit
#undef atomic_fetch_add_explicit
#undef atomic_compare_exchange_weak
#define atomic_load(p) (touch(p, false), *(p))
#define atomic_store(p, x) (touch(p, true), *(p) = (x))
#define atomic_fetch_add(p, x) (touch(p, true), (*(p) += (x)) - (x))
#define atomic_fetch_sub(p, x) (touch(p, true), (*(p) -= (x)) + (x))
#define atomic_load_explicit(p, order) atomic_load(p)
#define atomic_store_explicit(p, x, order) atomic_store(p, x)
#define atomic_fetch_add_explicit(p, x, order) atomic_fetch_add(p, x)
#define atomic_compare_exchange_weak(p, expected, x) \
    (touch(p, true), *(p) == *(expected) ? (*(p) = (x), true) : (*(expected) = *(p), false))
#define __builtin_ia32_pause pause_simulated
#define __builtin_ia32_rdtsc ticks_simulated
#define sched_yield yield_simulated
#define pthread_create(thread, attributes, f, argument) \
    ((void)(thread), (void)(f), create_simulated())
#include POOL

double llamac_seconds(void) { return seconds_simulated += 1e-5; }

static int item_ns, n_slow, spread_ns;
static double slowness, started[STEPS], latest_end;

// A Task whose items only take time.
static void spend(Worker *self, const void *args, int begin, int end) {
    int me = (int)(self - self->pool->workers);
    (void)args;
    clocks[me] += (end - begin) * item_ns * (me < n_slow ? slowness : 1);
}

static ThreadPool pool;

static void work(int me) {
    Worker *self = &pool.workers[me];
    unsigned random = 12345 + 7919 * me;
    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < 3; i++) random = random * 1664525 + 1013904223;
        if (spread_ns) clocks[me] += (random >> 16) % spread_ns;
        if (started[s] < clocks[me]) started[s] = clocks[me];
        counting = s >= WARM_UP;
        run_step(self);
        if (clocks[me] > latest_end) latest_end = clocks[me];
    }
    ended[me] = true;
    let_others_run();
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    n_workers = atoi(argv[1]), item_ns = atoi(argv[3]), n_slow = atoi(argv[4]);
    slowness = atof(argv[5]), spread_ns = atoi(argv[6]);
    int items = atoi(argv[2]);
    if (n_workers < 2 || n_workers > MAX_WORKERS) return 2;
    pool.workers = aligned_alloc(64, n_workers * sizeof(Worker));
    pool.steps = calloc(STEPS, sizeof(Step));
    memset(pool.workers, 0, n_workers * sizeof(Worker));
    llamac_thread_pool_start(&pool, n_workers);
    memset(clocks, 0, sizeof clocks);
    for (int s = 0; s < STEPS; s++) pool.steps[s] = (Step){spend, items, item_ns * 20, {0}};
    pool.n_steps = STEPS;
    for (int i = 0; i < n_workers; i++) {
        pool.workers[i].pool = &pool;
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = malloc(STACK), contexts[i].uc_stack.ss_size = STACK;
        makecontext(&contexts[i], (void (*)(void))work, 1, i);
    }
    for (;;) {
        running = -1;
        for (int i = 0; i < n_workers; i++)
            if (!ended[i] && (running < 0 || clocks[i] < clocks[running])) running = i;
        if (running < 0) break;
        swapcontext(&scheduler, &contexts[running]);
    }
    double counted = STEPS - WARM_UP, speed = n_workers - n_slow + n_slow / slowness;
    double ideal = (double)items * item_ns / speed;
    printf("%.1f %.1f %.0f\n", moves / counted, invalidations / counted,
           latest_end / STEPS - ideal);
    return 0;
}
