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
    MAX_GUESSES = 8,   // max tokens to guess for each text of a call
    FIRST_GUESSES = 1, // tokens to guess for a text that has had no guesses yet
    MIN_MATCH = 2,     // tokens that must be the same at both places
    MAX_MATCH = 8,
};

// Guesses `max` tokens that may follow the tokens (n,) of a text: those that follow the longest
// earlier match of its last tokens, the latest one if several are equally long. Returns `max`, or 0
// if no MIN_MATCH tokens match.
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

// What guesses cost and save, in units of a call of the model without guesses. Calls that read a
// prompt are not counted: in a counted call each text has one token and its guesses.
typedef struct {
    bool on;            // --lookup is given
    int n_texts;        // texts of the latest call
    int64_t n_latest;   // calls since n_texts has changed
    int64_t n_plain;    // those of them without guesses
    double plain;       // seconds that one of these takes
    int64_t calls;      // all calls
    double lost;        // calls' time that guesses took, less the calls that they made unnecessary
    int64_t n, n_right; // tokens that were guessed, and those that were right
} Lookup;

// Returns whether the next call, for n_texts texts, may have guesses: as long as all guesses
// together have lost at most a hundredth of the time. The first three calls for n_texts texts, and
// then one more for every 32, have none, so that the time without guesses is known.
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
    // A guess costs a text at most one more call. A longer time was caused by other programs
    double extra = seconds / l->plain - 1, max = (double)n / n_texts;
    l->lost += extra < max ? extra : max;
    l->calls++;
    l->n += n;
}

// Counts n guesses that were right. A call evaluates a token of each text, so a text that has
// gained a token has made one call in n_texts unnecessary.
static void count_right(Lookup *l, int n) {
    l->lost -= (double)n / l->n_texts;
    l->n_right += n;
}

#endif
