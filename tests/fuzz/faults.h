// Included before each source file of a fault-injection build. Each call that the system may refuse
// fails if fault_now says so.
#define _GNU_SOURCE 1 // as os.c does, before the first header
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

bool fault_now(void);      // returns whether this call must fail; sets errno
extern bool stream_failed; // makes ferror return true

#define malloc(n) (fault_now() ? NULL : malloc(n))
#define calloc(n, size) (fault_now() ? NULL : calloc(n, size))
#define realloc(p, n) (fault_now() ? NULL : realloc(p, n))
#define aligned_alloc(alignment, n) (fault_now() ? NULL : aligned_alloc(alignment, n))
#define open(path, flags) (fault_now() ? -1 : open(path, flags))
#define fstat(file, info) (fault_now() ? -1 : fstat(file, info))
#define mmap(at, n, access, flags, file, offset) \
    (fault_now() ? MAP_FAILED : mmap(at, n, access, flags, file, offset))
#define fopen(path, mode) (fault_now() ? NULL : fopen(path, mode))
#define fread(p, size, n, f) (fault_now() ? stream_failed = true, 0 : fread(p, size, n, f))
#define read(file, to, n) (fault_now() ? -1 : read(file, to, n))
#undef ferror
#define ferror(f) (stream_failed || (ferror)(f))
#define pread(file, to, n, at) (fault_now() ? -1 : pread(file, to, n, at))
#define realpath(path, to) (fault_now() ? NULL : realpath(path, to))
#define mkstemp(name) (fault_now() ? -1 : mkstemp(name))
#define fsync(file) (fault_now() ? -1 : fsync(file))
#define rename(from, to) (fault_now() ? -1 : rename(from, to))
#define fwrite(p, size, n, f) (fault_now() ? 0 : fwrite(p, size, n, f))
#define fflush(f) (fault_now() ? EOF : fflush(f))
#define pthread_create(thread, how, f, arg) \
    (fault_now() ? EAGAIN : pthread_create(thread, how, f, arg))

#define main run_main // faults.c has its own main
