# `make train` runs the main job, `make test` the tests; both set up .venv first. ARGS are passed on:
#   make train ARGS="tree.w=3 seed=1"        make test ARGS="tests/core/test_kernels.py"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test lint setup clean

train: setup
	$(BIN)/arborl train $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

setup: $(READY)

# Made again only when what it installs has changed. The last package is there for a file that tests read, CLIP's
# vocabulary; what it depends on (torchvision) would break transformers beside a CPU build of torch.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "ArboRL needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
		|| { echo "This Python has no venv module. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "setting up $(VENV) (a minute or two the first time; PyTorch is the larger part)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps open_clip_torch
	@touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
