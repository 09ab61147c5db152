# The command of `make demo`.
DEMO = $(BIN)/metaleader run rainbow-digits --schedule quick --seeds 1 --out runs/demo

# The Python for .venv; `make PYTHON=/path/to/python3.12 test` selects another.
PYTHON ?= $(shell command -v python3.11 || command -v python3)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The number of tries of each kind in the attack of `make torture`; empty for all.
TORTURE ?= 100

.DEFAULT_GOAL := help
.PHONY: help demo test torture lint docs format wheel clean setup system

help: ## print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: setup ## run the quick demonstration; the last line is the path of its report
	@rm -rf runs/demo
	$(DEMO)

test: lint docs ## run all checks, build the documentation, run the tests
	$(BIN)/pytest -n 2

torture: setup ## run the long tests; the last line counts what an attack with faults found
	$(BIN)/pytest -m torture
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/attack.py $(TORTURE)

lint: setup ## check formatting, lint, types and import directions
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

docs: setup ## build the documentation into site/; a warning or a broken link is an error
	$(BIN)/python docs/build.py

format: setup ## format the code and fix simple lint errors
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

wheel: setup ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## remove dist/, site/ and the caches; keep .venv/ and runs/
	rm -rf dist build site .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find metaleader tests -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(STAMP) ## create .venv/ with the pinned versions; install missing system packages if allowed

$(STAMP): pyproject.toml constraints.txt $(BIN)/python | system
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# --clear, because an existing folder has no working Python.
$(BIN)/python: | system
	$(PYTHON) -m venv --clear $(VENV)

# Checked on every call, which is fast, because system packages are not part of .venv.
system:
	@test -n '$(PYTHON)' || { echo 'error: no python3 found; metaleader needs Python 3.11 or newer' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "error: $(PYTHON) is Python %d.%d;" \
	    " metaleader needs 3.11 or newer: make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@bash .ci/system-packages $(or $(wildcard $(BIN)/python),$(PYTHON))
