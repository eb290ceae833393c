# `make run` and `make test` set up .venv by themselves. With PYTHON=/path/to/python whose torch fits, that torch is used.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-faults lint clean

run: $(VENV)/.installed
	$(BIN)/python -m launch.demo $(ARGS)

# Two processes share the tests; those that need worker pools stay together.
test: $(VENV)/.installed lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

# Whether the tests can fail: planted faults, of which each has to be caught.
test-faults: $(VENV)/.installed
	$(BIN)/python -m tests.faults $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) launch/environment.py $(VENV)
	touch $@

clean:
	rm -rf $(VENV)
