# Everything a fresh machine needs: `make verify` proves the operators and the engine, `make test` runs the gate.
# The environment is .venv and always the CPU one. PYTHON=... uses an environment of yours and installs only sparse-mla.
BASE_PYTHON ?= python3
TORCH ?= cpu
VERIFY ?=

.PHONY: setup verify test matrix clean

setup:
	@$(BASE_PYTHON) scripts/setup.py --torch $(TORCH)

ifdef PYTHON
verify:
	$(PYTHON) -m pip install --quiet --no-deps .
	$(PYTHON) -m sparse_mla verify $(VERIFY)
else
verify: setup
	HF_HUB_OFFLINE=1 scripts/verify .venv/bin/python $(VERIFY)
endif

test: setup
	HF_HUB_OFFLINE=1 scripts/check

matrix: setup
	.venv/bin/python scripts/compile_matrix.py --newest

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
