// The command line.
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include <limits.h>
#include "common.h"

static const char help[] =
    "Usage: run MODEL [options]      MODEL: a GGUF file, one of llama2.c's .bin files, or the "
    "folder\n"
    "                                of a training run (its model.gguf). Defaults are in (...).\n"
    "  -i TEXT          prompt; - reads it from stdin      -f FILE  prompt from a file\n"
    "  -n NUMBER        max tokens: of prompt and text together, or of each answer in a chat\n"
    "                   (256); 0: until the context is full\n"
    "  -t NUMBER        temperature, 0 is greedy (1.0)\n"
    "  -p NUMBER        sample from the most likely tokens with this total probability;\n"
    "                   0 or 1: from all (0.9)\n"
    "  -k NUMBER        sample from this many of the most likely tokens; 0: from all (0)\n"
    "  --min-p NUMBER   drop tokens less likely than NUMBER times the most likely one (0)\n"
    "  --repeat-penalty NUMBER  divides positive logits of the last 64 tokens, multiplies\n"
    "                   negative ones, as in llama.cpp; 0 and 1: off (0)\n"
    "  --frequency-penalty, --presence-penalty NUMBER  lower the logits of the last 64\n"
    "                   tokens: for each occurrence, or once, as in OpenAI's API; 0: off (0)\n"
    "  -s NUMBER        seed; 0: from the clock (0)\n"
    "  --stop TEXT      end before this text; may be given several times\n"
    "  -b NUMBER        texts to write, with the seeds -s, -s + 1 ... (1); with --prompts or\n"
    "                   --jsonl, max texts computed at the same time (16)\n"
    "  --prompts FILE   continue each line of a file; print the texts in the order of the lines\n"
    "  --prompt-cache FILE  keep the prompt's KV cache in a file; a later prompt is computed\n"
    "                   only from where it differs\n"
    "  --json-object    write only a JSON object, complete within -n tokens, not the prompt\n"
    "  --lookup         guess tokens from earlier text: faster if the text repeats parts of\n"
    "                   itself; the output stays the same\n"
    "  --jsonl          answer requests from stdin, one JSON object per line (doc/models.md)\n"
    "  -m MODE          generate or chat (generate)\n"
    "  -y TEXT          system prompt of the chat (asked for; if empty, the template's own);\n"
    "                   -y '': none\n"
    "  --template NAME  chat template (the model file's own):\n"
    "                   chatml, llama3, llama3.1, zephyr, llama2, mistral-v0, mistral-v1,\n"
    "                   mistral-v3, mistral-v3-tekken, phi3 or phi4-mini\n"
    "  -c NUMBER        context: max tokens that the model sees at once (the model's maximum)\n"
    "  -z FILE          tokenizer, in llama2.c's format (the model's own, else tokenizer.bin)\n"
    "  -j NUMBER        threads (one per core, max 64)\n"
    "  --kv NAME        number format of the KV cache: f32, f16 or q8\n"
    "                   (f32; f16 if the weights are quantised)\n"
    "  --no-copy        use the weights in the mapped file; processes share its memory\n"
    "  --stream         keep no weights in memory: read the file for every token (slow)\n"
    "  --device NAME    cpu, cuda, or auto: cuda if it can be used\n"
    "                   (cuda in the GPU program runcuda; run has only cpu)\n"
    "  --raw            print control characters that the model writes\n"
    "  --perplexity FILE  print how well the model predicts a text\n"
    "  --tokenize       print the token ids of the prompt, or of each line of stdin; with\n"
    "                   -m chat, those of user turns\n"
    "  --logits         write the logits of every prompt token as float32\n"
    "  --verify         compare the weights with the checksum in the file\n"
    "  --bench          measure the speed of a prompt, then of -n tokens one by one,\n"
    "                   for -b texts at once\n"
    "  --json           print the result of --bench as JSON\n"
    "  --version        version, instruction set and devices      -h, --help  this text\n";

#ifdef CUDA
static const char default_device[] = "cuda", devices[] = "cuda, cpu";
#else
static const char default_device[] = "cpu", devices[] = "cpu";
#endif

enum {
    MAX_STOPS = 16, // one more than the max number of --stop texts
    MAX_AT_ONCE = 1024,
    AT_ONCE = 16, // without -b: max texts of --prompts or --jsonl that are computed together
};

typedef struct {
    const char *model, *prompt, *prompt_file, *tokenizer, *mode, *system;
    const char *template, *perplexity, *device, *kv, *prompts, *prompt_cache;
    const char *stops[MAX_STOPS];
    int n_stops;
    double temperature, topp, topk, minp, repeat_penalty, frequency_penalty, presence_penalty;
    double seed, steps, context, threads, at_once; // 0: the default; steps 0: the context
    bool raw, no_copy, stream, tokenize, logits, verify, bench, json, jsonl, json_object, lookup;
} Options;

// An option of the command line. One of `on`, `text` and `number` points to where its value is
// stored; the other two are NULL.
typedef struct {
    const char *flag;
    bool *on; // becomes true; the option has no value
    const char **text;
    double *number, min, max;
    bool whole; // the number must be a whole number
    int *count; // options that may be repeated: values so far; else the last one counts
} Option;

static Option find_option(Options *o, const char *flag) {
    const Option options[] = {
        {"-t", .number = &o->temperature, .max = 1e6},
        {"-p", .number = &o->topp, .max = 1},
        {"-k", .number = &o->topk, .max = INT_MAX, .whole = true},
        {"--min-p", .number = &o->minp, .max = 1},
        {"--repeat-penalty", .number = &o->repeat_penalty, .max = 100},
        {"--frequency-penalty", .number = &o->frequency_penalty, .min = -100, .max = 100},
        {"--presence-penalty", .number = &o->presence_penalty, .min = -100, .max = 100},
        {"-s", .number = &o->seed, .max = 9007199254740991, .whole = true},
        {"-n", .number = &o->steps, .max = INT_MAX, .whole = true},
        {"-b", .number = &o->at_once, .min = 1, .max = MAX_AT_ONCE, .whole = true},
        {"-c", .number = &o->context, .min = 1, .max = INT_MAX, .whole = true},
        {"-j", .number = &o->threads, .min = 1, .max = 1024, .whole = true},
        {"-i", .text = &o->prompt},
        {"-f", .text = &o->prompt_file},
        {"-z", .text = &o->tokenizer},
        {"-m", .text = &o->mode},
        {"-y", .text = &o->system},
        {"--stop", .text = &o->stops[o->n_stops], .count = &o->n_stops},
        {"--prompts", .text = &o->prompts},
        {"--prompt-cache", .text = &o->prompt_cache},
        {"--kv", .text = &o->kv},
        {"--device", .text = &o->device},
        {"--perplexity", .text = &o->perplexity},
        {"--template", .text = &o->template},
        {"--no-copy", .on = &o->no_copy},
        {"--stream", .on = &o->stream},
        {"--raw", .on = &o->raw},
        {"--tokenize", .on = &o->tokenize},
        {"--verify", .on = &o->verify},
        {"--logits", .on = &o->logits},
        {"--bench", .on = &o->bench},
        {"--json", .on = &o->json},
        {"--jsonl", .on = &o->jsonl},
        {"--json-object", .on = &o->json_object},
        {"--lookup", .on = &o->lookup},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (!strcmp(flag, options[i].flag)) return options[i];
    die(flag, "no such option; see run --help");
}

// Parses a decimal number from o->min to o->max.
static double parse_number(const Option *o, const char *s) {
    char *end;
    double value = strtod(s, &end);
    bool plain = *s && strspn(s, o->whole ? "0123456789" : "0123456789.+-eE") == strlen(s);
    if (!plain || *end || !(value >= o->min && value <= o->max))
        die(o->flag, "'%.40s' is not a %snumber from %.0f to %.0f", s, o->whole ? "whole " : "",
            o->min, o->max);
    return value;
}

// Stores the value of an option; `value` is NULL if the option takes none, or if it is missing.
static void set_option(const Option *o, const char *value) {
    if (!o->on && !value) die(o->flag, "its value is missing; see run --help");
    if (o->on) *o->on = true;
    else if (o->text) *o->text = value;
    else *o->number = parse_number(o, value);
    if (o->count && ++*o->count == MAX_STOPS)
        die(o->flag, "given %d times, expected at most %d", MAX_STOPS, MAX_STOPS - 1);
}

// Returns the bits per number of the KV cache; 0: the library chooses.
static int kv_bits(const char *name) {
    if (!name) return 0;
    if (!strcmp(name, "f32")) return 32;
    if (!strcmp(name, "f16")) return 16;
    if (!strcmp(name, "q8")) return 8;
    die("--kv", "unknown KV cache type '%.40s', expected f32, f16 or q8", name);
}

// Checks combinations of options.
static void check_tasks(const Options *o) {
    bool chat = !strcmp(o->mode, "chat"), has_prompt = o->prompt || o->prompt_file;
    int tasks = o->tokenize + o->logits + o->verify + o->bench + (o->perplexity != NULL);
    if (o->prompt && o->prompt_file) die("-f", "the prompt is already given with -i");
    if (tasks > 1)
        die("options",
            "expected only one of --tokenize, --logits, --verify, --bench and --perplexity");
    if (o->json && !o->bench) die("--json", "works only together with --bench");
    if (o->prompts && o->jsonl) die("--jsonl", "prompts are already given with --prompts");
    if (o->prompts || o->jsonl) {
        const char *flag = o->jsonl ? "--jsonl" : "--prompts";
        if (has_prompt) die(flag, "a prompt is already given with %s", o->prompt ? "-i" : "-f");
        if (tasks || chat) die(flag, "works only when generating texts, not in a chat");
    }
    if (o->at_once > 1 && ((tasks && !o->bench) || chat))
        die("-b", "works only with --bench or when generating texts, not in a chat");
    if (o->prompt_cache && (tasks || chat || o->prompts || o->jsonl || o->at_once > 1))
        die("--prompt-cache",
            "works only when generating one text: no chat, --prompts, --jsonl or -b above 1");
    if ((o->json_object || o->lookup) && tasks)
        die(o->lookup ? "--lookup" : "--json-object",
            "works only when generating texts or in a chat");
}

static void check_options(const Options *o) {
    const char *device = o->device;
    if (!o->model) die("no model given", "expected ./run model.gguf [options]; see ./run --help");
    check_tasks(o);
    if (strcmp(o->mode, "generate") && strcmp(o->mode, "chat"))
        die("-m", "unknown mode '%s', expected generate or chat", o->mode);
    if (strcmp(device, "cpu") && strcmp(device, "cuda") && strcmp(device, "auto"))
        die("--device", "unknown device '%s', expected cpu, cuda or auto", device);
    if (!strcmp(device, "cuda") && strcmp(default_device, "cuda") != 0)
        die("--device",
            "this program runs on the CPU only; build the GPU program with: make runcuda");
    kv_bits(o->kv); // checks the name
}

static void print_version(void) {
    printf("llamac, library version %d\ninstruction set: %s\ndevices: %s\n", llamac_version(),
           llamac_isa(), devices);
}

static Options parse_options(int argc, char **argv) {
    Options o = {
        .mode = "generate", .temperature = 1, .topp = 0.9, .steps = 256, .device = default_device};
    for (int i = 1; i < argc; i++) {
        char *flag = argv[i];
        if (!strcmp(flag, "--help") || !strcmp(flag, "-h"))
            print_bytes(help, strlen(help)), flush(), exit(0);
        if (!strcmp(flag, "--version")) print_version(), flush(), exit(0);
        if (i == 1 && *flag != '-') { // the model comes first
            o.model = flag;
            continue;
        }
        if (!o.model) continue; // check_options reports the missing model, unless --help follows
        char *equals = strncmp(flag, "--", 2) ? NULL : strchr(flag, '='); // as in --kv=f16
        if (equals) *equals = 0;
        Option option = find_option(&o, flag);
        if (equals && option.on) *equals = '=', die(flag, "this option takes no value");
        set_option(&option, equals ? equals + 1 : option.on ? NULL : argv[++i]);
    }
    check_options(&o);
    return o;
}

// Returns whether the sampler needs logits in host memory: a GPU itself applies only temperature
// and top-p.
static bool needs_logits(const Options *o) {
    return o->topk || o->minp || (o->repeat_penalty && o->repeat_penalty != 1)
           || o->frequency_penalty || o->presence_penalty || o->json_object;
}

#endif
