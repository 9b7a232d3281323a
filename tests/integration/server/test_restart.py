"""What the server says after a restart of its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.capture import process
from tests.conftest import Database
from tests.integration.server.conftest import PATIENCE, Site
from tests.program import start_capture


def test_a_table_that_stopped_in_an_earlier_run_is_listed_with_the_time_of_its_stop(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "start_child", start_capture)
    database.execute("create table days (id int primary key, day date); create table others (id int primary key)")

    def run(*, is_first: bool) -> list[Any]:
        pipeline = penstock.Pipeline(
            database.dsn,
            {"type": "parquet", "path": "lake"},
            folder=tmp_path,
            spark={"master": "none"},
            types={"out_of_range": "error"},
            server={"port": 0},
        )
        with pipeline:
            site = Site(pipeline, database, tmp_path)
            site.wait(lambda: pipeline.address, "the server")
            if is_first:
                pipeline.wait_until_ready(PATIENCE)
                database.execute("insert into days values (1, '481516-01-01')")
            found = site.wait(lambda: _stops(site), "the event")
            [error] = site.ask("/api/v1/errors").json["errors"]
            assert [each["at"] for each in found] == [error["since"]]
            return found

    assert run(is_first=True) == run(is_first=False)


def _stops(site: Site) -> list[Any]:
    return [each for each in site.ask("/api/v1/events").json["events"] if each["event"] == "stopped"]
