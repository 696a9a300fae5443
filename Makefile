# Every target sets up its own virtual environment, once. A fresh machine needs only make and Python >= 3.11 with venv.
# For Linux and macOS: environments of Windows have other paths.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= requirements/ci.txt
EXTRAS ?= triton,examples,dev
TESTS ?= tests
# The tests to run by their marker; nothing = all.
MARK ?= not slow
DTYPE ?= float32

# Named after the constraints, so that changing them in the same environment installs again.
INSTALLED := $(VENV)/.installed-$(notdir $(CONSTRAINTS))
# `make demo` installs less.
INSTALLED_DEMO := $(VENV)/.installed-demo-$(notdir $(CONSTRAINTS))

.PHONY: help demo parity parity-released reproduce test test-slow test-exhaustive test-oldest test-newest newest oldest ecosystem installed test-ecosystem kernel-repository test-operators operators fuzz figures docs style typing audit bench gpu clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: $(INSTALLED_DEMO) ## load two old checkpoints, train a Luna and a Mega, and share one (4 minutes including the setup)
	OMP_NUM_THREADS=1 $(VENV)/bin/python examples/demo.py

# The tests start Python many times; without byte code each start would compile the package.
RUN_TESTS = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
    $(VENV)/bin/python -m pytest -n 2 --dist worksteal --durations=20 -m "$(MARK)" $(TESTS)

test: $(INSTALLED) ## run the fast tests, or those named by TESTS="..."
	$(RUN_TESTS)

test-slow: ## run the tests that `make test` leaves out
	$(MAKE) test MARK="slow and not exhaustive"

test-exhaustive: ## run every combination of parameters, and check the machine code with three versions of Triton (hours)
	$(MAKE) test MARK=exhaustive

test-oldest: VENV = .venv-oldest
test-oldest: oldest ## run the fast tests with the oldest supported versions, in .venv-oldest
	$(RUN_TESTS)

test-newest: VENV = .venv-newest
test-newest: newest ## run the fast tests with the newest versions of all dependencies (PRE=1: also pre-releases), in .venv-newest
	$(VENV)/bin/python -m pytest -q --noconftest tests/test_private_names.py # first: names what a new version has removed
	$(RUN_TESTS)

# A constraint of pip's configuration would cap versions, and an empty PIP_CONSTRAINT does not override it.
newest: export PIP_CONSTRAINT = /dev/null
newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --no-compile $(if $(PRE),--pre) --editable '.[$(EXTRAS)]'

test-ecosystem: VENV = .venv-ecosystem
test-ecosystem: MARK =
test-ecosystem: TESTS = tests/ecosystem tests/test_cli.py
test-ecosystem: ecosystem ## run the tests with PEFT, TRL, sentence-transformers and other tools, in an environment of their own
	$(RUN_TESTS)

OPERATORS := .venv-operators/bin/python
kernel-repository: operators ## write the operators without the models in build/kernel: a folder for the Kernel Hub, and a wheel
	rm -f build/kernel/*.whl
	$(OPERATORS) .ci/operators.py build/kernel
	$(OPERATORS) -m pip wheel --quiet --no-deps --wheel-dir build/kernel build/kernel/wheel

test-operators: operators ## test them in an environment without transformers and luna_mega
	OMP_NUM_THREADS=1 $(OPERATORS) -m pytest --noconftest tests/operators

DURATION ?= 60
SEED ?= $(shell date +%s)
LEVEL ?=
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all
# Uninitialized variables and memory are NaN, which the results must not depend on.
fuzz: ## random calls of the C library under sanitizers (DURATION=seconds SEED=first LEVEL=0 to 2: instruction set)
	@mkdir -p build
	@if echo 'int main(void) { return 0; }' | $(CC) $(SANITIZE) -x c -o build/fuzz_native - 2>build/fuzz.log \
	    && build/fuzz_native; then \
	    $(CC) -std=gnu11 -O1 -g -Wall -Wextra -Werror $(SANITIZE) -ftrivial-auto-var-init=pattern -pthread \
	        tests/kernels/fuzz_native.c -lm -o build/fuzz_native && \
	    ASAN_OPTIONS=malloc_fill_byte=255:max_malloc_fill_size=1073741824 build/fuzz_native $(DURATION) $(SEED) $(LEVEL); \
	else echo "skipped: $(CC) cannot build programs with AddressSanitizer here (build/fuzz.log)"; fi

operators:
	test -x $(OPERATORS) || $(PYTHON) -m venv .venv-operators
	$(OPERATORS) -m pip install --quiet --requirement requirements/operators.txt

oldest:
	$(MAKE) installed VENV=.venv-oldest CONSTRAINTS=requirements/ci-oldest.txt

ecosystem:
	$(MAKE) installed VENV=.venv-ecosystem CONSTRAINTS=requirements/ci-ecosystem.txt EXTRAS=$(EXTRAS),ecosystem

installed: $(INSTALLED)

# Further fixtures for `make parity`, with folders DIR/<family>/<name>.
FIXTURES ?=
parity: $(INSTALLED) ## compare with the original code and write docs/parity.md (FIXTURES=DIR adds fixtures)
	FIXTURES=$(FIXTURES) PARITY_TABLE=docs/parity.md HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
	    $(VENV)/bin/python -m pytest -n 2 --dist worksteal tests/parity

RELEASED := build/released
# Outputs that the original code recorded with this checkpoint (docs/conversion.md).
RECORDED ?=
parity-released: $(INSTALLED) ## download and convert a released Mega checkpoint; RECORDED=FILE verifies it (needs internet)
	mkdir -p $(RELEASED)
	curl --fail --location --output $(RELEASED)/mega.sc.zip https://dl.fbaipublicfiles.com/mega/mega.sc.zip
	$(VENV)/bin/python -m zipfile -e $(RELEASED)/mega.sc.zip $(RELEASED)/mega-sc
	$(VENV)/bin/luna-mega convert "$$(find $(RELEASED)/mega-sc -name '*.pt' | head -1)" --output $(RELEASED)/model
	$(if $(RECORDED),$(VENV)/bin/luna-mega verify $(RELEASED)/model $(RECORDED))

reproduce: $(INSTALLED) ## evaluate a checkpoint of the authors as the paper does (NAME=enwik8, OPTIONS="..."; needs internet)
	$(VENV)/bin/python examples/reproduce.py $(NAME) $(OPTIONS)

figures: $(INSTALLED) ## draw the plots of the pages, and fill their tables of measurements, from benchmarks/results
	$(VENV)/bin/python docs/site/plots.py

docs: ## build the documentation site in build/docs/site, in a separate environment; a broken link is an error
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --requirement requirements/docs.txt
	.venv-docs/bin/python docs/site/build.py

style: $(INSTALLED) ## lint, check the format and the spelling
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell

typing: $(INSTALLED) ## check the types of the public surface
	$(VENV)/bin/mypy tests/typed.py

audit: $(INSTALLED) ## report known vulnerabilities of the installed packages
	$(VENV)/bin/python -m pip install --quiet pip-audit
	$(VENV)/bin/pip-audit --skip-editable

bench: $(INSTALLED) ## measure the ops, on a GPU if available (DTYPE=bfloat16)
	$(VENV)/bin/python benchmarks/run.py --dtype $(DTYPE)

GPU_OPTIONS ?=
gpu: ## check the kernels on a GPU and measure them with the Python of PYTHON (4 minutes); results in outputs/gpu
	$(PYTHON) benchmarks/gpu.py $(GPU_OPTIONS)

clean: ## remove the environments and what was built
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-ecosystem .venv-operators .venv-docs build dist kernels/recurrence/*.so *.egg-info .pytest_cache .ruff_cache

$(INSTALLED_DEMO): EXTRAS = examples
# Python compiles a module when it is first imported; pip would compile all of them, most of which nothing imports.
$(INSTALLED) $(INSTALLED_DEMO): setup.cfg pyproject.toml setup.py $(wildcard kernels/recurrence/native*) $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "luna-mega needs Python >= 3.11: make PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(VENV)/bin/python -m pip install --no-compile --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	touch $@ $(INSTALLED_DEMO)
