# `make help` lists what there is. Everything happens in .venv; nothing outside of this folder is changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# ninja, cmake and the formatters of the environment, for what starts them by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)

# What is imported is compiled once and kept, here and in the many processes that tests start: set in a container, this
# has each of them compile PyTorch's and SymPy's sources anew, two to four seconds a process.
unexport PYTHONDONTWRITEBYTECODE

# Warnings are errors in development and CI; `pip install` leaves them warnings, since compilers differ.
export CUDA_OPS_WERROR ?= 1

C_SOURCES = $(shell git ls-files 'csrc/*.c' 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/c/*.c' 'tests/c/*.h' \
              'tests/emulation/*.cpp' 'tests/emulation/*.h' 'tests/emulation/*.cuh')

.PHONY: help mnist mnist-c gpt gpt2-c test fuzz fuzz-raw bench doctor build lint format check-gpu clean

help:
	@echo "make mnist       train the MNIST CNN with our kernels and with PyTorch's, side by side (ARGS='--epochs 3')"
	@echo "make mnist-c     train it in plain C, without Python (ARGS='--epochs 3 --threads 2'); needs a C compiler alone"
	@echo "make gpt         train GPT-2's architecture on tiny Shakespeare with our kernels and with PyTorch's (ARGS='--backend all')"
	@echo "make gpt2-c      train it in plain C, without Python (ARGS='--steps 500 --threads 2'); needs a C compiler alone"
	@echo "make test        run the test suite (ARGS='-k conv2d')"
	@echo "make fuzz        compare random cases of all ops with PyTorch (SECONDS=600 or CASES=2000, SEED=1 DEVICE=cuda)"
	@echo "make fuzz-raw    call the registered ops with arguments that do not fit (SECONDS=600 SEED=1 DEVICE=cuda)"
	@echo "make bench       time our ops against PyTorch's (ARGS='conv2d linear')"
	@echo "make doctor      say what is built, what runs, and what to do where something does not"
	@echo "make build       compile what has changed"
	@echo "make check-gpu   tests, compute-sanitizer and MNIST on this machine's GPU, with a report in benchmarks/results"
	@echo "make lint        ruff, clang-format, and the rules that a machine can check"
	@echo "make format      let ruff and clang-format mend what they can"
	@echo "make clean       remove what was built (and not .venv: delete that by hand)"
	@echo
	@echo "CUDA_OPS_CUDA=0 builds without the CUDA kernels, CUDA_OPS_CUDA=1 insists on them and brings nvcc if need be."

mnist: build
	@$(BIN)/python -m cuda_ops mnist $(ARGS)

# Shows what it compiles only where that fails. GCC's threads would wait for each other at full speed for milliseconds,
# which on a machine with other work costs far more than it saves.
mnist-c:
	@test -e build/apps/mnist || echo "cuda_ops: compiling the C library, once (minutes, where it is built with CUDA)"
	@$(MAKE) -s $(if $(findstring -j,$(MAKEFLAGS)),,-j$(shell getconf _NPROCESSORS_ONLN)) -f csrc/apps/Makefile build/apps/mnist
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-10000} build/apps/mnist $(ARGS)

gpt2-c:
	@test -e build/apps/gpt2 || echo "cuda_ops: compiling the C library, once (minutes, where it is built with CUDA)"
	@$(MAKE) -s $(if $(findstring -j,$(MAKEFLAGS)),,-j$(shell getconf _NPROCESSORS_ONLN)) -f csrc/apps/Makefile build/apps/gpt2
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-10000} build/apps/gpt2 $(ARGS)

gpt: build
	@$(BIN)/python -m cuda_ops gpt $(ARGS)

# A file of tests stays with one worker, since what its tests share is made once a worker; which of them begin is for
# tests/conftest.py to say. ARGS='-n 0' is one process.
test: build
	@$(BIN)/python -m pytest -n auto --maxprocesses=8 --dist loadfile --no-loadscope-reorder $(ARGS)

SECONDS ?= 60
# Cases of fuzz-raw, where both are made at once; its calls are shorter.
RAW_CASES ?= $(CASES)
FUZZ = PYTHONPATH=.:tests $(BIN)/python -m
FUZZ_LENGTH = $(if $(1),--cases $(1),--seconds $(SECONDS))
FUZZ_OPTIONS = $(if $(SEED),--seed $(SEED)) $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

fuzz: build
	@$(FUZZ) support.fuzz $(call FUZZ_LENGTH,$(CASES)) $(FUZZ_OPTIONS)

fuzz-raw: build
	@$(FUZZ) support.fuzz_raw $(call FUZZ_LENGTH,$(RAW_CASES)) $(FUZZ_OPTIONS)

bench: build
	@$(BIN)/python -m cuda_ops bench $(ARGS)

doctor: build
	@$(BIN)/python -m cuda_ops doctor $(ARGS)

check-gpu: build
	@$(BIN)/python benchmarks/check_gpu.py $(ARGS)

# The environment is made again when the pins change. The stamp comes last, so that a broken install is repeated.
# Python compiles what it imports; pip would compile all there is, on one core while the other waits.
$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "cuda_ops: $(PYTHON) is older than 3.10; name another: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "cuda_ops: $(PYTHON) cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)" >&2; exit 2; }
	@echo "cuda_ops: installing PyTorch and the other pinned packages into $(VENV) (some gigabytes, once)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -r requirements.txt
	@touch $@

# Compiles into build/ and cuda_ops/; incremental. The editable install after it only writes the link and metadata.
build: $(VENV)/.installed
	@$(BIN)/python build_backend/toolkit.py
	@$(BIN)/python setup.py -q build_ext --inplace
	@$(BIN)/python -c 'import importlib.metadata as m; m.version("cuda_ops")' 2>/dev/null || \
	    $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .

lint: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	@! grep -nsE '#[[:space:]]*include[[:space:]]*[<"](torch|ATen|c10|pybind11|Python)' -r csrc/cpu csrc/cuda csrc/include csrc/apps \
	    || { echo "cuda_ops: kernels know nothing of PyTorch or Python (see CONTRIBUTING.md)" >&2; exit 1; }
	@! grep -nsE '#[[:space:]]*include[[:space:]]*".*ladder/' -r --exclude-dir=ladder csrc \
	    || { echo "cuda_ops: production code includes no rung of a ladder (see CONTRIBUTING.md)" >&2; exit 1; }
	@! grep -nswE 'asm|__asm|__asm__' -r csrc --exclude-dir=ptx --exclude-dir=cpu \
	    || { echo "cuda_ops: an instruction in asm stands once, in csrc/cuda/ptx, in a function named after it" >&2; exit 1; }
	@echo "lint: clean"

format: $(VENV)/.installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(C_SOURCES)

clean:
	@rm -rf build dist cuda_ops.egg-info cuda_ops/*.so cuda_ops/_build_info.json .pytest_cache .hypothesis .ruff_cache runs
	@find cuda_ops tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
