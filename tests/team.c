// Gives the team of kernels_cpu.c many tasks, one right after the other, and counts how often each item is done.
//   team THREADS ROUNDS
#include "../kernels_cpu.c"

static int counts[4096];

static void count(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    (void)cpu, (void)args, (void)scratch;
    for (int i = begin; i < end; i++) __atomic_fetch_add(&counts[i], 1, __ATOMIC_RELAXED);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    Cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu || !start_team(cpu, atoi(argv[1]))) return 2;
    unsigned random = 1;
    for (int round = 0; round < atoi(argv[2]); round++) {
        random = random * 1664525 + 1013904223;
        int n = 2 + (random >> 16) % (round % 2 ? 40 : 4000); // a large task after a small one
        parallel(cpu, count, NULL, n, 1 << 20);
        for (int i = 0; i < n; i++) {
            if (counts[i] != 1) {
                printf("round %d: item %d of %d was done %d times\n", round, i, n, counts[i]);
                return 1;
            }
            counts[i] = 0;
        }
    }
    cpu_close(&cpu->ops);
    puts("every item once");
    return 0;
}
