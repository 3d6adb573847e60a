# make demo and make test need Python 3.11 or later and make; they install the rest in $(VENV).
#
#   make test PYTHON=python3.12 VENV=.venv312      another Python, in an environment of its own
#   make test TESTS=tests/optax                    some of the tests
#   make test CASES=                               all cases of the tests that take long, too
#   make compiled SOME=--cases=last-of-others      one case of each test, costly ones left out
#   make gpu CUDA=cuda12                           another release of CUDA

PYTHON ?= python3
CUDA ?= cuda13
CASES ?= --cases=last-of-costly
VENV ?= .venv
python := $(VENV)/bin/python
comma := ,
pytest := $(python) -m pytest -n auto --maxprocesses 8 --dist worksteal --durations=20

# Tests start dozens of processes. Each takes twice as long to import JAX if Python may not keep the
# bytecode, so it is kept beside the packages, even where the environment forbids writing it.
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint types docs compiled oracles examples gpu clean

help:  ## say what there is to make
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## train a tiny Llama in BF16 and in COAT: minutes, on any CPU
	JAX_PLATFORMS=cpu $(python) -m experiments.demo

test: $(VENV)/test.stamp  ## run the tests that need neither a GPU nor its compilers
	JAX_PLATFORMS=cpu $(pytest) \
	  -m "not gpu and not compiled and not interpret and not oracle and not examples" $(CASES) $(TESTS)

lint: $(VENV)/dev.stamp  ## check style and format
	$(python) -m ruff check
	$(python) -m ruff format --check

types: $(VENV)/dev.stamp  ## check types
	$(python) -m mypy

docs: $(VENV)/docs.stamp  ## build the documentation site in out/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict --quiet
	@echo "Open out/site/index.html in a browser."

compiled: $(VENV)/compiled.stamp  ## compile for Hopper, without a GPU
	JAX_PLATFORMS=cpu,cuda $(pytest) --no-skips -m compiled $(SOME)

oracles: $(VENV)/oracles.stamp  ## interpret kernels, and compare with torch and transformers
	JAX_PLATFORMS=cpu TRITON_INTERPRET=1 $(pytest) --no-skips -m interpret
	JAX_PLATFORMS=cpu $(pytest) --no-skips -m oracle
	JAX_PLATFORMS=cpu $(pytest) --no-skips -m examples -k hugging_face tests/examples

examples: $(VENV)/examples.stamp  ## run coat_jax inside other trainers: needs Python 3.12, as MaxText does
	JAX_PLATFORMS=cpu $(pytest) --no-skips -m examples -k "not hugging_face" tests/examples

gpu: $(VENV)/$(CUDA),test.stamp  ## on a GPU: its tests, and a benchmark of two minutes
	JAX_PLATFORMS=cuda,cpu $(python) -m experiments.gpu_suite

clean:  ## remove the environment, caches, and out/ with its runs
	rm -rf $(VENV) out build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find coat_jax experiments tests -name __pycache__ -prune -exec rm -rf {} +

# Installs some extras, as in .venv/test,docs.stamp; again only when what it depends on changes. Python compiles modules
# when they are first imported: most of the large libraries' never are.
$(VENV)/%.stamp: pyproject.toml constraints.txt | $(python)
	$(python) -m pip install --quiet --no-compile --disable-pip-version-check \
	  -c constraints.txt -e '.[$*]'
	@touch $@ $(patsubst %,$(VENV)/%.stamp,$(subst $(comma), ,$*))

$(python):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "coat_jax needs Python 3.11 or later, which '$(PYTHON)' is not." \
	       "Name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
