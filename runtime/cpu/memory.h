// The memory that a process may still allocate: limited by the machine, and by the control groups
// (containers, services, jobs) around the process.
#ifndef MEMORY_H
#define MEMORY_H

#include "../backend.h" // llamac_use_large_pages

// Bytes that may be allocated before the system takes memory from other processes. `root` is a
// prefix of the paths of the system's files; "" except in tests.
uint64_t llamac_free_memory(const char *root);

#endif
