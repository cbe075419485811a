# Each target creates .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export PARTITA_DATA ?= $(abspath $(wildcard ../shared/data))

.PHONY: demo test test-all lint bench docs clean

demo: $(STAMP)       ## who gains from personalization and who loses, on embedded data
	$(BIN)/partita demo

test: $(STAMP) lint  ## what CI runs
	$(BIN)/python -m pytest

test-all: $(STAMP) lint
	$(BIN)/python -m pytest -m ""

lint: $(STAMP)
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy

bench: $(STAMP)      ## speed as a ratio against the textbook loop, measured in the same run
	$(BIN)/python bench/rounds.py

docs: .venv/.docs    ## builds the documents into site/
	$(BIN)/mkdocs build --strict

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

.venv/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf .venv site dist build runs
