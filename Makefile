# Every target does its own set-up in .venv; stamps keep a second call from repeating it.
# After `make install` Python files are used where they lie: only csrc/ needs a rebuild.

TORCH       ?= torch==2.13.0
# The version this torch is released with. `make test TRITON=` goes without: it takes 700 MB of disk.
TRITON      ?= triton==3.7.1
# What `make dist` tries the wheel with: versions of torch, or Pythons of environments with one.
TORCHES     ?= $(TORCH)
PYTHON      ?= $(shell command -v python3.11 || command -v python3)
PYTEST_ARGS ?=
# One process per core, one thread in each: most tests are too small for more. Files stay whole, for what they share.
PARALLEL    ?= --numprocesses auto --maxprocesses 8 --dist loadfile
BENCH_ARGS  ?=
EXPERIMENTS_ARGS ?=
# Parts of `make report` to run again, all of them by default, and where their rows are kept.
PARTS       ?=
OUT         ?= benchmarks/results
PEERS       ?= orthogonium==0.0.4 deel-torchlip==1.0.5 geotorch==0.4.0
GPU_ARGS    ?=

SANITIZERS     ?= address,undefined
SANITIZE_TESTS ?= tests/test_cpu_backend.py
# The first two measure resident memory, which AddressSanitizer's quarantine of freed blocks fills; the third repeats what
# another test has executed.
SANITIZE_SKIP  ?= $(addprefix tests/test_cpu_backend.py::,test_repeated_calls_keep_no_memory test_workspace_is_bounded \
    test_same_input_same_bits)
# Tests of one file, so not PARALLEL. A process that a sanitizer ends counts as a failed test.
SANITIZE_PARALLEL ?= --numprocesses auto --maxprocesses 8

VENV   := .venv
STAMPS := $(VENV)/stamps
PY     := $(VENV)/bin/python
PIP_MODULE := -m pip --quiet --disable-pip-version-check
PIP    := $(PY) $(PIP_MODULE)
BUILD_TOOLS := 'setuptools>=77.0.3' ninja pybind11
EDITABLE := OCNN_FUSED_BUILD_EXTENSION=0 $(PIP) install --no-build-isolation --editable
NATIVE := $(shell find csrc)
CLANG  := $(shell find csrc tests/cpu_host tests/cuda_host -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: install test test-quick test-avx2 test-torch integrations test-integrations test-zoo coverage bench bench-training \
    bench-smoke bench-check report peers experiments-smoke lint format sanitize gpu gpu-check \
    cuda-build dist clean FORCE
.DELETE_ON_ERROR:

install: $(STAMPS)/extension

test: $(STAMPS)/extension $(STAMPS)/test
	OMP_NUM_THREADS=1 $(PY) -m pytest tests $(PARALLEL) $(PYTEST_ARGS)

# A selection for newcomers: two minutes on two cores, where the whole suite takes twenty and more.
QUICK_TESTS := $(patsubst %,tests/test_%.py,bad_input foreach identities imports info init one_node plan projection \
    properties regularizer regularizer_layers regularizer_networks report spectrum spectrum_network targets)

test-quick: $(STAMPS)/extension $(STAMPS)/test
	OMP_NUM_THREADS=1 $(PY) -m pytest $(QUICK_TESTS) $(PARALLEL) $(PYTEST_ARGS)

# On a processor with AVX-512, the share of the suite in which one without it can differ, as it would run there.
AVX2       := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
AVX2_TESTS := $(patsubst %,tests/test_%.py,autograd cpu_backend experiments)

test-avx2: $(STAMPS)/extension $(STAMPS)/test $(STAMPS)/experiments
	$(AVX2) OMP_NUM_THREADS=1 $(PY) -m pytest $(AVX2_TESTS) $(PARALLEL) $(PYTEST_ARGS)

# The suite with another torch, from a copy of the sources and in a venv of their own, so that .venv stays as it is:
# make test-torch TORCH=torch==2.10.0 PYTHON=python3.13 TRITON=triton==3.6.0
# WHEEL names a wheel for that Python, whose files are tested; without it one is built first.
# Without TRITON on the command line it runs without triton: each torch wants its own.
WHEEL         ?=
GIVEN_TRITON   = $(if $(filter command environment,$(firstword $(origin TRITON))),$(TRITON))
OTHER_NAME     = $(subst $() ,-,$(strip $(subst ==,-,$(TORCH) $(GIVEN_TRITON)) $(notdir $(PYTHON))))
OTHER_VENV     = $(CURDIR)/.venv-$(OTHER_NAME)
OTHER_PY       = $(OTHER_VENV)/bin/python
OTHER_PIP      = $(OTHER_PY) $(PIP_MODULE)
OTHER_FOLDER   = build/$(OTHER_NAME)

test-torch:
	test -x $(OTHER_PY) || $(PYTHON) -m venv $(OTHER_VENV)
	rm -rf $(OTHER_FOLDER)
	mkdir -p $(OTHER_FOLDER)/sources
	git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --ignore-failed-read \
	    | tar --extract --directory=$(OTHER_FOLDER)/sources
	$(OTHER_PIP) install '$(TORCH)' $(BUILD_TOOLS)
	$(if $(WHEEL),,$(OTHER_PIP) wheel --no-deps --wheel-dir $(OTHER_FOLDER) ./$(OTHER_FOLDER)/sources)
	$(OTHER_PY) -m zipfile --extract $(or $(WHEEL),$(OTHER_FOLDER)/*.whl) $(OTHER_FOLDER)/sources
	cd $(OTHER_FOLDER)/sources && OCNN_FUSED_BUILD_EXTENSION=0 $(OTHER_PIP) install --no-build-isolation \
	    --editable '.[test]' $(GIVEN_TRITON)
	cd $(OTHER_FOLDER)/sources && OMP_NUM_THREADS=1 $(OTHER_PY) -m pytest tests $(PARALLEL) $(PYTEST_ARGS)

# Which lines of the package the tests execute; what only child processes execute counts as missed.
coverage: $(STAMPS)/extension $(STAMPS)/test $(STAMPS)/coverage
	OMP_NUM_THREADS=1 $(PY) -m pytest tests $(PARALLEL) --cov=ocnn_fused --cov-report=term-missing:skip-covered \
	    --cov-report=html:build/coverage $(PYTEST_ARGS)

# Installs Lightning, transformers and Accelerate; without them `make test` skips its part that needs them.
integrations: $(STAMPS)/integrations

# That part alone.
test-integrations: $(STAMPS)/extension $(STAMPS)/integrations
	$(PY) -m pytest tests/integrations $(PYTEST_ARGS)

# Networks of timm, diffusers and peft against the definition. timm requires torchvision, of which there may be no build
# for the torch in use; its networks do without.
test-zoo: $(STAMPS)/extension $(STAMPS)/zoo
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/integrations -k "timm or diffusers or peft" $(PYTEST_ARGS)

bench: $(STAMPS)/extension $(STAMPS)/bench
	$(PY) benchmarks/compare.py $(BENCH_ARGS)

# What the regulariser adds to a training step.
bench-training: $(STAMPS)/extension $(STAMPS)/bench
	$(PY) benchmarks/training_overhead.py $(BENCH_ARGS)

# All experiments of docs/replication.md in seconds, on tiny data unless EXPERIMENTS_ARGS="--data PATH" names some.
experiments-smoke: $(STAMPS)/extension $(STAMPS)/experiments
	OMP_NUM_THREADS=1 $(PY) -m experiments queue --smoke $(EXPERIMENTS_ARGS)

# A smoke of every benchmark, seconds each: that they run, and that what they time is right.
bench-smoke: $(STAMPS)/extension $(STAMPS)/test $(STAMPS)/bench
	OMP_NUM_THREADS=1 $(PY) -m pytest benchmarks --benchmark-disable $(PYTEST_ARGS)

# Every benchmark, and docs/benchmarks.md and docs/scale.md from what they measured: a quarter of an hour on two cores.
# `make report PARTS="resnet34 memory"` runs these alone; OUT=build/benchmarks leaves the kept rows and docs/ as they are.
report: $(STAMPS)/extension $(STAMPS)/bench $(STAMPS)/test
	-$(MAKE) peers
	$(PY) benchmarks/report.py --run $(PARTS) --out $(OUT)

# A run in build/benchmarks against the kept one: ratios that have risen by more than 15%.
bench-check: $(STAMPS)/bench
	$(PY) benchmarks/check.py build/benchmarks benchmarks/results $(BENCH_ARGS)

# Packages for hard orthogonality to compare with, without what they ask for: that is torch and numpy.
peers: $(STAMPS)/peers

lint: $(STAMPS)/dev $(STAMPS)/test $(STAMPS)/bench $(STAMPS)/experiments
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CLANG)

format: $(STAMPS)/dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CLANG)

# A whole copy of the package, compiled with the sanitizers; the tests run from within, so that it is what they import.
# Their reports go past pytest (--capture=sys), else they would die with the process.
# libstdc++ is preloaded too, because the sanitizers look for its __cxa_throw before torch has loaded it.
SANITIZED := build/sanitize/lib
PRELOAD    = $$(for name in asan ubsan stdc++; do $${CXX:-g++} -print-file-name=lib$$name.so; done | paste -sd:)
# Two threads, so that work is divided; they must not spin, because the processes share the cores.
CHECKED    = env LD_PRELOAD="$(PRELOAD)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(CURDIR)/$(PY)

sanitize: $(STAMPS)/test
	OCNN_FUSED_SANITIZE=$(SANITIZERS) $(PY) setup.py --quiet build --build-base build/sanitize --build-lib $(SANITIZED)
	cd $(SANITIZED) && $(CHECKED) -c \
	    'from ocnn_fused._extension import *; assert module and "-fsanitize=$(SANITIZERS)" in build_info["flags"]'
	cd $(SANITIZED) && $(CHECKED) -m pytest --capture=sys --config-file=$(CURDIR)/pyproject.toml --rootdir=$(CURDIR) \
	    $(addprefix $(CURDIR)/,$(SANITIZE_TESTS)) $(addprefix --deselect=,$(SANITIZE_SKIP)) $(SANITIZE_PARALLEL) $(PYTEST_ARGS)

# Compiles the Triton kernels for every supported GPU; needs none. About four minutes on two cores.
ifeq ($(GIVEN_TRITON),)
gpu-check: $(STAMPS)/test
	mkdir -p build
	$(PY) tools/gpu_check.py --out build/gpu_check.md
else
# The same with another triton, beside the one in .venv, and then the tests of its launcher: make gpu-check TRITON=triton==3.9.0
OTHER_TRITON := $(CURDIR)/build/$(subst ==,-,$(GIVEN_TRITON))
gpu-check: $(STAMPS)/package
	test -d $(OTHER_TRITON) || $(PIP) install --no-deps --target $(OTHER_TRITON) '$(GIVEN_TRITON)'
	$(EDITABLE) '.[test]'
	PYTHONPATH=$(OTHER_TRITON) $(PY) tools/gpu_check.py --out build/gpu_check-$(notdir $(OTHER_TRITON)).md
	PYTHONPATH=$(OTHER_TRITON) $(PY) -m pytest tests/test_triton_driver.py $(PYTEST_ARGS)
endif

# For a machine with a GPU: check, tests, both benchmarks and the model, in one report to attach to an issue. TORCH names a
# build with CUDA, for instance `make gpu TORCH=torch==2.14.1 TRITON=`: that one brings its own triton.
gpu: $(STAMPS)/extension $(STAMPS)/test $(STAMPS)/bench
	$(PY) tools/gpu_report.py --out build/gpu $(GPU_ARGS)

# The extension with its CUDA backend, in a folder of its own; needs nvcc, but neither a GPU nor a torch with CUDA.
cuda-build: $(STAMPS)/test
	$(PY) tools/cuda_build.py --out build/cuda

# The sdist and, from it, the wheel for this Python, which is tried with every torch of TORCHES in clean environments. As
# the wheels of a release it is without CUDA, unless OCNN_FUSED_CUDA=1.
dist: export OCNN_FUSED_CUDA ?= 0
dist:
	rm -rf dist build/dist
	$(PYTHON) -m venv build/dist/builder
	build/dist/builder/bin/python $(PIP_MODULE) install 'setuptools>=77.0.3'
	build/dist/builder/bin/python tools/dist.py --out dist $(TORCHES)

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info ocnn_fused/_C*.so ocnn_fused/build_info.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS):
	$(PYTHON) -m venv $(VENV)
	mkdir -p $@

# Holds the wanted versions and changes only with them, so that another TORCH or TRITON reinstalls.
$(STAMPS)/wanted-%: FORCE | $(STAMPS)
	@echo '$($*)' | cmp -s - $@ || echo '$($*)' > $@

$(STAMPS)/torch: $(STAMPS)/wanted-TORCH
	$(PIP) install $(TORCH) $(BUILD_TOOLS)
	touch $@

# The package without what is compiled: that is built in place, where ninja redoes only what changed.
$(STAMPS)/package: pyproject.toml $(STAMPS)/torch
	$(EDITABLE) .
	touch $@

$(STAMPS)/extension: $(NATIVE) setup.py tools/cuda_toolkit.py ocnn_fused/_version.py $(STAMPS)/package
	$(PY) setup.py --quiet build_ext --inplace
	touch $@

$(STAMPS)/test: $(STAMPS)/wanted-TRITON $(STAMPS)/package
	$(EDITABLE) '.[test]' $(TRITON)
	touch $@

$(STAMPS)/bench $(STAMPS)/coverage $(STAMPS)/dev $(STAMPS)/experiments $(STAMPS)/integrations: $(STAMPS)/%: $(STAMPS)/package
	$(EDITABLE) '.[$*]'
	touch $@

$(STAMPS)/peers: $(STAMPS)/bench
	$(PIP) install --no-deps $(PEERS)
	touch $@

$(STAMPS)/zoo: $(STAMPS)/test
	$(PIP) install diffusers peft 'transformers>=4.46' pyyaml safetensors huggingface_hub
	$(PIP) install --no-deps timm
	touch $@
