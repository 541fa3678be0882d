// Runs the guessing of --lookup (cli/lookup.h), for test_lookup.py.
//   lookup guesses  reads lines "MAX TOKEN ...". Prints up to MAX guesses for each.
//   lookup costs    reads lines "SEED STEPS REPEATS SLOPE NOISE". Simulates a text of STEPS tokens
//                   for each. A guess is right with probability REPEATS. A call takes time 1, and
//                   SLOPE more for each guess. Other programs slow down a share NOISE of the calls.
//                   Prints the time, the number of guesses and the number of right guesses.
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
        double total = 0; // excludes disturbances, which would occur without guesses too
        int max = FIRST_GUESSES;
        for (int done = 0; done < steps;) {
            int n = may_guess(&l, 1) ? max : 0, right = 0;
            double seconds = 1 + n * slope,
                   disturbed = uniform() < noise ? seconds * (1 + 50 * uniform()) : seconds;
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
