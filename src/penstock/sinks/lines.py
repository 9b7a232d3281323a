"""Documents as lines of JSON, joined by columns: bodies are JSON already and pass through unchanged."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

TEXT = pa.large_string()
_CONTROL = "[\\x00-\\x1f]"


def escaped(ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return ids as JSON strings have them, without the quotes."""
    ids = pc.cast(ids, TEXT)
    for sign in ("\\", '"'):
        if pc.any(pc.match_substring(ids, sign)).as_py():
            ids = pc.replace_substring(ids, sign, "\\" + sign)
    control = pc.match_substring_regex(ids, _CONTROL)
    if pc.any(control).as_py():
        # Cold: control characters in a key. Undo the escapes above first.
        rare = [json.dumps(json.loads(f'"{each}"', strict=False))[1:-1] for each in ids.filter(control).to_pylist()]
        ids = pc.replace_with_mask(ids.combine_chunks(), control.combine_chunks(), pa.array(rare, TEXT))
    return ids


def one_line(body: pa.ChunkedArray) -> pa.ChunkedArray:
    """Replace line breaks by blanks; in JSON they occur only between tokens."""
    body = pc.cast(body, TEXT)
    for sign in ("\n", "\r"):
        if pc.any(pc.match_substring(body, sign)).as_py():
            body = pc.replace_substring(body, sign, " ")
    return body


def joined(line: pa.ChunkedArray) -> memoryview:
    """Return the joined texts, which Arrow stores one after the other."""
    whole = line.combine_chunks() if isinstance(line, pa.ChunkedArray) else line
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks)
    _, offsets, content = whole.buffers()
    if offsets is None or content is None:
        return memoryview(b"")
    ends = np.frombuffer(offsets, np.int64)[whole.offset : whole.offset + len(whole) + 1]
    return memoryview(content)[int(ends[0]) : int(ends[-1])]


def text(value: str) -> pa.Scalar:
    """Return a constant part of lines."""
    return pa.scalar(value, TEXT)
