"""Documents as a Delta table: what other readers find, races, upkeep, and what a kill leaves."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest

from penstock.destinations.delta.log import Committed, DeltaLog, Lost
from penstock.documents.mapping import IndexMapping
from penstock.errors import IndexUnusable
from penstock.sinks import delta
from penstock.sinks.delta import DeltaSink

ONE = IndexMapping("one", "f1", {}, {}, "mine")
_ENDLESS = """
import itertools, sys
from penstock.documents.mapping import IndexMapping
from penstock.sinks.delta import DeltaSink
sink = DeltaSink(sys.argv[1])
mapping = IndexMapping("one", "f1", {}, {})
sink.ensure_index(mapping)
sink.mark_seeded("one")
for version in itertools.count(1):
    if version % 10 == 0:
        sink.reindex(mapping)
        for id in range(20):
            sink.upsert("one", str(id), version - 1, '{"n": %d}' % (version - 1))
        sink.flush(False)
        sink.mark_seeded("one")
        sink.keep_up()
    sink.upsert("one", str(version % 20), version, '{"n": %d}' % version)
    sink.flush(True)
    print(version, flush=True)
"""


def serving(path: Path, **options: bool) -> DeltaSink:
    sink = DeltaSink(str(path), **options)
    sink.ensure_index(ONE)
    sink.mark_seeded("one")
    return sink


def rows(path: Path) -> list[tuple[str, int, str]]:
    return sorted(pl.read_delta(str(path / "one")).rows())


@pytest.mark.parametrize("vectors", [True, False])
def test_other_readers_see_one_row_per_document(vectors: bool, tmp_path: Path) -> None:
    sink = serving(tmp_path, deletion_vectors=vectors)
    for version, number in enumerate([1, 2, 3], 1):
        for id_ in "abc":
            sink.upsert("one", id_, version, json.dumps({"n": number}))
        sink.flush(True)
    sink.delete("one", "b", 4)
    sink.flush(True)
    assert rows(tmp_path) == [("a", 3, '{"n": 3}'), ("c", 3, '{"n": 3}')]


def test_a_generation_that_is_filled_appears_in_one_version_of_the_table(tmp_path: Path) -> None:
    sink = serving(tmp_path)
    sink.upsert("one", "old", 1, "{}")
    sink.flush(True)
    sink.reindex(ONE)
    for version, id_ in enumerate(["x", "y", "x"], 2):
        filling = sink.filling("one")
        filling.upsert("one", id_, version, "{}")
        filling.flush(True)
    assert rows(tmp_path) == [("old", 1, "{}")]
    sink.mark_seeded("one")
    assert rows(tmp_path) == [("x", 4, "{}"), ("y", 3, "{}")]


def test_concurrent_writers_keep_the_highest_version_and_every_removal(tmp_path: Path) -> None:
    sink = serving(tmp_path)
    last: dict[str, tuple[int, bool]] = {}
    work: list[list[tuple[str, int, bool]]] = [[] for _ in range(4)]
    random = Random(1)
    for version in range(1, 120):
        id_, removed = str(random.randrange(6)), random.random() < 0.4
        work[random.randrange(4)].append((id_, version, removed))
        last[id_] = version, removed

    def write(mine: list[tuple[str, int, bool]], seed: int) -> None:
        # In another order than their versions: what is older must not win.
        Random(seed).shuffle(mine)
        copied: DeltaSink = pickle.loads(pickle.dumps(sink))
        for id_, version, removed in mine:
            if removed:
                copied.delete("one", id_, version)
            else:
                copied.upsert("one", id_, version, json.dumps({"n": version}))
            copied.flush(False)

    threads = [threading.Thread(target=write, args=(mine, seed)) for seed, mine in enumerate(work)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    wanted = sorted(
        (id_, version, json.dumps({"n": version})) for id_, (version, removed) in last.items() if not removed
    )
    assert rows(tmp_path) == wanted
    assert sink.count("one") == len(wanted)


def test_a_removal_between_reading_and_committing_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = serving(tmp_path)
    other: DeltaSink = pickle.loads(pickle.dumps(sink))
    commit = DeltaLog.commit

    def late(log: DeltaLog, *arguments: Any) -> Committed | Lost:
        monkeypatch.undo()
        other.delete("one", "a", 5)
        other.flush(False)
        return commit(log, *arguments)

    monkeypatch.setattr(DeltaLog, "commit", late)
    sink.upsert("one", "a", 4, "{}")
    sink.flush(True)
    assert rows(tmp_path) == []


def test_upkeep_merges_files_and_forgets_old_removals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = serving(tmp_path)
    for version in range(1, 30):
        sink.upsert("one", str(version), version, "{}")
        sink.delete("one", f"gone {version}", version)
        sink.flush(True)
    before = rows(tmp_path)
    sink.keep_up()
    assert rows(tmp_path) == before
    [generation] = sink._known("one").generations  # pyright: ignore[reportPrivateUsage]
    current = sink._current("one", generation).refresh()  # pyright: ignore[reportPrivateUsage]
    assert current is not None
    assert len(current.files) < 8
    sink.upsert("one", "gone 29", 28, "{}")
    sink.flush(True)
    assert rows(tmp_path) == before, "removals outlive the merge"
    monkeypatch.setattr(delta, "_REMOVAL_SECONDS", -1.0)
    sink.keep_up()
    sink.upsert("one", "gone 29", 28, "{}")
    sink.flush(True)
    assert len(rows(tmp_path)) == len(before) + 1


def test_after_a_kill_every_flushed_document_is_there(tmp_path: Path) -> None:
    for round_ in range(2):
        folder = tmp_path / str(round_)
        with subprocess.Popen(
            [sys.executable, "-c", _ENDLESS, str(folder)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if int(line) >= 27 + 8 * round_:
                    child.send_signal(signal.SIGKILL)
                    break
            last = int([line, *child.stdout.read().split()][-1])
        sink = DeltaSink(str(folder))
        sink.ensure_index(IndexMapping("one", "f1", {}, {}))
        found = {json.loads(row[2])["n"] for row in rows(folder)}
        assert last in found
        assert len(rows(folder)) == 20, "one row per document"
        sink.upsert("one", "5", last + 100, "{}")
        sink.flush(True)
        assert sink.fetch("one", ["5"]) == {"5": {}}


@pytest.mark.parametrize("restarted", [True, False], ids=["at the next start", "by the next attempt"])
def test_an_interrupted_swap_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool) -> None:
    sink = serving(tmp_path)
    sink.reindex(ONE)
    sink.upsert("one", "a", 1, "{}")
    sink.flush(True)
    with monkeypatch.context() as patched:
        patched.setattr(DeltaSink, "_publish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            sink.mark_seeded("one")
    again = DeltaSink(str(tmp_path)) if restarted else sink
    if restarted:
        again.ensure_index(ONE)
    else:
        again.mark_seeded("one")
    assert again.is_seeded("one")
    again.upsert("one", "c", 2, "{}")
    again.flush(True)
    assert [row[0] for row in rows(tmp_path)] == ["a", "c"]


@pytest.mark.parametrize("deleted", ["one", "one/_delta_log"])
def test_a_deleted_table_is_filled_again_at_the_next_start(tmp_path: Path, deleted: str) -> None:
    sink = serving(tmp_path)
    sink.reindex(ONE)
    sink.upsert("one", "a", 1, "{}")
    sink.flush(True)
    sink.mark_seeded("one")
    sink.upsert("one", "a", 2, '{"x": 1}')
    sink.flush(True)
    shutil.rmtree(tmp_path / deleted)
    again = DeltaSink(str(tmp_path))
    again.ensure_index(ONE)
    assert not again.is_seeded("one")
    again.upsert("one", "b", 3, "{}")
    again.flush(True)
    again.mark_seeded("one")
    assert rows(tmp_path) == [("b", 3, "{}")]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_index_of_another_pipeline_is_left_alone(tmp_path: Path) -> None:
    serving(tmp_path)
    with pytest.raises(IndexUnusable, match="belongs to another pipeline, 'mine'"):
        DeltaSink(str(tmp_path)).ensure_index(IndexMapping("one", "f1", {}, {}, "yours"))
