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
} File; // mapped; bytes is NULL if there is none

// Maps a file into memory. Fails for directories, pipes and empty files.
bool llamac_map_file(const char *path, File *, Error *);
void llamac_unmap(File *);

// Asks the system to keep n bytes, allocated or mapped from a file, in large pages if it supports
// them.
void llamac_use_large_pages(const void *p, size_t n);

// Returns the memory of the whole pages between two addresses to the system. Pages of a mapped file
// are read again when they are needed.
void llamac_drop_pages(const uint8_t *begin, const uint8_t *end);

// Bytes that may be allocated before the system takes memory from other processes: limited by the
// machine, and by the control groups (containers, services, jobs) around the process. `root` is a
// prefix of the paths of the system's files; "" except in tests.
uint64_t llamac_free_memory(const char *root);

// One thread for each core that the process may use, at most 64.
int llamac_default_threads(void);

// Seconds on a monotonic clock.
double llamac_seconds(void);

#ifdef __cplusplus
}
#endif
#endif
