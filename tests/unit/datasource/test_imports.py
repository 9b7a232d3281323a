"""Every process in which Spark plans a read, and every new worker, imports the source: that must stay cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pyspark")

HEAVY = ("pandas", "penstock.capture", "penstock.datasource.changes", "penstock.destinations", "pydantic")


def loaded(code: str) -> list[str]:
    """Return the heavy modules that a process has imported after some code."""
    code += f"\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_a_read_is_planned_without_what_only_streams_need() -> None:
    assert loaded("import penstock.datasource.source") == []


def test_rows_are_decoded_without_pandas() -> None:
    """`pa.array` imports it, which takes 0.4 s."""
    assert (
        loaded("""
import numpy as np
from penstock.changes.wire import PADDING
from penstock.copy.binary import decode_tuples, tuple_layout
from penstock.schema import Column, PostgresType, TableSchema
from penstock.values import TypeSettings
names = {23: "int4", 25: "text", 16: "bool", 1700: "numeric"}
modifiers = {1700: (12 << 16 | 2) + 4}
columns = [
    Column(name, number, PostgresType(oid, name), modifiers.get(oid, -1))
    for number, (oid, name) in enumerate(names.items(), 1)
]
layout = tuple_layout(TableSchema(1, "public", "t", tuple(columns)), TypeSettings())
row = b"\\0\\4" b"\\0\\0\\0\\4\\0\\0\\0\\7" b"\\0\\0\\0\\1x" b"\\0\\0\\0\\1\\1" b"\\0\\0\\0\\0041.50"
batch = decode_tuples(row * 3 + PADDING, np.full(3, len(row)), layout)
assert [str(each) for each in batch.slice(2).to_pylist()[0].values()] == ["7", "x", "True", "1.50", "None"]
""")
        == []
    )
