"""Documents in files: lines of JSON, or Parquet.

    documents/customers/current ─▶ 5f1c0a9e77d2_20261115161500_3fa9          a link, replaced in one step
    documents/customers/5f1c0a9e77d2_20261115161500_3fa9/01763222400….ndjson

A flush adds a file to each generation and changes none, so a kill leaves nothing half written, and tasks need no lock.
A reader takes the highest version of each id; without a body, the document was removed. When a generation has many
small files, the driver merges the newest of them: first it writes the merged file, then it deletes the others. Whatever
a kill leaves of these is the same documents twice. Large files are not merged, but rewritten when most of their rows
are outdated. So memory is bounded by the size of a merged file and by the number of ids.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.durable import aside, probe_folder, sweep_aside, sync_folder, write_synced
from penstock.sinks.folders import FolderSink, Generation, IndexState, gone, newest, writing
from penstock.sinks.lines import TEXT, escaped, joined, one_line, text

CURRENT = "current"
"""The link to the generation that serves."""

_INDEX_FILE = "_penstock/index.json"
_MERGED_FILES = 64
_MERGED_BYTES = 64 << 20
"""How many files there are before some are merged, and how large a merged file can become."""
_ROWS = pa.schema([("id", TEXT), ("version", pa.int64()), ("body", TEXT)])
_LINE = r'^\{"id":"(?P<id>(?:[^"\\]|\\.)*)","version":(?P<version>[0-9]+),"document":(?P<body>.*)\}$'


class NdjsonSink(FolderSink):
    """Writes `{"id":"7","version":812,"document":{…}}`, one line per document; a removed one has `"document":null`."""

    SUFFIX = ".ndjson"

    def __init__(self, path: str) -> None:
        super().__init__()
        self._root = Path(path).absolute()
        self._read: tuple[Any, dict[str, str]] = (None, {})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_read": (None, {}), "_waiting": []}

    def bodies(self, index: str) -> dict[str, str]:
        """See `WholeReads`. Keeps the documents in memory while no file is added."""
        serving = IndexState.parse(self._load(index)).serving
        if serving is None:
            return {}
        names = [str(each) for each in self._pieces(index, serving)]
        if self._read[0] != names:
            rows = self._retried(lambda: self._rows(self._pieces(index, serving)))
            rows = rows.filter(pc.is_valid(rows["body"]))
            self._read = names, dict(zip(rows["id"].to_pylist(), rows["body"].to_pylist(), strict=True))
        return self._read[1]

    def _probe(self) -> None:
        probe_folder(self._root)

    # The format

    def _encode(self, rows: pa.Table) -> memoryview:
        line = pc.binary_join_element_wise(
            text('{"id":"'),
            escaped(rows["id"]),
            text('","version":'),
            pc.cast(rows["version"], TEXT),
            text(',"document":'),
            pc.coalesce(one_line(rows["body"]), text("null")),
            text("}\n"),
            text(""),
        )
        return joined(line)

    def _decode(self, path: Path) -> pa.Table:
        content = path.read_bytes().decode()  # as bytes: reading text would turn `\r` into a line break
        lines = pc.split_pattern(pa.array([content], TEXT), "\n").flatten()
        found = pc.extract_regex(lines.filter(pc.not_equal(lines, "")), _LINE)
        id_, version, body = (pc.struct_field(found, number).cast(TEXT) for number in range(3))
        unusual = pc.match_substring(id_, "\\")
        if pc.any(unusual).as_py():
            # Cold: quotes and control characters in a key.
            plain = [json.loads(f'"{each}"') for each in id_.filter(unusual).to_pylist()]
            id_ = pc.replace_with_mask(id_, unusual, pa.array(plain, TEXT))
        body = pc.if_else(pc.equal(body, "null"), pa.scalar(None, TEXT), body)
        return pa.Table.from_arrays([id_, pc.cast(version, pa.int64()), body], schema=_ROWS)

    # Generations: see `FolderSink`

    def _load(self, index: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return (self._root / index / _INDEX_FILE).read_bytes()
        return None

    def _store(self, index: str, content: bytes) -> None:
        self._place(index, self._root / index / _INDEX_FILE, content)

    def _create(self, index: str, generation: Generation, owner: str) -> None:
        with writing(index):
            folder = self._folder(index, generation.name)
            for each in (folder, (self._root / index / _INDEX_FILE).parent):
                each.mkdir(parents=True, exist_ok=True)
                for parent in (each, *each.parents[: len(each.relative_to(self._root).parts)]):
                    sync_folder(parent)

    def _exists(self, index: str, generation: Generation) -> bool:
        return self._folder(index, generation.name).is_dir()

    def _append(self, index: str, generation: Generation, rows: pa.Table) -> None:
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{self.SUFFIX}"
        self._place(index, self._folder(index, generation.name) / name, self._encode(rows))

    def _publish(self, index: str, state: IndexState) -> None:
        assert state.serving is not None
        link = self._root / index / CURRENT
        kept = {each.name for each in state.generations} | {CURRENT, state.former, Path(_INDEX_FILE).parts[0]}
        with writing(index):
            with aside(link) as temporary:
                temporary.symlink_to(state.serving.name)
                temporary.replace(link)
            sync_folder(link.parent)
            sweep_aside(link.parent)
            for each in [each for each in link.parent.iterdir() if each.name not in kept and each.is_dir()]:
                if each.is_symlink():
                    each.unlink()  # left by a kill
                else:
                    shutil.rmtree(each)

    def _count(self, index: str, generation: Generation) -> int:
        found = self._retried(lambda: self._newest(self._pieces(index, generation)))
        return pc.sum(found["exists"]).as_py() or 0

    def _tidy(self, index: str) -> None:
        for generation in self._known(index).generations:
            self._merge(index, generation)

    def _merge(self, index: str, generation: Generation) -> None:
        """Merge the newest files: each is as large as those after it together, at most, so few bytes move often."""
        pieces = self._pieces(index, generation)
        if len(pieces) < _MERGED_FILES:
            return
        size = count = 0
        for each in reversed(pieces):
            bytes_ = each.stat().st_size
            if count >= 2 and (bytes_ > size or size + bytes_ > _MERGED_BYTES):
                break
            size, count = size + bytes_, count + 1
        merged = pieces[-count:]
        # After the merged files and before later ones, which have the time at which they were written.
        name = f"{int(merged[-1].name.partition('-')[0]) + 1:020d}-{uuid.uuid4().hex[:8]}{self.SUFFIX}"
        self._place(index, merged[0].with_name(name), self._encode(self._rows(merged)))
        for each in merged:
            each.unlink(missing_ok=True)
        if size > _MERGED_BYTES // 2:
            self._sweep(index, generation)

    def _sweep(self, index: str, generation: Generation) -> None:
        """Rewrite files of which more than half of the rows are outdated."""
        pieces = self._pieces(index, generation)
        kept = self._newest(pieces)
        for number, piece in enumerate(pieces):
            rows = self._decode(piece)
            current = kept.filter(pc.equal(kept["piece"], number))["row"]
            if 2 * len(current) < len(rows):
                self._place(index, piece, self._encode(rows.take(current)))

    def _newest(self, pieces: list[Path]) -> pa.Table:
        """Return the place of each id's newest row, without its body: `piece`, `row`, and whether it `exists`."""
        return newest(pa.concat_tables(self._places(pieces)))

    def _places(self, pieces: list[Path]) -> Iterator[pa.Table]:
        for number, piece in enumerate([None, *pieces], -1):
            rows = _ROWS.empty_table() if piece is None else self._decode(piece)
            places = pa.array(np.full(len(rows), number)), pa.array(np.arange(len(rows))), pc.is_valid(rows["body"])
            yield pa.table([rows["id"], rows["version"], *places], ["id", "version", "piece", "row", "exists"])

    def _rows(self, pieces: list[Path]) -> pa.Table:
        return newest(pa.concat_tables([_ROWS.empty_table(), *map(self._decode, pieces)]))

    def _retried(self, read: Callable[[], pa.Table]) -> pa.Table:
        while True:
            # Files that another process merged meanwhile are gone: list them again.
            with suppress(FileNotFoundError):
                return read()

    def _pieces(self, index: str, generation: Generation) -> list[Path]:
        """Return the files of a generation, oldest first."""
        try:
            names = os.listdir(self._folder(index, generation.name))
        except FileNotFoundError:
            raise gone(index) from None
        return [self._folder(index, generation.name) / name for name in sorted(names) if name.endswith(self.SUFFIX)]

    def _folder(self, index: str, generation: str) -> Path:
        return self._root / index / generation

    def _place(self, index: str, path: Path, content: bytes | memoryview) -> None:
        """Create or replace a file, durably and in one step; its folder must exist."""
        with writing(index), aside(path) as temporary:
            write_synced(temporary, content)
            os.replace(temporary, path)
            sync_folder(path.parent)


class ParquetSink(NdjsonSink):
    """Writes Parquet files with the columns `id`, `version` and `document` (JSON as text; null for a removed one)."""

    SUFFIX = ".parquet"

    def _encode(self, rows: pa.Table) -> memoryview:
        sink = pa.BufferOutputStream()
        pq.write_table(rows.rename_columns(["id", "version", "document"]), sink)
        return memoryview(sink.getvalue())

    def _decode(self, path: Path) -> pa.Table:
        return pq.ParquetFile(path).read().rename_columns(_ROWS.names).cast(_ROWS)
