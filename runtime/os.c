// The operating system: files, memory, processors and the clock. All other files need only C and
// POSIX threads.
#define _GNU_SOURCE 1 // POSIX beside C11, and sched_getaffinity
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "backend.h" // refuses -ffast-math
#include "os.h"

double llamac_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

// ----------------------------------------------------------------------------
// Files

// Opens a regular file that is not empty. Writes its descriptor and its size.
static bool open_file(const char *path, int *file, size_t *size, Error *e) {
    CHECK(path, "the path is NULL");
    CHECK(*path, "the path is empty");
    *file = open(path, O_RDONLY | O_NONBLOCK); // a pipe is refused instead of waited for
    struct stat info;
    CHECK(*file >= 0 || errno != ENOENT, "no such file");
    CHECK(*file >= 0, "%s", strerror(errno));
    bool ok = fstat(*file, &info) == 0;
    if (!ok) fail(e, "%s", strerror(errno));
    else if (!(ok = S_ISREG(info.st_mode))) fail(e, "not a regular file");
    else if (!(ok = info.st_size > 0)) fail(e, "the file is empty");
    if (!ok) close(*file);
    else *size = info.st_size;
    return ok;
}

bool llamac_map_file(const char *path, File *mapped, Error *e) {
    int file;
    size_t size;
    TRY(open_file(path, &file, &size, e));
    void *bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0);
    bool ok = bytes != MAP_FAILED;
    if (!ok) fail(e, "%s", strerror(errno));
    close(file);
    if (!ok) return false;
    *mapped = (File){bytes, size};
    // large pages in the page cache serve later processes too
    llamac_use_large_pages(bytes, size);
    return true;
}

// Reads the bytes from `begin` on, up to `end` or the end of the file, to the same place in `bytes`.
// Returns where they end, or -1 after an error.
static ssize_t read_range(int file, uint8_t *bytes, size_t begin, size_t end) {
    ssize_t got = 1;
    for (; begin < end && got > 0; begin += got > 0 ? got : 0)
        got = pread(file, bytes + begin, end - begin, begin);
    return got < 0 ? -1 : (ssize_t)begin;
}

uint8_t *llamac_read_file(const char *path, const void *magic, size_t n, size_t *size, Error *e) {
    int file;
    if (!open_file(path, &file, size, e)) return NULL;
    uint8_t *bytes = resize(NULL, n, 1), *whole = NULL;
    ssize_t end = bytes ? read_range(file, bytes, 0, n) : 0;
    if (end == (ssize_t)n && *size >= n && !memcmp(bytes, magic, n)) {
        if ((whole = resize(bytes, *size, 1))) end = read_range(file, whole, n, *size);
        else free(bytes);
        bytes = whole;
    }
    if (!bytes) fail(e, no_memory);
    else if (end < 0) fail(e, "%s", strerror(errno));
    close(file);
    if (end < 0) free(bytes), bytes = NULL;
    *size = end < 0 ? 0 : end;
    return bytes;
}

void llamac_unmap(File *file) {
    if (file->bytes) munmap((void *)file->bytes, file->size);
    *file = (File){0};
}

// Returns the path of the file that `path` names, to be freed. If `path` is a symbolic link, that is
// the file at the end of it, because moving another file to `path` would replace the link.
static char *follow_link(const char *path, Error *e) {
    struct stat info;
    char *target;
    if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode)) {
        target = realpath(path, NULL);
        if (!target)
            fail(e, "a symbolic link is there that cannot be followed (%s): name another file",
                 strerror(errno));
        return target;
    }
    target = resize(NULL, strlen(path), 1);
    if (!target) return fail(e, no_memory), NULL;
    return strcpy(target, path);
}

// Fails if something is at `path` that does not begin with the n bytes of `magic`, or is no file.
static bool may_replace(const char *path, const void *magic, size_t n, Error *e) {
    uint8_t found[64];
    struct stat info;
    bool exists = lstat(path, &info) == 0;
    if (!exists && errno == ENOENT) return true;
    CHECK(exists, "%s", strerror(errno));
    CHECK(S_ISREG(info.st_mode), "something else than a regular file is there: name another file");
    FILE *file = fopen(path, "rb");
    CHECK(file, "%s", strerror(errno));
    bool same = fread(found, 1, n, file) == n && !memcmp(found, magic, n);
    fclose(file);
    CHECK(same, "a file that this library did not write is there: name another file");
    return true;
}

// Creates the file beside its target.
static bool create_beside(NewFile *file, Error *e) {
    size_t length = strlen(file->target);
    char *name = resize(NULL, length + 8, 1);
    CHECK(name, no_memory);
    memcpy(name, file->target, length);
    strcpy(name + length, ".XXXXXX");
    int number = mkstemp(name);
    FILE *stream = number < 0 ? NULL : fdopen(number, "wb");
    if (!stream) {
        fail(e, "a file beside it cannot be created: %s", strerror(errno));
        if (number >= 0) close(number), unlink(name);
        free(name);
        return false;
    }
    file->stream = stream, file->name = name;
    return true;
}

bool llamac_create_file(NewFile *file, const char *path, const void *magic, size_t n, Error *e) {
    CHECK(path, "the path is NULL");
    CHECK(*path, "the path is empty");
    *file = (NewFile){.target = follow_link(path, e)};
    TRY(file->target);
    bool ok = may_replace(file->target, magic, n, e) && create_beside(file, e);
    if (!ok) free(file->target), *file = (NewFile){0};
    return ok;
}

bool llamac_finish_file(NewFile *file, bool ok, Error *e) {
    bool written = ok && !fflush(file->stream) && !fsync(fileno(file->stream));
    if (ok && !written) fail(e, "%s", strerror(errno));
    bool closed = !fclose(file->stream);
    if (written && !closed) fail(e, "%s", strerror(errno));
    bool moved = written && closed && !rename(file->name, file->target);
    if (written && closed && !moved) fail(e, "%s", strerror(errno));
    if (!moved) unlink(file->name);
    free(file->name);
    free(file->target);
    *file = (NewFile){0};
    return moved;
}

void llamac_use_large_pages(const void *p, size_t n) {
#ifdef MADV_HUGEPAGE // Linux
    madvise((void *)p, n, MADV_HUGEPAGE);
#else
    (void)p, (void)n;
#endif
}

void llamac_drop_pages(const uint8_t *begin, const uint8_t *end) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)begin + page - 1) / page * page;
    uintptr_t last = (uintptr_t)end / page * page;
    if (first < last) madvise((void *)first, last - first, MADV_DONTNEED);
}

// ----------------------------------------------------------------------------
// Processors

#ifdef __linux__
// Returns whether a logical processor shares its core with an allowed processor of a lower number.
static bool shares_core(int processor, const cpu_set_t *allowed) {
    char path[80];
    int first, last, n;
    bool shares = false;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
             processor);
    FILE *file = fopen(path, "r"); // its text is a list such as 0-1 or 0,64
    while (file && (n = fscanf(file, "%d-%d", &first, &last)) > 0) {
        for (int i = first; i <= (n == 2 ? last : first) && i < processor; i++)
            shares |= CPU_ISSET(i, allowed) != 0;
        if (getc(file) != ',') break;
    }
    if (file) fclose(file);
    return shares;
}

// Returns how many physical cores the process may use. A second thread on a core (SMT) would only
// wait for the same arithmetic units.
static long usable_cores(void) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return sysconf(_SC_NPROCESSORS_ONLN);
    long cores = CPU_COUNT(&allowed);
    FILE *file = fopen("/sys/devices/system/cpu/smt/active", "r");
    bool smt = file && getc(file) == '1';
    if (file) fclose(file);
    for (int i = 0; smt && i < CPU_SETSIZE; i++)
        cores -= CPU_ISSET(i, &allowed) && shares_core(i, &allowed);
    return cores;
}
#else
static long usable_cores(void) { return sysconf(_SC_NPROCESSORS_ONLN); }
#endif

// A container's CPU quota (microseconds of each period) may allow fewer cores than it sees.
int llamac_default_threads(void) {
    long processors = usable_cores(), quota = 0, period = 0;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (file && fscanf(file, "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0
        && quota / period < processors)
        processors = quota / period;
    if (file) fclose(file);
    return processors < 1 ? 1 : processors > 64 ? 64 : (int)processors;
}

// ----------------------------------------------------------------------------
// Free memory
//
// Linux reports it in files. On other systems, all memory of the machine counts as free.

enum { MAX_SYSTEM_PATH = 4096 }; // bytes, as in Linux, with the terminating zero

// Returns the number in the file folder/name that follows `word` at the beginning of a line, or, if
// word is NULL, the number at the beginning of the file. Returns `otherwise` without such a number:
// the text of a limit may be "max".
static uint64_t number_in(const char *folder, const char *name, const char *word,
                          uint64_t otherwise) {
    char path[MAX_SYSTEM_PATH + 64], line[256];
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

// Returns how many bytes a control group (version 1 or 2) leaves below its limit. Cached pages of
// files do not count as used, because the system drops them when it needs memory.
static uint64_t left_by_group(const char *folder, bool v2) {
    const char *limit_name = v2 ? "memory.max" : "memory.limit_in_bytes";
    uint64_t limit = number_in(folder, limit_name, NULL, UINT64_MAX);
    // the kernel slows down processes that exceed the soft limit
    uint64_t soft = v2 ? number_in(folder, "memory.high", NULL, UINT64_MAX) : limit;
    uint64_t used = number_in(folder, v2 ? "memory.current" : "memory.usage_in_bytes", NULL, 0);
    const char *inactive = v2 ? "inactive_file " : "total_inactive_file ";
    const char *active = v2 ? "active_file " : "total_active_file ";
    uint64_t files =
        number_in(folder, "memory.stat", inactive, 0) + number_in(folder, "memory.stat", active, 0);
    limit = soft < limit ? soft : limit;
    used -= files < used ? files : used;
    return limit > used ? limit - used : 0;
}

// Returns the least of the bytes that a control group and its ancestors leave. `line` is a line of
// /proc/self/cgroup, "number:controllers:path"; version 2 has no controllers.
static uint64_t left_by_groups(const char *root, const char *line) {
    char folder[MAX_SYSTEM_PATH + 64];
    const char *controllers = strchr(line, ':');
    const char *path = controllers ? strchr(controllers + 1, ':') : NULL;
    uint64_t min = UINT64_MAX;
    bool v2 = path && path == controllers + 1;
    if (!path || (!v2 && strncmp(controllers, ":memory:", 8))) return min;
    const char *mount = v2 ? "" : "/memory";
    size_t top = (size_t)snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s", root, mount);
    snprintf(folder + top, sizeof folder - top, "%.*s", (int)strcspn(path + 1, "\n"), path + 1);
    // Cut off one name at a time, from the group up to the root. In a container, the path may be
    // the one outside it: a folder that does not exist sets no limit.
    for (char *end = folder + strlen(folder);; end = strrchr(folder, '/')) {
        *end = 0;
        uint64_t left = left_by_group(folder, v2);
        min = left < min ? left : min;
        if (strlen(folder) <= top) return min;
    }
}

uint64_t llamac_free_memory(const char *root) {
    char path[MAX_SYSTEM_PATH], line[MAX_SYSTEM_PATH];
    uint64_t whole = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    snprintf(path, sizeof path, "%s/proc", root);
    uint64_t min = number_in(path, "meminfo", "MemAvailable:", whole / 1024);
    min = min < whole / 1024 ? 1024 * min : whole; // meminfo counts KiB
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        uint64_t left = left_by_groups(root, line);
        min = left < min ? left : min;
    }
    if (file) fclose(file);
    return min;
}
