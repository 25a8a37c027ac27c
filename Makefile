# Needs Python 3.11 or newer, make and git. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Run a second time without a processor's wide instructions: their last digits must not be what a test demands.
ROUNDING := $(foreach name,methods/combination methods/fast_w2 methods/fedem training/fit methods/hypcluster model/layers participation/policies,tests/$(dir $(name))test_$(notdir $(name)).py)
# One more than processors: tests of networks wait a third of their time.
WORKERS := $(shell $(PYTHON) -c "import os; print(1 + os.cpu_count())")
# A worker that dies is not replaced: pytest-xdist 3.8 waits for ever for the groups of tests that it gave the new one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n $(WORKERS) --max-worker-restart 0 --durations 30
OUT ?= runs/digits-$(shell date +%Y%m%d-%H%M%S)
# No forests: growing and keeping them takes as long as all other runs together.
PER_CLIENT := sklearn:logistic,sklearn:svc
# Trials for the plan would take longer than these runs. In float64 every processor gets the README's numbers.
OPTIONS := --seeds 0..2 --jobs 2 --engine stacked plan.threads=1 dtype=float64

# Sites install these files and no others. Hashes are those of the index that pip is set to: a site's own index must have the same.
LOCK := --extra flower --extra tables --extra privacy --constraint constraints.txt --generate-hashes --allow-unsafe --strip-extras --no-annotate --no-emit-index-url --no-emit-find-links

.PHONY: run test test-long test-all types short docs site lock sbom dist smoke clean

run: $(VENV)/installed
	$(BIN)/perfed compare digits-label-skew --methods local,fedrep,fedavg-ft,ditto,fedpac,$(PER_CLIENT) $(OPTIONS) --out $(OUT)/label-skew
	$(BIN)/perfed compare flic-digits-views --methods local,hetfedrep,flic-class,flic-hl,$(PER_CLIENT) $(OPTIONS) --out $(OUT)/views

# Tests start hundreds of processes; where the environment forbids bytecode, each would compile perfed anew.
test test-long short: export PYTHONDONTWRITEBYTECODE =

# What to run before a commit. mypy has one core, beside the tests: the other is not idle meanwhile.
test: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs 2 types short

# What `make test` leaves out; together they are all tests.
test-long: $(VENV)/installed-test
	$(PYTEST) --dist loadgroup -m long
	OMP_NUM_THREADS=1 tests/without_sites.sh $(BIN)/python -n $(WORKERS) --max-worker-restart 0 --dist loadfile
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ROUNDING) -n auto --max-worker-restart 0

test-all:
	$(MAKE) test
	$(MAKE) test-long

types: $(VENV)/installed-test
	$(BIN)/mypy

# A file's tests share what it makes once, so that they stay together; long ones are few, and go where there is room.
short: $(VENV)/installed-test
	$(PYTEST) --dist loadfile -m "not long"

lock: $(VENV)/tools
	mkdir -p build
	$(VENV)/tools/bin/pip-compile --quiet $(LOCK) --output-file build/requirements.lock pyproject.toml

sbom: $(VENV)/tools $(VENV)/installed
	mkdir -p build
	$(VENV)/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-format JSON --output-file build/sbom.cdx.json $(BIN)/python

# Where torch is, so that the wheel has what `perfed list` says.
dist: $(VENV)/installed-test
	rm -rf dist
	$(BIN)/python -m hatchling build

# Does what is released work where nothing else is? make smoke PYTHON=python3.13
smoke: dist
	for made in dist/*; do tests/smoke.sh $(PYTHON) $$made || exit 1; done

docs: $(VENV)/installed
	$(BIN)/python docs/build_docs.py

# Warnings are errors, a link without its page or heading among them.
site: $(VENV)/installed-test
	$(BIN)/python docs/build_site.py

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

# Apart: what they need is not what perfed needs.
$(VENV)/tools: $(VENV)/installed
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet pip-tools cyclonedx-bom
	touch $@

clean:
	rm -rf $(VENV)
