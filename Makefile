# One virtual environment, .venv, made by whichever target comes first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test check bench crash long docs compat clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/bench_core.py
	$(BIN)/python benchmarks/bench_training.py

crash: $(READY)
	MIDSTRIDE_LONG=1 $(BIN)/python -m pytest tests/crash --timeout 3600

long: $(READY)
	MIDSTRIDE_LONG=1 $(BIN)/python -m pytest tests/scenarios tests/frameworks --timeout 3600

docs: $(READY)
	$(BIN)/python -m pytest tests/docs

# Each supported TensorFlow in an environment of its own under .compat: some gigabytes, some minutes.
compat:
	$(PYTHON) tests/compat/run.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Midstride needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt --editable '.[torch,cli]'
	touch $(READY)

clean:
	rm -rf $(VENV) .compat
