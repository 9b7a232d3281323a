"""What a process that starts makes of builds that an earlier one has left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.documents.builds import Builds
from penstock.documents.mapping import IndexMapping
from penstock.documents.readiness import Readiness
from penstock.lsn import Lsn
from penstock.source.lineage import Ancestry, Lineage
from penstock.state import IndexStatus, MemoryStore
from tests.support.document_sink import FileSink

MAPPING = IndexMapping("people", "f", {}, {})


@pytest.mark.parametrize(("vanished", "status"), [(False, IndexStatus.SEEDED), (True, IndexStatus.WANTED)])
def test_a_build_is_complete_only_if_what_it_filled_serves(tmp_path: Path, vanished: bool, status: IndexStatus) -> None:
    sink = FileSink(tmp_path / "sink.db")
    sink.reindex(MAPPING)
    sink.mark_seeded("people")
    store = MemoryStore("tests")
    store.acquire_lease()
    store.use_lineage(Ancestry(Lineage("7000000000000000001", 1, "postgres", "penstock")))
    store.upsert_replication_progress(Lsn(1))
    builds = Builds(store)
    generation = "one that is gone" if vanished else sink.facts("people").generation
    builds.fill(builds.want("people", "f", "somebody asked for it"), {"generation": generation, "ranges": []})
    documents: Any = SimpleNamespace(index_mappings=lambda: [MAPPING])
    readiness = Readiness(builds, sink)
    readiness.prepare(documents, is_first=False)
    assert builds.all()["people"].status is status


def test_another_generation_than_the_one_that_was_kept_up_to_date_is_not_trusted(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "sink.db")
    sink.reindex(MAPPING)
    sink.mark_seeded("people")
    store = MemoryStore("tests")
    store.acquire_lease()
    store.use_lineage(Ancestry(Lineage("7000000000000000001", 1, "postgres", "penstock")))
    store.upsert_replication_progress(Lsn(1))
    builds = Builds(store)
    plan = {"generation": sink.facts("people").generation, "ranges": []}
    filled = builds.fill(builds.want("people", "f", "somebody asked for it"), plan)
    assert filled is not None
    builds.seeded(filled)
    documents: Any = SimpleNamespace(index_mappings=lambda: [MAPPING])
    readiness = Readiness(builds, sink)
    readiness.prepare(documents, is_first=False)
    assert builds.all()["people"].status is IndexStatus.SEEDED
    sink.reindex(MAPPING)  # somebody else fills another one, and lets it serve
    sink.mark_seeded("people")
    readiness.prepare(documents, is_first=False)
    assert builds.all()["people"].status is IndexStatus.WANTED
    assert "another generation serves" in builds.all()["people"].reason


def test_an_index_that_has_to_be_rebuilt_is_rebuilt_after_a_run_that_skipped_it(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "sink.db")
    store = MemoryStore("tests")
    store.acquire_lease()
    store.use_lineage(Ancestry(Lineage("7000000000000000001", 1, "postgres", "penstock")))
    store.upsert_replication_progress(Lsn(1))
    builds = Builds(store)
    documents: Any = SimpleNamespace(index_mappings=lambda: [MAPPING])

    def status_after(*, skip: bool) -> IndexStatus:
        Readiness(builds, sink, skip_backfill=skip).prepare(documents, is_first=False)
        return builds.all()["people"].status

    sink.reindex(MAPPING)
    plan = {"generation": sink.facts("people").filling, "ranges": []}
    filled = builds.fill(builds.want("people", "f", "it is new"), plan)
    assert filled is not None
    sink.mark_seeded("people")
    builds.seeded(filled)
    assert [status_after(skip=each) for each in (True, True, False)] == [IndexStatus.SEEDED] * 3, "it is complete"
    builds.want("people", "f", "one of its tables was truncated")
    assert status_after(skip=True) is IndexStatus.SEEDED
    assert status_after(skip=True) is IndexStatus.SEEDED
    assert status_after(skip=False) is IndexStatus.WANTED
