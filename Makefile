# Everything a user or a developer runs. `make serve` and `make test` need nothing but Python 3.11+, make and gcc.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What pip installs is pinned in one place. Python compiles to bytecode what is imported, when it is: a fifth of it.
# CONSTRAINTS= for the newest of everything.
CONSTRAINTS ?= constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q --no-compile $(addprefix -c ,$(CONSTRAINTS))
# For the tests of the kernels where torch came without one.
TRITON := triton==3.9.0
MODEL ?= smollm2-135m-instruct
ARGS ?=

# On Linux without an NVIDIA GPU take PyTorch's CPU build, which is small. Where its index can't be reached,
# pip's own settings decide. Override with TORCH_INDEX=URL, or TORCH_INDEX= for none.
CPU_INDEX := https://download.pytorch.org/whl/cpu
PROBE := import socket; socket.create_connection(("download.pytorch.org", 443), 2)
TORCH_INDEX ?= $(shell [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null \
	&& $(PYTHON) -c '$(PROBE)' 2>/dev/null && echo $(CPU_INDEX))

.PHONY: help install install-test install-lint serve test test-all test-fast test-ray test-gpu lint coverage format docs site wheel dist publish-docs bench bench-gpu clients agents fuzz soak clean

help:
	@echo "make serve      install, fetch the embedded model, serve on 127.0.0.1:8000 (MODEL=..., ARGS=...)"
	@echo "make test       install, run the tests"
	@echo "make test-all   the same with what is for the night: clients' packages, more variants (minutes more)"
	@echo "make test-fast  the part of them that takes less than a minute"
	@echo "make test-ray   install Ray, run the tests of replicas on Ray Serve (minutes)"
	@echo "make lint       ruff, mypy, and the documentation's links"
	@echo "make coverage   how much of the heart its quick tests reach, with a floor"
	@echo "make docs       write docs/reference from the code"
	@echo "make site       the documentation as a site in build/site"
	@echo "make wheel      build dist/radixkv-*.whl"
	@echo "make dist       build and check what a release uploads: wheel and sdist"
	@echo "make publish-docs  the documentation of this version on the branch gh-pages"
	@echo "make bench      benchmarks on this machine's CPU (minutes)"
	@echo "make test-gpu   numbers on a GPU: kernels and models beside references (PART 1 of bench-gpu; 9 minutes at most)"
	@echo "make bench-gpu  numbers, kernels and engine on a GPU, in three parts of 9 minutes at most (PART=1, 2 or 3; ARGS=--plan)"
	@echo "make clients    Codex, Claude Code, LangChain, ... against the server, and docs/clients.md (ARGS=\"-k codex\"; minutes)"
	@echo "make agents     how much of their prompts Claude Code, Codex and opencode find in the cache, turn by turn (minutes)"
	@echo "make fuzz       a million random operations on the prefix cache, mutations of its code, 10,000 requests in small pools,"
	@echo "                10,000 generated requests of the API, samples, beams and kernels, every cell of the recorded traces"
	@echo "make soak       the engine under thousands of random workloads and faults, a server for 30 minutes"
	@echo "make install    the environment in .venv only"
	@echo "make clean      remove the environment and caches"

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "[1/3] making the environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] installing PyTorch (pinned; CPU build where there is no GPU)"
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@echo "[3/3] installing radixkv and what it needs (pinned in constraints.txt)"
	@$(PIP_INSTALL) -e '.[cpu]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(BIN)/python -m pip show -q triton 2>/dev/null || $(PIP_INSTALL) '$(TRITON)'
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed-test
	@$(PIP_INSTALL) -e '.[lint]'
	@touch $@

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test
install-lint: $(VENV)/.installed-lint

# Processes find the bytecode that another has compiled, also where the environment says otherwise.
serve test test-all test-fast test-ray: export PYTHONDONTWRITEBYTECODE =

serve: install
	@$(BIN)/radixkv serve $(MODEL) $(ARGS)

# Three processes, a file's tests in one of them: most tests use one core, and some wait. WORKERS=0 for one process.
WORKERS ?= 3
test-all: export RADIXKV_NIGHTLY = 1
test-all: test

test: install-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The fast tier: what finds most mistakes in under a minute on two idle cores. Nothing here needs a model, a
# compiler or the network. What grows slow is marked `slow`, or its file named in SLOW.
FAST := tests/test_layering.py tests/docs/test_links.py tests/docs/test_reference.py tests/cache \
	tests/scheduling/test_scheduling.py tests/scheduling/test_waiting_queue.py tests/scheduling/test_batch_rows.py \
	tests/engine/test_llm.py tests/engine/test_async_engine.py tests/engine/test_client_conformance.py \
	tests/server/test_rooms.py tests/server/test_dialects.py tests/server/http/test_auth.py \
	tests/server/apis/openai/test_openai_api.py
SLOW := tests/cache/test_namespaces.py tests/cache/test_large_caches.py
test-fast: install-test
	$(BIN)/python -m pytest -m "not slow" $(FAST) $(addprefix --ignore=,$(SLOW)) $(ARGS)

# Apart from the others, in an environment of their own: Ray is large, and most changes don't touch it.
RAY_VENV := build/ray
test-ray: install-test
	@test -x $(RAY_VENV)/bin/ray || { \
	$(BIN)/python -m venv $(RAY_VENV) && \
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	> "$$($(RAY_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/serving.pth" && \
	$(RAY_VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt 'ray[serve]' 'protobuf<7'; }
	PYTHONPATH=$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/server $(RAY_VENV)/bin/python -m pytest tests/server/ray_serve $(ARGS)

lint: install-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases benchmarks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f docs/site/mkdocs.yml

coverage: install-lint
	$(BIN)/coverage run -m pytest -m "not slow" tests/cache tests/scheduling $(addprefix --ignore=,$(SLOW)) $(ARGS)
	$(BIN)/coverage report

format: install-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python docs/generate_reference.py

site: install-lint
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f docs/site/mkdocs.yml
	@echo "the documentation is in build/site/index.html"

# In an environment of its own, so that it needs no torch.
wheel:
	@test -x build/wheel/bin/python || $(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip wheel --disable-pip-version-check -q --no-deps -w dist .

# What a release uploads: the wheel, made from the sdist, and the sdist; checked.
dist:
	@test -x build/dist/bin/twine || { $(PYTHON) -m venv build/dist && \
	build/dist/bin/python -m pip install --disable-pip-version-check -q build twine; }
	build/dist/bin/python -m build --outdir dist .
	build/dist/bin/twine check --strict dist/*.whl dist/*.tar.gz

# The site of this version on the branch `gh-pages`, beside those of earlier ones.
publish-docs: install-lint
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --config-file docs/site/mkdocs.yml --push --update-aliases \
		"$$($(BIN)/python -c 'import radixkv; print(radixkv.__version__)')" latest
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default --config-file docs/site/mkdocs.yml --push latest

bench: install-test
	$(BIN)/python -m benchmarks.time_to_first_token
	$(BIN)/python -m benchmarks.prefix_cache
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.scheduling
	$(BIN)/python -m benchmarks.serving

# What is right comes before what is fast.
test-gpu: PART = 1
test-gpu: bench-gpu

# With the Python at hand where it has what is needed, so that it works without a network, too.
bench-gpu: GPU_ARGS = $(if $(PART),--run $(PART)) $(ARGS)
bench-gpu:
	@if $(PYTHON) -c 'import torch, triton, transformers, pydantic_core, llguidance; assert torch.cuda.is_available()' 2>/dev/null; \
	then PYTHONPATH=.:kernels:server:$$PYTHONPATH $(PYTHON) -m benchmarks.gpu $(GPU_ARGS); \
	else $(MAKE) install-test && $(BIN)/python -m benchmarks.gpu $(GPU_ARGS); fi

clients: install-test
	$(BIN)/python tests/support/try_clients.py $(ARGS)

agents: install-test
	$(BIN)/python -m benchmarks.agent_prefixes $(ARGS)

fuzz: install-test
	$(BIN)/python tests/cache/fuzz.py --steps 1000000 $(ARGS)
	$(BIN)/python tests/cache/mutations.py
	$(BIN)/python tests/engine/fuzz_small_pools.py --requests 5000
	$(BIN)/python tests/engine/fuzz_small_pools.py --requests 5000 --mixed
	$(BIN)/python tests/server/fuzz_api.py --cases 10000
	$(BIN)/python tests/server/fuzz_adapters.py --requests 10000
	$(BIN)/python tests/model/fuzz_adapter_folders.py --cases 20000
	$(BIN)/python tests/model/fuzz_gguf.py --cases 10000
	$(BIN)/python tests/model/fuzz_stored_forms.py --seconds 600
	RADIXKV_FUZZ=20 $(BIN)/python -m pytest tests/engine/test_samples_and_beams.py tests/kernels/test_attention_contract.py \
		tests/kernels/test_float_product.py
	RADIXKV_FUZZ=20 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/interpreted -k random
	TRITON_INTERPRET=1 $(BIN)/python tests/engine/fuzz_small_pools.py --interpreted all --mixed --each 6 --requests 240
	RADIXKV_ALL_CELLS=1 $(BIN)/python -m pytest tests/cli/test_replay_recorded.py

soak: install-test
	$(BIN)/python -m pytest tests/engine/test_engine_semantics.py -k any_workload --hypothesis-profile=soak $(ARGS)
	RADIXKV_FAULT_SEEDS=50 $(BIN)/python -m pytest tests/engine/test_fault_points.py
	RADIXKV_HOSTILE_GRAMMARS=1000 $(BIN)/python -m pytest tests/engine/test_hostile_grammars.py
	$(BIN)/python tests/server/soak.py --minutes 30

clean:
	rm -rf $(VENV) build/clients .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
