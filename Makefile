# `make` alone lists the targets. Every target sets up what it needs; nothing has to be prepared.

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
# Tests on servers wait for most of their time.
SERVER_WORKERS ?= 5
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
STAMP := $(VENV)/.installed
JARS := $(VENV)/jars
OPENSEARCH := $(VENV)/opensearch
PYTEST := $(BIN)/python -m pytest
# Tests start hundreds of processes; each would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@echo "Penstock. Targets:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(STAMP) jars opensearch ## create .venv with everything; as root also install missing system packages

.PHONY: system
system:
	@scripts/system-packages.sh $(PYTHON)

$(BIN)/python: | system
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Build tools come first and pinned: pyspark is a source distribution and is built with them.
$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) hatchling setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-build-isolation -e '.[dev]'
	@touch $@

.PHONY: jars
jars: $(STAMP)
	@$(BIN)/python scripts/delta-jars.py $(JARS)

.PHONY: opensearch
opensearch: $(STAMP) system
	@$(BIN)/python scripts/opensearch-server.py $(OPENSEARCH)

.PHONY: demo
demo: $(STAMP) ## a shop becomes Delta tables that follow it, and are compared with it; about a minute
	$(BIN)/penstock demo $(ARGS)

.PHONY: demo-search
demo-search: $(STAMP) opensearch ## a shop's documents in an OpenSearch follow its rows, also while an index is built anew
	$(BIN)/penstock demo --search $(ARGS)

.PHONY: test
test: lint unit integration ## everything that must pass: lint, unit, integration and end to end

.PHONY: unit
unit: $(STAMP) ## the tests that need no service, in less than a minute
	$(PYTEST) -q -n $(WORKERS) tests/unit $(ARGS)

.PHONY: integration
integration: $(STAMP) system jars opensearch ## the tests on real servers, and whole pipelines
	$(PYTEST) -q -n $(SERVER_WORKERS) --dist loadgroup $(wildcard tests/integration tests/e2e) $(ARGS)

.PHONY: lint
lint: ruff types imports ## ruff, types and import order

.PHONY: ruff
ruff: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(STAMP) ## check the types
	$(BIN)/basedpyright

.PHONY: imports
imports: $(STAMP) ## check that packages import only what stands before them
	$(BIN)/lint-imports --no-cache

.PHONY: fmt
fmt: $(STAMP) ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: bench-capture bench-copy bench-stream bench-latency bench-verify bench-handover bench-shutdown bench-documents ## all benchmarks

.PHONY: bench-capture
bench-capture: $(STAMP) ## capture against pg_recvlogical; ARGS="--workload mixed --changes 300000" narrows it
	$(BIN)/python benchmarks/capture.py $(ARGS)

.PHONY: bench-copy
bench-copy: $(STAMP) ## the copy of a table against psql and COPY; ARGS="--rows 300000" narrows it
	$(BIN)/python benchmarks/table_copy.py $(ARGS)

.PHONY: bench-verify
bench-verify: $(STAMP) ## a table compared with its source, against its copy; ARGS="--rows 300000" narrows it
	$(BIN)/python benchmarks/verify.py $(ARGS)

.PHONY: bench-handover
bench-handover: $(STAMP) ## the lag of small tables while a large one is copied; ARGS="--rows 1000000" narrows it
	$(BIN)/python benchmarks/handover.py $(ARGS)

.PHONY: bench-shutdown
bench-shutdown: $(STAMP) ## how soon a pipeline ends, and streams again; ARGS="--mode none --rounds 3" narrows it
	$(BIN)/python benchmarks/shutdown.py $(ARGS)

.PHONY: bench-stream
bench-stream: $(STAMP) ## changes from a slot into Delta, against pg_recvlogical; ARGS="--large" adds tables of 20M rows
	$(BIN)/python benchmarks/stream.py $(ARGS)

.PHONY: bench-latency
bench-latency: $(STAMP) ## from commit to visible in Delta, at 200 transactions/s; ARGS="--seconds 20" narrows it
	$(BIN)/python benchmarks/latency.py $(ARGS)

.PHONY: bench-documents
bench-documents: $(STAMP) opensearch ## documents filled and changed, against psql building the same; ARGS="--rows 100000" narrows it
	$(BIN)/python benchmarks/documents.py $(ARGS)

.PHONY: traps
traps: $(STAMP) ## which trap is covered by which tests, and which by none
	@$(BIN)/python scripts/traps.py

.PHONY: audit
audit: $(STAMP) ## look for what must not be committed, overlong files, repeated code and broken requirements; the size of src
	@$(BIN)/python scripts/audit.py
	@$(BIN)/python -m pip check

.PHONY: fuzz
fuzz: $(STAMP) ## the decoder against 100,000 mutated messages
	PENSTOCK_FUZZ_CASES=$${PENSTOCK_FUZZ_CASES:-100000} $(PYTEST) tests/unit/capture/test_fuzz.py --timeout 3600 $(ARGS)

.PHONY: s3-server
s3-server: $(STAMP) ## build a real S3 server for the long tests, once; needs Go
	@$(BIN)/python scripts/s3-server.py $(BIN)

.PHONY: soak
soak: $(STAMP) system s3-server ## the long tests, in full or as much as fits: MINUTES=20; a row per stage goes to docs/soak/README.md
	$(BIN)/python scripts/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

.PHONY: build
build: $(STAMP) ## build the wheel and try it in an environment of its own
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	scripts/try-wheel.sh $(BIN)/python dist/*.whl

.PHONY: constraints
constraints: $(STAMP) ## write the versions of .venv into the constraints
	@sed -n '/^#/p' $(CONSTRAINTS) > $(CONSTRAINTS).new
	@$(BIN)/python -m pip list --format freeze --exclude-editable --exclude pip >> $(CONSTRAINTS).new
	@mv $(CONSTRAINTS).new $(CONSTRAINTS)

.PHONY: clean
clean: ## remove everything that make has created
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
