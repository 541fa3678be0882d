// The internal interface between the library's files for metadata, tokenizers and models.
#ifndef LLAMAC_MODEL_H
#define LLAMAC_MODEL_H

#include "backend.h"
#include "bytes.h"
#include "os.h"
#include "sha256.h"

#ifndef __wasm__ // which has 32 bits: open_engine refuses what does not fit
_Static_assert(sizeof(size_t) == 8,
               "sizes of models are counted in 64 bits; 32-bit systems cannot run them");
#endif
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "model files are little-endian and are used in place"); // mapped, not converted

// ----------------------------------------------------------------------------
// GGUF's metadata (gguf.c)

// Supported architectures. Their names are in gguf.c.
enum { LLAMA, QWEN2, QWEN3, N_ARCHITECTURES };
extern const char *const llamac_architectures[N_ARCHITECTURES];

// Types of values, as numbered by GGUF.
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
    CHECKSUM,      // SHA-256 of the data of all tensors
    LIST_CHECKSUM, // SHA-256 of the list of tensors: names, shapes, types and offsets
    N_KEYS
};

typedef struct {
    bool present, is_array;
    uint32_t kind;  // type of the value, or of the elements of an array
    uint64_t count; // 1, or the length of the array
    Reader data;    // positioned at the value
} Value;

// Returns the architecture in the metadata; N_ARCHITECTURES if it is missing or unknown.
int llamac_architecture(const Value *values);

// Returns the name of a key in this file, for messages, such as "llama.context_length".
typedef struct { char s[64]; } KeyName;
KeyName llamac_key(const Value *values, int key);

// Reads `count` keys and their values. Fails on an unknown architecture, and on an unknown key that
// begins with the architecture's name, because it may change what the model computes.
bool llamac_take_metadata(Reader *, uint64_t count, Value values[N_KEYS], Error *);

// Read a value of any numeric type to *out. If the key is absent, *out becomes `fallback`; a
// fallback of NAN makes the key required.
bool llamac_get_number(const Value *values, int key, double fallback, double *out, Error *);
bool llamac_get_int(const Value *values, int key, double fallback, int *out, Error *);

// Returns a value that is a string; "" if the key is absent or of another type.
String llamac_get_string(const Value *values, int key);

// ----------------------------------------------------------------------------
// The tokenizer (tokenizer.c)

// Token types, as numbered by sentencepiece and GGUF.
enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };

// An entry of the vocabulary. It is not larger than its entry in a file, so the size of the file
// limits the memory that a vocabulary can take.
typedef struct {
    const char *s;
    float score;
    signed n : 28, type : 4; // n: bytes of s
} Piece;

typedef struct BytePairs BytePairs; // bpe.c

typedef struct {
    Piece *pieces; // (vocab_size,); their texts are in the file
    int vocab_size;
    int *table;            // (table_size,) hash table of ids of pieces by text, -1: empty
    uint32_t table_size;   // a power of two
    const Piece **symbols; // (n_symbols,) user-defined pieces, sorted by text
    int n_symbols;
    int byte_ids[256];  // id of the piece of each byte, or -1
    bool has_unused;    // some pieces are UNUSED: merges may pass through them, tokens never are
    bool encode_whole;  // encoding each word of a text by itself could change the tokens
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

// Builds `table`, `symbols` and `byte_ids` for the pieces that a loader has filled in, and replaces
// earlier ones.
bool llamac_index_pieces(Tokenizer *, Error *);

void llamac_free_tokenizer(Tokenizer *);

// Encodes a text. Returns the tokens, to be freed, and their number in *n_tokens. `how` is a sum of
// WITH_BOS (begin with the token BOS) and WITH_PREFIX (put a space before the text if the
// vocabulary has space_prefix). Text never becomes a control token.
enum { WITH_BOS = 1, WITH_PREFIX = 2 };
int *llamac_encode_text(const Tokenizer *, const char *s, size_t n, int how, int *n_tokens,
                        Error *);

// Checks the arguments that all encoding functions share. Sets *n_tokens to 0.
bool llamac_check_text_arguments(const llamac_model *, const char *text, size_t n, int *n_tokens,
                                 Error *);

// Returns the token that encoding may produce for this text; -1 if there is none, or only a
// control, byte, unknown or unused piece.
int llamac_token_of(const Tokenizer *, const char *s, int n);

// Returns the longest user-defined piece at the beginning of s (n bytes), or -1.
int llamac_match_symbol(const Tokenizer *, const char *s, size_t n);

// ----------------------------------------------------------------------------
// Byte-level BPE (bpe.c)

// Reads the pre-tokenizer and the merges, and builds the tables. The caller has filled in `pieces`.
bool llamac_byte_level(Tokenizer *, const Value *values, Error *);

void llamac_find_bytes(Tokenizer *); // fills in byte_ids

// Like llamac_encode_text. Returns NULL if there is not enough memory.
int *llamac_encode_bytes(const Tokenizer *, const char *s, size_t n, bool bos, int *n_tokens);

// Decodes a piece that is spelled in GPT-2's letters (bpe.c). Writes the first `room` bytes, and
// returns how many bytes the piece has.
size_t llamac_decode_byte_level(const Piece *, char *out, size_t room);

void llamac_free_byte_pairs(BytePairs *);

// ----------------------------------------------------------------------------
// Models (model.c)

typedef struct Template Template; // of a chat (chat.c)

enum {
    MAX_SHOWN_PATH = 200, // max bytes of a path in a message
    MAX_MARKS = 4,        // max markers of a chat template
};

struct llamac_model {
    Model transformer;
    Tokenizer tokenizer;
    File file, tokenizer_file;
    const Template *chat;          // NULL: not set
    int stop;                      // token that ends an answer in the chat template, -1: none
    int mark_tokens[MAX_MARKS];    // tokens of the template's markers, -1: not in the vocabulary
    bool chat_bos;                 // a chat begins with BOS, unless the template says otherwise
    Text chat_system;              // the system prompt of chats without one
    char path[MAX_SHOWN_PATH + 1]; // of the file, for messages; "": opened from memory
};

// Loads a model from the bytes of its file, which the model points into. `flags`: as for
// llamac_open.
bool llamac_load(llamac_model *, const uint8_t *bytes, size_t size, int flags, Error *);

// Puts the path before the message, unless it is "". Returns false.
bool llamac_name_file(const char *path, Error *);

// Computes the identity of a model: the SHA-256 of its sizes, RoPE's frequencies, the checksums in
// its file, if any, and the type, the shape and eight samples of 64 bytes of each tensor, including
// its first and last bytes. The weights must be in host memory.
void llamac_identify(const Model *, uint8_t identity[SHA256_BYTES]);

// Returns how many bytes of weights the computation of one token reads, and the lowest address of
// these weights in *first.
uint64_t llamac_weight_bytes(const Model *, const uint8_t **first);

#endif
