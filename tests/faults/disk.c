/*
 * Simulates a disk that fails now and then, for a program run with LD_PRELOAD=disk.so.
 *
 * A save begins when the program creates a folder ".tmp_...". In every second save, one call fails
 * with ENOSPC, EIO or EACCES, or one write stores only half of its bytes. After such a short write,
 * the next write may fail with ENOSPC. The kinds of call fail by turns. Only paths that contain
 * "/checkpoints", "/latest" or "/best" are affected. Each failure is appended to the file that the
 * environment variable DISK_LOG names.
 *
 * With DISK_FULL_AFTER=N in the environment, the disk works for N saves. After them, it is full for
 * checkpoints and model files.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SHORT = -1, SHORT_AND_FULL = -2 };
enum kind { WRITE, OPEN, FSYNC, RENAME, COPY, MKDIR, KINDS };
static const char *const names[KINDS] = {"write", "open", "fsync", "rename", "copy", "mkdir"};
/* The failing call is drawn from the first per_save[kind] calls of its kind in a save. */
static const int per_save[KINDS] = {16, 16, 6, 3, 1, 1};

/* saves: saves begun so far. calls: calls of each kind in this save. full: the next write fails
 * with ENOSPC. */
static int saves, calls[KINDS], full;

/* Returns what happens to this call: 0: it succeeds; an errno: it fails with it; SHORT or
 * SHORT_AND_FULL, for writes of more than one byte: it stores half of its bytes. */
static int fault(const char *path, enum kind kind, size_t bytes) {
    const char *sound = getenv("DISK_FULL_AFTER");
    if (sound) {
        saves += kind == MKDIR && strstr(path, "/.tmp_");
        return saves > atoi(sound) && kind == WRITE
                       && (strstr(path, "/.tmp_") || strstr(path, ".gguf"))
                   ? ENOSPC
                   : 0;
    }
    if (!strstr(path, "/checkpoints") && !strstr(path, "/latest") && !strstr(path, "/best"))
        return 0;
    if (kind == MKDIR && strstr(path, "/.tmp_")) {
        saves++;
        full = 0;
        memset(calls, 0, sizeof calls);
    }
    if (full && kind == WRITE) return full = 0, ENOSPC;
    unsigned int seed = saves;
    int number = rand_r(&seed) % per_save[kind];
    if (saves % 2 == 0 || (enum kind)(saves / 2 % KINDS) != kind || calls[kind]++ != number)
        return 0;
    static const int writing[] = {ENOSPC, EIO, SHORT, SHORT_AND_FULL},
                     other[] = {EIO, EACCES, ENOSPC};
    int turn = saves / (2 * KINDS),
        what = kind == WRITE && bytes > 1 ? writing[turn % 4] : other[turn % 3];
    full = what == SHORT_AND_FULL;
    FILE *log = fopen(getenv("DISK_LOG"), "a");
    fprintf(log, "%d %s %s\n", saves, names[kind],
            what == SHORT            ? "short"
            : what == SHORT_AND_FULL ? "short, then ENOSPC"
            : what == ENOSPC         ? "ENOSPC"
            : what == EIO            ? "EIO"
                                     : "EACCES");
    fclose(log);
    return what;
}

static int fault_fd(int fd, enum kind kind, size_t bytes) {
    char link[64], path[4096] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int before = errno;
    if (readlink(link, path, sizeof path - 1) < 0) path[0] = 0;
    errno = before;
    return fault(path, kind, bytes);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_IF(e) \
    do { \
        int e_ = (e); \
        if (e_ > 0) return errno = e_, -1; \
    } while (0)

ssize_t write(int fd, const void *data, size_t n) {
    int e = fault_fd(fd, WRITE, n);
    FAIL_IF(e);
    return NEXT(write)(fd, data, e < 0 ? n / 2 : n);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    int e = fault_fd(fd, WRITE, parts[0].iov_len);
    FAIL_IF(e);
    return e < 0 ? NEXT(write)(fd, parts[0].iov_base, parts[0].iov_len / 2)
                 : NEXT(writev)(fd, parts, count);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t n) {
    FAIL_IF(fault_fd(out, COPY, 0));
    return NEXT(sendfile64)(out, in, offset, n);
}

int fsync(int fd) {
    FAIL_IF(fault_fd(fd, FSYNC, 0));
    return NEXT(fsync)(fd);
}

int mkdir(const char *path, mode_t mode) {
    FAIL_IF(fault(path, MKDIR, 0));
    return NEXT(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    FAIL_IF(fault(from, RENAME, 0));
    return NEXT(rename)(from, to);
}

#define REPLACE(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        FAIL_IF(fault(path, OPEN, 0)); \
        return NEXT(name)(path, flags, mode); \
    }
REPLACE(open)
REPLACE(open64)

FILE *fopen64(const char *path, const char *mode) {
    int e = fault(path, OPEN, 0);
    return e > 0 ? (errno = e, NULL) : NEXT(fopen64)(path, mode);
}
