// Prints how many bytes of memory runtime/os.c finds free. It reads FOLDER/proc and FOLDER/sys in
// place of the system's files.
//
// Usage: memory FOLDER
#include <stdio.h>
#include "../runtime/os.h"

int main(int argc, char **argv) {
    printf("%llu\n", (unsigned long long)llamac_free_memory(argc > 1 ? argv[1] : ""));
    return 0;
}
