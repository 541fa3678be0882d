// Files of saved sequences. All numbers are little-endian.
//
//   offset
//   0    "llamacKV"
//   8    version of the format, 4 bytes
//   12   bits of a number in the KV cache, 4 bytes: 32, 16 or 8
//   16   n_layers, n_kv_heads, head_dim, 4 bytes each
//   28   n, the number of tokens, 4 bytes
//   32   identity of the model, 32 bytes: see llamac_identify
//   64   the tokens, 4 bytes each
//        blocks of 64 positions; the last block has the remaining ones. A block has keys
//        (n_layers, n_kv_heads, positions, head_dim) and values of the same shape. With 8 bits,
//        the scales of the keys (n_layers, n_kv_heads, positions), float32, and those of the values
//        follow
//   end  SHA-256 of all bytes before it
//
// Saving needs memory for one block only. The CPU and the GPU write the same files: the size of a
// block does not depend on the page size of the KV cache, which each backend chooses.
#include <errno.h>
#include "state.h"

enum { VERSION = 1, HEADER = 64, BLOCK = 64 }; // HEADER in bytes, BLOCK in positions

static const char magic[] = "llamacKV";
enum { MAGIC = sizeof magic - 1 }; // bytes

typedef struct {
    char magic[MAGIC];
    uint32_t version, kv_bits, n_layers, n_kv_heads, head_dim, n;
    uint8_t identity[SHA256_BYTES];
} Header;
_Static_assert(sizeof(Header) == HEADER, "the header is written as it is in memory");

static Header header_of(const StateOwner *o, int n) {
    const Config *c = &o->model->config;
    Header h = {.version = VERSION,
                .kv_bits = o->backend->kv_bits,
                .n_layers = c->n_layers,
                .n_kv_heads = c->n_kv_heads,
                .head_dim = c->head_dim,
                .n = n};
    memcpy(h.magic, magic, MAGIC);
    llamac_identify(o->model, h.identity);
    return h;
}

// Returns the bytes of the keys, values and scales of n positions. There is no overflow: a model
// with sizes that large is refused when it is opened.
static uint64_t bytes_of_positions(const StateOwner *o, int n) {
    const Config *c = &o->model->config;
    uint64_t rows = (uint64_t)c->n_layers * c->n_kv_heads * n, bits = o->backend->kv_bits;
    return 2 * rows * (c->head_dim * bits / 8 + (bits == 8 ? sizeof(float) : 0));
}

static int positions_of_block(int n, int pos) { return n - pos < BLOCK ? n - pos : BLOCK; }

// ----------------------------------------------------------------------------
// Writing

typedef struct {
    FILE *stream;
    Sha256 sha; // of what was written
    bool failed;
} Writer;

static void put(Writer *w, const void *bytes, size_t n) {
    llamac_sha256_add(&w->sha, bytes, n);
    if (!n || fwrite(bytes, 1, n, w->stream) == n) return;
    w->failed = true;
    // If the disk is full after a part of the bytes, Wine's C library does not set errno. The next
    // write sets it.
    size_t written = fwrite(bytes, 1, n, w->stream);
    (void)written; // only its errno is needed
}

// Writes everything to the file. `block` has room for a block.
static bool write_all(FILE *stream, const StateOwner *o, const Cache *cache, const int *tokens,
                      int n, uint8_t *block, Error *e) {
    Backend *b = o->backend;
    Writer w = {.stream = stream, .sha = llamac_sha256_begin()};
    Header header = header_of(o, n);
    put(&w, &header, sizeof header);
    if (n) put(&w, tokens, n * sizeof *tokens);
    for (int pos = 0, count; pos < n && !w.failed; pos += count) {
        count = positions_of_block(n, pos);
        b->read_cache(b, cache, pos, count, block);
        const char *failure = b->failure ? b->failure(b) : NULL;
        CHECK(!failure, "%s", failure);
        put(&w, block, bytes_of_positions(o, count));
    }
    uint8_t digest[SHA256_BYTES];
    llamac_sha256_end(&w.sha, digest);
    CHECK(!w.failed && fwrite(digest, 1, sizeof digest, stream) == sizeof digest,
          "it cannot be written: %s", strerror(errno));
    return true;
}

bool llamac_write_state(const char *path, const StateOwner *o, const Cache *cache,
                        const int *tokens, int n, Error *e) {
    NewFile file;
    uint8_t *block = resize(NULL, bytes_of_positions(o, positions_of_block(n, 0)), 1);
    CHECK(block, no_memory);
    bool ok = llamac_create_file(&file, path, magic, MAGIC, e);
    if (ok) {
        ok = write_all(file.stream, o, cache, tokens, n, block, e);
        ok = llamac_finish_file(&file, ok, e);
    }
    free(block);
    return ok;
}

// ----------------------------------------------------------------------------
// Reading

uint8_t *llamac_read_state(const char *path, size_t *size, Error *e) {
    return llamac_read_file(path, magic, MAGIC, size, e);
}

// Checks magic, version and checksum. Whether the sequence fits the engine is checked afterwards.
static bool check_whole(const uint8_t *bytes, size_t size, Error *e) {
    CHECK(size >= MAGIC && !memcmp(bytes, magic, MAGIC),
          "not a file of --prompt-cache or llamac_sequence_save; name another file");
    CHECK(size >= HEADER + SHA256_BYTES,
          "%zu bytes, expected %d or more: the file was cut off; delete it", size,
          HEADER + SHA256_BYTES);
    uint8_t digest[SHA256_BYTES], version[4] = {VERSION};
    const uint8_t *expected = bytes + size - SHA256_BYTES;
    CHECK(!memcmp(bytes + MAGIC, version, 4),
          "version %u of the format of saved sequences, expected %d: delete the file",
          ((const Header *)bytes)->version, VERSION);
    Sha256 sha = llamac_sha256_begin();
    llamac_sha256_add(&sha, bytes, size - SHA256_BYTES);
    llamac_sha256_end(&sha, digest);
    CHECK(!memcmp(digest, expected, SHA256_BYTES),
          "SHA-256 %02x%02x%02x%02x..., expected %02x%02x%02x%02x...: the file was cut off or is "
          "damaged; delete it",
          digest[0], digest[1], digest[2], digest[3], expected[0], expected[1], expected[2],
          expected[3]);
    return true;
}

bool llamac_check_state(const uint8_t *bytes, size_t size, const StateOwner *o, SavedState *saved,
                        Error *e) {
    TRY(check_whole(bytes, size, e));
    const Header *h = (const Header *)bytes;
    Header expected = header_of(o, 0);
    const uint8_t *found = h->identity, *own = expected.identity;
    bool same_model = !memcmp(found, own, SHA256_BYTES) && h->n_layers == expected.n_layers
                      && h->n_kv_heads == expected.n_kv_heads && h->head_dim == expected.head_dim;
    CHECK(same_model,
          "it was saved with another model (%02x%02x%02x%02x..., expected %02x%02x%02x%02x...): "
          "open that model, or name another file",
          found[0], found[1], found[2], found[3], own[0], own[1], own[2], own[3]);
    CHECK(h->kv_bits == expected.kv_bits,
          "its KV cache has %u bits, expected %u as in this engine: use the --kv that it was saved "
          "with, or name another file",
          h->kv_bits, expected.kv_bits);
    CHECK(h->n <= (uint32_t)o->positions,
          "it has %u tokens, but the context has room for %d: use a longer context (-c), or name "
          "another file",
          h->n, o->positions);
    int n = (int)h->n;
    uint64_t needed = HEADER + (uint64_t)n * sizeof(int) + bytes_of_positions(o, n) + SHA256_BYTES;
    CHECK(size == needed, "%zu bytes, expected %llu for %d tokens: delete the file", size,
          (unsigned long long)needed, n);
    *saved = (SavedState){(const int *)(bytes + HEADER), n, bytes + HEADER + n * sizeof(int)};
    int vocab_size = o->model->config.vocab_size;
    for (int i = 0; i < n; i++)
        CHECK(saved->tokens[i] >= 0 && saved->tokens[i] < vocab_size,
              "token %d is outside the vocabulary of %d tokens: delete the file", saved->tokens[i],
              vocab_size);
    return true;
}

void llamac_restore_cache(const SavedState *saved, const StateOwner *o, Cache *cache) {
    const uint8_t *block = saved->blocks;
    for (int pos = 0, count; pos < saved->n; pos += count) {
        count = positions_of_block(saved->n, pos);
        o->backend->write_cache(o->backend, cache, pos, count, block);
        block += bytes_of_positions(o, count);
    }
}
