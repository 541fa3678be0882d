// Measures how long the thread pool takes for a step without work: the cost of its barrier.
//   cc -O3 -I runtime/cpu -DPOOL='"PATH/thread_pool.c"' bench/empty_steps.c -pthread
//   empty_steps THREADS LISTS
//
// Runs lists of 100 steps and computes the mean time of a step in each list. Prints the 10th
// percentile and the median over the lists, in nanoseconds. On a machine with other load, the
// median includes the time in which workers wait for a core.
#define _DEFAULT_SOURCE 1 // POSIX in addition to C11
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include POOL

enum { STEPS = 100 };

double llamac_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void do_nothing(Worker *self, const void *args, int begin, int end) {
    (void)self, (void)args, (void)begin, (void)end;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    static ThreadPool pool;
    int n_threads = argc == 3 ? atoi(argv[1]) : 0, lists = argc == 3 ? atoi(argv[2]) : 0;
    if (n_threads < 1 || lists < 1) return 2;
    pool.workers = aligned_alloc(64, n_threads * sizeof(Worker));
    pool.steps = calloc(STEPS, sizeof(Step));
    double *times = malloc(lists * sizeof(double));
    memset(pool.workers, 0, n_threads * sizeof(Worker));
    for (int i = 0; i < n_threads; i++) pool.workers[i].pool = &pool;
    llamac_thread_pool_start(&pool, n_threads);
    pool.n_steps = STEPS;
    // two items of about a microsecond per worker, as in the smallest steps that workers share
    for (int s = 0; s < STEPS; s++)
        pool.steps[s] = (Step){do_nothing, 2 * n_threads, 20000, {0}};
    for (int i = 0; i < lists; i++) {
        double begin = llamac_seconds();
        llamac_thread_pool_run(&pool);
        times[i] = (llamac_seconds() - begin) * 1e9 / STEPS;
    }
    qsort(times, lists, sizeof(double), compare);
    printf("%.0f %.0f\n", times[lists / 10], times[lists / 2]);
    llamac_thread_pool_stop(&pool);
    return 0;
}
