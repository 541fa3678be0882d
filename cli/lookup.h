// --lookup: guesses the next tokens of a text from an earlier place of it that ends alike. The
// model evaluates them in one call with the text's last token, and those that are then sampled too
// need no call of their own (prompt lookup decoding, Saxena 2023). Wrong guesses cost time, so
// guesses stop while they have cost more than they saved.
#ifndef CLI_LOOKUP_H
#define CLI_LOOKUP_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    MAX_GUESSES = 8, // tokens in a call
    FIRST_GUESSES = 1,
    MIN_MATCH = 2, // tokens that must be the same at both places
    MAX_MATCH = 8,
};

// Writes up to `max` tokens that may follow the tokens (n,) of a text: those that follow the
// longest earlier match of its last tokens, the latest of equals. Returns their number.
static int guess_tokens(const int *tokens, int n, int max, int *guesses) {
    int longest = 0, from = 0;
    for (int end = n - 1; end > 0 && longest < MAX_MATCH; end--) {
        int length = 0;
        while (length < end && length < MAX_MATCH
               && tokens[end - 1 - length] == tokens[n - 1 - length])
            length++;
        if (length > longest) longest = length, from = end;
    }
    if (longest < MIN_MATCH) return 0;
    // A match near the end has few tokens after it: the guesses then repeat them
    for (int i = 0; i < max; i++)
        guesses[i] = from + i < n ? tokens[from + i] : guesses[from + i - n];
    return max;
}

// Returns how many tokens to guess for a text after `right` of its last n guesses were right.
static int next_guesses(int n, int right) {
    if (right < n) return right + 1;
    return 2 * n < MAX_GUESSES ? 2 * n : MAX_GUESSES;
}

// What guesses cost and save. Only those calls of the model are counted in which each text has one
// token beside its guesses.
typedef struct {
    bool on;                   // --lookup is given
    int n_texts;               // in the latest calls
    int64_t n_latest, n_plain; // calls for so many texts: all, and those without guesses
    double plain;              // seconds that a call without guesses takes
    int64_t calls;             // so far
    double lost;               // time that guesses took, less that of calls they spared, in calls
    int64_t n, n_right;        // guesses
} Lookup;

// Returns whether the next call, for n_texts texts, may have guesses: as long as all guesses
// together have lost at most a hundredth of the time. At least three calls, and one in 32, have
// none, so that the time without guesses is known.
static bool may_guess(const Lookup *l, int n_texts) {
    bool known = l->n_texts == n_texts && l->n_plain > 2 + l->n_latest / 32;
    return l->on && known && l->lost <= 0.01 * (double)l->calls;
}

// Counts a call of n_texts texts with n guesses in all.
static void count_call(Lookup *l, int n_texts, int n, double seconds) {
    if (l->n_texts != n_texts) {
        l->n_texts = n_texts;
        l->n_latest = l->n_plain = 0, l->plain = INFINITY;
    }
    l->n_latest++, l->n_plain += !n;
    // The shortest time is the one that other programs have disturbed least. It may rise, because
    // longer contexts take longer
    if (!n) l->plain *= 1.01;
    if (seconds < l->plain) l->plain = seconds;
    // If it took longer than a call for each token, other programs have disturbed it
    double extra = seconds / l->plain - 1, max = (double)n / n_texts;
    l->lost += extra < max ? extra : max;
    l->calls++;
    l->n += n;
}

// Counts n guesses that were right: each is a token that needs no call of its own.
static void count_right(Lookup *l, int n) {
    l->lost -= (double)n / l->n_texts;
    l->n_right += n;
}

#endif
