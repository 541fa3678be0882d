// Free memory. Linux reports it in files; elsewhere it is taken to be all memory of the machine.
#define _DEFAULT_SOURCE // POSIX beside C11
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "memory.h"

enum { MAX_PATH = 4096 }; // bytes, as in Linux, with the zero at the end

// Reads the number that follows `word` at the beginning of a line of the file folder/name. With
// word NULL, reads the number at the beginning of the file. Returns `otherwise` if there is no such
// number: a limit may be "max".
static uint64_t number_in(const char *folder, const char *name, const char *word,
                          uint64_t otherwise) {
    char path[MAX_PATH + 64], line[256];
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

// Bytes left in a control group. Pages of files do not count as used, because the system drops them
// when it needs memory.
static uint64_t left_by_group(const char *folder, bool v2) {
    const char *limit_name = v2 ? "memory.max" : "memory.limit_in_bytes";
    uint64_t limit = number_in(folder, limit_name, NULL, UINT64_MAX);
    // beyond the soft limit, processes are slowed down
    uint64_t soft = v2 ? number_in(folder, "memory.high", NULL, UINT64_MAX) : limit;
    uint64_t used = number_in(folder, v2 ? "memory.current" : "memory.usage_in_bytes", NULL, 0);
    const char *inactive = v2 ? "inactive_file " : "total_inactive_file ";
    const char *active = v2 ? "active_file " : "total_active_file ";
    uint64_t files =
        number_in(folder, "memory.stat", inactive, 0) + number_in(folder, "memory.stat", active, 0);
    limit = soft < limit ? soft : limit, used -= files < used ? files : used;
    return limit > used ? limit - used : 0;
}

// Bytes left in a control group and all groups around it. `line` is a line of /proc/self/cgroup:
// number, controllers (none in version 2), path.
static uint64_t left_by_groups(const char *root, const char *line) {
    char folder[MAX_PATH + 64];
    const char *controllers = strchr(line, ':');
    const char *path = controllers ? strchr(controllers + 1, ':') : NULL;
    uint64_t min = UINT64_MAX;
    bool v2 = path && path == controllers + 1;
    if (!path || (!v2 && strncmp(controllers, ":memory:", 8))) return min;
    const char *mount = v2 ? "" : "/memory";
    size_t top = (size_t)snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s", root, mount);
    snprintf(folder + top, sizeof folder - top, "%.*s", (int)strcspn(path + 1, "\n"), path + 1);
    // from the group up to the root; in a container, the path may be that outside the container
    for (char *end = folder + strlen(folder);; end = strrchr(folder, '/')) {
        *end = 0;
        uint64_t left = left_by_group(folder, v2);
        min = left < min ? left : min;
        if (strlen(folder) <= top) return min;
    }
}

uint64_t llamac_free_memory(const char *root) {
    char path[MAX_PATH], line[MAX_PATH];
    uint64_t whole = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    snprintf(path, sizeof path, "%s/proc", root);
    uint64_t min = number_in(path, "meminfo", "MemAvailable:", whole / 1024);
    min = min < whole / 1024 ? 1024 * min : whole; // the file is in KiB
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        uint64_t left = left_by_groups(root, line);
        min = left < min ? left : min;
    }
    if (file) fclose(file);
    return min;
}

void llamac_use_large_pages(const void *p, size_t n) {
#ifdef MADV_HUGEPAGE // Linux
    madvise((void *)p, n, MADV_HUGEPAGE);
#else
    (void)p, (void)n;
#endif
}
