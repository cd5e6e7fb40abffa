# TokenRouter Workbench. `make` alone lists the targets; each sets up what it needs, once.
#
# Variables:
#   PYTHON=/path/to/python3.12   the interpreter to build .venv with (3.11 or later)
#   TORCH_INDEX=URL              take torch from this index instead of the default one; on Linux the
#                                default is the CUDA build, some gigabytes, also without a GPU
#   ARGS='…'                     passed on to the command behind the target

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := serve,ui,hf,dev
PIP     = $(BIN)/python .ci/install.py $(VENV)/install.log
PYTHONS = $(PYTHON) python3 python3.13 python3.12 python3.11

# A shell lets what it puts in the background ignore Ctrl-C, nohup lets it ignore a closed terminal;
# the tests must not inherit that.
HEARS   = import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); \
    signal.signal(signal.SIGHUP, signal.SIG_DFL); \
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
RUN     = OMP_NUM_THREADS=1 $(BIN)/python -c '$(HEARS)' -m
PYTEST  = $(RUN) coverage run -p -m pytest -m 'not browser and not slow' -p no:cacheprovider $(ARGS)
COMPUTING = $(addprefix tests/,checkpoint exchange figures kernels model routing runtime train views workbench)

.DEFAULT_GOAL := help
.PHONY: help install start lab test browser notebooks drills soak service check gpu resolve clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## set up .venv (every other target does it when needed)

start: $(STAMP)  ## run the engine and its live page, print the URL; Ctrl-C ends all of it
	@exec $(BIN)/workbench start $(ARGS)

lab: $(STAMP)  ## open the lessons in JupyterLab, print the URL; Ctrl-C ends it
	@exec $(BIN)/workbench lab $(ARGS)

# Two processes, for a second core: what starts programs and browsers, and beside it what only computes.
test: check  ## lint, types, then the test suite with the coverage of engine
	@rm -f .coverage .coverage.*
	@$(PYTEST) $(COMPUTING) > .second.log 2>&1 & second=$$!; \
	    $(PYTEST) tests $(COMPUTING:%=--ignore=%); first=$$?; \
	    wait $$second || first=$$?; cat .second.log; rm -f .second.log; exit $$first
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage report --fail-under=85

browser: $(STAMP)  ## the page in a real Chromium
	@$(RUN) pytest -m browser $(ARGS)

notebooks: $(STAMP)  ## run every notebook from top to bottom
	@$(RUN) pytest tests/notebooks $(ARGS)

drills: $(STAMP)  ## walk every drill every way and the demo, and kill what runs them
	@$(RUN) pytest -m 'not browser' --timeout 600 \
	    tests/drills tests/demos tests/dashboards/test_start.py $(ARGS)

soak: $(STAMP)  ## half an hour of watching: looks, readers and viewers come and go, nothing stays
	@$(RUN) pytest tests/soak $(ARGS)
	@$(RUN) pytest -m slow --timeout 1200 tests/runtime/test_draft.py $(ARGS)

service: $(STAMP)  ## the service under load, fuzz, a real Prometheus and TLS; half an hour
	@$(RUN) pytest -s -m slow --timeout 1200 tests/serve $(ARGS)

check: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

# Installs nothing: a GPU machine often has torch and triton already, and no network.
gpu:  ## is every kernel right on this NVIDIA GPU, and how fast? installs nothing, 4 minutes
	$(or $(PYTHON),$(wildcard $(BIN)/python),python3) -m workbench.bench.gpu $(ARGS)

resolve: | $(BIN)/python  ## prove that the public index alone satisfies every pin (metadata only)
	PYTHON=$(or $(PYTHON),$(BIN)/python) bash .ci/resolve

clean:  ## remove .venv and every cache
	rm -rf $(VENV) .venv-* .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov

$(BIN)/python:
	@for python in $(PYTHONS); do \
	    if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
	        2>/dev/null; then \
	        echo "Making $(VENV) with $$($$python --version)."; \
	        exec $$python -m venv $(VENV); \
	    fi; \
	done; \
	echo "No Python 3.11 or later with venv among: $(strip $(PYTHONS));" \
	    "install one (on Debian also python3-venv), or name it: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

# Rebuilt only when a requirement or a pin changes, so that a second run starts at once.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(VENV) holds $$($(BIN)/python --version), 3.11 or later is needed;" \
	    "run make clean, then again" >&2; exit 1; }
	@echo "Installing the packages into $(VENV): some minutes, this once."
ifdef TORCH_INDEX
	@$(PIP) --index-url $(TORCH_INDEX) "$$(grep '^torch==' constraints.txt)"
endif
	@$(PIP) -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $@
