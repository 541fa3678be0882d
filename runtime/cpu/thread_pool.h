// A pool of threads that runs a list of steps together. Each step is a loop over independent items.
// A step is cut into one share for each worker, and a share into slices. A worker that has finished
// its own share takes slices of the others, so nobody waits for a worker that the system has
// suspended, except for slices that it has already begun. When all slices of a step are finished,
// every worker goes on to the next step by itself: that costs one cache line sent between two
// cores. Between two lists workers spin for a while before they sleep, because the next list
// usually comes within microseconds.
#ifndef THREAD_POOL_H
#define THREAD_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include "kernels.h"

typedef struct Cpu Cpu;
typedef struct ThreadPool ThreadPool;
typedef struct Worker Worker;

// Computes items begin..end-1 of a step.
typedef void Task(Worker *self, const void *args, int begin, int end);

enum { MAX_ARGS = 224 }; // bytes of a task's arguments

typedef struct {
    Task *task;
    int n;        // items
    int64_t cost; // approximate multiplications of one item
    _Alignas(8) char args[MAX_ARGS];
} Step;

// Fields that one worker writes and another reads have a cache line of their own. Numbers of steps
// and counts of slices keep growing from list to list, and wrap around to zero.
struct Worker {
    _Alignas(64) atomic_uint taken;    // slices taken so far from this worker's share
    _Alignas(64) atomic_uint finished; // slices of any share that this worker has finished so far
    _Alignas(64) ThreadPool *pool;
    pthread_t thread;
    unsigned step;  // number of the step that this worker is in
    Cpu *cpu;       // the backend that tasks work on; below is what tasks keep for each worker:
    bool prepared;  // x and blocks hold the activations of the present step
    float *x;       // (cols,) normalised activations of one token
    Block *blocks;  // (cols / 32,) the same in 8 bits
    float *scratch; // (scratch_size,)
};

struct ThreadPool {
    Step *steps;
    int n_steps, n_threads;
    Worker *workers;      // (n_threads,); the first is the caller
    unsigned first;       // number of steps[0]
    atomic_uint goal;     // number of the last step, plus 1
    atomic_int sleepers;  // workers that sleep
    atomic_bool stopping; // asks the workers to end
    pthread_mutex_t lock; // guards falling asleep
    pthread_cond_t wake;
};

// Starts workers 1..n_threads-1, or fewer if the system refuses: results do not depend on them.
void llamac_thread_pool_start(ThreadPool *pool, int n_threads);

// Runs the steps. The caller runs them alone if they are too small to share.
void llamac_thread_pool_run(ThreadPool *pool);

// Asks the workers to end, and waits for them.
void llamac_thread_pool_stop(ThreadPool *pool);

#endif
