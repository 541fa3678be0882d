// Tests how run handles failures of the system. Runs run's main with ARGUMENTS once for each call
// that the system may refuse, with that one call failing, until a run makes fewer calls. Each run
// must end by itself: with exit code 0, or with exit code 1 and one line `run: ...`. Its stdin is
// the file that the environment variable INPUT names. Prints how many calls failed, and how many
// of the runs ended with an error or without.
//
// Usage: faults ARGUMENTS...
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

int run_main(int argc, char **argv);

static struct {
    int to_fail;
    int calls;
} *shared; // with the child process
bool stream_failed;

// run exits after an error without freeing its memory, so leaks are not reported.
const char *__asan_default_options(void) { return "detect_leaks=0"; }

bool fault_now(void) {
    errno = ENOMEM;
    return __atomic_add_fetch(&shared->calls, 1, __ATOMIC_RELAXED) == shared->to_fail;
}

// Runs the program in a child process in which the n-th call fails. Returns its wait status, and
// writes its stderr to `words`.
static int run_once(int n, int argc, char **argv, const char *input, char *words, size_t room) {
    FILE *log = tmpfile();
    *shared = (typeof(*shared)){.to_fail = n};
    pid_t child = fork();
    if (child == 0) {
        dup2(fileno(log), 2);
        dup2(open("/dev/null", O_WRONLY), 1);
        dup2(open(input ? input : "/dev/null", O_RDONLY), 0);
        alarm(60);
        exit(run_main(argc, argv));
    }
    int status = -1;
    waitpid(child, &status, 0);
    rewind(log);
    words[fread(words, 1, room - 1, log)] = 0;
    fclose(log);
    return status;
}

int main(int argc, char **argv) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int refused = 0, endured = 0;
    for (int n = 1;; n++) {
        char words[8192];
        int status = run_once(n, argc, argv, getenv("INPUT"), words, sizeof words);
        const char *last = words; // begin of the last line; statistics may precede it
        for (char *c = words; *c; c++)
            if (*c == '\n' && c[1]) last = c + 1;
        bool one_line = !strncmp(last, "run: ", 5) && strstr(words, "run: ") == last;
        bool refusal = WIFEXITED(status) && WEXITSTATUS(status) == 1 && one_line;
        if (!refusal && !(WIFEXITED(status) && WEXITSTATUS(status) == 0))
            return fprintf(stderr, "call %d failed, status %x: %s\n", n, status, words) > 0;
        if (shared->calls < n) break; // each call has failed once
        refused += refusal, endured += !refusal;
    }
    printf("%d calls failed in turn: %d refused, %d endured\n", refused + endured, refused,
           endured);
    return 0;
}
