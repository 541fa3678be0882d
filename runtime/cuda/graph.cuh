// The Backend's begin and end. The ops are launched one by one in the first pass of a shape,
// recorded as a CUDA graph in the second, and replayed from the graph in later ones, which saves
// the launches. A recording serves all sequences, and all numbers of tokens that padded_rows rounds
// to the same number. One token is computed by whole_token instead, if that can run.
#pragma once
#include "cache.cuh"
#include "launch_token.cuh"

// Frees a recording and marks it as unused.
static void drop_recording(Recording *r) {
    if (r->exec) (void)cudaGraphExecDestroy(r->exec);
    *r = {};
}

static bool is_same(const PassShape &a, const PassShape &b) {
    return a.T == b.T && a.n_wanted == b.n_wanted && a.gathers == b.gathers
           && a.on_host == b.on_host && a.hidden_states == b.hidden_states
           && a.attenders.singles == b.attenders.singles
           && a.attenders.others == b.attenders.others;
}

// Returns the recording of a shape. If there is none, reserves an unused recording, or the least
// recently used one, for this shape and returns NULL: the first pass runs op by op, because it
// loads the kernels, which is not possible during a recording.
static Recording *find_recording(Cuda *c, const PassShape &shape) {
    Recording *oldest = c->recordings;
    c->n_passes++;
    for (Recording &r : c->recordings) {
        if (is_same(r.shape, shape)) return r.last_pass = c->n_passes, &r;
        if (r.last_pass < oldest->last_pass) oldest = &r; // last_pass is 0 if unused
    }
    drop_recording(oldest);
    *oldest = {shape, NULL, c->n_passes};
    return NULL;
}

// Writes the kernels' inputs of a batch to c->input_host. The wanted rows are padded by repeating
// the last one.
static void fill_input(Cuda *c, const Batch *batch) {
    int n = batch->n_wanted;
    fill_tokens(c, batch);
    for (int i = 0; n && i < padded_rows(c, n); i++)
        c->input_host->rows[i] = batch->wanted[std::min(i, n - 1)];
}

// Returns whether the ops must be called.
static bool begin(Backend *b, const Batch *batch) {
    Cuda *c = (Cuda *)b;
    const Run *run = batch->runs;
    int T = batch->T, n_wanted = batch->n_wanted;
    c->in_pass = true, c->batch = *batch, c->recording = NULL;
    if (has_failed(c)) return false;
    // whole_token overwrites the logits of an earlier pass, so it is used only if logits are wanted
    if (T == 1 && n_wanted == 1 && !batch->hidden_states && has_whole_token(c)) {
        CUDA(c, try_launch_token(c, run->cache, batch->tokens[0], run->pos));
        return false;
    }
    fill_input(c, batch);
    bool gathers = n_wanted > 0 && n_wanted < T; // llama.c will call gather
    PassShape shape = {padded_rows(c, T),
                       n_wanted ? padded_rows(c, n_wanted) : 0,
                       gathers,
                       batch->logits != NULL,
                       batch->hidden_states != NULL,
                       find_attenders(batch)};
    if (c->can_record) c->recording = find_recording(c, shape);
    if (c->recording && c->recording->exec) return false;
    if (c->recording) CUDA(c, cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
    send_tokens(c, shape.T);
    if (gathers) send_rows(c, shape.n_wanted);
    return true;
}

// Ends the recording of a pass. The stream must stop recording even after a failure.
static void finish_recording(Cuda *c, Recording *r) {
    cudaGraph_t graph = NULL;
    cudaError_t e = cudaStreamEndCapture(c->stream, &graph);
    check(c, e, "cudaStreamEndCapture", __FILE__, __LINE__);
    CUDA(c, cudaGraphInstantiate(&r->exec, graph, 0));
    if (graph) (void)cudaGraphDestroy(graph);
}

// Launches the recording if there is one, copies its results to the host, and waits for them.
static void end(Backend *b) {
    Cuda *c = (Cuda *)b;
    Recording *r = c->recording;
    if (r && !r->exec) finish_recording(c, r);
    if (r) CUDA(c, cudaGraphLaunch(r->exec, c->stream));
    int n = c->batch.n_wanted;
    if (n && c->batch.logits) copy_rows(c, c->batch.logits, c->logits, n, c->config.vocab_size);
    if (n && c->batch.hidden_states) copy_rows(c, c->batch.hidden_states, c->y, n, c->config.dim);
    CUDA(c, cudaStreamSynchronize(c->stream));
    c->in_pass = false, c->half_x_source = NULL, c->recording = NULL;
}

// Returns whether the driver can record a launch and replay it. Some setups that share a GPU do not
// allow it.
static bool try_recording(Cuda *c) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    bool ok = cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    if (ok) {
        ok = try_launch(c, NULL, convert, 1, 256, 0, c->half_x, c->partials, 1) == cudaSuccess;
        ok = cudaStreamEndCapture(c->stream, &graph) == cudaSuccess && ok;
    }
    ok = ok && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess
         && cudaGraphLaunch(exec, c->stream) == cudaSuccess;
    if (exec) (void)cudaGraphExecDestroy(exec);
    if (graph) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    return ok;
}
