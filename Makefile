# `make demo` and `make test` set up everything from a bare clone; a second call starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := containers/requirements-cpu.lock
READY := $(VENV)/ready
WORKERS ?= 3
export OMP_NUM_THREADS ?= 1
# Otherwise each of the tests' processes would compile what it imports.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo test test-full test-long test-slurm-matrix gpu-check lint format slurm clean

help:  ## List the targets.
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "make %-20s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) slurm  ## Make .venv with all packages, and install Slurm for the tests where this user may.
	@if command -v nvidia-smi >/dev/null; then $(BIN)/python -m pipeline.node.c_compiler; fi

# On a machine with an NVIDIA GPU the packages come from the `gpu` extra, elsewhere from the CPU lock.
$(READY): $(LOCK) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	if command -v nvidia-smi >/dev/null; then $(BIN)/python -m pip install --quiet --editable '.[gpu,dev,lm_eval]'; \
	else $(BIN)/python -m pip install --quiet --no-deps -r $(LOCK) && $(BIN)/python -m pip install --quiet --no-deps --editable .; fi
	touch $(READY)

# A real Slurm and Apptainer for the tests, where this user may install them.
slurm:
	@containers/install-slurm.sh
	@containers/install-apptainer.sh

# `make demo OVERRIDES=policy.megatron_cfg.enabled=true` trains on Megatron-Core.
demo: $(READY)  ## Teach a 0.8M model additions on this machine, and write a report: 2 minutes on 2 cores.
	rm -rf runs/demo
	$(BIN)/python launch/submit.py recipe=tiny_grpo cluster.executor=local run_dir=runs/demo $(OVERRIDES)
	$(BIN)/python launch/report.py runs/demo

# Three workers, for many tests wait; a file's tests stay together. Some tests start up to eight processes.
test: setup  ## Run the default tests: about 10 minutes on 2 cores.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What `make test` leaves out and takes minutes rather than hours.
test-full: setup  ## Run the wider grids and further layouts that `make test` leaves out: about 30 minutes.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'full and not gpu and not long'

test-long: setup  ## Run the tests that take minutes each: hours.
	$(BIN)/python -m pytest -m long

# The Slurm tests on this machine's Slurm and on two newer ones, each in a Debian of its own that is made once. `ARGS=...`: for pytest.
test-slurm-matrix: setup  ## Run the Slurm tests on Slurm 22.05, 24.11 and 26.05 (as root).
	containers/install-slurm.sh matrix
	$(BIN)/python -m tests.slurm.roots $(ARGS)

# On a machine with a GPU: do the GPU's tests pass, and how fast is it? `make gpu-check PYTHON=...` takes that Python; otherwise
# .venv is taken if `make setup` has made it, unless python3's torch finds a GPU and .venv's does not. Installs nothing.
# `ARGS="parts=train,decode total=570 out=FILE"`. Writes gpu_check.json; ends with 2 where there is no GPU.
gpu-check:  ## On a machine with a GPU: check and measure it, and run its tests, into gpu_check.json.
	@finds_gpu() { "$$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }; \
	python=$(PYTHON); \
	if [ -z "$(filter command environment,$(origin PYTHON))" ] && [ -e $(READY) ]; then \
		if finds_gpu $(BIN)/python || ! finds_gpu $(PYTHON); then python=$(BIN)/python; fi; \
	fi; \
	$$python -m tests.gpu_check $(ARGS)

lint: $(READY)  ## Check style, docstrings and types.
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)  ## Mend style where that can be done automatically.
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:  ## Remove .venv, learning curves and the demo's run.
	rm -rf $(VENV) .bench runs/demo
