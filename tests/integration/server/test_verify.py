"""Comparing tables through the API: results, keys only with the token, one at a time, and the pipeline goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.capture import process
from penstock.operations import verify_process
from penstock.operations.verify import verifications
from tests.conftest import Database
from tests.integration.server.conftest import CELL, PATIENCE, SECRETS, TOKEN, Site, start_comparison
from tests.program import start_capture

PATH = "/api/v1/verifications"
start_child = verify_process.start_child
"""As pipelines start it; the fixture has replaced it by one that starts faster."""


@contextmanager
def a_lost_row(site: Site, key: int) -> Iterator[None]:
    """Remove a copied row of `many` from its file at the destination, and put it back at the end."""
    file = next(each for each in _copied(site) if key in pq.read_table(each)["id"].to_pylist())
    before, rows = file.read_bytes(), pq.read_table(file)
    pq.write_table(rows.filter(pc.not_equal(rows["id"], key)), file)
    try:
        yield
    finally:
        file.write_bytes(before)


def _copied(site: Site) -> list[Path]:
    newest = sorted((site.folder / "lake/public/many/generations").iterdir())[-1]
    return sorted(newest.glob("data/000000000000-*.parquet"))


def verify(site: Site, **body: Any) -> dict[str, Any]:
    """Compare, and return the result."""
    before = {each["id"] for each in site.ask(PATH).json["verifications"]}
    answer = site.act(PATH, body)
    assert answer.status == 202, answer.body
    idle(site)
    [new] = [each for each in site.ask(PATH).json["verifications"] if each["id"] not in before]
    return new


def idle(site: Site) -> None:
    site.wait(lambda: site.ask("/api/v1/now").json["verifying"] is None, "the end of the comparison")


def test_tables_are_compared_and_the_keys_of_differing_rows_need_the_token(site: Site) -> None:
    assert verify(site, tables=["public.many"])["result"] == "equal"
    with a_lost_row(site, 77):
        run = verify(site, tables=["public.many", "followed"], output="lake")
    assert run["result"] == "different"
    assert run["requested_by"] == "HTTP client 127.0.0.1"
    lake = run["outputs"]["lake"]
    assert (lake["tables"], lake["rows"]["missing"]) == ({"different": 1, "equal": 1}, 1)
    [many] = lake["found"]
    assert (many["table"], many["missing"]) == ("public.many", 1)
    assert "differences" not in many
    assert site.ask(f"{PATH}/{run['id']}").status == 401
    [with_keys] = site.ask(f"{PATH}/{run['id']}", token=TOKEN).json["outputs"]["lake"]["found"]
    assert with_keys["differences"] == [{"kind": "missing", "key": {"id": "77"}, "columns": []}]
    assert site.ask(f"{PATH}/1", token=TOKEN).status == 404
    metrics = site.ask("/metrics").body.decode()
    assert 'penstock_verify_rows{output="lake",result="missing"} 1.0' in metrics


def test_no_cell_is_kept_with_the_result(site: Site) -> None:
    with site.database.connect() as connection:
        connection.execute("update followed set note = note || '.' where id < 10")
    run = verify(site)
    text = (
        str(site.ask(f"{PATH}/{run['id']}", token=TOKEN).json)
        + (site.pipeline._config.pipeline.spool.path / "verified.json").read_text()
    )
    assert [secret for secret in SECRETS if secret in text] == []
    assert CELL in str(site.database.execute("select note from followed where id = 1000"))


def test_only_one_comparison_runs_and_the_pipeline_goes_on_when_it_is_killed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(site)
    children: list[Any] = []

    def start_stopped() -> Any:
        children.append(start_child())
        os.kill(children[0].pid, signal.SIGSTOP)
        return children[0]

    monkeypatch.setattr(verify_process, "start_child", start_stopped)
    assert site.act(PATH, {"tables": ["public.many"]}).status == 202
    progress = site.ask("/api/v1/now").json["verifying"]
    assert (progress["requested_by"], progress["step"]) == ("HTTP client 127.0.0.1", "starting")
    refused = site.act(PATH, {})
    assert (refused.status, refused.json["error"]) == (409, "a comparison runs already")
    children[0].kill()
    idle(site)
    [failed] = [each for each in site.ask(PATH).json["verifications"] if "reason" in each][:1]
    assert failed["reason"] == "the process of the comparison was ended by signal 9"
    lake = site.pipeline._running.outputs[0]
    before = lake.status.changes
    site.database.execute("update many set note = note || '.' where id = 2")
    site.wait(lambda: lake.status.changes > before, "a change")
    monkeypatch.setattr(verify_process, "start_child", start_child)
    assert verify(site, tables=["public.many"])["result"] == "equal"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"tables": ["public.nothing"]}, 422),
        ({"output": "nothing"}, 422),
        ({"output": "documents"}, 422),
        ({"sample": 0}, 422),
        ({"sample": 1.5}, 422),
        ({"show_values": True}, 422),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(site: Site, body: Any, status: int) -> None:
    idle(site)
    assert site.act(PATH, body).status == status
    assert site.ask("/api/v1/now").json["verifying"] is None


def test_a_comparison_needs_the_token(site: Site) -> None:
    assert site.ask(PATH, "POST", {}, client="127.0.0.5").status == 401


def test_a_sample_is_compared(site: Site) -> None:
    run = verify(site, tables=["public.many"], sample=0.1)
    rows = run["outputs"]["lake"]["rows"]["equal"]
    assert 0 < rows < 500
    assert run["outputs"]["lake"]["sample"] == 0.1


def test_a_comparison_names_what_it_waits_for_and_ends_with_the_pipeline(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "start_child", start_capture)
    monkeypatch.setattr(verify_process, "start_child", start_comparison)
    database.execute("create table things (id int primary key); insert into things values (1)")
    pipeline = penstock.Pipeline(
        database.dsn,
        {"type": "parquet", "path": "lake"},
        folder=tmp_path,
        spark={"master": "none"},
        server={"port": 0, "token": TOKEN},
    )
    with pipeline, database.connect() as blocking:
        site = Site(pipeline, database, tmp_path)
        site.wait(lambda: pipeline.address, "the server")
        pipeline.wait_until_ready(PATIENCE)
        with blocking.transaction():
            blocking.execute("select pg_current_xact_id()")
            assert site.act(PATH, {}).status == 202
            seen = site.wait(
                lambda: (found := site.ask("/api/v1/now").json["verifying"])["step"] == "waiting" and found,
                "the wait for the transaction",
            )
            assert str(blocking.info.backend_pid) in seen["text"]
            # Changes flow meanwhile.
            database.execute("insert into things values (2)")
            lake = pipeline._running.outputs[0]
            site.wait(lambda: lake.status.changes == 1, "a change")
            spool = pipeline._config.pipeline.spool.path
            pipeline.close()
    [run] = verifications(spool)
    assert (run["result"], run["reason"]) == ("not compared", "it was stopped")
