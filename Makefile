# Every target runs on a bare machine that has Python and make; what is missing goes into $(VENV) first.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install -qq --constraint constraints.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# One thread a process: the processes of a test share the cores.
ONE_THREAD = OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo demo-compare test test-all check lint parity features faults bench fit shown docs site clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.with-base ## install, then train a small language model on real text on a 2 x 2 x 2 mesh of processes
	$(ONE_THREAD) $(BIN)/lightning-3d train recipe=demo
	@echo "the same recipe on one process, with plain Lightning and the same losses:"
	@echo "  $(BIN)/lightning-3d train recipe=demo strategy=single trainer.devices=1"
	@echo "both side by side: make demo-compare"

demo-compare: $(VENV)/.with-base ## the losses of the demo on its mesh and on one process, side by side
	$(ONE_THREAD) $(BIN)/python -m tests.parity.demo

test: lint site ## everything that CI runs
	$(ONE_THREAD) $(BIN)/python -m pytest --numprocesses=2 --dist=worksteal --durations=40 -m "not thorough"

test-all: lint site ## the same with more cases of the same kinds, in twice the time
	$(ONE_THREAD) $(BIN)/python -m pytest --numprocesses=2 --dist=worksteal --durations=40

check: lint ## the fast part of the tests, for each edit
	$(ONE_THREAD) $(BIN)/python -m pytest -q -m "not (slow or spmd or parity or thorough)"

lint: $(VENV)/.with-test ## format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict lightning_3d

parity: $(VENV)/.with-test ## every row against one device; writes docs/parity.md
	$(ONE_THREAD) $(BIN)/python -m tests.parity.run --all

features: $(VENV)/.with-test ## every feature of the Trainer on every mesh; writes docs/features.md
	$(ONE_THREAD) $(BIN)/python -m tests.features.run

faults: $(VENV)/.with-test ## checkpoints of every mesh on every other one, and killed runs; writes docs/resharding.md, docs/faults.md
	$(ONE_THREAD) $(BIN)/python -m tests.faults.matrix
	$(ONE_THREAD) $(BIN)/python -m tests.faults.kill

bench: $(VENV)/.with-test ## step times, start, memory, collectives beside others; writes docs/benchmarks.md
	-DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation deepspeed || echo "DeepSpeed does not install here: compared without it"
	$(ONE_THREAD) $(BIN)/python -m tests.benchmarks.run

fit: $(VENV)/.with-test ## errors of the planner on published tables, each left out of a fit of its constants too
	$(ONE_THREAD) $(BIN)/python -m tests.unit.planner.fit --leave

shown: $(VENV)/.with-test ## the pictures and outputs that README and pages show, made anew
	$(ONE_THREAD) $(BIN)/python -m tests.documents.pictures --measured
	$(ONE_THREAD) $(BIN)/python -m tests.documents.outputs

docs: $(VENV)/.with-docs ## write the map of the code and the house, then build the pages
	$(BIN)/python -m tests.contract.map
	$(BIN)/python -m tests.contract.house
	$(MAKE) site

site: $(VENV)/.with-docs ## build the pages into site/, warnings are errors (they count only if they are printed)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove what builds and tests left behind, not $(VENV)
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.with-base: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): once, a few minutes"
	$(INSTALL) torch
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.with-%: $(VENV)/.with-base
	$(INSTALL) --editable '.[$*]'
	@touch $@
