# Every target sets itself up, once: python3 and make are all a machine needs. `make help` lists them.

PYTHON  ?= python3
WORKERS ?= 2

VENV  := .venv
BIN   := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow lint format types pytest examples docs wheel bench clean

help: ## list the targets
	@echo 'make TARGET   (with another Python: make clean, then make PYTHON=python3.12 TARGET)'
	@sed -n 's/^\([a-z-]*\):.*## /  \1	/p' Makefile | expand -t 14

demo: $(VENV)/.runtime ## train a classifier of time series and write a page about it
	@$(BIN)/primal run uea/JapaneseVowels

test: lint types pytest examples docs wheel ## everything a change must pass

lint: $(VENV)/.dev ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.dev ## repair style and formatting
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.dev ## check the types of source and tests
	@$(BIN)/mypy

pytest: $(VENV)/.dev ## run the tests and the doctests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-slow: $(VENV)/.dev ## run the tests marked slow
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

examples: $(VENV)/.dev ## run every example
	@for example in examples/*.py; do \
		echo "$$example"; $(BIN)/python "$$example" || exit 1; \
	done

docs: $(VENV)/.dev ## build the documentation; a broken link or reference fails
	@$(BIN)/zensical build --clean --strict

wheel: build/wheel-works ## build the wheel, install it into an empty environment, use it there

bench: $(VENV)/.runtime ## measure the attention, and a training step, on this machine's CPU
	@$(BIN)/python benchmarks/core_cpu.py
	@$(BIN)/python benchmarks/train_step.py

clean: ## remove all that these targets made
	@rm -rf $(VENV) build dist site .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environments --------------------------------------------------------------------------------
# One stamp each, written when everything before it succeeded: a second run starts at once, an
# interrupted one starts that step again.

# $(call pip,ENVIRONMENT) REQUIREMENTS
pip = $(1)/bin/python -m pip --quiet --quiet install --constraint constraints.txt

# $(call install-torch,ENVIRONMENT)
# torch comes before all that needs it, so that nothing else decides which build is taken. Linux
# without an NVIDIA GPU takes the CPU build and is spared gigabytes of CUDA: pip finds it if one of
# its sources offers it; uv knows where PyTorch keeps it.
define install-torch
	@echo 'installing torch $(TORCH) in $(1) ...'
	@if [ "$$(uname -s)" != Linux ] || command -v nvidia-smi >/dev/null; then \
		$(call pip,$(1)) torch==$(TORCH); \
	elif $(call pip,$(1)) torch==$(TORCH)+cpu 2>/dev/null; then \
		:; \
	elif $(call pip,$(VENV)) uv && $(BIN)/uv pip install --quiet --python $(1) \
		--constraint constraints.txt --torch-backend cpu torch==$(TORCH) 2>/dev/null; then \
		:; \
	else \
		echo 'no CPU build of torch is within reach: installing the CUDA build, gigabytes of it ...'; \
		$(call pip,$(1)) torch==$(TORCH); \
	fi
endef

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'Primal needs Python 3.11 or newer as $(PYTHON): install it, or say make PYTHON=python3.12' >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo '$(PYTHON) cannot make environments: install its venv (Debian, Ubuntu: apt install python3-venv)' >&2; \
		exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.python pyproject.toml constraints.txt
	$(call install-torch,$(VENV))
	@echo 'installing primal-attention in $(VENV) ...'
	@$(call pip,$(VENV)) hatchling
	@$(call pip,$(VENV)) --no-build-isolation --editable '.[timeseries]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo 'installing the tools for tests and documentation in $(VENV) ...'
	@$(call pip,$(VENV)) --no-build-isolation --editable '.[dev]'
	@touch $@

# Tried again only when something that goes into the wheel has changed: an empty environment takes a
# minute. Nothing is compiled there, it runs once.
build/wheel-works: export PIP_NO_COMPILE := 1
build/wheel-works: $(VENV)/.dev README.md LICENSE $(shell find primal -name '*.py' -o -name '*.css' -o -name py.typed)
	@rm -rf build/empty dist
	@$(BIN)/python -m pip --quiet --quiet wheel --no-deps --no-build-isolation --wheel-dir dist .
	@$(BIN)/python -m venv build/empty
	$(call install-torch,build/empty)
	@$(call pip,build/empty) dist/primal_attention-*-py3-none-any.whl
	@cd / && '$(CURDIR)/build/empty/bin/python' -I -c 'import primal, torch; \
		x = torch.randn(2, 16, 32); \
		output = primal.PrimalAttention(width=32, heads=4, rank=4)(x); \
		assert output.values.shape == x.shape; \
		assert "build/empty" in primal.__file__'
	@rm -rf build/empty
	@touch $@
	@echo "$$(ls dist/*.whl) works in an empty environment"
