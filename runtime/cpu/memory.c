// Linux says in files how much memory is free; elsewhere the machine's whole memory has to do.
#define _DEFAULT_SOURCE // POSIX beside C11
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "memory.h"

enum { LONGEST_PATH = 4096 }; // as in Linux, its end included

// The number behind a word at the beginning of a line of the file folder/name; NULL: at the beginning of the first line.
// `otherwise` where there is none, "max" for example.
static uint64_t number_in(const char *folder, const char *name, const char *word, uint64_t otherwise) {
    char path[LONGEST_PATH + 64], line[256];
    unsigned long long number = otherwise;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    for (size_t n = word ? strlen(word) : 0; file && fgets(line, sizeof line, file);)
        if (!word || !strncmp(line, word, n)) {
            sscanf(line + n, "%llu", &number);
            break;
        }
    if (file) fclose(file);
    return number;
}

// What a control group leaves: pages of files do not count as used, for the system takes them back when it needs them.
static uint64_t left_by_group(const char *folder, bool v2) {
    uint64_t limit = number_in(folder, v2 ? "memory.max" : "memory.limit_in_bytes", NULL, UINT64_MAX);
    uint64_t soft = v2 ? number_in(folder, "memory.high", NULL, UINT64_MAX) : limit; // beyond it, processes are slowed down
    uint64_t used = number_in(folder, v2 ? "memory.current" : "memory.usage_in_bytes", NULL, 0);
    uint64_t files = number_in(folder, "memory.stat", v2 ? "inactive_file " : "total_inactive_file ", 0)
                     + number_in(folder, "memory.stat", v2 ? "active_file " : "total_active_file ", 0);
    limit = soft < limit ? soft : limit, used -= files < used ? files : used;
    return limit > used ? limit - used : 0;
}

// What a group and those around it leave. `line` is one of /proc/self/cgroup: number, controllers (none in version 2), path.
static uint64_t left_by_groups(const char *root, const char *line) {
    char folder[LONGEST_PATH + 64];
    const char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
    uint64_t least = UINT64_MAX;
    bool v2 = path && path == controllers + 1;
    if (!path || (!v2 && strncmp(controllers, ":memory:", 8))) return least;
    size_t top = (size_t)snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s", root, v2 ? "" : "/memory");
    snprintf(folder + top, sizeof folder - top, "%.*s", (int)strcspn(path + 1, "\n"), path + 1);
    for (char *end = folder + strlen(folder);; end = strrchr(folder, '/')) { // in a container the path may be that outside
        *end = 0;
        uint64_t left = left_by_group(folder, v2);
        least = left < least ? left : least;
        if (strlen(folder) <= top) return least;
    }
}

uint64_t llamac_free_memory(const char *root) {
    char path[LONGEST_PATH], line[LONGEST_PATH];
    uint64_t whole = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    snprintf(path, sizeof path, "%s/proc", root);
    uint64_t least = number_in(path, "meminfo", "MemAvailable:", whole / 1024);
    least = least < whole / 1024 ? 1024 * least : whole; // the file has KiB
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        uint64_t left = left_by_groups(root, line);
        least = left < least ? left : least;
    }
    if (file) fclose(file);
    return least;
}

void llamac_use_large_pages(const void *p, size_t n) {
#ifdef MADV_HUGEPAGE // in Linux alone
    madvise((void *)p, n, MADV_HUGEPAGE);
#else
    (void)p, (void)n;
#endif
}
