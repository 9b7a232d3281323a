"""The options of the spark destination, and the numbers of its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.registry import create_destination
from penstock.destinations.spark import SparkDestination
from penstock.destinations.spark.checkpoint import Checkpoint
from penstock.destinations.spark.frames import hidden_name
from penstock.errors import ConfigError, DestinationUnavailable, SparkGone, ValuesNotSent
from penstock.lsn import Lsn
from penstock.schema import Column
from penstock.state import MemoryStore
from penstock.testing.destinations import make_context
from penstock.testing.destinations.contract import ORDERS, TEXT

URL = {"url": "jdbc:postgresql://h/d"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either function or format"),
        ({"function": "a:b", "format": "delta"}, "either function or format"),
        ({"format": "delta", "mode": "overwrite", "path": "x"}, "unknown mode 'overwrite'"),
        ({"function": "os.path:join", "path": "x"}, "function does not go with"),
        ({"function": "no_such_module:write"}, "no module 'no_such_module'"),
        ({"function": "os.path:no_such"}, "has no function 'no_such'"),
        ({"function": "os.path"}, "has no function ''"),
        ({"format": "parquet", "path": "x", "table": "y"}, "two names of the same thing"),
        ({"format": "parquet", "mode": "upsert", "path": "x"}, "cannot upsert into format 'parquet'"),
        ({"format": "parquet", "table": "all"}, "names all tables the same"),
        ({"format": "parquet", "table": "{tabel}"}, "not a pattern of names"),
        ({"format": "jdbc"}, "needs options.url"),
        ({"format": "jdbc", "mode": "upsert", "options": {"url": "jdbc:mysql://h/d"}}, "into PostgreSQL only"),
        ({"format": "jdbc", "options": {**URL, "dbtable": "t"}}, "must not contain dbtable"),
        ({"format": "delta", "path": "x", "options": {"a": []}}, "should be text, a number, true or false: a"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        create_destination("spark", {"checkpoint": str(tmp_path), **options})
    assert said in refused.value.message
    assert refused.value.hint


def test_without_spark_a_start_says_what_to_set(tmp_path: Path) -> None:
    destination = SparkDestination(format="delta", path="x", checkpoint=str(tmp_path))
    with pytest.raises(ConfigError, match='master is "none"') as refused:
        destination.startup(make_context())
    assert "local[*]" in refused.value.hint


def test_numbers_never_come_twice(tmp_path: Path) -> None:
    store = MemoryStore("x")
    seen: list[int] = []
    for _ in range(3):
        checkpoint = Checkpoint(tmp_path / "checkpoint")
        checkpoint.open(store)
        seen += [checkpoint.numbers(2), checkpoint.numbers(70_000), checkpoint.numbers(1)]
    assert seen == sorted(set(seen))
    assert all(
        later - earlier >= count for earlier, later, count in zip(seen, seen[1:], [2, 70_000, 1] * 3, strict=False)
    )


def test_hidden_columns_give_way_to_those_of_the_source() -> None:
    columns = (*ORDERS.columns, Column("_ROW_hash", 4, TEXT), Column("_row_hash_", 5, TEXT))
    assert hidden_name(ORDERS) == "_row_hash"
    assert hidden_name(type(ORDERS)(1, "public", "t", columns)) == "_row_hash__"


def test_errors_of_tasks_reach_the_driver_as_themselves() -> None:
    from py4j.protocol import Py4JError

    from penstock.destinations.spark.frames import Guarded, failure
    from penstock.errors import SnapshotLost

    def read(_: object) -> list[Any]:
        raise SnapshotLost("the snapshot is gone", hint="Wait.", table="t", position=Lsn(1))

    with pytest.raises(RuntimeError) as raised:
        list(Guarded("t", read)(None))
    found = failure("t", Py4JError(f"Traceback: {raised.value} at line 1"))
    assert isinstance(found, SnapshotLost)
    assert (found.message, found.hint, found.facts["table"]) == ("the snapshot is gone", "Wait.", "t")
    # A cell that an error quotes cannot pass for one.
    with pytest.raises(RuntimeError) as forged:
        list(Guarded("t", read, token="guessed")(None))
    assert not isinstance(failure("t", Py4JError(str(forged.value))), SnapshotLost)


def test_errors_of_spark_are_told_apart() -> None:
    from py4j.protocol import Py4JError, Py4JNetworkError

    from penstock.destinations.spark.frames import UNKNOWN_ROW, failure

    assert isinstance(failure("t", Py4JNetworkError("gone")), SparkGone)
    assert isinstance(failure("t", ConnectionRefusedError()), SparkGone)
    assert isinstance(failure("t", Py4JError(f"x {UNKNOWN_ROW} y")), ValuesNotSent)
    assert isinstance(failure("t", Py4JError("java.net.ConnectException: refused")), DestinationUnavailable)
    other = failure("t", Py4JError("the value 42 is bad"))
    assert "42" not in other.message
