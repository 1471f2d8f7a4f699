# make setup   a virtual environment in .venv, installed with the constraints
# make demo    set-up, then the digits on a ring of three processes
# make test    set-up, lint, types, every quick test (at most 12 minutes on two cores)
# make long    what takes longer (at most 45 minutes)
# make bench   every experiment, as root on Linux, into runs/bench (hours; it goes on where it was stopped)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint quick long bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/setup.sh
	touch $(STAMP)

demo: setup
	$(BIN)/ringtmp train

lint: setup
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

quick: setup
	$(BIN)/pytest -m "not long and not nightly" -n 2 --dist worksteal

test: lint quick

long: setup
	$(BIN)/pytest -m "long and not alone" -n 2 --dist worksteal --timeout 1500
	$(BIN)/pytest -m "long and alone" --timeout 1500

bench: setup
	$(BIN)/ringtmp bench all --out runs/bench

clean:
	rm -rf $(VENV) dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
