// The interface to the operating system: files, memory, processors, threads, the clock, and what
// programs need. Only os.c and this header use POSIX or Windows. Paths, arguments and texts are
// UTF-8 on every system.
#ifndef LLAMAC_OS_H
#define LLAMAC_OS_H

// MinGW's own printf supports %zu, but that of Windows' older C library does not. By default, GCC
// checks formats for the latter.
#ifdef __MINGW32__
#include <stddef.h> // may set the macro
#undef __USE_MINGW_ANSI_STDIO
#define __USE_MINGW_ANSI_STDIO 1
#endif
#if defined(__MINGW32__) && !defined(__clang__)
#define PRINTF_LIKE(at, first) __attribute__((format(gnu_printf, at, first)))
#else
#define PRINTF_LIKE(at, first) __attribute__((format(printf, at, first)))
#endif

#include <stdio.h>
#include "llamac.h"
#ifndef _WIN32
#include <pthread.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ----------------------------------------------------------------------------
// Files

typedef struct File {
    const uint8_t *bytes;
    size_t size;
    int descriptor; // of the open file
} File;             // a file mapped into memory; bytes is NULL if no file is mapped

// Maps a file into memory. Fails for directories, pipes and empty files.
bool llamac_map_file(const char *path, File *, llamac_error *);
void llamac_unmap(File *);

// Reads n bytes of a mapped file from byte `at` on, without mapping them into memory. Returns false
// if the file ends earlier, or cannot be read.
bool llamac_read_mapped(const File *, uint8_t *bytes, size_t at, size_t n);

// Reads a file and returns its bytes, to be freed, and their number in *size. Reading is safer than
// mapping: if another program truncates a mapped file, access to it raises SIGBUS. If the first n
// bytes are not `magic`, reads only these. Fails like llamac_map_file.
uint8_t *llamac_read_file(const char *path, const void *magic, size_t n, size_t *size,
                          llamac_error *);

// A file that is being written under a temporary name, in the folder of its target.
typedef struct {
    FILE *stream;
    char *name;   // temporary path, allocated
    char *target; // final path, allocated
} NewFile;

// Creates a file that llamac_finish_file moves to `path` or, if that is a symbolic link, to the
// file at its end. On POSIX, only its owner can read it. Fails if something is there that is not a
// regular file beginning with the n bytes of `magic`.
bool llamac_create_file(NewFile *, const char *path, const void *magic, size_t n, llamac_error *);

// Closes the file and moves it to its target when all of it is on the disk. If `ok` is false or
// that fails, removes it. Returns whether it was moved. If `ok` is false, *e is not changed.
bool llamac_finish_file(NewFile *, bool ok, llamac_error *);

// Opens a file for reading bytes. Returns NULL and sets errno if that fails.
FILE *llamac_open_file(const char *path);

// Returns whether the path leads to a folder.
bool llamac_is_folder(const char *path);

// Returns false if nothing is at the path; true if something is, or if the system cannot tell.
bool llamac_may_exist(const char *path);

// ----------------------------------------------------------------------------
// Memory

// Returns n uninitialised bytes at a multiple of `alignment`, a power of two that divides n, to be
// freed by llamac_free_aligned. Returns NULL if there is not enough memory.
void *llamac_allocate_aligned(size_t alignment, size_t n);
void llamac_free_aligned(void *);

// Asks the system to use large pages, where it supports them, for n bytes that are allocated or
// mapped from a file.
void llamac_use_large_pages(const void *p, size_t n);

// Drops the pages that lie wholly between two addresses from memory. The system reads pages of a
// mapped file again when they are needed.
void llamac_drop_pages(const uint8_t *begin, const uint8_t *end);

// Returns how many bytes can be allocated without swapping: the minimum of the machine's available
// memory and what the control groups (containers, services, jobs) of the process leave. `root` is
// put before the paths /proc and /sys; it is "" except in tests.
uint64_t llamac_free_memory(const char *root);

// ----------------------------------------------------------------------------
// Processors, threads and the clock

// Return whether an ARM processor has instructions for dot products of bytes, and for products of
// matrices of bytes. False on other processors.
bool llamac_has_dotprod(void);
bool llamac_has_i8mm(void);

// Returns the default number of threads: one for each physical core that the process may use,
// within its CPU quota and at most 64.
int llamac_default_threads(void);

// Returns the seconds on a monotonic clock.
double llamac_seconds(void);

typedef struct {
    void (*run)(void *);
    void *arg;
#ifdef _WIN32
    void *handle;
#else
    pthread_t handle;
#endif
} Thread;

// Starts a thread that calls run(arg). The Thread must stay where it is until llamac_join_thread,
// which waits for the end of the thread. Returns false if the system refuses.
bool llamac_start_thread(Thread *, void (*run)(void *), void *arg);
void llamac_join_thread(Thread *);

// Lets other threads run on this processor.
void llamac_yield(void);

// A lock with a condition variable: threads can sleep until they are woken.
typedef struct {
#ifdef _WIN32
    void *lock, *wake; // an SRWLOCK and a CONDITION_VARIABLE
#else
    pthread_mutex_t lock;
    pthread_cond_t wake;
#endif
} Monitor;

void llamac_open_monitor(Monitor *);
void llamac_close_monitor(Monitor *);
void llamac_lock(Monitor *);
void llamac_unlock(Monitor *);

// Unlocks the monitor, sleeps and locks it again. May return without being woken.
void llamac_sleep(Monitor *);
void llamac_wake_all(Monitor *);

// ----------------------------------------------------------------------------
// Programs (run.c); the library calls none of these

// Prepares stdin, stdout and stderr for bytes, and a console for UTF-8. Makes a write to a pipe
// without a reader return an error. If a mapped file is truncated while in use, the program ends
// with a line on stderr and exit code 1. Converts the arguments to UTF-8.
void llamac_begin_program(int *argc, char ***argv);

// Returns whether stderr is shown in a terminal.
bool llamac_stderr_is_terminal(void);

// Returns the peak memory of the process in bytes.
uint64_t llamac_peak_memory(void);

enum { LLAMAC_INPUT_LATER = -2 };

// Reads bytes of stdin, up to n >= 4096. Returns their number; 0 at the end of the input; -1 after
// an error, which sets errno. If none have arrived, waits for some or, unless `wait`, returns
// LLAMAC_INPUT_LATER. On Windows, \r\n is read as \n, and a console only with `wait`.
int64_t llamac_read_input(char *bytes, size_t n, bool wait);

#ifdef __cplusplus
}
#endif
#endif
