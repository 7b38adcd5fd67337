# Every target makes its own .venv. All a machine needs is Python >= 3.11, make and pip's access
# to packages.

VENV   := .venv
BIN    := $(VENV)/bin
MADE   := $(VENV)/.made
RUN    := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest

# Crash tests start many processes of their own and wait for outages to pass: three workers keep two
# cores busy (9 min 24 s with two, 7 min 5 s with three). One file stays on one worker: its servers are
# started once, its processes do not compete with it.
WORKERS ?= 3

# `make test ARGS="-k lease"`
ARGS ?=

# What holds the product to a time runs when no other test does.
BUSY  := not timed and not soak and not bench
TIMED := timed and not soak and not bench

# What every store must do is tested once more on Debian's PostgreSQL, where that is installed:
# older than the packages' one, and with a compiler for its plans.
OLDER := $(wildcard /usr/lib/postgresql/15/bin/postgres)

# System packages are installed for CI and for who says so: nobody gets one by running the tests.
SERVERS := $(if $(filter true,$(CI)),servers)

.DEFAULT_GOAL := help
.PHONY: help demo test check servers soak bench figures clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN)  ## see jobs survive a killed worker
	$(BIN)/tenure demo

test: $(DEV) $(SERVERS)  ## run every test CI runs
ifneq ($(ARGS),)
	$(PYTEST) -n $(WORKERS) --dist loadfile $(ARGS)
else
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "$(BUSY)"
	$(PYTEST) -m "$(TIMED)"
endif
ifneq ($(and $(OLDER),$(if $(ARGS),,all)),)
	TENURE_TEST_POSTGRES_MAJOR=15 $(PYTEST) -n $(WORKERS) --dist loadfile -k postgres tests/contract tests/plans
endif

check: $(DEV)  ## lint, format, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

# PostgreSQL comes with the Python packages; pgbouncer is Debian's. A line when it cannot be had.
servers: $(DEV)  ## install the servers tests need, where that is possible
	@$(BIN)/python tests/servers.py

soak: $(DEV) $(SERVERS)  ## run the long tests that kill things at random
	$(PYTEST) -m soak --timeout 3600 $(ARGS)

bench: $(RUN)  ## measure, on an otherwise idle machine
	$(BIN)/tenure bench --all $(ARGS)

# One file a family; a line a figure: name, bar, value, ok or MISSED. Every file is run, whatever is missed.
figures: $(DEV) $(SERVERS)  ## measure what the promises are held to, on an otherwise idle machine
	@missed=0; for file in benchmarks/figures_*.py; do $(BIN)/python $$file || missed=1; done; exit $$missed

clean:  ## remove the virtual environment, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The newest interpreter that can do it, or a sentence that says what is missing.
$(MADE):
	@set -e; \
	found=; without_venv=; \
	for python in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then found=$$python; break; fi; \
	  without_venv=$$python; \
	done; \
	if [ -z "$$found" ] && [ -n "$$without_venv" ]; then \
	  echo "$$without_venv cannot make virtual environments: its venv or ensurepip module is missing." >&2; \
	  echo "On Debian and Ubuntu: apt install python3-venv (or python3.12-venv and the like)." >&2; \
	  exit 1; \
	fi; \
	if [ -z "$$found" ]; then \
	  echo "Tenure needs Python 3.11 or newer; none of python3.13, python3.12, python3.11, python3 is." >&2; \
	  echo "Install one, or name yours: make PYTHON=path/to/python3 ..." >&2; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV)
	@touch $@

$(RUN): pyproject.toml $(MADE)
	$(PIP) install --editable .
	@touch $@

$(DEV): pyproject.toml $(MADE)
	$(PIP) install --editable '.[dev]'
	@touch $@ $(RUN)
