"""The lines of a bulk request, joined by columns: bodies are JSON already, and pass through as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

LONGEST_ID = 512
"""In bytes. A longer one makes the server refuse the whole request."""

_TEXT = pa.large_string()
_ACTION_BYTES = 84
"""What is sent for a document besides its id and its body."""
_RARE = "[\\x00-\\x1f]"


def bulk_lines(batch: pa.Table) -> memoryview:
    """What to send for these documents (`penstock.documents.base.WRITTEN`); the index is in the address."""
    body = _one_line(batch.column("body"))
    gone = pc.is_null(body)
    line = pc.binary_join_element_wise(
        pc.if_else(gone, _text('{"delete":{"_id":"'), _text('{"index":{"_id":"')),
        _escaped(batch.column("id")),
        _text('","version":'),
        pc.cast(batch.column("version"), _TEXT),
        _text(',"version_type":"external_gte"}}\n'),
        pc.coalesce(pc.binary_join_element_wise(body, _text(""), _text("\n")), _text("")),
        _text(""),
    )
    return _content(line)


def documents_size(batch: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    """About how many bytes each document is on its way."""
    body = pc.fill_null(pc.binary_length(batch.column("body")), 0)
    lengths = pc.add(pc.cast(body, pa.int64()), pc.cast(pc.binary_length(batch.column("id")), pa.int64()))
    return lengths.to_numpy() + _ACTION_BYTES


def cut(batch: pa.Table, most_documents: int, most_bytes: int) -> Iterator[pa.Table]:
    """Pieces that hold at most so many documents and bytes; a document that is larger comes alone."""
    ends = np.cumsum(documents_size(batch))
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        fitting = int(np.searchsorted(ends, before + most_bytes, side="right"))
        stop = max(start + 1, min(fitting, start + most_documents))
        yield batch.slice(start, stop - start)
        start = stop


def unusable_ids(batch: pa.Table) -> pa.ChunkedArray:
    """Whether each document has an id that no index takes; one of them would spoil the request of all."""
    length = pc.binary_length(batch.column("id"))
    return pc.or_(pc.equal(length, 0), pc.greater(length, LONGEST_ID))


def _escaped(ids: pa.ChunkedArray) -> pa.ChunkedArray:
    ids = pc.cast(ids, _TEXT)
    for sign in ("\\", '"'):
        if pc.any(pc.match_substring(ids, sign)).as_py():
            ids = pc.replace_substring(ids, sign, "\\" + sign)
    control = pc.match_substring_regex(ids, _RARE)
    if pc.any(control).as_py():
        # Cold: control characters in a key. What was escaped above has to be read back for that.
        rare = [json.dumps(json.loads(f'"{each}"', strict=False))[1:-1] for each in ids.filter(control).to_pylist()]
        ids = pc.replace_with_mask(ids.combine_chunks(), control.combine_chunks(), pa.array(rare, _TEXT))
    return ids


def _one_line(body: pa.ChunkedArray) -> pa.ChunkedArray:
    """A line break in JSON stands only between its parts, where a blank does as well."""
    body = pc.cast(body, _TEXT)
    return pc.replace_substring(body, "\n", " ") if pc.any(pc.match_substring(body, "\n")).as_py() else body


def _content(line: pa.ChunkedArray) -> memoryview:
    """The texts one after the other; Arrow has them so in memory already."""
    whole = line.combine_chunks() if isinstance(line, pa.ChunkedArray) else line
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks)
    _, offsets, content = whole.buffers()
    if offsets is None or content is None:
        return memoryview(b"")
    ends = np.frombuffer(offsets, np.int64)[whole.offset : whole.offset + len(whole) + 1]
    return memoryview(content)[int(ends[0]) : int(ends[-1])]


def _text(value: str) -> pa.Scalar:
    return pa.scalar(value, _TEXT)
