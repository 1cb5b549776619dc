# Two commands set up all that they need in .venv: the main job, and the tests. The demo scales the rounds of its
# longest workload (not its shape) to stay under 90 s on two cores; BUDGET= runs all of them.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# pytest-xdist keeps the cases of one server on one worker; two workers fit two cores.
WORKERS ?= 2
BUDGET ?= 9

.PHONY: demo test lint clean

demo: $(BIN)/.installed
	$(BIN)/python -m pytest -p kvcheck matrices/llama.yaml -n $(WORKERS) --dist loadgroup $(if $(BUDGET),--kvcheck-budget $(BUDGET))

test: $(BIN)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch 2.13.0 has a CPU build for Python 3.11; on a machine with a GPU build of torch installed, pip keeps that.
$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "torch==2.13.0" || $(BIN)/pip install --quiet torch
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .kvcheck .pytest_cache .mypy_cache .ruff_cache dist build
