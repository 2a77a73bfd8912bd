# The commands of this repository. `make` lists them. `make up` and `make test` are all that a newcomer needs.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3.11
VENV ?= .venv
# Goes to `dsv4-deploy up`: make up ARGS='--port 8001 --tp 2'
ARGS ?=
PYTEST_ARGS ?=
# One more than there are processors: many tests wait for a process.
TEST_JOBS ?= $(shell echo $$(($$(nproc) + 1)))
BENCH_ARGS ?=
LOCK_ARGS ?=

# Where torch==2.13.0+cpu comes from; tools/install.py reads these. Whatever pip is configured with (a mirror, a folder of
# wheels) is asked first, then TORCH_INDEX. TORCH_WHEEL, a file or folder, is used instead of both; TORCH_SHA256 replaces the
# pinned digest for another build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_WHEEL ?=
TORCH_SHA256 ?=
export TORCH_INDEX TORCH_WHEEL TORCH_SHA256

# What the tests need of the system, as command=package (Debian's names).
APT_TOOLS ?= curl=curl systemd-analyze=systemd

BIN = $(VENV)/bin

.PHONY: help venv venv-test up down deps tools sources fingerprints docs chart lint test test-fast bench soak lock clean python-check

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile
	@echo; echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) ARGS= PYTEST_ARGS= TEST_JOBS= BENCH_ARGS= LOCK_ARGS= TORCH_INDEX= TORCH_WHEEL= TORCH_SHA256="

python-check:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
		echo "error: there is no $(PYTHON) here; the no-GPU mode needs Python 3.11." >&2; \
		echo "  Install it (Debian 12: apt-get install python3.11-venv) or name one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
		echo "error: $(PYTHON) does not run as Python 3.11, the version that the no-GPU mode is locked for." >&2; \
		echo "  Name one that does: make PYTHON=/path/to/python3.11" >&2; exit 2; }

venv: python-check ## the virtual environment: real vLLM for the CPU, hash-checked, and this project
	@"$(PYTHON)" tools/install.py --venv "$(VENV)"

venv-test: python-check ## the same with what the tests need
	@"$(PYTHON)" tools/install.py --venv "$(VENV)" --test

up: venv ## install if needed, serve the tiny DeepSeek-V4 and print its answer (ARGS= goes to `dsv4-deploy up`)
	@"$(BIN)/dsv4-deploy" up $(ARGS)

down: ## stop the server that `make up` started
	@if [ -x "$(BIN)/dsv4-deploy" ]; then "$(BIN)/dsv4-deploy" down; else echo "Nothing is installed in $(VENV), so nothing runs from it."; fi

deps: ## system packages that the tests need, when they are missing
	@missing=; for pair in $(APT_TOOLS); do \
		command -v "$${pair%%=*}" >/dev/null 2>&1 || missing="$$missing $${pair#*=}"; done; \
	[ -n "$$missing" ] || exit 0; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then \
		echo "error: the tests need these packages:$$missing" >&2; \
		echo "  Install them as root, for example: apt-get install$$missing" >&2; exit 1; fi; \
	echo "Installing for the tests:$$missing"; \
	apt-get -o DPkg::Lock::Timeout=300 -qq update && \
	DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq install -y --no-install-recommends $$missing

tools: venv-test ## what the tests of the Helm chart and of `render` run (helm, kubectl, trivy, promtool, compose, Quadlet)
	@"$(BIN)/python" tools/kube_tools.py
	@"$(BIN)/python" tools/render_tools.py

sources: venv-test ## what the patches are tested with: vLLM releases' Python files, and Triton (660 MB, once), hash-checked
	@"$(BIN)/python" tools/vllm_sources.py

fingerprints: sources ## record the digests of what the patches touch, and say which changed
	@"$(BIN)/python" tools/fingerprints.py

docs: venv ## rewrite docs/patches.md
	@"$(BIN)/python" tools/patches_doc.py

chart: venv ## rewrite what the Helm chart derives from values.yaml and the catalog
	@"$(BIN)/python" tools/chart.py

lint: venv-test ## ruff (rules and format) and mypy
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"

# What is not about time runs file beside file, on every processor; servers one after the other. Both parts always run.
# (xdist 3.8's loadgroup does nothing under pytest 9.2: seen, tests of one group on three workers.)
PYTEST = "$(BIN)/python" -m pytest $(PYTEST_ARGS)
BESIDE = -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
# Of what PYTEST_ARGS chooses, all may lie in the other part: then pytest ends with 5.
NONE_CHOSEN = [ $$? = $(if $(PYTEST_ARGS),5,never) ]
# One thread: torch's threads spin while they wait, which on a shared machine costs more than they bring.
test test-fast: export OMP_NUM_THREADS ?= 1
test: deps venv-test tools sources lint ## everything: lint, then all tests with real servers (PYTEST_ARGS= goes to pytest)
	@failed=0; $(PYTEST) $(BESIDE) -m "not e2e" || $(NONE_CHOSEN) || failed=1; \
	$(PYTEST) -m e2e || $(NONE_CHOSEN) || failed=1; exit $$failed

test-fast: deps venv-test tools sources ## the tests that start no vLLM
	@$(PYTEST) $(BESIDE) -m "not vllm and not e2e"

bench: venv ## start-up, memory and decode speed against plain vLLM (BENCH_ARGS='--json FILE')
	"$(BIN)/python" bench/commands.py
	"$(BIN)/python" bench/registry.py
	"$(BIN)/python" bench/triage.py
	"$(BIN)/python" bench/startup.py $(BENCH_ARGS)
	"$(BIN)/python" bench/health.py

soak: venv-test ## ten minutes of 64 clients with a probe every second, against a real server (SOAK_SECONDS=600)
	SOAK_SECONDS=$${SOAK_SECONDS:-600} OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -s tests/e2e/test_supervisor.py -k "started_means or probes_never"

lock: python-check ## rewrite the hashed locks from pyproject.toml (LOCK_ARGS=--upgrade for newer versions)
	@"$(PYTHON)" tools/lock.py $(LOCK_ARGS)

clean: python-check ## remove the virtual environment, caches and build leftovers
	@"$(PYTHON)" tools/install.py --venv "$(VENV)" --remove
	@rm -rf build dist .cache/tools *.egg-info tools/vllm-shim/build tools/vllm-shim/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
