// The thread pool. thread_pool.h describes how workers share a step.
#define _DEFAULT_SOURCE // declare POSIX functions under -std=c11
#include <sched.h>
#include "thread_pool.h"

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() (void)0
#endif

enum {
    SLICES = 4,                 // slices of a share
    SPINS_BEFORE_HELP = 16,     // before a worker takes slices of others; about 300 nanoseconds
    SPINS_BEFORE_SLEEP = 20000, // of a worker without steps; about 200 microseconds
    // min multiplications per step, on average over a list of steps, for workers to share the list
    MIN_WORK = 20000,
};

// Sets begin and end to share i of n items, items begin..end-1.
static void share_of(int n, int n_threads, int i, int *begin, int *end) {
    *begin = (int)((int64_t)n * i / n_threads);
    *end = (int)((int64_t)n * (i + 1) / n_threads);
}

// Returns the first item of a slice of the share begin..end-1; slice SLICES is its end. Each slice
// has three quarters of the items that remain, the last slice all of them. So the last slices are
// small, and all workers finish at nearly the same time.
static int slice_start(int begin, int end, int slice) {
    return slice < SLICES ? end - ((end - begin) >> 2 * slice) : end;
}

// Takes slices of share i of this worker's step until all are taken, and runs them. `taken` counts
// the share's taken slices from the start of the pool, SLICES per step. It is end_slice once all
// slices of this step are taken, and more if other workers have begun the next step. Once a slice
// has been taken, no worker can leave the step before the slice is finished, so pool->steps and
// pool->first, the number of steps[0], do not change meanwhile.
static void take_slices(Worker *self, int i) {
    ThreadPool *pool = self->pool;
    atomic_uint *taken = &pool->workers[i].taken;
    unsigned slice = atomic_load(taken), end_slice = (self->step + 1) * SLICES, done = 0;
    while ((int)(end_slice - slice) > 0) {
        if (!atomic_compare_exchange_weak(taken, &slice, slice + 1)) continue;
        const Step *step = &pool->steps[self->step - pool->first];
        int begin, end;
        share_of(step->n, pool->n_threads, i, &begin, &end);
        int first_item = slice_start(begin, end, slice % SLICES);
        int end_item = slice_start(begin, end, slice % SLICES + 1);
        if (first_item < end_item) step->task(self, step->args, first_item, end_item);
        slice++, done++;
    }
    if (!done) return;
    unsigned finished = atomic_load_explicit(&self->finished, memory_order_relaxed);
    atomic_store_explicit(&self->finished, finished + done, memory_order_release);
}

// Returns whether all workers together have finished the slices of all steps up to this one.
static bool is_finished(ThreadPool *pool, unsigned step) {
    unsigned finished = 0;
    for (int i = 0; i < pool->n_threads; i++)
        finished += atomic_load_explicit(&pool->workers[i].finished, memory_order_acquire);
    return (int)(finished - (step + 1) * SLICES * pool->n_threads) >= 0;
}

// Runs this worker's share of its step, waits until the whole step is finished, and moves on to the
// next step. Takes slices of the others only if they are late, and once: reading their `taken`
// sooner would take its cache line away from them.
static void run_step(Worker *self) {
    ThreadPool *pool = self->pool;
    int me = (int)(self - pool->workers), n = pool->n_threads;
    self->prepared = false; // this worker's buffers still hold activations of an earlier step
    take_slices(self, me);
    for (int spins = 1; !is_finished(pool, self->step); spins++) {
        PAUSE();
        // Help each other worker once: the condition on spins is true in a single iteration.
        for (int i = 1; spins == SPINS_BEFORE_HELP && i < n; i++) take_slices(self, (me + i) % n);
        if (spins % 1024 == 0) sched_yield();
    }
    self->step++;
}

// Returns whether the worker has steps to run or must return. A worker first adds itself to
// `sleepers`, then loads `goal` and `stopping` here. The caller first stores `goal` or `stopping`,
// then loads `sleepers`. All of these are sequentially consistent, so either the worker sees the
// new value, or the caller sees the sleeper and wakes it.
static bool has_work(const Worker *w) {
    return atomic_load(&w->pool->goal) != w->step || atomic_load(&w->pool->stopping);
}

static void *run_worker(void *arg) {
    Worker *self = arg;
    ThreadPool *pool = self->pool;
    int spins = 0;
    for (; !atomic_load_explicit(&pool->stopping, memory_order_acquire); spins++) {
        while (self->step != atomic_load_explicit(&pool->goal, memory_order_acquire))
            run_step(self), spins = 0;
        PAUSE();
        if (spins % 1024 == 1023) sched_yield();
        if (spins < SPINS_BEFORE_SLEEP) continue;
        pthread_mutex_lock(&pool->lock);
        atomic_fetch_add(&pool->sleepers, 1);
        while (!has_work(self)) pthread_cond_wait(&pool->wake, &pool->lock);
        atomic_fetch_sub(&pool->sleepers, 1);
        pthread_mutex_unlock(&pool->lock);
        spins = 0;
    }
    return NULL;
}

// Wakes all sleepers. The lock keeps the signal from arriving between a worker's check of has_work
// and its wait.
static void wake(ThreadPool *pool) {
    if (!atomic_load(&pool->sleepers)) return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
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
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    Worker *w = pool->workers + 1;
    while (w < pool->workers + n_threads && !pthread_create(&w->thread, NULL, run_worker, w)) w++;
    pool->n_threads = (int)(w - pool->workers);
}

void llamac_thread_pool_stop(ThreadPool *pool) {
    atomic_store(&pool->stopping, true);
    wake(pool);
    for (int i = 1; i < pool->n_threads; i++) pthread_join(pool->workers[i].thread, NULL);
    if (!pool->n_threads) return; // the pool was never started
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
}
