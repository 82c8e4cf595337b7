# SPDX-License-Identifier: Apache-2.0
# `make` alone lists the targets.

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip -qq --disable-pip-version-check
PINS := requirements/demo-cpu.txt
STAMP := $(VENV)/.installed
RUN_DIR ?= runs/demo
# PYTHON=...          the interpreter that makes .venv (otherwise python3.11, else the first of 3.12, 3.13 and python3 that works)
# TORCH_PIP_ARGS=...  extra arguments of the pip call that installs torch, such as --index-url
# SOAK_ARGS=...       arguments of tests/soak.py, such as --steps 300 --kills 2
# PYTEST_ARGS=...     extra arguments of pytest, such as tests/unit_tests/planning or -x
PYTHON ?=
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
SOAK_ARGS ?=
# PYTEST_WORKERS=...  files of tests that run side by side (0: one after the other)
PYTEST_WORKERS ?= 2

# Two ranks or more share few cores in the tests: more threads a rank would only fight.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install test test-slow test-native soak demo clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s  %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv and install the pinned CPU dependencies and this package into it

$(STAMP): $(PINS) pyproject.toml setup.py
	@set -eu; \
	if ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	  for python in $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3); do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo "make install: no usable Python (3.10 or newer, with venv and ensurepip); install one, or name it: make install PYTHON=/path/to/python3" >&2; exit 1; \
	  fi; \
	  echo "[1/4] $$($$found --version) environment in $(VENV)"; \
	  $$found -m venv $(VENV); \
	else \
	  echo "[1/4] $$($(RUN) --version) environment in $(VENV) is there"; \
	fi; \
	torch=$$(grep '^torch==' $(PINS)); \
	echo "[2/4] $$torch (the largest part)"; \
	$(PIP) install $(TORCH_PIP_ARGS) $$torch; \
	if $(RUN) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "[3/4] the other pinned dependencies ($(PINS))"; \
	  $(PIP) install -r $(PINS); \
	else \
	  echo "[3/4] the other dependencies in pyproject.toml's ranges (the pins are for Python 3.11 and newer)"; \
	  $(PIP) install '.[test]' 'setuptools>=77'; \
	fi; \
	echo "[4/4] megatron-dyn, editable"; \
	$(PIP) install --no-deps --no-build-isolation --editable .; \
	touch $@

test: install ## unit and functional tests (GPU tests are skipped, with the reason, where there is no GPU)
	@$(RUN) -m pytest tests -m "not slow and not native" -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-slow: install ## the tests that take long
	@$(RUN) -m pytest tests -m "slow and not native" --timeout 1800 -o faulthandler_timeout=1740 $(PYTEST_ARGS)

test-native: install ## compile the extension against the headers of the tested Transformer Engines (downloads wheels once, half a gigabyte)
	@$(RUN) -m pytest tests -m native $(PYTEST_ARGS)

soak: install ## 5,000 steps on TP 2 x PP 2, unbroken and with ranks killed at random: equal losses, flat memory (hours on few cores)
	@$(RUN) tests/soak.py $(SOAK_ARGS)

demo: install ## train a small GPT on this machine's Python standard library, two ranks, about two minutes; results in $(RUN_DIR)
	@$(RUN) examples/demo/run_demo.py --run-dir $(RUN_DIR)

clean: ## remove .venv, builds and caches (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis
	find megatron_dyn tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
