// --lookup: prompt lookup decoding (Saxena 2023). If the last tokens of a text also occur earlier
// in it, the tokens after the earlier occurrence are guesses for the next tokens. The model
// evaluates the guesses in one call with the text's last token. Each time that sampling draws the
// guessed token, this saves a call. Wrong guesses make calls slower, so guessing stops while it has
// cost more time than it has saved.
#ifndef CLI_LOOKUP_H
#define CLI_LOOKUP_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    MAX_GUESSES = 8,   // max tokens to guess for each text of a call
    FIRST_GUESSES = 1, // tokens to guess for a text that has had no guesses yet
    MIN_MATCH = 2,     // min tokens that must be the same at both places
    MAX_MATCH = 8,
};

// Guesses the next `max` tokens of a text from its tokens (n,): those after the longest earlier
// match of its last tokens, or after the latest of several equally long ones. Returns `max`, or 0
// if fewer than MIN_MATCH tokens match.
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
    // If fewer than `max` tokens follow the match, the guesses continue with the first guesses, as
    // if these were part of the text
    for (int i = 0; i < max; i++)
        guesses[i] = from + i < n ? tokens[from + i] : guesses[from + i - n];
    return max;
}

// Returns how many tokens to guess for a text after `right` of its last n guesses were right.
static int next_guesses(int n, int right) {
    if (right < n) return right + 1;
    return 2 * n < MAX_GUESSES ? 2 * n : MAX_GUESSES;
}

// The cost and the savings of guessing, in units of a call of the model without guesses. Calls that
// evaluate a prompt are not counted: in a counted call, each text has one token and its guesses.
typedef struct {
    bool on;            // --lookup is given
    int n_texts;        // texts of the latest call
    int64_t n_same;     // calls since n_texts changed
    int64_t n_plain;    // calls without guesses among these
    double plain;       // estimated seconds of a call without guesses
    int64_t calls;      // all calls
    double lost;        // calls that guesses have cost, minus calls that they have saved
    int64_t n, n_right; // tokens that were guessed, and those that were right
} Lookup;

// Returns whether the next call, for n_texts texts, may have guesses: if guessing has lost at most
// 1% of the time so far. The first three calls for n_texts texts, and then one more for every 32,
// have no guesses, to measure the time of such a call.
static bool may_guess(const Lookup *l, int n_texts) {
    bool known = l->n_texts == n_texts && l->n_plain > 2 + l->n_same / 32;
    return l->on && known && l->lost <= 0.01 * (double)l->calls;
}

// Counts a call of n_texts texts with n guesses in total.
static void count_call(Lookup *l, int n_texts, int n, double seconds) {
    if (l->n_texts != n_texts) {
        l->n_texts = n_texts;
        l->n_same = l->n_plain = 0, l->plain = INFINITY;
    }
    l->n_same++, l->n_plain += !n;
    // The shortest time is the one that other programs disturbed least. The estimate rises by 1%
    // with each call without guesses, because calls take longer as the contexts grow
    if (!n) l->plain *= 1.01;
    if (seconds < l->plain) l->plain = seconds;
    // Guessing n / n_texts tokens for each text costs at most the time of that many more calls. Any
    // time beyond that was caused by other programs
    double extra = seconds / l->plain - 1, max = (double)n / n_texts;
    l->lost += extra < max ? extra : max;
    l->calls++;
    l->n += n;
}

// Counts n right guesses, in all texts together. n_texts of them save a call, because a call
// without guesses computes one token of each text.
static void count_right(Lookup *l, int n) {
    l->lost -= (double)n / l->n_texts;
    l->n_right += n;
}

#endif
