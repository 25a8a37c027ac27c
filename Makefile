# Needs Python 3.11 or newer, make and git. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= runs/flic-digits-views-$(shell date +%Y%m%d-%H%M%S)

.PHONY: run test clean

run: $(VENV)/installed
	$(BIN)/perfed compare flic-digits-views --methods local,hetfedrep,flic-class,flic-hl --seeds 0..2 --out $(OUT)

test: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n auto

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV)
