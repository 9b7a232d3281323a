"""A destination that is away for longer than an errored table may hold back progress: full, read-only, unmounted.

No table stops, none is copied again, and all catch up when it is back. An object store: `test_delta_on_s3`.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.parquet.destination import ParquetDestination
from penstock.errors import Retry
from penstock.lsn import reaches
from penstock.state import Errored, MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.workers.apply import ErrorHold
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Background, current_position, tables_alone, tables_settings, updates_of_both, wait_for
from tests.e2e.test_delta import pipeline_into, wait_applied, wait_ready
from tests.support.disks import SmallDisk
from tests.support.proxy import Proxy
from tests.support.readback import check_equal
from tests.support.s3 import S3Server

AWAY_MINUTES = float(os.environ.get("PENSTOCK_SOAK_AWAY_MINUTES", "15"))
AWAY_RATE = int(os.environ.get("PENSTOCK_SOAK_AWAY_RATE", "5000"))
"""Changes per second while the store is away."""


def test_a_disk_that_is_full_read_only_or_unmounted_stops_no_table(
    database: Any, tmp_path: Path, small_disk: SmallDisk, caplog: Any
) -> None:
    caplog.set_level("INFO", "penstock.destinations")
    caplog.set_level("INFO", "penstock.workers.apply")
    with database.connect() as connection:
        for table in "ab":
            connection.execute(f"create table {table} (id int primary key, n int)")
            connection.execute(f"insert into {table} select n, 0 from generate_series(1, 100) n")
    lake, elsewhere = small_disk.folder / "lake", small_disk.folder / "elsewhere"

    def make_read_only() -> None:
        # A file that is open for writing prevents it.
        wait_for(small_disk.make_read_only, "the disk to be read-only")

    def waits() -> int:
        return caplog.text.count("apply failed, retrying")

    hold = ErrorHold(timedelta(seconds=0), bytes=1)
    with pipeline_into(database, tmp_path, lake=lake, error_hold=hold) as pipeline:
        wait_ready(pipeline, 2)
        with Background(database, updates_of_both()):
            for leave, come_back in (
                (small_disk.fill, small_disk.free),
                (make_read_only, small_disk.make_writable),
                (lambda: lake.rename(elsewhere), lambda: elsewhere.rename(lake)),
            ):
                before, applied = waits(), pipeline.status.changes
                wait_for(lambda applied=applied: pipeline.status.changes > applied, "changes to flow")
                leave()
                wait_for(lambda before=before: waits() > before + 1, "apply to have waited twice")
                come_back()
                wait_applied(pipeline, database)
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    assert "table stopped" not in caplog.text
    assert caplog.text.count("table copied") == 2, "none was copied again"
    check_equal(database.dsn, LakeReadBack(lake), ["a", "b"])


@pytest.mark.parametrize("kind", [DeltaDestination, ParquetDestination], ids=["delta", "parquet"])
def test_a_disk_that_fills_up_during_the_first_copy_is_waited_for(
    database: Any, tmp_path: Path, small_disk: SmallDisk, kind: Any
) -> None:
    database.execute("create table a (id int primary key, note text)")
    # It does not compress to the 2 MB that are free.
    database.execute(
        "insert into a select n, (select string_agg(md5(n::text || i::text), '') from generate_series(1, 40) i)"
        " from generate_series(1, 5000) n"
    )
    filler = small_disk.folder / "filler"
    filler.write_bytes(bytes(22 << 20))
    settings = tables_settings(database, tmp_path)
    pipeline = tables_alone(settings, MemoryStore("e2e"), kind(small_disk.folder / "lake"), LocalTasks())
    with pipeline:
        seen: set[int] = set()

        def has_failed(times: int) -> bool:
            phase = next(iter(pipeline.phases.values()), None)
            if isinstance(phase, Errored):
                assert "No space left on device" in phase.reason, phase
                assert phase.retry_policy.retry is Retry.TIMED
                seen.add(phase.attempts)
            return len(seen) >= times

        wait_for(lambda: has_failed(2), "the first copy and its retry")
        left = [path for path in small_disk.folder.rglob("*") if re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name)]
        assert left == [], "attempts leave nothing behind"
        filler.unlink()
        wait_for(lambda: has_failed(99) or [phase.name for phase in pipeline.phases.values()] == ["ready"], "the copy")


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_store_that_is_away_for_long_under_load_is_caught_up_with(
    s3: S3Server, database: Any, tmp_path: Path, caplog: Any, record_property: Any
) -> None:
    """At the default `error_hold`, with the store's default time-outs."""
    caplog.set_level("INFO", "penstock.destinations")
    rows, pause = 1000, 0.1
    with database.connect() as connection:
        for table in "ab":
            connection.execute(f"create table {table} (id int primary key, n int, note text default repeat('x', 50))")
            connection.execute(f"insert into {table} select n, 0 from generate_series(1, {rows}) n")
    each = max(1, round(AWAY_RATE * pause / 2))
    proxy = Proxy(s3.port)
    options = {**s3.options, "aws_endpoint": f"http://127.0.0.1:{proxy.port}"}
    lake = f"s3://lake/{uuid.uuid4().hex}"
    due = 0.0

    def update(connection: Any) -> None:
        nonlocal due
        for table in "ab":
            connection.execute(f"update {table} set n = n + 1 where id <= {each}")
        due = max(due + pause, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))

    try:
        with pipeline_into(database, tmp_path, lake=lake, max_rows=200_000, storage_options=options) as pipeline:
            wait_ready(pipeline, 2)
            with Background(database, update, pause=0) as load:
                wait_for(lambda: pipeline.status.changes > 10_000, "changes to flow")
                proxy.refuse = True
                proxy.cut()
                began, before = time.monotonic(), load.count
                phases = set()
                while time.monotonic() < began + 60 * AWAY_MINUTES:
                    phases |= {phase.name for phase in pipeline.phases.values()}
                    time.sleep(1)
                missed = 2 * each * (load.count - before)
                seconds = time.monotonic() - began
                proxy.refuse = False
            back = time.monotonic()
            end = current_position(database)
            wait_for(lambda: reaches(pipeline.status.applied, end), "apply to catch up", timeout=3600)
            caught_up = time.monotonic() - back
            phases |= {phase.name for phase in pipeline.phases.values()}
    finally:
        proxy.close()
    record_property(
        "away", f"{seconds:.0f} s, {missed} changes ({missed / seconds:.0f}/s), caught up in {caught_up:.0f} s"
    )
    assert phases == {"ready"}
    assert caplog.text.count("table copied") == 2, "none was copied again"
    check_equal(database.dsn, LakeReadBack(lake, s3.options), ["a", "b"])
