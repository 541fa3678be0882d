// A pool of threads that run a list of steps together. Each step is a loop over independent items.
//
// Work stealing: a step is cut into one share for each worker, and a share into slices. A worker
// that has finished its own share takes slices of other shares. So if the system suspends a worker,
// the others wait only for the slice that it has begun.
//
// Barrier: finished slices are counted in a tree of counters. Each leaf counts the slices of the
// shares of a few workers. The worker that completes a counter adds 1 to the parent, and all
// workers wait for the root. A worker that arrives writes one counter, and few workers write the
// same one, so the cost of a step grows with the number of workers, not with its square. The leaves
// count slices of shares, not workers that have arrived. So a worker that the system has suspended
// delays no step whose slices others have taken.
//
// Between two lists, workers spin for a while before they sleep, because the next list usually
// comes within microseconds.
#ifndef THREAD_POOL_H
#define THREAD_POOL_H

#include <stdatomic.h>
#include "../os.h"
#include "kernels.h"

typedef struct Cpu Cpu;
typedef struct ThreadPool ThreadPool;
typedef struct Worker Worker;

// Computes items begin..end-1 of a step. `args` are those of the step.
typedef void Task(Worker *self, const void *args, int begin, int end);

enum { MAX_ARGS = 224 }; // max bytes of a step's arguments

typedef struct {
    Task *task;
    int n;        // number of items
    int64_t cost; // approximate multiplications of one item
    _Alignas(8) char args[MAX_ARGS];
} Step;

// One counter of the barrier's tree. `finished` counts slices in a leaf, and completions of the
// children in other nodes.
typedef struct Node Node;
struct Node {
    _Alignas(64) atomic_uint finished; // so far, over all steps
    unsigned per_step;                 // what one step adds to `finished`
    Node *parent;                      // NULL for the root
};

// Fields that one worker writes and another reads have a cache line of their own. Steps are
// numbered and slices counted from the start of the pool, not of the list, so that a late worker
// notices that its step is over. These numbers wrap around to zero.
struct Worker {
    _Alignas(64) atomic_uint taken; // slices taken so far from this worker's share
    Node node;                      // a node of the tree, stored here but unrelated to this worker
    _Alignas(64) ThreadPool *pool;
    Thread thread;
    unsigned step; // number of the step that this worker runs, or will run next
    Cpu *cpu;      // the backend that tasks work on

    // Private to the tasks that this worker runs
    bool prepared;   // x and blocks hold the activations of this step; false when a step begins
    float *x;        // (cols,) normalised activations of one token
    Block *blocks;   // (cols / 32,) the same in 8 bits
    uint16_t *pairs; // (cols + 1,) the same in BF16, see `pairs` in cpu.h
    float *scratch;  // (scratch_size,) temporary memory of a task
};

struct ThreadPool {
    Step *steps; // (n_steps,)
    int n_steps, n_threads;
    Worker *workers; // (n_threads,); workers[0] is the thread that calls llamac_thread_pool_run
    Node *root;      // of the barrier's tree
    uint64_t help_ticks, yield_ticks, sleep_ticks; // times in ticks of the processor's clock
    unsigned first;                                // number of steps[0]
    atomic_uint goal;                              // number of the last step in the list, plus 1
    atomic_int sleepers;                           // workers that sleep or are about to
    atomic_bool stopping;                          // workers must return
    Monitor idle; // locked from the decision to sleep until the worker sleeps; woken by a new goal,
                  // or stopping
};

// Starts workers 1..n_threads-1, or fewer if the system refuses: results do not depend on their
// number.
void llamac_thread_pool_start(ThreadPool *pool, int n_threads);

// Runs the steps in order, and returns when all are finished. The caller runs them alone if they
// are too small to share.
void llamac_thread_pool_run(ThreadPool *pool);

// Stops the workers and waits until they have returned. Does nothing if the pool was never started.
void llamac_thread_pool_stop(ThreadPool *pool);

#endif
