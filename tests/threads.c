// Prints how many threads an engine has by default on a simulated machine: runtime/os.c reads
// made-up files and a made-up affinity mask.
//
// Usage: threads CORES ALLOWED ACTIVE QUOTA
//   CORES    the hardware threads that share a core with each processor, such as "0,2 1,3 0,2 1,3"
//   ALLOWED  the processors in the affinity mask, such as "0 1"
//   ACTIVE   content of /sys/devices/system/cpu/smt/active
//   QUOTA    content of /sys/fs/cgroup/cpu.max
#define _GNU_SOURCE 1 // as os.c does, before the first header
#include <sched.h>
#include <stdio.h>
#include <string.h>

static char **given; // the arguments

static FILE *open_text(const char *text) {
    return *text ? fmemopen((void *)text, strlen(text), "r") : NULL;
}

// Replaces fopen: opens the made-up file at a path, or returns NULL for any other path.
static FILE *made_up_file(const char *path, const char *mode) {
    int cpu;
    char end[40], *core = given[1];
    static char text[40];
    if (strcmp(mode, "r")) return NULL;
    if (!strcmp(path, "/sys/devices/system/cpu/smt/active")) return open_text(given[3]);
    if (!strcmp(path, "/sys/fs/cgroup/cpu.max")) return open_text(given[4]);
    if (sscanf(path, "/sys/devices/system/cpu/cpu%d/topology/%39s", &cpu, end) != 2) return NULL;
    if (strcmp(end, "thread_siblings_list")) return NULL;
    while (cpu-- && (core = strchr(core, ' '))) core++;
    return core && sscanf(core, "%39s", text) == 1 ? open_text(text) : NULL;
}

static int made_up_affinity(int process, size_t size, cpu_set_t *set) {
    char *at = given[2];
    (void)process, (void)size;
    CPU_ZERO(set);
    for (int cpu, n; sscanf(at, "%d%n", &cpu, &n) == 1; at += n) CPU_SET(cpu, set);
    return 0;
}

#define fopen made_up_file
#define sched_getaffinity(process, size, set) made_up_affinity(process, size, set)
#include "../runtime/os.c"

int main(int argc, char **argv) {
    given = argv;
    return argc == 5 ? !printf("%d\n", llamac_default_threads()) : 2;
}
