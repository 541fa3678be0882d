// The guesses of --lookup, for test_lookup.py. `lookup guesses` reads lines of tokens after a max and writes the guesses; `lookup
// costs` reads lines "SEED STEPS REPEATS SLOPE NOISE": a text of STEPS tokens, of which a share of REPEATS continues an
// earlier place of it, on a machine where each guess makes a call of 1 longer by SLOPE and other programs disturb a share of NOISE
// of the calls. Writes the time that it takes, guesses, and right ones.
#include <stdio.h>
#include <stdlib.h>
#include "../cli/lookup.h"

static uint64_t state;

static double uniform(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(state >> 11) / (double)(1ull << 53);
}

static void guesses(void) {
    int tokens[1000], max, found[MAX_GUESSES];
    char line[8000];
    while (fgets(line, sizeof line, stdin)) {
        char *at = line;
        int n = 0;
        max = (int)strtol(at, &at, 10);
        for (char *end; tokens[n] = (int)strtol(at, &end, 10), end != at; at = end) n++;
        int count = guess_tokens(tokens, n, max, found);
        for (int i = 0; i < count; i++) printf("%d ", found[i]);
        puts("");
    }
}

static void costs(void) {
    int steps;
    unsigned seed;
    double repeats, slope, noise;
    while (scanf("%u %d %lf %lf %lf", &seed, &steps, &repeats, &slope, &noise) == 5) {
        state = 0x9e3779b97f4a7c15ull + seed;
        for (int i = 0; i < 10; i++) uniform();
        Lookup l = {.on = true};
        double total = 0; // without disturbances, which the program would have without guesses too
        int max = FIRST_GUESSES;
        for (int done = 0; done < steps;) {
            int n = may_guess(&l, 1) ? max : 0, right = 0;
            double seconds = 1 + n * slope, disturbed = uniform() < noise ? seconds * (1 + 50 * uniform()) : seconds;
            while (right < n && uniform() < repeats) right++;
            total += seconds;
            count_call(&l, 1, n, disturbed);
            done += 1 + right;
            if (!n) continue;
            max = next_guesses(n, right);
            count_right(&l, right);
        }
        printf("%f %lld %lld\n", total, (long long)l.n, (long long)l.n_right);
    }
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    if (argv[1][0] == 'g') guesses();
    else costs();
    return 0;
}
