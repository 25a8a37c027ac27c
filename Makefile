# Needs Python 3.11 or newer, make and git. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Run a second time without a processor's wide instructions: their last digits must not be what a test demands.
ROUNDING := $(foreach name,methods/combination methods/fast_w2 methods/fedem training/fit methods/hypcluster model/layers participation/policies,tests/$(dir $(name))test_$(notdir $(name)).py)
# One more than processors: tests of networks wait a third of their time.
WORKERS := $(shell $(PYTHON) -c "import os; print(1 + os.cpu_count())")
OUT ?= runs/digits-$(shell date +%Y%m%d-%H%M%S)
PER_CLIENT := sklearn:logistic,sklearn:svc
# Trials for the plan would take longer than these runs.
OPTIONS := --seeds 0..2 --engine stacked plan.threads=2

.PHONY: run test types pytest docs clean

run: $(VENV)/installed
	$(BIN)/perfed compare digits-label-skew --methods local,fedrep,fedavg-ft,fedpac,$(PER_CLIENT) $(OPTIONS) --out $(OUT)/label-skew
	$(BIN)/perfed compare flic-digits-views --methods local,hetfedrep,flic-class,flic-hl,$(PER_CLIENT) $(OPTIONS) --out $(OUT)/views

# Tests start hundreds of processes; where the environment forbids bytecode, each would compile perfed anew.
test pytest: export PYTHONDONTWRITEBYTECODE =

# mypy has one core, beside the tests: the other is not idle meanwhile.
test: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs 2 types pytest
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ROUNDING) -n auto

types: $(VENV)/installed-test
	$(BIN)/mypy

pytest: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n $(WORKERS) --dist loadgroup

docs: $(VENV)/installed
	$(BIN)/python docs/build_docs.py

# pip would compile what it installs on one core alone. With the tests' packages all others are there too.
define install
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.$(1)'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # a package may hold templates
	touch $(VENV)/installed $@
endef

$(VENV)/installed $(VENV)/installed-test: pyproject.toml constraints.txt

$(VENV)/installed:
	$(call install)

$(VENV)/installed-test:
	$(call install,[test])

clean:
	rm -rf $(VENV)
