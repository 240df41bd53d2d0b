# Everything runs in a virtual environment in the checkout, which `make setup` creates and keeps up to date.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
# Further options of `pip install`, for instance where to find torch without CUDA.
PIP_OPTIONS ?=
# Further options of the demo and of pytest.
DEMO_OPTIONS ?=
PYTEST_OPTIONS ?=
# Processes that the tests are dealt out to, file by file: more than cores, as some always wait for storage. Each takes
# 1.5 to 3 GB.
PYTEST_WORKERS ?= 6

# As in an activated environment: the tests start python, ninja and others by name.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONHOME

# Bytecode is left to the first import (which must be allowed to keep it): most of what comes is never imported.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints-dev.txt $(PIP_OPTIONS)
BUILD_REQUIREMENTS := scikit-build-core nanobind cmake ninja
CXX_FILES = $(shell find lightning_smartinfinity hls tests -name '*.[ch]pp' -o -name '*.inl')
BUILD_INPUTS := CMakeLists.txt pyproject.toml lightning_smartinfinity/__init__.py \
    lightning_smartinfinity/common/update_rules.py tools/generate_update_rules.py \
    $(shell find lightning_smartinfinity -name '*.[ch]pp' -o -name '*.inl' -o -name '*.cmake')

# Each stamp says that its step succeeded with the files it depends on.
CREATED := $(VENV)/.created
REQUIREMENTS := $(VENV)/.requirements
INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled

# The tests of SmartSSDs: yes, no, or auto: if a file that they depend on changed since BASE (tools/card_tests.py).
CARDS ?=
BASE ?=

.PHONY: help setup demo test test-long test-cards test-activations checks lint types contracts compile unit csim xo format dist clean

help: ## List the targets; times on two cores
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED) ## Create .venv and install the package into it (3 min; PYTHON=python3 by default)
	@echo "$(VENV) is up to date"

$(CREATED):
	@tools/system_packages.sh $(PYTHON)
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --upgrade $(PIP_OPTIONS) 'pip>=24'
	@touch $@

# torch comes first and pinned: left to the resolver, it may be another build, with gigabytes of libraries for it.
$(REQUIREMENTS): constraints-dev.txt $(CREATED)
	@echo "Installing torch and the build requirements"
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) $(BUILD_REQUIREMENTS)
	@touch $@

# Editable, without build isolation: Python files are used where they lie, and a build recompiles only what changed.
$(INSTALLED): $(BUILD_INPUTS) $(REQUIREMENTS)
	@tools/system_packages.sh $(PYTHON)
	@echo "Building and installing lightning-smartinfinity"
	@$(PIP_INSTALL) --no-build-isolation --config-settings cmake.define.SMART_INFINITY_TESTING=ON --editable '.[dev]'
	@touch $@

demo: setup ## Train a small language model on text found on this machine (about two minutes on two cores)
	@$(VENV)/bin/python examples/finetune_text.py $(DEMO_OPTIONS)

test: CARDS := $(or $(CARDS),auto)
test: checks unit ## All checks: lint, types, contracts, tests; of cards if CARDS=yes or concerned (12 min; 15 with cards and a new .venv)

# At once: mypy, which takes longest, uses one core.
checks: $(INSTALLED)
	@$(MAKE) --jobs --output-sync=target lint types contracts compile

# Once per environment: otherwise each process of the tests would compile all libraries and all tests itself.
compile: $(COMPILED)
	@:

$(COMPILED): $(INSTALLED)
	@told=$$(HF_HUB_OFFLINE=1 python -m pytest --quiet --collect-only) || { echo "$$told"; exit 1; }
	@touch $@

# Every check prints one line that says what it does, and then nothing but what is wrong.
lint: $(INSTALLED) ## Style of Python and C++ (ruff, clang-format), what no card could run in kernels (5 s)
	@echo "lint: style of Python and C++, kernels that no card could run (5 s)"
	@ruff check --quiet .
	@ruff format --check --quiet .
	@printf '%s\n' $(CXX_FILES) | xargs clang-format --dry-run -Werror
	@python -m hls.lint

types: $(INSTALLED) ## mypy --strict on the package and on examples of user code (30 s, then 5 s)
	@echo "types: mypy --strict (30 s, then 5 s)"
	@mypy --no-error-summary
	@mypy --no-error-summary --strict tests/typing

contracts: $(INSTALLED) ## Who may import whom, which room of the core may include which, docs/seams.md (10 s)
	@echo "contracts: who may import or include whom, docs/seams.md (10 s)"
	@told=$$(lint-imports --no-logo) || { echo "$$told"; exit 1; }
	@python tools/include_contracts.py
	@python tools/seams.py --check

# In the order of folders: by the number of tests, as xdist would have it, long files of few tests came last.
unit: $(INSTALLED) ## The tests; the output ends with those that failed (15 min)
	@tools/test_packages.sh
	@echo "unit: the tests, in $(PYTEST_WORKERS) processes (15 min); what failed comes last"
	@cards=$(if $(CARDS),$$(python -m tools.card_tests $(CARDS) $(BASE:%=--base %))) && \
	    HF_HUB_OFFLINE=1 python -m pytest --quiet --numprocesses $(PYTEST_WORKERS) --dist loadfile \
	    --no-loadscope-reorder $$cards $(PYTEST_OPTIONS)

test-cards: ## The tests of SmartSSDs, emulated (1.5 min)
	@$(MAKE) unit PYTEST_OPTIONS="tests/smartssd tests/hls tests/xrt $(PYTEST_OPTIONS)"

test-long: export LONG := 1
test-long: test-cards ## The tests that take minutes each, those of cards, and 4 GB in the folder for temporary files
	@$(MAKE) unit PYTEST_OPTIONS="--long -m long -o timeout=3600 -o faulthandler_timeout=3630 $(PYTEST_OPTIONS)"
	@for time in $$(seq 12); do $(MAKE) test-activations || exit; done

test-activations: ## The tests that train, with all activations on storage and late transfers (12 min)
	@TEST_WITH_ACTIVATIONS_ON_STORAGE=1 $(MAKE) unit PYTEST_OPTIONS="tests/training tests/fabric $(PYTEST_OPTIONS)"

csim: $(INSTALLED) ## The SmartSSD's kernels, compiled for this machine, against numpy and torch.optim (2 min)
	$(MAKE) -C hls csim

xo: CARD := $(CURDIR)/build/card
xo: $(INSTALLED) ## Compile the SmartSSD's kernels with v++, the smallest first; needs Vitis, no card
	$(MAKE) -C hls $(CARD)/sgd_update.xo CARD=$(CARD)
	$(MAKE) -C hls xo CARD=$(CARD)

format: $(INSTALLED) ## Rewrite Python and C++ files in the project's style (5 s)
	ruff check --fix .
	ruff format .
	clang-format -i $(CXX_FILES)

dist: $(INSTALLED) ## Source distribution and wheel in dist/ (1 min)
	python -m build --outdir dist

clean: ## Remove .venv, builds and caches (1 s)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
