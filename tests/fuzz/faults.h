// Included before every source of a fault-injection build: each call that the system may refuse goes through `refuse`.
#define _GNU_SOURCE 1 // as run.c does, before the first header
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#undef _DEFAULT_SOURCE // which run.c defines

bool refuse(void);              // whether this call is the one to fail; sets errno
extern bool stream_failed;      // which ferror then says

#define malloc(n) (refuse() ? NULL : malloc(n))
#define calloc(n, size) (refuse() ? NULL : calloc(n, size))
#define realloc(p, n) (refuse() ? NULL : realloc(p, n))
#define aligned_alloc(alignment, n) (refuse() ? NULL : aligned_alloc(alignment, n))
#define open(path, flags) (refuse() ? -1 : open(path, flags))
#define fstat(file, info) (refuse() ? -1 : fstat(file, info))
#define mmap(at, n, access, flags, file, offset) (refuse() ? MAP_FAILED : mmap(at, n, access, flags, file, offset))
#define fopen(path, mode) (refuse() ? NULL : fopen(path, mode))
#define fread(p, size, n, f) (refuse() ? stream_failed = true, 0 : fread(p, size, n, f))
#undef getchar
#define getchar() (refuse() ? stream_failed = true, EOF : getc(stdin))
#undef ferror
#define ferror(f) (stream_failed || (ferror)(f))
#define mkstemp(name) (refuse() ? -1 : mkstemp(name))
#define fsync(file) (refuse() ? -1 : fsync(file))
#define rename(from, to) (refuse() ? -1 : rename(from, to))
#define fwrite(p, size, n, f) (refuse() ? 0 : fwrite(p, size, n, f))
#define fflush(f) (refuse() ? EOF : fflush(f))
#define pthread_create(thread, how, f, arg) (refuse() ? EAGAIN : pthread_create(thread, how, f, arg))

#define main run_main // faults.c has its own
