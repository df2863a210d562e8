# `make train` and `make test` do all the set-up they need in .venv: pinned packages, torch where none is there, packgraph.
# PACKGRAPH_PYTHON=python3 make train uses that interpreter as it is: installs nothing, needs no network.
# ARGS are passed on: make train ARGS="--run.steps 50"

BASE_PYTHON ?= python3
ARGS ?=
.DEFAULT_GOAL := help
.PHONY: help setup train verify audit soak test test-all test-ranks faults lint docs check-python

# Tests start many processes, and without bytecode each would compile all of packgraph anew.
unexport PYTHONDONTWRITEBYTECODE

ifdef PACKGRAPH_PYTHON
PYTHON := $(PACKGRAPH_PYTHON)
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
RUN_READY := check-python
DEV_READY := check-python
else
PYTHON := .venv/bin/python
RUN_READY := .venv/.ready-run
DEV_READY := .venv/.ready-dev
endif

# As many test workers as there are cores for this process, four at most; none without pytest-xdist.
WORKERS = $$($(PYTHON) -c 'import importlib.util as u, os; \
	n = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1); \
	print(f"-n {n}" if n > 1 and u.find_spec("xdist") else "")')
# Stops with a clear text where a tool is missing: $(call need,module)
need = @$(PYTHON) -c 'import importlib.util as u, sys; u.find_spec("$(1)") or sys.exit( \
	"make $@: $(PYTHON) has no $(1). Install it there, or leave PACKGRAPH_PYTHON out to use .venv")'

help:
	@echo "make train      train the preset qwen3-tiny on the source code of Python's library, through captured graphs"
	@echo "make verify     compare eager and graph training, bit by bit"
	@echo "make test       tests on one process, and some on several    make test-all   the slow ones, too"
	@echo "make test-ranks all tests on several processes               make lint       ruff and mypy"
	@echo "make faults     ranks that fail, flipped bits, bad inputs    make soak       a long run: memory, files, threads"
	@echo "make audit      licences, known vulnerabilities              make setup      only the set-up"
	@echo "make docs       the documentation as a site, in build/site"

setup: $(DEV_READY)

train: $(RUN_READY)
	$(PYTHON) -m packgraph.cli train qwen3-tiny $(ARGS)

verify: $(RUN_READY)
	$(PYTHON) -m packgraph.cli verify $(ARGS)

# Tests on the GPU run one after another in one process: they measure memory and share one device.
# The others are to take less than ten minutes on two quiet cores: what is longer and varies what a
# quick test shows is marked `slow`, for test-all.
test: $(DEV_READY)
	$(call need,pytest)
	$(PYTHON) -m pytest tests/gpu -m gpu $(ARGS)
	$(PYTHON) -m pytest tests -m "not gpu and not slow and (core or not dist)" $(WORKERS) $(ARGS)

test-all: $(DEV_READY)
	$(call need,pytest)
	$(PYTHON) -m pytest tests/gpu -m gpu $(ARGS)
	$(PYTHON) -m pytest tests -m "not gpu and (core or not dist)" $(WORKERS) $(ARGS)

test-ranks: $(DEV_READY)
	$(call need,pytest)
	$(PYTHON) -m pytest tests -m "dist and not gpu and not core" $(WORKERS) $(ARGS)

# About 20 s a case of ranks; ARGS choose: make faults ARGS="tp kill save plain"
faults: $(DEV_READY)
	PACKGRAPH_FLIPS=50000 $(PYTHON) -m pytest tests/faults/test_flips.py tests/faults/test_disk.py -o timeout=0
	$(PYTHON) tests/faults/malformed.py --count 1000 --seed $$$$
	$(PYTHON) tests/faults/restarts.py
	$(PYTHON) tests/faults/restarts.py --ranks 2
	$(PYTHON) tests/faults/restarts.py --model moonlight-tiny --layouts dp=2,ep=2 dp=4,ep=4 --restarts 4
	$(PYTHON) tests/faults/matrix.py $(ARGS)

# About 25 minutes.
soak: $(DEV_READY)
	$(PYTHON) tests/faults/soak.py $(ARGS)

# Says "Error 1" if something bad was found, "Error 3" if vulnerabilities could not be asked for: requirements/audit.py.
audit: $(DEV_READY)
	$(BASE_PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install -q pip-audit==2.10.1 pip-licenses==5.5.5
	@.venv/audit/bin/python requirements/audit.py --tools .venv/audit/bin --python $(PYTHON)

lint: $(DEV_READY)
	$(call need,ruff)
	$(call need,mypy)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check -q .
	$(PYTHON) -m mypy

# build/site/index.html; serve it while writing with: .venv/bin/mkdocs serve
docs: $(if $(PACKGRAPH_PYTHON),check-python,.venv/.ready-docs)
	$(call need,mkdocs)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

check-python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"packgraph needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) -c 'import importlib.util as u, sys; u.find_spec("torch") or sys.exit( \
		"$(PYTHON) has no torch; leave PACKGRAPH_PYTHON out, and make installs everything in .venv")'

.venv/.ready-run: requirements/run.txt requirements/torch.txt pyproject.toml
	@$(BASE_PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit( \
		"packgraph needs Python 3.11 to 3.13, $(BASE_PYTHON) is " + sys.version.split()[0] + \
		"; name another one: make setup BASE_PYTHON=python3.12")'
	$(BASE_PYTHON) -m venv .venv
	$(PYTHON) -m pip install -q -r requirements/run.txt
	@$(PYTHON) -c 'import torch' 2>/dev/null || { echo "Installing torch into .venv; this may take minutes"; \
		$(PYTHON) -m pip install -q -r requirements/torch.txt; }
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation -e .
	@echo "The command is .venv/bin/packgraph (or packgraph after: source .venv/bin/activate)"
	@touch $@

.venv/.ready-dev: .venv/.ready-run requirements/dev.txt
	$(PYTHON) -m pip install -q -r requirements/dev.txt
	@touch $@

.venv/.ready-docs: .venv/.ready-run requirements/docs.txt
	$(PYTHON) -m pip install -q -r requirements/docs.txt
	@touch $@
