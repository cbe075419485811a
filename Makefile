# Each target creates .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ifneq ($(wildcard ../shared/data),)
export PARTITA_DATA ?= $(abspath ../shared/data)
endif
export NO_MKDOCS_2_WARNING := 1
TOOLS := pytest pytest-xdist hypothesis hatchling markdown-it-py torchmetrics
LOWEST := $(addprefix tests/,test_packaging.py core data optim schedule models measures aggregate track cli \
  engine/model engine/execute engine/significance recipes/test_tuning.py report deploy)

.PHONY: demo test test-all test-lowest test-ecosystem test-flower lint bench docs clean

demo: .venv/.core    ## who gains from personalization and who loses, on embedded data
	$(BIN)/partita demo

test: .venv/.dev lint  ## what CI runs
	$(BIN)/python -m pytest

test-all: .venv/.dev lint
	$(BIN)/python -m pytest -m "" --hypothesis-profile=search

# With CUDA libraries torch takes 5 GB: TORCH_INDEX=https://download.pytorch.org/whl/cpu takes it without them.
test-lowest: .venv-lowest/.done  ## the oldest versions that pyproject.toml admits
	.venv-lowest/bin/python -m pytest $(LOWEST)

test-ecosystem: .venv-ecosystem/.done  ## models of torchvision, timm, transformers and peft; WRITE=--write writes their table
	.venv-ecosystem/bin/python -m pytest tests/ecosystem $(WRITE)

test-flower: .venv-flower/.done  ## real federations of Flower: SuperLink, SuperNodes and client processes
	.venv-flower/bin/python -m pytest tests/flower -m "" -n 1

lint: .venv/.dev
	$(BIN)/ruff check src tests bench examples docs/*.py
	$(BIN)/ruff format --check src tests bench examples docs/*.py
	$(BIN)/mypy

bench: .venv/.core   ## speed as a ratio against the textbook loop, measured in the same run
	$(BIN)/python bench/peers.py
	$(BIN)/partita bench --methods
	$(BIN)/python bench/aggregators.py
	$(BIN)/python bench/asynchronous.py
	$(BIN)/python bench/cohort.py --cohorts 50 500
	$(BIN)/python bench/evaluation.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/workers.py
	$(BIN)/python bench/attention.py

docs: .venv/.dev     ## builds the documents into site/
	$(BIN)/mkdocs build --strict

.venv/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/.dev: .venv/.core
	$(INSTALL) -e '.[dev]'
	touch $@

.venv-lowest/.done: pyproject.toml constraints-lowest.txt
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[hf,track,tune,deploy]' $(TOOLS)
	touch $@

.venv-ecosystem/.done: pyproject.toml constraints-ecosystem.txt
	test -x .venv-ecosystem/bin/python || $(PYTHON) -m venv .venv-ecosystem
	.venv-ecosystem/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-ecosystem.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[ecosystem]' pytest pytest-xdist hypothesis
	touch $@

.venv-flower/.done: pyproject.toml constraints-flower.txt
	test -x .venv-flower/bin/python || $(PYTHON) -m venv .venv-flower
	.venv-flower/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-flower.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[flower]' pytest pytest-xdist hypothesis
	touch $@

clean:
	rm -rf .venv .venv-lowest .venv-ecosystem .venv-flower site dist build runs
