// What the units of the library know of a model and its tokenizer. The functions are internal, for all their names.
#ifndef LLAMAC_MODEL_H
#define LLAMAC_MODEL_H

#include "backend.h"
#include "bytes.h"

_Static_assert(sizeof(size_t) == 8, "sizes of models are counted in 64 bits; 32-bit systems cannot run them");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "model files are little-endian and are used in place");

// ----------------------------------------------------------------------------
// GGUF's metadata (gguf.c)

// The architectures that forward computes; gguf.c has their names.
enum { LLAMA, QWEN2, QWEN3, N_ARCHITECTURES };
extern const char *const llamac_architectures[N_ARCHITECTURES];

enum { U8, I8, U16, I16, U32, I32, FLOAT, BOOL, STRING, ARRAY, U64, I64, DOUBLE, N_KINDS };

// Keys that are read; gguf.c has their names.
enum {
    ARCHITECTURE,
    ALIGNMENT,
    CONTEXT_LENGTH,
    EMBEDDING_LENGTH,
    BLOCK_COUNT,
    FEED_FORWARD_LENGTH,
    HEAD_COUNT,
    HEAD_COUNT_KV,
    KEY_LENGTH,
    VALUE_LENGTH,
    ROPE_DIMENSION,
    SLIDING_WINDOW,
    NORM_EPS,
    ROPE_BASE,
    SCALING_TYPE,
    SCALING_FACTOR,
    SCALING_CONTEXT,
    SCALE_LINEAR,
    VOCAB_SIZE,
    QUANTIZATION_VERSION,
    TOKENIZER,
    TOKENS,
    SCORES,
    TOKEN_TYPES,
    PRE_TOKENIZER,
    MERGES,
    BOS_ID,
    EOS_ID,
    EOT_ID,
    UNK_ID,
    ADD_BOS,
    SPACE_PREFIX,
    EXTRA_SPACES,
    CHAT_TEMPLATE,
    SPLIT_NO,
    SPLIT_COUNT,
    CHECKSUM,
    LIST_CHECKSUM,
    N_KEYS
};

typedef struct {
    bool present, is_array;
    uint32_t kind;   // of the value, or of an array's elements
    uint64_t count;  // 1, or the array's length
    Reader data;     // reads the value
} Value;

// Of the values that were read; N_ARCHITECTURES: none of those.
int llamac_architecture(const Value *values);

// A key's name in the file that the values are from, for messages.
typedef struct { char s[64]; } KeyName;
KeyName llamac_key(const Value *values, int key);

// Reads `count` keys and their values. Another architecture than those above is an error, and so is a key of this one's that
// may change what the model computes.
bool llamac_take_metadata(Reader *, uint64_t count, Value values[N_KEYS], Error *);

// A number of any kind; the fallback when the key is absent, an error when it is absent and the fallback is NAN.
bool llamac_get_number(const Value *values, int key, double fallback, double *out, Error *);
bool llamac_get_int(const Value *values, int key, double fallback, int *out, Error *);

String llamac_get_string(const Value *values, int key); // "" when it is absent, or no string

// ----------------------------------------------------------------------------
// The tokenizer (tokenizer.c)

enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE }; // sentencepiece's and GGUF's numbers

typedef struct {
    const char *s;
    float score;
    signed n : 28, type : 4;
} Piece; // no larger than its entry in a file

typedef struct BytePairs BytePairs; // bpe.c

typedef struct {
    Piece *pieces;                // (vocab_size,) texts lie in the file
    int vocab_size;
    int *table;                   // (table_size,) hash table of the pieces: ids, -1 where empty
    uint32_t table_size;          // a power of two
    const Piece **symbols;        // (n_symbols,) user-defined pieces, sorted by text
    int n_symbols;
    int byte_ids[256];            // piece of each byte
    bool has_unused;              // some pieces are UNUSED: merges may pass through them, but they are no tokens
    bool words_join;              // a piece may reach from one word into the next, so a text cannot be cut into words
    bool byte_fallback;           // characters that are no piece become bytes rather than unknown
    bool space_prefix;            // a space goes before the text
    bool extra_spaces_removed;    // runs of spaces shrink to one, spaces at the ends go
    bool add_bos;
    const char *space;            // how pieces write a space
    int bos, eos, unk;
    int eot;                      // ends an answer; -1: there is none
    BytePairs *byte_pairs;        // of byte-level BPE; NULL: it is sentencepiece's
    String chat_template;         // in Jinja
} Tokenizer;

// Both leave the tokenizer to be freed, whether they succeed or not.
bool llamac_gguf_tokenizer(Tokenizer *, const Value *values, int vocab_size, Error *);
bool llamac_bin_tokenizer(Tokenizer *, const uint8_t *bytes, size_t size, int vocab_size, Error *);

// Builds the tables over pieces that are filled in, in place of those that stand there.
bool llamac_index_pieces(Tokenizer *, Error *);

void llamac_free_tokenizer(Tokenizer *);

// The tokens of a text, in memory to be freed; their number in *n_tokens. With `bos`, the beginning token comes first.
// With `prefix`, the text begins as the vocabulary wants it: with a space or not. No text becomes a control token.
int *llamac_encode_text(const Tokenizer *, const char *s, size_t n, bool bos, bool prefix, int *n_tokens, Error *);

// Whether what llamac_encode and its kind were given is usable. Sets *n_tokens to 0.
bool llamac_takes_text(const llamac_model *, const char *text, size_t n, int *n_tokens, Error *);

// The token that is spelled like this and may come from text, or -1.
int llamac_token_of(const Tokenizer *, const char *s, int n);

// The longest user-defined piece that s (n bytes) begins with, or -1.
int llamac_match_symbol(const Tokenizer *, const char *s, size_t n);

// ----------------------------------------------------------------------------
// Byte-level BPE (bpe.c)

// Reads what such a tokenizer has beside its pieces, which are filled in, and builds the tables.
bool llamac_byte_level(Tokenizer *, const Value *values, Error *);

void llamac_find_bytes(Tokenizer *); // fills in byte_ids

// As llamac_encode_text; NULL if memory was missing.
int *llamac_encode_bytes(const Tokenizer *, const char *s, size_t n, bool bos, int *n_tokens);

// Writes at most `room` of the bytes that a piece stands for, and returns how many they are.
size_t llamac_decode_letters(const Piece *, char *out, size_t room);

void llamac_free_byte_pairs(BytePairs *);

// ----------------------------------------------------------------------------
// Models (model.c)

typedef struct {
    const uint8_t *bytes;
    size_t size;
} File; // mapped; NULL: none

typedef struct Template Template; // of a chat (chat.c)

enum { LONGEST_PATH = 200 }; // bytes of a path in a message

struct llamac_model {
    Model weights;
    Tokenizer tokenizer;
    File file, tokenizer_file;
    const Template *chat; // NULL: none in use
    int stop;             // the mark that ends an answer by it, -1: none
    char path[LONGEST_PATH + 1]; // of the file, for messages; "": opened from memory
};

bool llamac_load(llamac_model *, const uint8_t *bytes, size_t size, int flags, Error *);

// Puts the path before the message, unless it is "". Returns false.
bool llamac_name_file(const char *path, Error *);

// Bytes of the matrices that one token reads. *first is the lowest address of them.
uint64_t llamac_weights_read(const Model *, const uint8_t **first);

#endif
