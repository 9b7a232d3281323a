"""The pages for people who know supabase/etl and flusso: every name of theirs is on them, and ours exist."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGES = {"supabase/etl": REFERENCE / "coming-from-etl.md", "flusso": REFERENCE / "coming-from-flusso.md"}
TEXT = "\n".join(path.read_text() for path in PAGES.values())
NOT_YET = "*not yet*"

SEED_000 = """
Destination name shutdown drop_table_for_copy write_table_rows write_events PipelineDestination ReplicatedTableSchema
TableRow Event async_result DropTableForCopyResult WriteTableRowsResult WriteEventsResult EtlResult TableId SnapshotId
SchemaStore get_table_schema get_table_schemas load_table_schemas store_table_schema prune_table_schemas TableSchema
TableSchemaRetention
StateStore get_table_replication_state get_table_replication_states load_table_replication_states
update_table_replication_states update_table_replication_state rollback_table_replication_state TableReplicationStates
get_replication_progress upsert_replication_progress delete_replication_progress WorkerType PgLsn
get_destination_table_metadata get_applied_destination_table_metadata load_destination_tables_metadata
store_destination_table_metadata DestinationTableMetadata AppliedDestinationTableMetadata
TableReplicationPhase Init DataSync FinishedCopy SyncWait Catchup SyncDone Ready Errored
lsn reason solution retry_policy
TableLifecycleStore clear_table_copy_state delete_table_pipeline_state
PipelineStore DestinationStore SharedStateStore MemoryStore PostgresStore PostgresStore::new Pipeline::start
"""
SEED_001 = """
Pipeline Destination truncate_table write_table_rows write_events
SchemaStore get_table_schema get_table_schemas load_table_schemas store_table_schema
StateStore get_table_replication_state get_table_replication_states load_table_replication_states
update_table_replication_state rollback_table_replication_state
get_table_mapping get_table_mappings load_table_mappings store_table_mapping
TableReplicationPhase Init DataSync FinishedCopy SyncWait Catchup SyncDone Ready Errored RetryPolicy
"""
SEED_003 = "Pipeline unknown-types-to-bytes test-utils failpoints"
SEED_002 = "ChangeCapture live snapshot lag tables SnapshotTable Change Upsert Ack AckSink BoxStream Result Send Sync"
SEED_004 = """
Engine Engine::new source documents sink observer queue_capacity batch skip_backfill failure_policies
with_observer with_queue_capacity with_batch with_failure_policies run DEFAULT_QUEUE_CAPACITY
ChangeCapture DocumentBuilder Sink Observer NoopObserver BatchPolicy max_changes max_delay FailurePolicies FailurePolicy
FailurePolicy::Stop flush ensure_index queue_channel Pipeline run_inner on_error Error Result
"""
EVENTS = "Begin Commit Insert Update Delete Truncate Relation"
IN_WORDS = (
    "Apply Worker",
    "Table Sync Worker",
    "Replication Client",
    "worker pool",
    "shutdown mechanism",
    "DDL event trigger",
    "source migrations",
    "replication mask",
    "destination: BigQuery",
    "destination: Custom API",
    "destination: Memory",
)


@cache
def rows() -> list[tuple[str, str, str]]:
    """The rows of all tables: their name, ours, remark."""
    found = re.findall(r"^\| (.*?) \| (.*?) \|(?: (.*?))? \|$", TEXT, re.MULTILINE)
    return [row for row in found if row[0] not in PAGES]


def names_in(cell: str) -> set[str]:
    """The names between backticks, also those of the fields in braces."""
    return {name for part in re.findall(r"`(.*?)`", cell) for name in re.findall(r"[\w:-]+", part)}


def resolve(path: str) -> Any:
    """What a dotted path names: a module, or something in one."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not path.startswith(error.name or "?"):
                raise
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(penstock(?:\.\w+)+)`", TEXT))))
def test_what_the_pages_name_exists(path: str) -> None:
    resolve(path)


@pytest.mark.parametrize(
    "wanted",
    [SEED_000, SEED_001, SEED_002, SEED_003, SEED_004, EVENTS],
    ids=["seed 000", "seed 001", "seed 002", "seed 003", "seed 004", "events"],
)
def test_every_name_of_the_seeds_has_its_row(wanted: str) -> None:
    there = {name for seed, _, _ in rows() for name in names_in(seed)}
    assert sorted(set(wanted.split()) - there) == []


@pytest.mark.parametrize("words", IN_WORDS)
def test_what_has_no_name_in_code_has_its_row_too(words: str) -> None:
    assert [seed for seed, _, _ in rows() if words in seed]


def test_a_row_names_what_exists_or_says_that_nothing_does_and_why() -> None:
    for seed, here, remark in rows():
        exists = re.fullmatch(r"`penstock(\.\w+)+`", here) is not None
        assert exists or (here == NOT_YET and remark), seed


def test_stores_and_destinations_have_no_method_that_a_reader_of_the_seeds_would_miss() -> None:
    """The methods of the seeds are methods here, by the same name, unless their row says why there is none."""
    from penstock.destinations.base import Destination
    from penstock.state import Store

    methods = {
        name for name in SEED_000.split() if re.match(r"(get|load|store|update|upsert|delete|clear|prune)_", name)
    }
    missing = {name for seed, here, _ in rows() if here == NOT_YET for name in names_in(seed)}
    assert {name for name in methods - missing if not callable(getattr(Store, name, None))} == set()
    assert all(hasattr(Destination, name) for name in ["name", "shutdown", "drop_table_for_copy", "write_table_rows"])
