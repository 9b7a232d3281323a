"""Documents in files: what a reader finds there, and what a kill leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.documents.mapping import IndexMapping
from penstock.errors import DestinationUnavailable, IndexUnusable
from penstock.sinks import files
from penstock.sinks.files import NdjsonSink, ParquetSink

KINDS = [NdjsonSink, ParquetSink]
ONE = IndexMapping("one", "f1", {}, {}, "mine")
_ENDLESS = """
import itertools, sys
from penstock.documents.mapping import IndexMapping
from penstock.sinks import files
files._MERGED_FILES, files._MERGED_BYTES = 4, 2_000
sink = getattr(files, sys.argv[1])(sys.argv[2])
sink.ensure_index(IndexMapping("one", "f1", {}, {}))
sink.mark_seeded("one")
for version in itertools.count(1):
    sink.upsert("one", str(version % 20), version, '{"n": %d}' % version)
    sink.flush(True)
    print(version, flush=True)
"""


def serving(kind: type[NdjsonSink], path: Path) -> NdjsonSink:
    sink = kind(str(path))
    sink.ensure_index(ONE)
    sink.mark_seeded("one")
    return sink


def put(sink: NdjsonSink, version: int, **documents: Any) -> None:
    for id_, document in documents.items():
        if document is None:
            sink.delete("one", id_, version)
        else:
            sink.upsert("one", id_, version, json.dumps(document))
    sink.flush(True)


def test_a_reader_finds_one_line_of_json_per_document_behind_the_link(tmp_path: Path) -> None:
    sink = serving(NdjsonSink, tmp_path)
    sink.upsert("one", 'a "b"\n\\', 7, '{"x": "ü",\n "y": null}')
    sink.delete("one", "gone", 8)
    sink.flush(True)
    [file] = (tmp_path / "one" / "current").glob("*.ndjson")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [
        {"id": 'a "b"\n\\', "version": 7, "document": {"x": "ü", "y": None}},
        {"id": "gone", "version": 8, "document": None},
    ]
    assert list(sink.bodies("one")) == ['a "b"\n\\']


def test_a_reader_of_parquet_finds_columns(tmp_path: Path) -> None:
    put(serving(ParquetSink, tmp_path), 3, a={"x": 1})
    [file] = (tmp_path / "one" / "current").glob("*.parquet")
    assert pq.read_table(file).to_pylist() == [{"id": "a", "version": 3, "document": '{"x": 1}'}]


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_merged_and_outdated_lines_disappear(
    kind: type[NdjsonSink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MERGED_FILES", 4)
    monkeypatch.setattr(files, "_MERGED_BYTES", 20_000)
    sink = serving(kind, tmp_path)
    for version in range(1, 200):
        put(sink, version, **{str(version % 7): {"n": version, "text": "long" * 40}}, other=None)
    pieces = list((tmp_path / "one" / "current").glob(f"*{kind.SUFFIX}"))
    assert len(pieces) < 20
    assert sum(len(sink._decode(piece)) for piece in pieces) < 100, "most lines are current"  # pyright: ignore[reportPrivateUsage]
    assert sorted(each["n"] for each in sink.fetch("one", [str(n) for n in range(7)]).values()) == list(range(193, 200))
    put(sink, 5, other={"n": 5})
    assert sink.fetch("one", ["other"]) == {}, "the removal outlives the merge"


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_kill_every_flushed_document_is_there(kind: type[NdjsonSink], tmp_path: Path) -> None:
    for round_ in range(2):
        folder = tmp_path / str(round_)
        command = [sys.executable, "-c", _ENDLESS, kind.__name__, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if int(line) >= 40 + 7 * round_:
                    child.send_signal(signal.SIGKILL)
                    break
            last = int([line, *child.stdout.read().split()][-1])
        sink = kind(str(folder))
        sink.ensure_index(IndexMapping("one", "f1", {}, {}))
        assert sink.is_seeded("one")
        found = {each["n"] for each in sink.fetch("one", [str(n) for n in range(20)]).values()}
        assert found >= set(range(last - 18, last + 1)), "flushed, so durable"
        assert len(found) == 20


def test_a_swap_that_a_kill_interrupted_is_finished_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = serving(NdjsonSink, tmp_path)
    before = (tmp_path / "one" / "current").readlink()
    sink.reindex(ONE)
    put(sink, 1, a={"x": 1})
    with monkeypatch.context() as patched:
        patched.setattr(NdjsonSink, "_publish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            sink.mark_seeded("one")
    assert (tmp_path / "one" / "current").readlink() == before
    again = NdjsonSink(str(tmp_path))
    again.ensure_index(ONE)
    assert again.is_seeded("one")
    assert (tmp_path / "one" / "current").readlink() != before
    assert (tmp_path / "one" / before).is_dir(), "a reader may still use it"
    again.reindex(ONE)
    again.mark_seeded("one")
    assert not (tmp_path / "one" / before).exists()


def test_a_swap_that_a_full_disk_interrupted_is_finished_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = serving(NdjsonSink, tmp_path)
    before = (tmp_path / "one" / "current").readlink()
    sink.reindex(ONE)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "symlink_to", _fill_disk)
        with pytest.raises(DestinationUnavailable, match="No space left"):
            sink.mark_seeded("one")
    assert (tmp_path / "one" / "current").readlink() == before
    sink.mark_seeded("one")
    assert str((tmp_path / "one" / "current").readlink()) == sink.facts("one").generation != str(before)


def test_a_kill_before_the_link_is_replaced_does_not_stop_later_starts(tmp_path: Path) -> None:
    sink = serving(NdjsonSink, tmp_path)
    left = tmp_path / "one" / f".current.{'a' * 32}"
    left.symlink_to((tmp_path / "one" / "current").readlink())
    sink.ensure_index(ONE)
    assert not left.is_symlink()
    assert (tmp_path / "one" / "current").is_dir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_break_of_any_kind_between_tokens_of_json_loses_no_document(
    kind: type[NdjsonSink], tmp_path: Path
) -> None:
    sink = serving(kind, tmp_path)
    sink.upsert("one", "a", 1, '{"x":\r1,\r\n"y":\n2}')
    sink.flush(True)
    assert sink.fetch("one", ["a"]) == {"a": {"x": 1, "y": 2}}
    if kind is NdjsonSink:
        [file] = (tmp_path / "one" / "current").glob("*.ndjson")
        assert len(file.read_text().splitlines()) == 1
        # As an earlier version wrote it.
        file.write_bytes(file.read_bytes().replace(b" ", b"\r"))
        assert sink.count("one") == 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_index_of_another_pipeline_is_left_alone(tmp_path: Path) -> None:
    serving(NdjsonSink, tmp_path)
    with pytest.raises(IndexUnusable, match="belongs to another pipeline, 'mine'"):
        NdjsonSink(str(tmp_path)).ensure_index(IndexMapping("one", "f1", {}, {}, "yours"))


def test_a_deleted_generation_stops_the_index_and_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = serving(NdjsonSink, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_synced", _fill_disk)
        with pytest.raises(DestinationUnavailable, match="No space left"):
            put(sink, 1, a={})
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "listdir", _lose_disk)
        with pytest.raises(DestinationUnavailable, match="Input/output error"):
            sink.flush(True)
        patched.setattr(Path, "read_bytes", _lose_disk)
        with pytest.raises(DestinationUnavailable, match="Input/output error"):
            NdjsonSink(str(tmp_path)).ensure_index(ONE)
    (tmp_path / "one" / "current").resolve().rename(tmp_path / "elsewhere")
    with pytest.raises(IndexUnusable, match="was deleted"):
        put(sink, 2, a={})
    again = NdjsonSink(str(tmp_path))
    again.ensure_index(ONE)
    assert not again.is_seeded("one")
    put(again, 3, a={"x": 1})
    again.mark_seeded("one")
    assert again.fetch("one", ["a"]) == {"a": {"x": 1}}


def _lose_disk(*_: object) -> None:
    raise OSError(5, "Input/output error")


def _fill_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")
