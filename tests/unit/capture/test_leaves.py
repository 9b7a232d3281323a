"""Which descriptions are those of leaves: these follow the description of their table, but others may do so, too."""

from __future__ import annotations

import struct
from pathlib import Path

from penstock.capture.parcels import HEADER
from tests.unit.capture import corpus as recorded
from tests.unit.capture.gathering import assemble


def test_only_a_table_that_no_change_names_is_a_leaf(tmp_path: Path) -> None:
    corpus = recorded.load()
    at = next(number for number, message in enumerate(corpus.ordinary) if _kind(message) == "T")
    begin = next(message for message in reversed(corpus.ordinary[:at]) if _kind(message) == "B")
    insert = next(message for message in corpus.ordinary[at:] if _kind(message) == "I")
    commit = next(message for message in corpus.ordinary[at:] if _kind(message) == "C")
    described = {_table(message): message for message in corpus.ordinary if _kind(message) == "R"}
    truncated = {*struct.unpack(">2I", corpus.ordinary[at][HEADER + 6 : HEADER + 14])}
    (whole,) = {_table(insert)} & truncated
    (silent,) = truncated - {whole}

    def leaves(*messages: bytes) -> list[tuple[int, int]]:
        found = assemble(corpus, [begin, *messages, commit], tmp_path).leaves
        return [(table_id, leaf) for table_id, leaf, _ in found]

    first, second = described[whole], described[silent]
    assert leaves(first, second, insert) == [(whole, silent)]
    assert leaves(first, second) == [(whole, silent)]
    assert leaves(first, second, corpus.ordinary[at]) == [], "tables that are truncated together"
    assert leaves(second, first, insert) == [], "the description before belongs to a change that was rolled back"


def _kind(message: bytes) -> str:
    return chr(message[HEADER])


def _table(message: bytes) -> int:
    return struct.unpack(">I", message[HEADER + 1 : HEADER + 5])[0]
