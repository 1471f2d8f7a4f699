# make setup   a virtual environment in .venv, installed with the constraints
# make demo    set-up, then the digits on a ring of three processes
# make test    set-up, lint, types, every quick test (at most 6 minutes on two cores)
# make long    what takes longer (at most 45 minutes)
# make nightly what takes hours, in parts: a part is a test file (make nightly PART="seeded_faults bench_speed"). A part that
#              has passed leaves a stamp in runs/nightly and is not run again unless asked: make nightly AGAIN=1
# make screenshots   pictures of the live page for docs/ (needs chromium)
# make bench   every experiment, as root on Linux, into runs/bench (hours; it goes on where it was stopped)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Every test file with something for `make nightly` in it.
PART ?= $(patsubst test_%.py,%,$(notdir $(shell grep -l "mark[.]nightly" tests/*/test_*.py)))
AGAIN ?=
# pytest says 5 where it finds no test.
OR_NONE := || test $$? -eq 5

.PHONY: setup demo test lint quick long nightly bench screenshots clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/setup.sh
	touch $(STAMP)

demo: setup
	$(BIN)/ringtmp train

lint: setup
	$(BIN)/ruff check src tests scripts examples
	$(BIN)/ruff format --check src tests scripts examples
	$(BIN)/mypy

quick: setup
	$(BIN)/pytest -m "not long and not nightly" -n 2 --dist worksteal

# Both at once: types are checked while tests wait for processes they have started.
test: setup
	$(MAKE) -j 2 lint quick

long: setup
	$(BIN)/pytest -m "long and not alone" -n 2 --dist worksteal --timeout 1500
	$(BIN)/pytest -m "long and alone" --timeout 1500

# The parts that fail do not keep the others from running.
nightly: setup
	$(if $(AGAIN),rm -f $(PART:%=runs/nightly/%))
	$(MAKE) -k $(PART:%=runs/nightly/%)

runs/nightly/%: | setup
	mkdir -p $(@D)
	$(BIN)/pytest $(wildcard tests/*/test_$*.py) -m "nightly and not alone" -n 2 --dist worksteal --timeout 7200 $(OR_NONE)
	$(BIN)/pytest $(wildcard tests/*/test_$*.py) -m "nightly and alone" --timeout 7200 $(OR_NONE)
	git rev-parse HEAD > $@ 2>/dev/null || date > $@

bench: setup
	$(BIN)/ringtmp bench all --out runs/bench

screenshots: setup
	$(BIN)/python scripts/make_screenshots.py

clean:
	rm -rf $(VENV) dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
