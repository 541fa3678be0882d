// Tests the thread pool of runtime/cpu/thread_pool.h. Runs many lists of steps, one right after the
// other. Checks that each item is done once, and that all items of a step are done before the next
// step begins. Then waits until the workers sleep, and checks that all of them wake up and work.
//
// Usage: thread_pool THREADS ROUNDS
#define _DEFAULT_SOURCE 1 // POSIX in addition to C11
#include "../runtime/cpu/cpu.c"
#include "../runtime/cpu/products.c"
#include "../runtime/cpu/attention.c"
#include <stdio.h>
#include <unistd.h>

enum { STEPS = 5, ITEMS = 4096 };

typedef struct { int step, before; } Args; // before: number of items of the previous step

static int counts[STEPS][ITEMS], done[STEPS], early, helped;

static void count(Worker *self, const void *args, int begin, int end) {
    const Args *a = args;
    (void)self;
    if (a->step && __atomic_load_n(&done[a->step - 1], __ATOMIC_RELAXED) != a->before)
        __atomic_store_n(&early, 1, __ATOMIC_RELAXED);
    for (int i = begin; i < end; i++) __atomic_fetch_add(&counts[a->step][i], 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&done[a->step], end - begin, __ATOMIC_RELAXED);
}

// Counts each worker once, at its first item.
static void help(Worker *self, const void *args, int begin, int end) {
    (void)args;
    if (!counts[0][self - self->pool->workers]++) __atomic_fetch_add(&helped, 1, __ATOMIC_RELAXED);
    usleep(100 * (end - begin));
}

// If a worker does not fall asleep, or does not wake up, SIGALRM ends the program.
static void sleep_and_wake(Cpu *cpu) {
    ThreadPool *pool = &cpu->pool;
    alarm(30);
    for (int seen = 0; seen < 10; usleep(1000))
        seen = atomic_load(&pool->sleepers) < pool->n_threads - 1 ? 0 : seen + 1;
    while (helped < pool->n_threads)
        llamac_add_step(cpu, help, "", 1, 16 * pool->n_threads, 1 << 20);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    Cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu || !(cpu->pool.steps = allocate(cpu, STEPS, sizeof(Step), 64))) return 2;
    make_workers(cpu, atoi(argv[1]), 32, 16);
    if (cpu->out_of_memory) return 2;
    llamac_thread_pool_start(&cpu->pool, atoi(argv[1]));
    unsigned random = 1;
    for (int round = 0; round < atoi(argv[2]); round++) {
        int n[STEPS], steps = 1 + round % STEPS;
        cpu->collecting = true, cpu->pool.n_steps = 0;
        for (int s = 0; s < steps; s++) {
            random = random * 1664525 + 1013904223;
            // mix large steps with small ones
            n[s] = 1 + (random >> 16) % (random & 1 << 12 ? 40 : ITEMS - 1);
            llamac_add_step(cpu, count, &(Args){s, s ? n[s - 1] : 0}, sizeof(Args), n[s], 1 << 20);
        }
        cpu->collecting = false;
        llamac_thread_pool_run(&cpu->pool);
        if (early) return puts("a step began before the one before was finished"), 1;
        for (int s = 0; s < steps; s++, done[s - 1] = 0)
            for (int i = 0; i < n[s]; i++) {
                if (counts[s][i] != 1) {
                    printf("round %d: item %d of %d was done %d times\n", round, i, n[s],
                           counts[s][i]);
                    return 1;
                }
                counts[s][i] = 0;
            }
    }
    sleep_and_wake(cpu);
    cpu_close(&cpu->ops);
    puts("every item once");
    return 0;
}
