# make repro   run the pipeline at the scale in params.yaml, print the scoreboard (SCALE=smoke: a preset)
# make test    unit tests, all notebooks and the whole pipeline at smoke scale
# make lab     JupyterLab         make bench   benchmarks (bench-gpu: kernels on CUDA)   make lint   ruff, mypy
# Each sets up .venv first where it is missing or out of date. In an environment of your own (conda):
# call `reslab repro`, `pytest`, `jupyter lab` directly.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(abspath $(VENV))/bin
READY  := $(VENV)/.ready

export PATH := $(BIN):$(PATH)

.PHONY: repro test lab bench bench-gpu lint setup
repro: $(READY)
	@$(BIN)/python -m reslab repro $(if $(SCALE),--scale $(SCALE))

test: $(READY)
	@$(BIN)/python -m pytest

lab: $(READY)
	@$(BIN)/jupyter lab --notebook-dir=notebooks

bench: $(READY)
	@$(BIN)/python -m reslab bench

bench-gpu: $(READY)
	@$(BIN)/python -m reslab bench kernel --device cuda

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@echo "setting up $(VENV): about a minute, once packages are downloaded"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"Python 3.11 or 3.12 is needed, $(PYTHON) is {v[0]}.{v[1]}; run make PYTHON=python3.11" if v not in ((3, 11), (3, 12)) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25' uv
	@grep -E '^(torch|triton)' requirements.lock > $(VENV)/torch.txt
	@$(BIN)/python -m pip install -qq --no-compile -r $(VENV)/torch.txt
	@# uv is ten times as fast, but knows neither pip's settings nor its mirrors: pip where uv fails
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -r requirements.lock -e . 2> /dev/null \
		|| $(BIN)/python -m pip install -qq --no-compile -r requirements.lock -e .
	@$(BIN)/python -m reslab setup
	@touch $(READY)
