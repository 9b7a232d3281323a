"""What an error means for a table."""

from __future__ import annotations

import psycopg
import pytest

from penstock.errors import LeaseLost, PenstockError, Retry, SchemaNotFollowed, SparkGone, TableRewritten
from penstock.state import Init
from penstock.workers.failures import Partitions, Policies, Recopy, SchemaChanges, errored


@pytest.mark.parametrize(
    "error",
    [psycopg.OperationalError("the connection is lost"), psycopg.errors.AdminShutdown("terminating connection")],
    ids=["lost", "ended"],
)
def test_a_lost_connection_is_tried_again_wherever_it_was_noticed(error: psycopg.Error) -> None:
    found = errored(Init(), error, position=None)
    assert found.retry_policy.retry is Retry.TIMED
    assert str(error) in found.reason


@pytest.mark.parametrize("kind", [SparkGone, LeaseLost])
def test_an_error_that_ends_the_run_does_not_stop_the_table(kind: type[PenstockError]) -> None:
    assert errored(Init(), kind("gone"), position=None).retry_policy.retry is Retry.TIMED


def test_an_error_without_a_name_waits_for_a_person_and_quotes_nothing() -> None:
    found = errored(Init(), ValueError("cell value 42"), position=None)
    assert found.retry_policy.retry is not Retry.TIMED
    assert "42" not in found.reason
    assert "ValueError" in found.reason


def test_an_error_with_a_name_keeps_it() -> None:
    found = errored(Init(), TableRewritten("t was emptied"), position=None)
    assert found.reason == "t was emptied"


def test_the_remedy_says_what_a_new_copy_would_lose() -> None:
    error, keep = SchemaNotFollowed("t: its key changed"), SchemaChanges(partitions=Partitions.KEEP)
    assert "former partitions" in (errored(Init(), error, position=None, schema_changes=keep).solution or "")
    assert errored(Init(), error, position=None, schema_changes=SchemaChanges()).solution == error.hint
    assert "partitioned tables stopped until resync" in str(keep)


STOP, SMALL, DEFAULT = SchemaChanges(recopy=Recopy.STOP), SchemaChanges(recopy_max_bytes=10), SchemaChanges()


def test_a_renamed_table_keeps_its_policy_unless_a_name_says_otherwise() -> None:
    of_tables = {"public.a": STOP, "public.b": SMALL}
    policies = Policies(DEFAULT, of_tables)
    policies.remember({1: "public.a"})
    policies.remember({1: "public.new"})
    assert policies.of(1, "public.new") is STOP
    later = Policies(DEFAULT, of_tables, {1: policies.known_as(1) or ""})
    later.remember({1: "public.newer"})
    assert later.of(1, "public.newer") is STOP
    later.remember({1: "public.newer", 2: "public.a"})
    assert (later.of(1, "public.newer"), later.of(2, "public.a")) == (DEFAULT, STOP)
    later.remember({1: "public.b"})
    assert later.of(1, "public.b") is SMALL
