// How much memory a process may still take: of the machine, and of the control groups (containers, services, jobs) around
// it.
#ifndef MEMORY_H
#define MEMORY_H

#include "../backend.h" // llamac_use_large_pages

// Bytes that may be taken before the system takes memory from others. `root` stands before the names of the system's files.
uint64_t llamac_free_memory(const char *root);

#endif
