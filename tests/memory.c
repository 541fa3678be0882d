// Prints how many bytes runtime/cpu/memory.h finds free, with the system's files below a folder.
//   memory FOLDER
#define _DEFAULT_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "../runtime/cpu/memory.h"

int main(int argc, char **argv) {
    printf("%llu\n", (unsigned long long)free_memory(argc > 1 ? argv[1] : ""));
    return 0;
}
