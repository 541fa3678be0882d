// Weights that are not kept in memory: a thread reads them from the model file for every pass
// through the model, one section ahead of the steps that multiply them.
//
// A section is about SECTION_BYTES of weights in the order in which a pass multiplies them: parts
// of one or more matrices. There are two buffers. While the workers multiply the section in one of
// them, the thread reads the next section into the other.
#include <stdlib.h>
#include "../os.h"
#include "cpu.h"

enum { ALIGNMENT = 64 }; // alignment in bytes of the rows and scales in a buffer

// Bytes at..at+n-1 of the file. `skipped`: bytes of the matrix's rows, or scales, before them.
typedef struct { size_t at, n, skipped; } Extent;

// Rows of a matrix that are read together: those of items first..end-1 of its product's step.
typedef struct {
    Mat *m;
    int first, end;
    Extent rows, scales; // scales: only for INT8_GROUPS, which stores them elsewhere in the file
    size_t at;           // byte offset of the rows in the buffer; the scales follow
    int section;
} Part;

struct Stream {
    const struct File *file;
    Part *parts; // (n,) in the order in which a pass needs them
    int *first;  // (n_sections + 1,) first part of each section, then n
    int n, n_sections;
    size_t bytes; // of all parts in the file
    uint8_t *buffers[2];
    // Guarded by the monitor. Each change that a thread may wait for wakes all waiting threads
    int held[2];   // the section in each buffer, -1: none
    bool ready[2]; // whether that section has been read
    int current;   // the section that the workers multiply or wait for
    bool stopping, failed;
    Monitor monitor;
    Thread thread;
    bool started;
};

static size_t align(size_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// ----------------------------------------------------------------------------
// The thread that reads

// Returns the buffer that holds a section, or -1.
static int buffer_of(const Stream *s, int section) {
    return s->held[0] == section ? 0 : s->held[1] == section ? 1 : -1;
}

// Returns the section to read now: the current one or, if a buffer holds it, the next one; -1 if
// buffers hold both. The first section follows the last, because the next pass begins with it.
static int section_to_read(const Stream *s) {
    int next = (s->current + 1) % s->n_sections;
    return buffer_of(s, s->current) < 0 ? s->current : buffer_of(s, next) < 0 ? next : -1;
}

static bool read_section(const Stream *s, int section, uint8_t *buffer) {
    bool ok = true;
    for (int i = s->first[section]; i < s->first[section + 1] && ok; i++) {
        const Part *p = &s->parts[i];
        uint8_t *rows = buffer + p->at, *scales = rows + align(p->rows.n);
        ok = llamac_read_mapped(s->file, rows, p->rows.at, p->rows.n)
             && llamac_read_mapped(s->file, scales, p->scales.at, p->scales.n);
    }
    return ok;
}

static void read_ahead(void *arg) {
    Stream *s = arg;
    llamac_lock(&s->monitor);
    while (!s->stopping) {
        int section = section_to_read(s);
        if (section < 0) {
            llamac_sleep(&s->monitor);
            continue;
        }
        int buffer = s->held[0] == s->current ? 1 : 0;
        s->held[buffer] = section, s->ready[buffer] = false;
        llamac_unlock(&s->monitor);
        bool ok = read_section(s, section, s->buffers[buffer]);
        llamac_lock(&s->monitor);
        s->ready[buffer] = true, s->failed |= !ok;
        llamac_wake_all(&s->monitor);
    }
    llamac_unlock(&s->monitor);
}

// Waits until a section has been read, and returns its buffer. From then on, the other buffer is
// free for the next section.
static const uint8_t *await_section(Stream *s, int section) {
    int buffer;
    llamac_lock(&s->monitor);
    s->current = section;
    llamac_wake_all(&s->monitor);
    while ((buffer = buffer_of(s, section)) < 0 || !s->ready[buffer]) llamac_sleep(&s->monitor);
    llamac_unlock(&s->monitor);
    return s->buffers[buffer];
}

// ----------------------------------------------------------------------------
// Steps

// A Task with one item: waits for a section, and makes its matrices point to where row 0 and scale
// 0 would be in the buffer. Only the rows of the section may be read.
static void open_section(Worker *self, const void *args, int begin, int end) {
    Stream *s = self->cpu->stream;
    int section = *(const int *)args;
    const uint8_t *buffer = await_section(s, section);
    (void)begin, (void)end;
    for (Part *p = s->parts + s->first[section]; p < s->parts + s->first[section + 1]; p++) {
        const uint8_t *rows = buffer + p->at, *scales = rows + align(p->rows.n);
        p->m->data = rows - p->rows.skipped;
        if (p->m->type == INT8_GROUPS) p->m->scales = scales - p->scales.skipped;
    }
}

int llamac_find_part(const Stream *s, const Mat *m) {
    for (int i = 0; i < s->n; i++)
        if (s->parts[i].m == m) return i;
    return -1;
}

int llamac_open_part(Cpu *cpu, int part) {
    const Stream *s = cpu->stream;
    int section = s->parts[part].section;
    if (part == s->first[section])
        llamac_add_step(cpu, open_section, &section, sizeof section, 1, 0);
    return s->parts[part].end;
}

const char *llamac_stream_failure(const Backend *b) {
    Stream *s = ((const Cpu *)b)->stream;
    llamac_lock(&s->monitor);
    bool failed = s->failed;
    llamac_unlock(&s->monitor);
    return failed ? "its file was cut off while in use, or cannot be read" : NULL;
}

double llamac_stream_speed(Stream *s) {
    double begin = llamac_seconds();
    for (int i = 0; i < s->n_sections; i++) await_section(s, i);
    return (double)s->bytes / (llamac_seconds() - begin);
}

// ----------------------------------------------------------------------------
// Opening and closing

// Returns the part of m with items first..end-1. The data of m must be in the mapped file.
static Part make_part(const struct File *file, Mat *m, int first, int end) {
    const uint8_t *rows = row_of(m, first * ROWS), *rows_end = row_of(m, end * ROWS);
    Part p = {.m = m, .first = first, .end = end};
    p.rows = (Extent){rows - file->bytes, rows_end - rows, rows - row_of(m, 0)};
    if (m->type != INT8_GROUPS) return p;
    // a group may begin in an earlier row and end in a later one
    size_t group = p.rows.skipped / m->group;
    size_t groups_end = (p.rows.skipped + p.rows.n + m->group - 1) / m->group;
    const uint8_t *scales = (const uint8_t *)m->scales + group * sizeof(float);
    p.scales =
        (Extent){scales - file->bytes, (groups_end - group) * sizeof(float), group * sizeof(float)};
    return p;
}

// Cuts the matrices into parts of whole items, and groups the parts into sections. Sets *largest to
// the bytes of a buffer for the largest section. Returns false if there is not enough memory.
static bool cut(Stream *s, Mat *const *matrices, int n, size_t *largest) {
    int capacity = 0, section = 0;
    for (int i = 0; i < n; i++) capacity += (matrices[i]->rows + ROWS - 1) / ROWS;
    s->parts = calloc(capacity, sizeof *s->parts);
    s->first = calloc(capacity + 1, sizeof *s->first);
    if (!s->parts || !s->first) return false;
    size_t used = 0; // bytes of the section so far
    for (int i = 0; i < n; i++) {
        Mat *m = matrices[i];
        int items = (m->rows + ROWS - 1) / ROWS;
        size_t item = row_of(m, ROWS) - row_of(m, 0); // bytes
        for (int first = 0, end; first < items; first = end) {
            int fit = used < SECTION_BYTES ? (int)((SECTION_BYTES - used) / item) : 0;
            if (!fit && used) {
                s->first[++section] = s->n, used = 0;
                fit = (int)(SECTION_BYTES / item);
            }
            end = first + (fit ? fit : 1) < items ? first + (fit ? fit : 1) : items;
            Part *p = &s->parts[s->n++];
            *p = make_part(s->file, m, first, end);
            p->section = section, p->at = used;
            used += align(p->rows.n) + align(p->scales.n);
            s->bytes += p->rows.n + p->scales.n;
            *largest = used > *largest ? used : *largest;
        }
    }
    s->first[s->n_sections = section + 1] = s->n;
    return true;
}

// Allocates the buffers and starts the thread.
static bool start(Stream *s, size_t buffer_size) {
    for (int i = 0; i < 2; i++) {
        s->held[i] = -1;
        s->buffers[i] = llamac_allocate_aligned(ALIGNMENT, align(buffer_size + 1));
        if (!s->buffers[i]) return false;
    }
    llamac_open_monitor(&s->monitor);
    s->started = llamac_start_thread(&s->thread, read_ahead, s);
    return s->started;
}

void llamac_close_stream(Stream *s) {
    if (!s) return;
    if (s->started) {
        llamac_lock(&s->monitor);
        s->stopping = true;
        llamac_wake_all(&s->monitor);
        llamac_unlock(&s->monitor);
        llamac_join_thread(&s->thread);
        llamac_close_monitor(&s->monitor);
    }
    for (int i = 0; i < 2; i++) llamac_free_aligned(s->buffers[i]);
    free(s->parts);
    free(s->first);
    free(s);
}

Stream *llamac_open_stream(Mat *const *matrices, int n, const struct File *file) {
    size_t largest = 0;
    Stream *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->file = file;
    if (cut(s, matrices, n, &largest) && start(s, largest)) return s;
    llamac_close_stream(s);
    return NULL;
}

int llamac_count_parts(const Stream *s) { return s->n; }

uint64_t llamac_streamed_bytes(const Stream *s) { return s->bytes; }
