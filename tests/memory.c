// Prints how many bytes runtime/os.c finds free, with the system's files below a folder.
//   memory FOLDER
#include <stdio.h>
#include "../runtime/os.h"

int main(int argc, char **argv) {
    printf("%llu\n", (unsigned long long)llamac_free_memory(argc > 1 ? argv[1] : ""));
    return 0;
}
