# make help lists the targets. CC, CFLAGS, NVCC, NVCCFLAGS, ARCH, PYTHON and PIP_FLAGS can be overridden on the
# command line.
CC      ?= cc
CFLAGS  ?= -O3
WARN    := -std=c11 -Wall -Wextra
NVCC    ?= nvcc
NVCCFLAGS ?= -O3
OBJCOPY ?= objcopy
# Compute capabilities without the dot: all that this nvcc knows, from Volta (70) on. ARCH=90 compiles for Hopper alone.
ARCH    ?= $(shell $(NVCC) --list-gpu-arch | sed 's/compute_//' | awk '$$1 >= 70' | sort -n)
PYTHON  ?= python3
LIBRARY := $(wildcard runtime/*.c runtime/cpu/*.c)
SOURCES := run.c $(LIBRARY)
FORMATTED = run.c $(wildcard browser/*.c cli/*.h runtime/*.[ch] runtime/cpu/*.[ch] runtime/cuda/* \
                       examples/*.c tests/*.c tests/*.cpp tests/*/*.[ch] tests/*/*.cpp)
HEADERS := $(wildcard cli/*.h runtime/*.h runtime/*/*.h runtime/cuda/*.cuh)
VENV    := .venv/bin/python
, := ,
TARGETS := v0 v1 v2 gguf gguf_tokenizer tokenizer_bin encode bpe grammar state batch
RUNS    := 3000000
QUESTION := "One windy Friday, Sue and Pip went to the lake. Where did they go that windy Friday?"

.PHONY: help lib wasm demo chat test lint test-long test-trackers mutations bench debug fuzz encode-long bpe-long odd-strings coverage clean

help:                ## this list
	@grep -E '^[a-z.-]+:.*##' Makefile | sed 's/:[^#]*##/:/' | sed 's/:/ /' | awk '{name = $$1; $$1 = ""; printf "make %-17s%s\n", name, $$0}'

demo: .venv/demo run ## set up, train a small model on built-in stories (5 minutes in all), write a story with it
	$(VENV) train.py --out_dir=out/demo --wandb_log=True
	./run out/demo/model.gguf -i "Once upon a time" -t 0.8 -s 1
	@echo
	@echo "This model was trained from nothing just now. What to try next:"
	@echo "  ./run out/demo/model.gguf -i 'One morning'         another story"
	@echo "  .venv/bin/wandb leet                               the curves of your runs in this terminal"
	@echo "  .venv/bin/python train.py --data=my.txt            your own text"
	@echo "  .venv/bin/python train.py --help                   every knob"

chat: .venv/demo run out/demo/model.gguf ## teach the demo's model to answer questions about stories (three minutes), and ask it one
	$(VENV) train.py config/chat_short.py --wandb_log=True
	$(VENV) train.py config/chat.py --wandb_log=True
	$(VENV) evaluate.py out/chat --conversations=questions --wandb_log=True
	@echo "Ask it more about this or another text; Ctrl-D ends."
	./run out/chat/model.gguf -m chat -y "" -t 0 -i $(QUESTION)

out/demo/model.gguf:
	$(MAKE) demo

# Three workers: two leave a seventh of two cores idle, waiting for the processes that they have started.
test: .venv/test run ## run the tests, except those marked slow (ten minutes on two cores)
	OMP_WAIT_POLICY=PASSIVE $(VENV) -m pytest -q -n 3 --dist=loadfile --no-loadscope-reorder -m "not slow" tests

lint: .venv/test     ## style, layers of imports and likely mistakes: ruff, import-linter, clang-format, the compiler's warnings
	$(VENV) -m ruff check .
	PYTHONPATH=. .venv/bin/lint-imports
	! LC_ALL=C.UTF-8 grep -nE '^.{101}' page/*.js page/*.css page/*.html browser/*.js browser/*.html
	.venv/bin/clang-format --dry-run --Werror $(FORMATTED)
	$(CC) $(WARN) -Wshadow -Wstrict-prototypes -Wpointer-arith -Wvla -Werror -O1 -fsyntax-only $(SOURCES)

test-long: .venv/test run lib ## the tests marked slow, and the long proofs: 100 stops at random steps, 100 kills, 40 faults of the tracker, texts of 1 GB, 2,000 mutants of each file format that Python reads, 50 clean runs under the checks, the page with 200 runs, GPU kernels at 7 sizes of GPU and their races, two processes beside one (two hours)
	OMP_WAIT_POLICY=PASSIVE $(VENV) -m pytest -q -n 2 --dist=loadfile --no-loadscope-reorder -m slow tests
	OMP_WAIT_POLICY=PASSIVE $(VENV) -m pytest -q -s tests/long_resume.py tests/long_track.py tests/long_docs.py tests/long_files.py tests/long_mutated_files.py tests/long_cuda.py tests/long_parallel.py tests/long_checks.py tests/long_page.py

test-trackers:       ## do SwanLab and trackio hold the rows of log.jsonl? in an environment of their own
	$(PYTHON) -m venv cache/trackers
	cache/trackers/bin/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c requirements-extras.txt pytest tqdm numpy swanlab trackio
	cache/trackers/bin/python -m pytest -q -s tests/long_trackers.py

mutations: .venv/test ## do the tests notice 200 changed operators, constants and conditions of Python? (under an hour on two idle cores)
	$(VENV) -m tests.mutations 200 py --workers=2

bench: .venv/demo run ## measure the speed of run with models of 15M to 1.1B parameters (18 GB of disk; see bench/README.md)
	$(VENV) bench/run.py

run: $(SOURCES) $(HEADERS) ## the C program that runs a model; it finds the CPU's vector instructions itself
	$(CC) $(WARN) $(CFLAGS) -o $@ $(SOURCES) -lm -pthread

lib: libllamac.a libllamac.so ## the library alone, for other programs: runtime/llamac.h, examples/

# One object of all units, for both: what one of them calls in another is no business of who links it.
.SECONDARY: cache/lib/llamac.o
cache/lib/llamac.o: $(LIBRARY) $(HEADERS)
	mkdir -p cache/lib && cd cache/lib && $(CC) $(WARN) $(CFLAGS) -fPIC -fvisibility=hidden -c $(LIBRARY:%=../../%)
	$(LD) -r -o $@ $(patsubst %.c,cache/lib/%.o,$(notdir $(LIBRARY)))
	-$(OBJCOPY) --localize-hidden $@

libllamac.a: cache/lib/llamac.o
	rm -f $@ && $(AR) rcs $@ $<

libllamac.so: cache/lib/llamac.o
	$(CC) $(CFLAGS) -shared -o $@ $< -lm -pthread

runcuda: $(SOURCES) runtime/cuda/cuda.cu $(HEADERS) ## run for NVIDIA GPUs (needs nvcc; ARCH=90 compiles for one kind of GPU, in less time)
	mkdir -p cache/cuda && cd cache/cuda && $(CC) $(WARN) $(CFLAGS) -DCUDA -c $(SOURCES:%=../../%)
	$(NVCC) -std=c++17 -Wno-deprecated-gpu-targets $(NVCCFLAGS) $(foreach a,$(ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
	    -gencode arch=compute_$(lastword $(ARCH)),code=compute_$(lastword $(ARCH)) \
	    -o $@ runtime/cuda/cuda.cu $(patsubst %.c,cache/cuda/%.o,$(notdir $(SOURCES))) -lm -lpthread

# Programs for other systems. zig (ziglang of PyPI, in requirements-dev.txt) has the C libraries of all of them. WITH names
# another compiler: make run.exe WITH=x86_64-w64-mingw32-gcc. GCC for Windows aligns the stack to 16 bytes, but not the
# vectors of 32 that it keeps there (GCC bug 54412): its assembler makes such moves unaligned. Clang rounds a * b + c once where GCC
# rounds twice, unless told otherwise: the texts would differ.
ABROAD := run.exe run-macos run-macos-intel run-arm run-linux
run.exe: SYSTEM := x86_64-windows-gnu ## run for Windows, compiled here by zig; WITH=COMPILER: by another one
run-macos: SYSTEM := aarch64-macos ## run for Macs with Apple's processors
run-macos-intel: SYSTEM := x86_64-macos ## run for Macs with Intel's processors
run-arm: SYSTEM := aarch64-linux-musl ## run for Linux on 64-bit ARM, without libraries
run-linux: SYSTEM := x86_64-linux-musl ## run for Linux on x86-64, without libraries
run.exe: UNALIGNED := $(if $(filter %gcc,$(WITH)),-Wa$(,)-muse-unaligned-vector-move)
$(ABROAD): $(SOURCES) $(HEADERS) $(if $(WITH),,.venv/test)
	$(or $(WITH),$(VENV) -m ziglang cc -target $(SYSTEM)) $(WARN) -ffp-contract=off $(CFLAGS) $(UNALIGNED) -s -o $@ $(SOURCES) -lm -pthread

# The library for browsers and node: browser/llamac.js. CC_WASM compiles for wasm32-wasi: zig's clang, or another.
CC_WASM ?= $(VENV) -m ziglang cc -target wasm32-wasi
wasm: browser/llamac.wasm ## the library for browsers, which python export.py --format=html needs (by ziglang)
browser/llamac.wasm: browser/wasm.c $(LIBRARY) $(HEADERS) | .venv/test
	$(CC_WASM) $(WARN) -O3 -msimd128 -mexec-model=reactor -s -Wl,-z,stack-size=1048576 -o $@ browser/wasm.c $(LIBRARY)

debug: $(SOURCES) $(HEADERS) ## run with address and undefined-behaviour sanitizers
	$(CC) $(WARN) -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -o run-debug $(SOURCES) -lm -pthread

# libFuzzer follows no branches of the kernels. Two programs: tracing comparisons finds the bytes that a file must have, but takes
# most of the time of the targets whose inputs are choices.
SANITIZE := -std=gnu11 -g -O2 -fsanitize=address,undefined -fno-sanitize-recover=all
CHOICES  := grammar state batch
fuzz: .venv/test     ## fuzz run's loaders, encoder, grammar, saved sequences and batches with clang's libFuzzer, RUNS inputs for each target
	mkdir -p cache/fuzz && cd cache/fuzz && clang $(SANITIZE) -c ../../runtime/cpu/*.c
	clang $(SANITIZE) -fsanitize=fuzzer -o cache/fuzz/files tests/fuzz/fuzz.c tests/fuzz/printer.c cache/fuzz/*.o -lm -pthread
	clang $(SANITIZE) -fsanitize=fuzzer -fno-sanitize-coverage=trace-cmp -o cache/fuzz/choices tests/fuzz/fuzz.c \
	    tests/fuzz/printer.c cache/fuzz/*.o -lm -pthread
	$(VENV) tests/fuzz/seeds.py cache/fuzz/seeds
	for target in $(TARGETS); do mkdir -p cache/fuzz/$$target && program=files && \
	    case " $(CHOICES) " in *" $$target "*) program=choices; esac && TARGET=$$target cache/fuzz/$$program -runs=$(RUNS) \
	    -max_len=24576 -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix=cache/fuzz/ \
	    cache/fuzz/$$target cache/fuzz/seeds/$$target tests/fuzz/corpus || exit 1; done

encode-long: .venv/test run ## compare run's encoder with sentencepiece's on a million strings, then their speed
	$(VENV) -m tests.test_encode ./run 1000000
	$(VENV) -m tests.test_encode ./run

bpe-long: .venv/test lib ## compare byte-level BPE with tokenizers on a million strings, then their speed (TEXTS="english.txt chinese.txt code.txt")
	$(VENV) -m tests.test_bpe_run 1000000 $(TEXTS)
	$(VENV) -m tests.test_bpe_run time $(TEXTS)

odd-strings: .venv/test run ## compare run on odd strings with sentencepiece, transformers and, with LLAMA_CPP=folder, llama.cpp
	LLAMA_CPP="$(LLAMA_CPP)" $(VENV) -m tests.odd_strings ./run

coverage: .venv/test ## which branches of the library's loaders and tokenizer the tests take (gcov)
	rm -rf cache/coverage && mkdir -p cache/coverage
	COVERAGE="$(CURDIR)/cache/coverage" $(VENV) -m pytest -q tests/test_run.py tests/test_encode.py tests/test_hostile.py
	$(VENV) tests/fuzz/coverage.py cache/coverage

.venv/demo: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("llamac needs Python 3.10 or newer, this is %s" % sys.version.split()[0] \
	    if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv
	$(VENV) -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -r requirements.txt
	@touch $@

.venv/test: .venv/demo requirements-dev.txt requirements-extras.txt
	$(VENV) -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -r requirements-dev.txt
	@touch $@

clean:               ## remove build products; runs, caches and .venv stay
	rm -f run run-debug runcuda browser/llamac.wasm libllamac.a libllamac.so cache/lib/*.o cache/cuda/*.o
	rm -f $(ABROAD) run.pdb
