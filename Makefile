# make serve      serve MODEL=DIR, by default the small trained demo/qwen3, on PORT (8000); FLAGS="--..." are passed on
# make test       lint, types and all tests but the slow ones
# make test-all   the slow ones too: long schedules, every architecture, every library from its wheel
# make docs       the documentation as a site, in build/site
# make clean      remove what the others made
# Needs Python 3.11 or newer with pip and venv; the first run downloads the rest.

PORT ?= 8000
MODEL ?= demo/qwen3
LIBS := tensor kernels graph kvpool sampler scheduler frontend
PROJECTS := pyproject.toml recipes/pyproject.toml examples/llama/pyproject.toml $(LIBS:%=libs/%/pyproject.toml)

PYTHON := $(shell for p in $(PYTHON) python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Triton and cuBLAS are large, so only a machine with an NVIDIA driver gets them.
GPU := $(shell $(PYTHON) -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null \
	|| command -v nvidia-smi >/dev/null && echo gpu)
RUNTIME := .venv/.installed-$(or $(GPU),cpu)
TESTING := .venv-test/.installed

# Most modules are never imported, and to compile all of them takes half of the time. Python compiles the others at first import.
PIP := -m pip --disable-pip-version-check install --progress-bar off --no-compile

# $(call make_venv,FOLDER): the environment, with what builds the packages, so that one pip call installs all of them
# and finds each library's siblings here. The pip that Python 3.11 brings does not find siblings that are required with extras.
define make_venv
	@test -n "$(PYTHON)" || { echo "openinfer needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making $(1) with $(PYTHON) ..."
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@$(1)/bin/python $(PIP) 'pip>=25' hatchling editables
endef

.PHONY: serve test test-all docs clean
.DELETE_ON_ERROR:

serve: $(RUNTIME)
	@echo "Once it is ready, in another terminal:"
	@echo "  curl -s http://127.0.0.1:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}'"
	@echo "  .venv/bin/openinfer chat http://127.0.0.1:$(PORT)"
	@exec .venv/bin/openinfer serve $(MODEL) --port $(PORT) $(FLAGS)

test: $(TESTING)
	@.venv-test/bin/python scripts/run_tests.py

test-all: $(TESTING)
	@.venv-test/bin/python scripts/run_tests.py --all

docs: .venv-docs/.installed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo "The site is in build/site: open build/site/index.html"

clean:
	rm -rf .venv .venv-test .venv-docs build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(RUNTIME): $(PROJECTS) constraints.txt
	$(call make_venv,.venv)
	@echo "Installing openinfer for a $(or $(GPU),cpu) machine into .venv (a minute or two) ..."
	@.venv/bin/python $(PIP) --no-build-isolation -c constraints.txt $(LIBS:%=-e ./libs/%) -e ./recipes -e '.$(if $(GPU),[gpu])'
	@touch $@

$(TESTING): $(PROJECTS) .ci/constraints.txt constraints.txt
	$(call make_venv,.venv-test)
	@echo "Installing openinfer and what its tests need into .venv-test (a minute or two) ..."
	@.venv-test/bin/python $(PIP) --no-build-isolation -c .ci/constraints.txt ruff mypy anthropic \
		$(LIBS:%=-e './libs/%[test]') -e './recipes[test]' -e ./examples/llama -e .
	@.venv-test/bin/python $(PIP) -c .ci/constraints.txt --no-deps nixl-cu13  # it declares PyTorch as a dependency but does not need it
	@touch $@

.venv-docs/.installed: docs/requirements.txt
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@echo "Installing what builds the site into .venv-docs ..."
	@.venv-docs/bin/python $(PIP) --quiet -r docs/requirements.txt
	@touch $@
