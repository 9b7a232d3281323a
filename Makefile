# `make` lists the targets. Every target installs what it needs.

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
# Tests on servers spend most of their time waiting.
SERVER_WORKERS ?= 7
SERVER_TESTS := $(wildcard tests/integration tests/e2e)
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
STAMP := $(VENV)/.installed
JARS := $(VENV)/jars
SPARK_CLASSES := $(VENV)/spark-classes.jsa
OPENSEARCH := $(VENV)/opensearch
PYTEST := $(BIN)/python -m pytest
# Tests start hundreds of processes; without bytecode files, each would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@echo "Penstock. Targets:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(STAMP) jars opensearch kafka bigquery-emulator fakesnow ## create .venv with all extras and tools; as root, also install missing system packages

.PHONY: system
system:
	@scripts/system-packages.sh $(PYTHON)

$(BIN)/python: | system
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Build tools come first, pinned: they build pyspark, which is a source distribution.
$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) hatchling setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-build-isolation -e '.[dev]'
	@touch $@

.PHONY: jars
jars: $(STAMP)
	@$(BIN)/python scripts/delta-jars.py $(JARS)

# Tests start Spark many times; with an archive of its classes, that takes half the time.
$(SPARK_CLASSES): $(STAMP) | system
	-@$(BIN)/python -m penstock.spark.class_archive $@ > $(VENV)/spark-classes.log 2>&1

.PHONY: opensearch
opensearch: $(STAMP) system
	@$(BIN)/python scripts/opensearch-server.py $(OPENSEARCH)

.PHONY: kafka
kafka: $(STAMP) system
	@$(BIN)/python scripts/kafka-server.py $(VENV)/kafka $(VENV)/apicurio

.PHONY: bigquery-emulator
bigquery-emulator: $(STAMP) ## install the BigQuery emulator, for the tests of that destination
	@$(BIN)/python scripts/emulators.py bigquery-emulator $(VENV)/bigquery-emulator

.PHONY: fakesnow
fakesnow: $(STAMP) ## install the Snowflake emulator, for the tests of that destination
	@$(BIN)/python scripts/emulators.py fakesnow $(VENV)/fakesnow

.PHONY: ducklake
ducklake: $(STAMP) ## run the contract of destinations on a DuckLake, with a version of DuckDB that has the extension
	@test -d $(VENV)/ducklake || $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/ducklake -r requirements/ducklake.txt
	PYTHONPATH=$(VENV)/ducklake:src $(PYTEST) -q -n 2 tests/integration/destinations/duckdb/test_contract.py -k TestLake

.PHONY: demo
demo: $(STAMP) jars ## replicate a demo shop into Delta tables and compare every row; about a minute
	$(BIN)/penstock demo $(ARGS)

.PHONY: demo-search
demo-search: $(STAMP) opensearch ## replicate a demo shop into OpenSearch documents, and rebuild an index under load
	$(BIN)/penstock demo --search $(ARGS)

# The type checker uses one core, and downloads use none: they run beside the unit tests. Their output is kept apart.
.PHONY: test
test: $(STAMP) ## run everything that must pass: lint, unit, integration and end-to-end tests
	@$(MAKE) --no-print-directory --jobs 5 --output-sync=target unit lint collected jars opensearch kafka bigquery-emulator fakesnow $(SPARK_CLASSES)
	@$(MAKE) --no-print-directory integration

.PHONY: unit
unit: $(STAMP) ## run the tests that need no service
	$(PYTEST) -q -n $(WORKERS) tests/unit $(ARGS)

.PHONY: integration
integration: $(STAMP) system jars opensearch kafka bigquery-emulator fakesnow $(SPARK_CLASSES) ## run the tests on real servers, and the end-to-end tests
	$(PYTEST) -q -n $(SERVER_WORKERS) --dist loadgroup $(SERVER_TESTS) $(ARGS)

# Otherwise each of many processes compiles these tests.
.PHONY: collected
collected: $(STAMP)
	@$(PYTEST) -qq --collect-only $(SERVER_TESTS) > $(VENV)/collected || { cat $(VENV)/collected; exit 1; }

.PHONY: lint
lint: ruff types imports ## run ruff, the type checker and the import-order check

.PHONY: ruff
ruff: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(STAMP) ## check the types
	$(BIN)/basedpyright

.PHONY: imports
imports: $(STAMP) ## check that packages import only lower layers
	$(BIN)/lint-imports --no-cache

.PHONY: fmt
fmt: $(STAMP) ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: bench-capture bench-copy bench-stream bench-to-postgres bench-to-duckdb bench-to-kafka bench-split bench-latency bench-served bench-verify bench-handover bench-schema-changes bench-shutdown bench-documents bench-source ## run all benchmarks

.PHONY: bench-capture
bench-capture: $(STAMP) ## compare capture with pg_recvlogical; smaller: ARGS="--workload mixed --changes 300000"
	$(BIN)/python benchmarks/capture.py $(ARGS)

.PHONY: bench-copy
bench-copy: $(STAMP) ## compare copying a table with psql and COPY; smaller: ARGS="--rows 300000"
	$(BIN)/python benchmarks/table_copy.py $(ARGS)

.PHONY: bench-verify
bench-verify: $(STAMP) ## compare verifying a table with copying it; smaller: ARGS="--rows 300000"
	$(BIN)/python benchmarks/verify.py $(ARGS)

.PHONY: bench-schema-changes
bench-schema-changes: $(STAMP) ## measure the lag of a small table while large ones go through DDL; smaller: ARGS="--rows 300000"
	$(BIN)/python benchmarks/schema_changes.py $(ARGS)

.PHONY: bench-handover
bench-handover: $(STAMP) ## measure the lag of small tables while a large one is copied; smaller: ARGS="--rows 1000000"
	$(BIN)/python benchmarks/handover.py $(ARGS)

.PHONY: bench-shutdown
bench-shutdown: $(STAMP) ## measure how fast a pipeline stops and resumes; smaller: ARGS="--mode none --rounds 3"
	$(BIN)/python benchmarks/shutdown.py $(ARGS)

.PHONY: bench-stream
bench-stream: $(STAMP) ## compare streaming into Delta with pg_recvlogical; ARGS="--large" adds tables of 20M rows
	$(BIN)/python benchmarks/stream.py $(ARGS)

.PHONY: bench-to-duckdb
bench-to-duckdb: $(STAMP) ## compare writing to a DuckDB file with pg_recvlogical and COPY
	$(BIN)/python benchmarks/to_duckdb.py $(ARGS)

.PHONY: bench-to-kafka
bench-to-kafka: $(STAMP) kafka ## compare sending changes to Kafka with pg_recvlogical; smaller: ARGS="--changes 300000 --rows 100000 --rounds 2"
	$(BIN)/python benchmarks/to_kafka.py $(ARGS)

.PHONY: bench-to-postgres
bench-to-postgres: $(STAMP) ## compare writing to Postgres with pg_recvlogical, a subscription and COPY; smaller: ARGS="--changes 200000 --rows 300000 --rounds 1"
	$(BIN)/python benchmarks/to_postgres.py $(ARGS)

.PHONY: bench-split
bench-split: $(STAMP) ## compare one hot table on two cores with one; smaller: ARGS="--workload stream --changes 600000"
	$(BIN)/python benchmarks/split.py $(ARGS)

.PHONY: bench-latency
bench-latency: $(STAMP) ## measure the time from commit to visible in Delta, at 200 transactions/s; smaller: ARGS="--seconds 20"
	$(BIN)/python benchmarks/latency.py $(ARGS)

.PHONY: bench-served
bench-served: $(STAMP) ## measure what the HTTP server costs under 200 requests/s; smaller: ARGS="--mode latency --seconds 20"
	$(BIN)/python benchmarks/served.py $(ARGS)

.PHONY: bench-documents
bench-documents: $(STAMP) opensearch ## compare filling and updating documents with psql building them; smaller: ARGS="--rows 100000"
	$(BIN)/python benchmarks/documents.py $(ARGS)

.PHONY: bench-source
bench-source: $(STAMP) ## compare format("penstock") with Spark's JDBC reader, and with pg_recvlogical; smaller: ARGS="--rows 300000 --changes 200000"
	$(BIN)/python benchmarks/source.py $(ARGS)

.PHONY: traps
traps: $(STAMP) ## list which tests cover which trap
	@$(BIN)/python scripts/traps.py

.PHONY: audit
audit: $(STAMP) ## find forbidden content, overlong files, repeated code and conflicting requirements; print the size of src
	@$(BIN)/python scripts/audit.py
	@$(BIN)/python -m pip check

.PHONY: fuzz
fuzz: $(STAMP) ## run the decoder on 100,000 mutated messages
	PENSTOCK_FUZZ_CASES=$${PENSTOCK_FUZZ_CASES:-100000} $(PYTEST) tests/unit/capture/test_fuzz.py --timeout 3600 $(ARGS)

.PHONY: s3-server
s3-server: $(STAMP) ## build an S3 server for the long tests, once; needs Go
	@$(BIN)/python scripts/s3-server.py $(BIN)

.PHONY: soak
soak: $(STAMP) system s3-server ## the long tests, in full or as much as fits: MINUTES=20; a row per stage goes to docs/soak/README.md
	$(BIN)/python scripts/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

.PHONY: wheel
wheel: | $(BIN)/python ## build the wheel into dist; installs nothing but its build tool
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) hatchling
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

.PHONY: build
build: wheel system ## build the wheel and try it in empty environments, with each extra; PYTHON=python3.13 tries another Python
	$(PYTHON) scripts/try-wheel.py dist/*.whl

.PHONY: constraints
constraints: $(STAMP) ## write the versions installed in .venv to the constraints
	@sed -n '/^#/p' $(CONSTRAINTS) > $(CONSTRAINTS).new
	@$(BIN)/python -m pip list --format freeze --exclude-editable --exclude pip >> $(CONSTRAINTS).new
	@mv $(CONSTRAINTS).new $(CONSTRAINTS)

.PHONY: clean
clean: ## remove everything that make created
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
