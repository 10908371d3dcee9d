# `make demo` and `make test` are all that a fresh machine needs: Python 3.11 or newer, pip, make and git.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check gpu-test

demo: $(INSTALLED)
	rm -rf runs/padded runs/non-padded
	$(BIN)/specgen generate --output runs/padded --baseline
	$(BIN)/specgen generate --drafter-batch non-padded --output runs/non-padded
	$(BIN)/specgen report runs/padded runs/non-padded

test: $(INSTALLED)
	$(BIN)/pytest

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

gpu-test: $(INSTALLED)
	$(BIN)/pytest -m gpu

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
