# make run    the whole recipe (PROFILE=laptop SEED=1 OUT=runs/laptop-1 RUN_ARGS=…)
# make test   lint, types, floors, tests
# make test-e2e   whole runs through the command line, and kill -9 in every stage (many minutes)
# make kube-assets   Kubernetes' own programs for tests/cluster, built once from Debian's sources (4 to 15 minutes)
# make test-node   tests with real pods on this machine (root)
# make learning-table   three seeds on the test pool; writes docs/results/learning-$(PROFILE).json
# make bench-capture bench-engine   ratios against a baseline in one run; write docs/results/bench-*.json
# make bench-operator   claims at once, cost of a claim, first command in a pod (after kube-assets; as root for pods)
# make images   builds them with podman or docker and prints their sizes (IMAGES="operator sandbox" IMAGE_ARGS=…)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := train,harness,pipeline,operator,kubernetes,ui,dev

PROFILE ?= laptop
SEED ?= 1
OUT ?= runs/$(PROFILE)-$(SEED)
RUN_ARGS ?=
PYTEST_ARGS ?=
SEEDS ?= 1 2 3
IMAGES ?=
IMAGE_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup run test test-e2e kube-assets test-node lint learning-table bench-capture bench-engine bench-operator images clean

help:
	@sed -n '1,9s/^# //p' Makefile

setup: $(STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no python3; on Debian: apt-get install python3.11 python3.11-venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "make: $(PYTHON) is $$("$(PYTHON)" -V 2>&1), constraints.txt is for Python 3.11; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq python3.11-venv; \
	  else echo "make: Python's venv is missing; run: sudo apt-get install python3.11-venv" >&2; exit 1; fi; }
	"$(PYTHON)" -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

run: $(STAMP)
	$(BIN)/occamy run --profile $(PROFILE) --seed $(SEED) --out $(OUT) $(RUN_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -q -n 2 -m "not e2e and not node" $(PYTEST_ARGS)

test-e2e: $(STAMP)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -q -m e2e $(PYTEST_ARGS)

kube-assets:
	@"$(PYTHON)" -m tests.cluster.kube_assets

test-node: $(STAMP)
	$(BIN)/pytest -q -m node tests/cluster $(PYTEST_ARGS)

learning-table: $(STAMP)
	$(BIN)/occamy learning-table --profile $(PROFILE) --seeds $(SEEDS) --write docs/results/learning-$(PROFILE).json

bench-capture: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_capture --write docs/results/bench-capture.json

bench-engine: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_engine --write docs/results/bench-engine.json

bench-operator: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.bench_operator --write docs/results/bench-operator.json

images:
	"$(PYTHON)" images/build.py $(IMAGES) $(IMAGE_ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build
