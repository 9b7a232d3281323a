"""The records of the spool's log: one line of JSON per entry, with a checksum.

An entry is a run of whole transactions between two boundaries. A line exists only after all files that it names are
complete, and counts only if its checksum is right: a line that was torn by a crash was never there.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, fields
from typing import Any

from penstock.changes.steps import Message, Segment, Step, Truncation
from penstock.errors import SpoolCorrupt
from penstock.lsn import Lsn, OrderKey


@dataclass(frozen=True, slots=True)
class Entry:
    """Whole transactions after the boundary `begin`, up to the boundary `end`, in commit order."""

    number: int
    begin: Lsn
    end: Lsn
    transactions: int = 0
    first_commit_time: int = 0
    last_commit_time: int = 0
    """Unix microseconds, by the source's clock."""
    steps: tuple[Step, ...] = ()
    """The order of the steps of one table is the order of its changes."""

    @property
    def rows(self) -> int:
        return sum(step.rows for step in self.steps if isinstance(step, Segment))

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps if isinstance(step, Segment))


def to_line(entry: Entry) -> bytes:
    """A line of the log."""
    record = {
        "number": entry.number,
        "begin": str(entry.begin),
        "end": str(entry.end),
        "transactions": entry.transactions,
        "commit_times": [entry.first_commit_time, entry.last_commit_time],
        "steps": [_step_to_json(step) for step in entry.steps],
    }
    body = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def from_line(line: bytes) -> Entry | None:
    """The entry of a line; None if the line is torn."""
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        record = json.loads(body)
        return Entry(
            number=record["number"],
            begin=Lsn.parse(record["begin"]),
            end=Lsn.parse(record["end"]),
            transactions=record["transactions"],
            first_commit_time=record["commit_times"][0],
            last_commit_time=record["commit_times"][1],
            steps=tuple(_step_from_json(step) for step in record["steps"]),
        )
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise SpoolCorrupt(f"a record of the spool's log cannot be understood: {error}") from error


_KINDS: dict[str, type[Step]] = {"rows": Segment, "truncate": Truncation, "message": Message}


def _step_to_json(step: Step) -> dict[str, Any]:
    kind = next(name for name, type_ in _KINDS.items() if isinstance(step, type_))
    return {"kind": kind} | {field.name: _to_json(getattr(step, field.name)) for field in fields(step)}


def _step_from_json(record: dict[str, Any]) -> Step:
    type_ = _KINDS[record.pop("kind")]
    return type_(**{name: _from_json(name, value) for name, value in record.items()})


def _to_json(value: Any) -> Any:
    if isinstance(value, OrderKey):
        return [str(value.commit_lsn), value.ordinal]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def _from_json(name: str, value: Any) -> Any:
    if name in ("first", "last", "key"):
        return OrderKey(Lsn.parse(value[0]), value[1])
    if name == "content":
        return base64.b64decode(value)
    return value
