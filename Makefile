# Verbs of the project; CI calls the same. `make help` lists them.
#
#   make demo [section.key=value ...]   install what it needs, train examples/spell_backward
#   make test                           install, lint, run the default tests
#   make lint                           ruff, mypy strict, import rules
#   make bench BENCH=name               run benchmarks/name.py
#   make test-slow, test-store, test-hzp, test-weights, test-workflow, test-sglang, test-demo
#                                       suites that take longer; CI runs them too
#   make soak                           ten minutes of full load on the zmq store
#   make fuzz FUZZ_S=600                fuzz the wire and the zmq store, so many seconds each

PYTHON ?= python3
VENV   ?= .venv
BENCH  ?= ledger
FUZZ_S ?= 600

BIN       := $(VENV)/bin
PIP       := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PACKAGES  := . $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/asyncflow-*/pyproject.toml adapters/asyncflow-*/pyproject.toml)))
MANIFESTS := $(patsubst %,%/pyproject.toml,$(PACKAGES))
SOURCES   := $(sort $(wildcard plugins/*/src adapters/*/src))
BASE      := examples/spell_backward/base

# `make demo trainer.world_size=2`: everything given on make's command line that is not one of
# make's own variables is an override of the configuration.
OVERRIDES := $(filter-out PYTHON=% VENV=% BENCH=% FUZZ_S=%,$(MAKEOVERRIDES))

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean soak fuzz test-slow test-store test-hzp test-weights \
  test-workflow test-sglang test-demo

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "AsyncFlow needs Python 3.11 or newer; set PYTHON=..., $(PYTHON) is too old"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# What a user needs: core, plugins, adapters.
$(VENV)/installed: $(BIN)/python $(MANIFESTS) constraints.txt
	@echo "installing AsyncFlow into $(VENV) (PyTorch included, this can take minutes) ..."
	@$(PIP) $(patsubst %,-e %,$(PACKAGES))
	@touch $@

# What a developer needs beside it.
$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	@$(PIP) -r requirements-dev.txt
	@touch $@

demo: $(VENV)/installed
	@$(BIN)/python examples/spell_backward/prepare.py
	@$(BIN)/asyncflow run examples/spell_backward/config.yaml $(OVERRIDES)

test: lint
	@$(BIN)/python -m pytest -m "not slow and not gpu"

SLOW = @$(BIN)/python -m pytest -m "slow and not gpu"

test-slow: $(VENV)/installed-dev
	$(SLOW) tests --ignore=tests/weights --ignore=tests/workflow

# The zmq store under more than 200 random kills of its processes, and its contract over them.
test-store: $(VENV)/installed-dev
	$(SLOW) -s plugins/asyncflow-store-zmq

# Every sharding tuple at 2 and 4 ranks against the unsharded run.
test-hzp: $(VENV)/installed-dev
	$(SLOW) adapters/asyncflow-hzp

# Faults of weight transports, and what is detected in how long.
test-weights: $(VENV)/installed-dev
	$(SLOW) -s tests/weights plugins/asyncflow-weights-host plugins/asyncflow-weights-collective

# Runs whose processes are killed, stopped, starved and cut off, and runs that are resumed.
test-workflow: $(VENV)/installed-dev
	@$(BIN)/python examples/spell_backward/prepare.py
	$(SLOW) -s tests/workflow

# Real SGLang servers on the CPU, in an environment of their own; killed and hung ones too.
test-sglang: $(VENV)/installed-dev
	@$(BIN)/python adapters/asyncflow-sglang/cpu/make.py .venv-sglang
	$(SLOW) adapters/asyncflow-sglang

# The main job, as a user starts it, and what it must have learned.
test-demo: demo
	@$(BIN)/python examples/spell_backward/check.py runs/demo

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy asyncflow_core $(SOURCES)
	@$(BIN)/lint-imports --no-cache

bench: $(VENV)/installed-dev
	@$(BIN)/python benchmarks/$(BENCH).py

fuzz: $(VENV)/installed-dev
	@$(PIP) atheris
	@$(BIN)/python -m tests.wire.fuzz_wire -max_total_time=$(FUZZ_S) -rss_limit_mb=2048 \
	  -len_control=0 -max_len=8192
	@cd plugins/asyncflow-store-zmq && for what in calls layout segment journal; do \
	  $(abspath $(BIN))/python -m tests.fuzz_store $$what -max_total_time=$(FUZZ_S) \
	  -rss_limit_mb=4096 -len_control=0 -max_len=2048 || exit 1; done

soak: $(VENV)/installed-dev
	@$(BIN)/python benchmarks/soak.py --seconds 600

clean:
	rm -rf $(VENV) $(BASE) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
