# headwise: `make demo` shows it, `make test` proves it, `make check` lints it, `make figures` measures it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv demo test check soak figures clean
venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "headwise needs Python 3.10 or newer; give one with PYTHON=..."; exit 1; }
	@echo "[1/2] creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/2] installing headwise and its dependencies (a few minutes, about 3 GB)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,demo]'
	@touch $@

demo: venv
	@$(BIN)/python -m headwise demo

test: venv
	@$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder

soak: venv
	@$(BIN)/python -m pytest -m soak

check: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

figures: venv
	@$(BIN)/python benchmarks/figures.py

clean:
	rm -rf $(VENV)
