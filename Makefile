# Every target prepares its own virtual environment first, so each works as the first command on a fresh clone.
#
# PYTHON        interpreter that makes the environment (3.11 or newer)
# TORCH_INDEX   a further package index that offers the CPU build of torch, which is then taken instead of the default
#               index's CUDA build, gigabytes large
# WORKERS       parallel test processes; 0 runs the tests in one process
# ARGS          further arguments for pytest
# GPU_PYTHON    Python version of the machine with a GPU
# TORCH, NUMPY  for make compat: the release of torch, and of numpy where it is not that of constraints.txt
# TRANSFORMERS  for make world: the release of transformers, beside TORCH

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2
ARGS ?=
TORCH ?= 2.14.1
NUMPY ?=
TRANSFORMERS ?= 5.23.0
GPU_PYTHON ?= 3.12

# Not under coverage: interrupts that may strike while the tracer holds its own lock.
UNTRACED := \
            --deselect tests/runtime/test_turns.py::test_an_interrupt_at_any_moment_leaves_no_thread_behind
COMPILED := tests/simulate tests/search/test_cut.py tests/search/test_window.py

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
       $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv gate test lint types soak bench coverage compat world docs gpu wheels mutants size clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	    printf 'make %-9s %s\n' "$$name" "$$text"; done

venv: $(READY)  ## create .venv with the pinned dependencies and this project (done once)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, \
	this is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	@echo "creating $(VENV): the first time takes one to two minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools torch
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

gate: $(READY)  ## run the memory-regression gate on all models
	$(BIN)/pytest --magis-models=all $(ARGS)

test: lint types  ## check style and types, then run the whole test suite
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(READY)  ## check style only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## check types only
	$(BIN)/mypy

soak: $(READY)  ## run the tests that take several hours, with thousands of fresh examples
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m soak --hypothesis-profile=soak $(ARGS)

bench: $(READY)  ## run every benchmark and print its table
	@set -e; for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python "$$program"; done

coverage: $(READY)  ## run the test suite under coverage; at least 90% is required
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS) --dist worksteal $(UNTRACED) $(ARGS)
	NUMBA_DISABLE_JIT=1 $(BIN)/coverage run -m pytest -n $(WORKERS) --dist worksteal $(COMPILED)  # compiled lines are not traced
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=90

$(DOCS_READY): docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	@touch $@

docs: $(DOCS_READY)  ## build the documentation site into build/site; a warning or a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict  # --quiet would hide warnings from it

gpu:  ## on a GPU machine: CUDA tests, profiles, measured workloads, within 9 minutes; call again to go on
	$(PYTHON) tools/gpu/run.py --out .gpu/out $(ARGS)

wheels: $(READY)  ## fetch what a GPU machine without an index lacks (rustworkx, for GPU_PYTHON)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version $(GPU_PYTHON) \
	    --constraint constraints.txt --dest .gpu/wheels rustworkx

compat:  ## the core's tests, the gate on three networks and the GPU rehearsal under another release: TORCH=2.14.1
	$(PYTHON) tools/compat.py --torch $(TORCH) $(if $(NUMPY),--numpy $(NUMPY)) --workers $(WORKERS) $(ARGS)

world: $(READY)  ## predicted bytes of transformers' families under one release of it and of torch: TORCH=2.14.1 TRANSFORMERS=5.23.0
	$(BIN)/python benchmarks/world.py run --torch $(TORCH) --transformers $(TRANSFORMERS) --jobs $(WORKERS) $(ARGS)

mutants: $(READY)  ## plant mutants in the core and count how many the tests kill
	$(BIN)/python tools/mutants.py

size: $(READY)  ## print lines of Python by room: the core's packages, its neighbours, tests
	@$(BIN)/python tools/size.py

clean:  ## remove caches and what runs left behind; .venv, .venv-docs, .compat, .world and baselines stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .mutants htmlcov build dist *.egg-info
	rm -f .coverage .coverage.* results*.csv junit*.xml
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +
