# lean: `make demo` shows it working, `make test` runs every test. Both install what they need into .venv.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
# Processes that test at once; each may hold 1.5 GB.
JOBS    ?= 2
CHECKED := src tests demo
PIP     := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: install demo test test-fast lint clean

install: $(VENV)/.installed

$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.tested: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[test]"
	touch $@ $(VENV)/.installed

demo: install
	$(BIN)/python demo/run.py

lint: $(VENV)/.tested
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow or not slow"

test-fast: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

clean:
	rm -rf build $(VENV)
