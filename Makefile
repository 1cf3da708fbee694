# Every target sets up what it needs: a virtual environment in .venv, the pinned tools, the build. Later runs are quick.
#   make demo      one MoE layer and four layers of a model, ours and stock, on the best device available
#   make test      the fast tests, on the CPU and on mps (a Mac's own, else the simulated one)
#   make test-sim  the simulated Metal's own tests;  make test-tools  tests of the benchmarks, the fuzzer and other tools
#   make test-slow slow tests: broken kernels, emulated AMX, wheels, every alternative of tuning, the oldest transformers.
#                  It runs the sets whose subject has changed since they last passed; SETS="wheels tuning" chooses some,
#                  SETS=--all all
#   make test-oldest  the tests that depend on transformers, with the oldest supported; TRANSFORMERS=5.25.0 chooses another
#   make test-arm  the CPU's readers of packed weights on an emulated ARM processor
#   make portable  the CPU backend without csrc/cpu/x86, in build/portable, with the tests of the ops
#   make test-all  all of these, changed or not, and the full grid of cases: hours
#   make fuzz      random calls of every op against the reference, and broken checkpoints; CASES=20000 CHECKPOINTS=500 SEED=7
#                  choose them, CASE=avx2-123 runs one
#   make fuzz-serve  random requests to a server in each mode; REQUESTS=2000 SEED=7 choose them, CASE=batched-123 repeats one
#   make sanitize  the CPU libraries under sanitizers, with the tests of the ops and the fuzzer
#   make bench     times of every op, compared with PyTorch, transformers and MLX; ARGS="--help" lists options
#   make tune      measure launch parameters on this Mac's GPU and save the fastest: ARGS="--model gpt-oss-20b"
#   make report    the files to send us from a Mac, in build/report: doctor.txt, validated.txt, bench.json, packed.json,
#                  tune.json
#   make validate  doctor under Metal's own checks of every call and every access of a shader
#   make benchmarks  write BENCHMARKS.md and the README's table from benchmarks/, and docs/ops.md from reference.py
#   make cross     the macOS extension compiled and linked on this machine against real macOS torch wheels;
#                  CROSS="2.14.1 2.15.0" chooses them
#   make wheel     a wheel for the torch that TORCH=2.15 chooses, tested in a fresh environment; the result is in dist/
#   make shaders   Apple's own compilers on every shader, on a Mac with Xcode: make shaders ARGS="--only linear"
#   make lint      style and format checks, also of the workflows;  make format fixes them
#   make ci        everything that CI runs on Linux, with the seconds of each phase: at most 30 minutes on two cores
#   make clean     remove build output;  make distclean also removes .venv
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# The instruction sets that an editable build compiles: this machine's best, all of them, or a list.
MOE_METAL_CPU ?= native
BUILT := build/installed-$(MOE_METAL_CPU)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
SIM_TESTS := tests/metal_sim
TOOL_TESTS := tests/tools tests/gpu
# A process per core, but at most four, to limit memory. Each has OpenMP threads for all cores: waiting threads must sleep,
# or they take the cores from the other processes and small ops take ten times as long.
PROCESSES := --numprocesses auto --maxprocesses 4 --dist worksteal
TEST_PYTHON := OMP_WAIT_POLICY=passive $(BIN)/python
PYTEST := $(TEST_PYTHON) -m pytest $(PROCESSES)
TRANSFORMERS ?= 5.23.0
SETS ?=
CROSS ?= 2.14.1 2.15.0
TORCH ?= $(if $(filter Darwin,$(shell uname)),2.14,2.13)
CASES ?= 20000
CHECKPOINTS ?= 500
REQUESTS ?= 2000
MAX_JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
CXX_FILES := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.mm csrc/cpu/*/*.h csrc/cpu/*/*.cpp csrc/cpu/*/*/*.h csrc/cpu/*/*/*.cpp shaders/*.h shaders/*/*.h shaders/*.metal)
SIM_FILES := $(wildcard $(addprefix tests/metal_sim/,engine/*.h engine/*.cpp engine/shim/*.h engine/shim/*.cpp device/*.h device/*.cpp device/*.mm))
SIM_FILES += $(wildcard tests/gpu/shim/*.h)
# Metal's own validation, which needs an Apple GPU: man MetalValidation.
CHECKED := MTL_DEBUG_LAYER=1 MTL_SHADER_VALIDATION=1 MTL_SHADER_VALIDATION_REPORT_TO_STDERR=1
export MAX_JOBS

.PHONY: help demo test test-sim test-tools test-slow test-oldest test-arm portable test-all bench tune benchmarks doctor validate mps report shaders cross wheel fuzz fuzz-serve sanitize lint ci format clean distclean

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/.ready: tools/requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "Missing: $(PYTHON). Install Python 3.11 or newer, or say make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Missing: Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Say make PYTHON=/path/to/python3"; exit 1; }
	@echo "==> Making a virtual environment in .venv"
	@$(PYTHON) -m venv .venv || { echo "Missing: Python's venv module. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "==> Installing torch, transformers and the build tools (a minute or two the first time)"
	@$(PIP_INSTALL) -r tools/requirements.txt
	@touch $@

$(BIN)/.ready-to-test: tests/requirements.txt $(BIN)/.ready
	@echo "==> Installing what the tests need: pytest, mlx, peft ... (a minute or two the first time)"
	@$(PIP_INSTALL) -r tests/requirements.txt
	@touch $@

# A build of all instruction sets has the native one in it; a native build removes the others, which would be outdated.
build/installed-%: $(BIN)/.ready setup.py pyproject.toml $(CXX_FILES) shaders/embed.py
	@command -v $${CXX:-c++} >/dev/null || { echo "Missing: a C++ compiler. On macOS: xcode-select --install; on Debian and Ubuntu: apt-get install g++"; exit 1; }
	@$(BIN)/python -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' || { echo "Missing: Python's headers. On Debian and Ubuntu: apt-get install python3-dev"; exit 1; }
	@mkdir -p build
	@rm -f build/installed-*
	@set -o pipefail; MOE_METAL_CPU=$* $(BIN)/python -m pip install --verbose --disable-pip-version-check --no-build-isolation --no-deps --editable . 2>&1 \
		| tee build/log | grep --line-buffered --only-matching '==> .*' \
		|| { tail -n 60 build/log; echo "The build failed; the end of its output is above, all of it in build/log"; exit 1; }
	@touch $@ $(if $(filter all,$*),build/installed-native)

demo: $(BUILT)
	@$(BIN)/python -m torch_moe_metal demo

test: $(BUILT) $(BIN)/.ready-to-test
	$(PYTEST) -m "not slow" tests $(addprefix --ignore=,$(SIM_TESTS) $(TOOL_TESTS))

test-sim: $(BUILT) $(BIN)/.ready-to-test
	$(PYTEST) -m "not slow" $(SIM_TESTS)

test-tools: $(BUILT) $(BIN)/.ready-to-test
	$(PYTEST) -m "not slow" $(TOOL_TESTS)

# tools/slow_sets.py builds all instruction sets if a set that it runs needs them.
test-slow: $(BUILT) $(BIN)/.ready-to-test
	$(TEST_PYTHON) tools/slow_sets.py $(SETS) -- $(PROCESSES)

test-oldest: $(BUILT) $(BIN)/.ready-to-test
	$(TEST_PYTHON) tools/other_transformers.py $(TRANSFORMERS) -- $(PROCESSES)

test-arm: $(BUILT) $(BIN)/.ready-to-test
	MOE_METAL_DEVICES=cpu $(BIN)/python -m pytest tests/test_arm.py

# A copy of the tree without the folder. Its objects stay, so that only what has changed is compiled again.
PORTABLE := csrc shaders tests torch_moe_metal LICENSE README.md pyproject.toml setup.py
PORTABLE_TESTS := $(addprefix tests/test_,ops.py quantized.py ggml.py attention.py)
portable: $(BIN)/.ready-to-test
	@mkdir -p build/portable/build
	@rm -rf $(addprefix build/portable/,$(PORTABLE))
	@tar -c --exclude csrc/cpu/x86 --exclude '*.so' --exclude tests/metal_sim --exclude __pycache__ $(PORTABLE) \
		| tar -x -C build/portable
	@cd build/portable && MOE_METAL_CPU=$(MOE_METAL_CPU) ../../$(BIN)/python setup.py --quiet build_ext --inplace
	cd build/portable && MOE_METAL_DEVICES=cpu OMP_WAIT_POLICY=passive ../../$(BIN)/python -m pytest $(PROCESSES) \
		-m "not slow" $(PORTABLE_TESTS)

test-all: build/installed-all $(BIN)/.ready-to-test
	$(PYTEST)
	$(MAKE) --no-print-directory test-oldest MOE_METAL_CPU=all

fuzz: build/installed-all $(BIN)/.ready-to-test
	@$(BIN)/python tests/fuzz.py --cases $(CASES) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE)) $(ARGS)
	$(if $(CASE),,@$(BIN)/python tests/fuzz_checkpoints.py --cases $(CHECKPOINTS) $(if $(SEED),--seed $(SEED)))

fuzz-serve: $(BUILT) $(BIN)/.ready-to-test
	@$(BIN)/python tests/fuzz_serve.py --requests $(REQUESTS) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE)) $(ARGS)

sanitize: $(BIN)/.ready-to-test
	@$(BIN)/python tools/sanitize.py $(ARGS)

bench: $(BUILT)
	@$(BIN)/python tools/bench_mlx.py $(ARGS)

tune: $(BUILT)
	@$(BIN)/python -m torch_moe_metal tune $(ARGS)

doctor: $(BUILT)
	@$(BIN)/python -m torch_moe_metal doctor

# doctor under Apple's own validation of each call and each access; an invalid call ends it.
validate: $(BUILT)
	@mkdir -p build
	@set -o pipefail; $(CHECKED) $(BIN)/python -m torch_moe_metal doctor 2>&1 | tee build/validated.txt
	@! grep Invalid build/validated.txt

mps: $(BIN)/.ready
	@$(BIN)/python tools/mps.py $(ARGS)

# Nothing here fails the target: if a virtual Mac's GPU is broken, doctor says so and the report is still written.
report: $(BUILT)
	@mkdir -p build/report
	@GITHUB_STEP_SUMMARY= $(BIN)/python tools/mps.py > build/report/machine.txt
	@$(BIN)/python -m torch_moe_metal doctor | tee build/report/doctor.txt
	$(BIN)/python tools/bench_mlx.py --json $(ARGS) > build/report/bench.json
	$(BIN)/python tools/bench_mlx.py --json --formats affine4 mxfp4 --dtypes bf16 $(ARGS) > build/report/packed.json
	-$(BIN)/python -m torch_moe_metal tune --json > build/report/tune.json
	-$(CHECKED) $(BIN)/python -m torch_moe_metal doctor > build/report/validated.txt 2>&1

benchmarks: $(BIN)/.ready
	@$(BIN)/python tools/benchmarks.py

shaders: $(BUILT)
	$(BIN)/python tools/compile_shaders.py $(ARGS)

cross: $(BIN)/.ready-to-test
	$(BIN)/python tools/cross.py $(CROSS)

wheel:
	$(PYTHON) tools/wheel.py $(TORCH)

lint: $(BIN)/.ready-to-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES) $(SIM_FILES)
	$(BIN)/python tools/check_shaders.py
	$(BIN)/python tools/benchmarks.py --check
	$(BIN)/shellcheck .ci/run
	$(BIN)/actionlint -shellcheck $(BIN)/shellcheck $(wildcard .github/workflows/*.yml)

ci:
	@bash .ci/run

format: $(BIN)/.ready-to-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES) $(SIM_FILES)

clean:
	rm -rf build dist *.egg-info torch_moe_metal/*.so tests/metal_sim/build

distclean: clean
	rm -rf .venv
