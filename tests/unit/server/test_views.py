"""Lists for a thousand tables: found, sorted and paged by the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.operations.status_model import OutputStatus, PipelineStatus, SourceStatus, TableError, TableStatus
from penstock.server.guarding import Refused
from penstock.server.views import error_list, table_rows

ERROR = TableError("cannot be written", "Repair it.", "resync", "2026-01-01T00:00:00", None, 1, True)


def monitor() -> Any:
    tables = tuple(
        TableStatus(
            table=f"public.t{number:04}",
            id=number,
            output="lake",
            phase="errored" if number == 700 else "ready",
            position=None,
            error=ERROR if number == 700 else None,
            rows=None if number == 3 else number,
            lag_bytes=number % 10,
        )
        for number in range(1000)
    )
    output = OutputStatus("lake", False, None, 0, 0.0, 0.0, tables)
    status = PipelineStatus("shop", None, SourceStatus("db"), (output,), problems=("public.t0700 has stopped",))
    return SimpleNamespace(status=lambda: status)


def names(**query: str) -> list[str]:
    return [each["table"] for each in table_rows(monitor(), query)["tables"]]


def test_one_answer_has_a_part_and_says_how_many_there_are() -> None:
    found = table_rows(monitor(), {})
    assert (len(found["tables"]), found["found"], found["total"]) == (200, 1000, 1000)
    assert found["phases"] == {"ready": 999, "errored": 1}
    assert len(names(limit="5000")) == 1000
    assert names(limit="2", offset="998") == ["public.t0998", "public.t0999"]


def test_tables_are_found_and_sorted() -> None:
    assert names(search="T099", limit="1") == ["public.t0990"]
    assert names(phase="errored") == ["public.t0700"]
    assert names(sort="phase", limit="1") == ["public.t0700"]
    assert names(sort="rows", descending="1", limit="1") == ["public.t0999"]
    assert names(sort="rows", limit="1") == ["public.t0003"], "an unknown number comes first"
    assert names(output="other") == []


@pytest.mark.parametrize("query", [{"sort": "id"}, {"limit": "x"}, {"offset": "-1"}, {"limit": "²"}])
def test_wrong_queries_are_refused(query: dict[str, str]) -> None:
    with pytest.raises(Refused):
        table_rows(monitor(), query)


def test_an_error_is_listed_once() -> None:
    (error,) = error_list(monitor())
    assert (error["table"], error["command"], error["solution"]) == ("public.t0700", "resync", "Repair it.")
