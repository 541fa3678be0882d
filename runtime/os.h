// The operating system: files, memory, processors and the clock.
#ifndef LLAMAC_OS_H
#define LLAMAC_OS_H

#include "bytes.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const uint8_t *bytes;
    size_t size;
} File; // a file mapped into memory; bytes is NULL if no file is mapped

// Maps a file into memory. Fails for directories, pipes and empty files.
bool llamac_map_file(const char *path, File *, Error *);
void llamac_unmap(File *);

// Reads a file and returns its bytes, to be freed, and their number in *size. Reading is safer than
// mapping: if another program truncates a mapped file, access to it raises SIGBUS. If the first n
// bytes are not `magic`, reads only these. Fails like llamac_map_file.
uint8_t *llamac_read_file(const char *path, const void *magic, size_t n, size_t *size, Error *);

// A file that is being written under its own name, in the folder where it will be.
typedef struct {
    FILE *stream;
    char *name;   // its own name, allocated
    char *target; // the path where it will be, allocated
} NewFile;

// Creates a file, readable only by its owner, that llamac_finish_file moves to `path` or, if that is
// a symbolic link, to where it leads. Fails if something is there that is not a regular file
// beginning with the n bytes of `magic`.
bool llamac_create_file(NewFile *, const char *path, const void *magic, size_t n, Error *);

// Closes the file and moves it to its target when all of it is on the disk. If `ok` is false or that
// fails, removes it. Returns whether it was moved. If `ok` is false, *e is not changed.
bool llamac_finish_file(NewFile *, bool ok, Error *);

// Asks the system to use large pages, where it supports them, for n bytes that are allocated or
// mapped from a file.
void llamac_use_large_pages(const void *p, size_t n);

// Drops the pages that lie wholly between two addresses from memory. The system reads pages of a
// mapped file again when they are needed.
void llamac_drop_pages(const uint8_t *begin, const uint8_t *end);

// Returns how many bytes can be allocated without swapping: the least of the machine's available
// memory and what the control groups (containers, services, jobs) of the process leave. `root` is
// put before the paths /proc and /sys; it is "" except in tests.
uint64_t llamac_free_memory(const char *root);

// Returns the default number of threads: one for each physical core that the process may use,
// within its CPU quota and at most 64.
int llamac_default_threads(void);

// Returns the seconds on a monotonic clock.
double llamac_seconds(void);

#ifdef __cplusplus
}
#endif
#endif
