"""A copy that is killed goes on where it was, and ends equal, whatever changes meanwhile."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Background, current_position
from tests.support.readback import check_equal
from tests.support.resumed_copy import RANGE_BYTES, create, drive, recorded, resumption, writes

ROWS = 5_000
SEEDS = range(*map(int, os.environ.get("PENSTOCK_RESUME_SEEDS", "1-4").split("-")))
"""For the soak: from the first seed up to the second one."""
POINTS = ("before_snapshot", "after_snapshot", "during_copy", "before_reread", "after_copy", "after_finished_copy")


@pytest.mark.parametrize("kind", ["whole", "texts", "times"])
def test_a_copy_killed_at_ninety_percent_reads_at_most_fifteen_percent_again(database: Any, tmp_path: Path, kind: str):
    with database.connect() as connection:
        create(connection, kind, ROWS)
        size, blocks = connection.execute(
            "select pg_table_size('busy'), pg_relation_size('busy') / current_setting('block_size')::int"
        ).fetchone()
    ranges = -(-size // RANGE_BYTES)
    pipeline = drive(database.dsn, tmp_path, f"resumed_{database.name[-12:]}")
    with Background(database, writes(kind, ROWS, 1), pause=0.05):
        pipeline.start(armed=f"after_finished_ranges=kill:{int(ranges * 0.9)}")
        assert pipeline.wait_ended() == -9
        first, begun = recorded(pipeline, blocks), resumption(pipeline)
        assert len(first) == int(ranges * 0.9)
        pipeline.start(armed="before_reread=kill")
        assert pipeline.wait_ended() == -9
        second = recorded(pipeline, blocks)
        assert resumption(pipeline) == begun
        assert second.items() >= first.items()
        assert sum(first.values()) >= 0.85 * blocks
        assert sum(second.values()) == blocks, "no block was read twice"
        pipeline.start()
        pipeline.wait_phases("ready", 1)
        assert not recorded(pipeline, blocks)
    end = current_position(database)
    pipeline.wait_applied(end)
    pipeline.stop()
    check_equal(database.dsn, LakeReadBack(pipeline.settings.lake), ["busy"])


def test_a_copy_that_holds_back_too_much_starts_again(database: Any, tmp_path: Path):
    with database.connect() as connection:
        create(connection, "whole", 800)
    limits = {"resume_max_bytes": 1, "copy_bytes_per_second": 200_000}
    pipeline = drive(database.dsn, tmp_path, f"resumed_{database.name[-12:]}", **limits)
    with Background(database, writes("whole", 800, 1), pause=0.05):
        pipeline.start(armed="before_give_up_resuming=kill")
        assert pipeline.wait_ended() == -signal.SIGKILL
        assert resumption(pipeline) is not None
        pipeline.start(armed="after_copy=kill")
        assert pipeline.wait_ended() == -signal.SIGKILL
        assert resumption(pipeline) is None
        pipeline.start()
        pipeline.wait_phases("ready", 1)
    pipeline.wait_applied(current_position(database))
    pipeline.stop()
    check_equal(database.dsn, LakeReadBack(pipeline.settings.lake), ["busy"])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_copies_killed_anywhere_end_equal(database: Any, tmp_path: Path, seed: int, record_property: Any):
    choose = random.Random(seed)
    kind, rows = choose.choice(["whole", "texts", "times"]), choose.randrange(800, 3_000)
    options = {"mode": choose.choice(["mirror", "mirror", "soft_delete"]), "deletion_vectors": choose.random() < 0.7}
    with database.connect() as connection:
        create(connection, kind, rows)
    pipeline = drive(database.dsn, tmp_path, f"resumed_{database.name[-12:]}", options=options)
    said: list[Any] = [kind, rows, options]
    with Background(database, writes(kind, rows, seed), pause=choose.choice([0.02, 0.1])):
        for _ in range(choose.randrange(2, 6)):
            armed = f"after_finished_ranges=kill:{choose.randrange(1, 8)}"
            if choose.random() < 0.4:
                armed = f"{choose.choice(POINTS)}=kill"
            pipeline.start(armed=armed)
            pipeline.wait_until(lambda seen: "ready" in seen.phases.values() or _has_stopped(seen))
            if pipeline.running:
                said.append("ready")
                break
            assert pipeline.wait_ended() == -signal.SIGKILL
            said.append((armed, len(recorded(pipeline, 0))))
        if not pipeline.running:
            pipeline.start()
        pipeline.wait_until(lambda seen: "ready" in seen.phases.values() or _has_stopped(seen))
    print(f"seed {seed}: {said}")
    assert not _has_stopped(pipeline.seen)
    pipeline.wait_applied(current_position(database))
    pipeline.stop()
    check_equal(database.dsn, LakeReadBack(pipeline.settings.lake), ["busy"])
    record_property("kills", len(said) - 3)


def _has_stopped(seen: Any) -> bool:
    return "errored" in seen.phases.values()
