// The Backend's begin and end. The ops of a call of forward are launched one by one in the first
// call, recorded as a CUDA graph in the second, and replayed from the graph in later ones, which
// spares the launches. One token is computed by whole_token instead, if that can run.
#pragma once
#include "launch_token.cuh"

// Returns whether forward must call the ops. The first call with this T and all_logits runs op by
// op: it loads the kernels, which cannot be recorded, and sets c->out, which launch_token needs.
// The second call is recorded if the driver can do so; later calls replay the recording.
static bool begin(Backend *b, const int *tokens, int T, int pos, bool all_logits) {
    Cuda *c = (Cuda *)b;
    Recording *r = &c->recordings[T][all_logits];
    c->in_pass = true;
    if (T == 1 && r->warmed_up && has_whole_token(c)) {
        launch_token(c, tokens[0], pos);
        return false;
    }
    c->recording = r->warmed_up && c->can_record ? r : NULL;
    if (r->exec) { // the graph begins with the copy of input_host to the device
        c->input_host->pos = pos;
        memcpy(c->input_host->tokens, tokens, sizeof(int) * T);
        return false;
    }
    if (c->recording) CUDA(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
    r->warmed_up = true;
    send_input(c, tokens, T, pos);
    return true;
}

// Ends a recording, launches the graph if there is one, and waits for the results.
static void end(Backend *b) {
    Cuda *c = (Cuda *)b;
    Recording *r = c->recording;
    if (r && !r->exec) {
        cudaGraph_t graph;
        CUDA(cudaStreamEndCapture(c->stream, &graph));
        CUDA(cudaGraphInstantiate(&r->exec, graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
    if (r) CUDA(cudaGraphLaunch(r->exec, c->stream));
    CUDA(cudaStreamSynchronize(c->stream));
    c->in_pass = false, c->half_x_source = NULL;
    c->recording = NULL;
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
    if (exec) CUDA(cudaGraphExecDestroy(exec));
    if (graph) CUDA(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
    return ok;
}
