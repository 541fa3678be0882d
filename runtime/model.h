// Internal interface of the library's files: models, metadata and tokenizers.
#ifndef LLAMAC_MODEL_H
#define LLAMAC_MODEL_H

#include "backend.h"
#include "bytes.h"
#include "os.h"

_Static_assert(sizeof(size_t) == 8,
               "sizes of models are counted in 64 bits; 32-bit systems cannot run them");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "model files are little-endian and are used in place");

// ----------------------------------------------------------------------------
// GGUF's metadata (gguf.c)

// Supported architectures. Their names are in gguf.c.
enum { LLAMA, QWEN2, QWEN3, N_ARCHITECTURES };
extern const char *const llamac_architectures[N_ARCHITECTURES];

enum { U8, I8, U16, I16, U32, I32, FLOAT, BOOL, STRING, ARRAY, U64, I64, DOUBLE, N_KINDS };

// Metadata keys that are read. Their names are in gguf.c.
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
    uint32_t kind;  // type of the value, or of the elements of an array
    uint64_t count; // 1, or the length of the array
    Reader data;    // positioned at the value
} Value;

// The architecture in the metadata; N_ARCHITECTURES if it is missing or unknown.
int llamac_architecture(const Value *values);

// The name of a key in this file, for messages.
typedef struct { char s[64]; } KeyName;
KeyName llamac_key(const Value *values, int key);

// Reads `count` keys and their values. Fails on an unknown architecture, and on an unknown key of
// the architecture that may change what the model computes.
bool llamac_take_metadata(Reader *, uint64_t count, Value values[N_KEYS], Error *);

// Get a number of any type. If the key is absent, use the fallback, or fail if that is NAN.
bool llamac_get_number(const Value *values, int key, double fallback, double *out, Error *);
bool llamac_get_int(const Value *values, int key, double fallback, int *out, Error *);

String llamac_get_string(const Value *values, int key); // "" if it is absent or not a string

// ----------------------------------------------------------------------------
// The tokenizer (tokenizer.c)

enum {
    NORMAL = 1,
    UNKNOWN,
    CONTROL,
    USER_DEFINED,
    UNUSED,
    BYTE
}; // token types as numbered by sentencepiece and GGUF

typedef struct {
    const char *s;
    float score;
    signed n : 28, type : 4;
} Piece; // not larger than its entry in a file

typedef struct BytePairs BytePairs; // bpe.c

typedef struct {
    Piece *pieces; // (vocab_size,); their texts are in the file
    int vocab_size;
    int *table;            // (table_size,) hash table of ids of pieces, -1: empty
    uint32_t table_size;   // a power of two
    const Piece **symbols; // (n_symbols,) user-defined pieces, sorted by text
    int n_symbols;
    int byte_ids[256];  // id of the piece of each byte, or -1
    bool has_unused;    // some pieces are UNUSED: intermediate results of merges, never tokens
    bool words_join;    // some piece may span two words, so a text cannot be split into words
    bool byte_fallback; // unknown characters are encoded as bytes instead of as `unk`
    bool space_prefix;  // put a space before the text
    bool extra_spaces_removed; // shrink runs of spaces to one, remove spaces at both ends
    bool add_bos;
    const char *space; // how pieces write a space
    int bos, eos, unk;
    int eot;               // ends an answer; -1: the vocabulary has no such token
    BytePairs *byte_pairs; // byte-level BPE; NULL: sentencepiece's BPE
    String chat_template;  // Jinja source
} Tokenizer;

// Load a tokenizer. Free it with llamac_free_tokenizer, also after a failure.
bool llamac_gguf_tokenizer(Tokenizer *, const Value *values, int vocab_size, Error *);
bool llamac_bin_tokenizer(Tokenizer *, const uint8_t *bytes, size_t size, int vocab_size, Error *);

// Builds the tables for the pieces, replacing earlier tables.
bool llamac_index_pieces(Tokenizer *, Error *);

void llamac_free_tokenizer(Tokenizer *);

// Encodes a text. Returns the tokens, to be freed, and their number in *n_tokens. `how` is a sum of
// WITH_BOS (begin with the token BOS) and WITH_PREFIX (put a space before the text if the
// vocabulary wants it). Text never becomes a control token.
enum { WITH_BOS = 1, WITH_PREFIX = 2 };
int *llamac_encode_text(const Tokenizer *, const char *s, size_t n, int how, int *n_tokens,
                        Error *);

// Checks the arguments that all encoding functions share. Sets *n_tokens to 0.
bool llamac_takes_text(const llamac_model *, const char *text, size_t n, int *n_tokens, Error *);

// The token with this text that may be produced from text, or -1.
int llamac_token_of(const Tokenizer *, const char *s, int n);

// The longest user-defined piece at the beginning of s (n bytes), or -1.
int llamac_match_symbol(const Tokenizer *, const char *s, size_t n);

// ----------------------------------------------------------------------------
// Byte-level BPE (bpe.c)

// Reads the pre-tokenizer and the merges, and builds the tables. The pieces are filled in.
bool llamac_byte_level(Tokenizer *, const Value *values, Error *);

void llamac_find_bytes(Tokenizer *); // fills in byte_ids

// Like llamac_encode_text. Returns NULL if there is not enough memory.
int *llamac_encode_bytes(const Tokenizer *, const char *s, size_t n, bool bos, int *n_tokens);

// Writes at most `room` of the bytes of a piece, and returns how many bytes it has.
size_t llamac_decode_letters(const Piece *, char *out, size_t room);

void llamac_free_byte_pairs(BytePairs *);

// ----------------------------------------------------------------------------
// Models (model.c)

typedef struct Template Template; // of a chat (chat.c)

enum { MAX_SHOWN_PATH = 200 }; // max bytes of a path in a message

struct llamac_model {
    Model transformer;
    Tokenizer tokenizer;
    File file, tokenizer_file;
    const Template *chat;          // NULL: not set
    int stop;                      // token that ends an answer in the chat template, -1: none
    char path[MAX_SHOWN_PATH + 1]; // of the file, for messages; "": opened from memory
};

bool llamac_load(llamac_model *, const uint8_t *bytes, size_t size, int flags, Error *);

// Puts the path before the message, unless it is "". Returns false.
bool llamac_name_file(const char *path, Error *);

// Returns how many bytes of weights one token reads, and their lowest address in *first.
uint64_t llamac_weight_bytes(const Model *, const uint8_t **first);

#endif
