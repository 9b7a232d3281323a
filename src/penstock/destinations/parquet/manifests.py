"""What makes a batch atomic: a manifest names its files and the position behind them, and is there or is not.

The manifests of a copy and of all changes since are numbered without gaps, and the next number is taken by creating its
file, which succeeds for one writer only. So a number decides three things at once: what readers see, which position is
recorded, and who may write. Four kinds exist.

| kind | says |
|---|---|
| `copy` | number 0: the table as it was at `position` |
| `changes` | what a batch added: files, truncates and changes of the schema, in order |
| `opened` | another process writes from here on; whoever wrote before has lost |
| `fenced` | nothing follows: a newer copy has begun |
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.changes.steps import Truncation
from penstock.durable import sync_folder
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json, schema_to_json

FORMAT = 1


class ManifestKind(StrEnum):
    """See the module."""

    COPY = "copy"
    CHANGES = "changes"
    OPENED = "opened"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that a task wrote."""

    name: str
    """In the generation's `data` folder."""
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NewSchema:
    """The files that follow have this schema."""

    schema: TableSchema
    version: str
    """Empty for that of the copy."""


ManifestStep = DataFile | NewSchema | Truncation


@dataclass(frozen=True, slots=True)
class Manifest:
    """One of the numbered records."""

    kind: ManifestKind
    writer: str
    """The process that wrote it."""
    pipeline_id: str
    lineage: str
    attempt: str
    epoch: int
    """Of the writer's lease."""
    begin: Lsn
    position: Lsn
    """What is in when this manifest is; `opened` and `fenced` repeat that of the one before."""
    steps: tuple[ManifestStep, ...] = ()

    @property
    def files(self) -> tuple[DataFile, ...]:
        return tuple(step for step in self.steps if isinstance(step, DataFile))


def to_json(manifest: Manifest) -> str:
    """The content of a manifest's file."""
    record = {
        "format": FORMAT,
        "kind": manifest.kind.value,
        "writer": manifest.writer,
        "pipeline": manifest.pipeline_id,
        "lineage": manifest.lineage,
        "attempt": manifest.attempt,
        "epoch": manifest.epoch,
        "begin": str(manifest.begin),
        "position": str(manifest.position),
        "steps": [_step_to_json(step) for step in manifest.steps],
    }
    return json.dumps(record, ensure_ascii=False)


def from_json(text: str) -> Manifest:
    """What `to_json` gave."""
    record: dict[str, Any] = json.loads(text)
    return Manifest(
        kind=ManifestKind(record["kind"]),
        writer=record["writer"],
        pipeline_id=record["pipeline"],
        lineage=record["lineage"],
        attempt=record["attempt"],
        epoch=record["epoch"],
        begin=Lsn.parse(record["begin"]),
        position=Lsn.parse(record["position"]),
        steps=tuple(_step_from_json(step) for step in record["steps"]),
    )


def put_if_absent(path: Path, text: str) -> bool:
    """Create a file with its whole content, durably, unless it exists; says whether it was created.

    A file is linked to its name when it is complete and on disk, so nobody ever sees a part of it, and of several that
    try one succeeds.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def make_folder(path: Path) -> None:
    """Create a folder and those above it, durably."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def _step_to_json(step: ManifestStep) -> dict[str, Any]:
    match step:
        case DataFile():
            return {"file": step.name, "rows": step.rows, "bytes": step.bytes}
        case NewSchema():
            return {"schema": schema_to_json(step.schema), "version": step.version}
        case Truncation():
            return {
                "truncate": str(step.key.commit_lsn),
                "ordinal": step.key.ordinal,
                "commit_time": step.commit_time,
                "cascade": step.cascade,
                "restart_identity": step.restart_identity,
            }


def _step_from_json(record: dict[str, Any]) -> ManifestStep:
    if "file" in record:
        return DataFile(record["file"], record["rows"], record["bytes"])
    if "schema" in record:
        return NewSchema(schema_from_json(record["schema"]), record["version"])
    # Which table it is of is not in the record: a manifest is of one table.
    return Truncation(
        table_id=0,
        table="",
        key=OrderKey(Lsn.parse(record["truncate"]), record["ordinal"]),
        commit_time=record["commit_time"],
        xid=0,
        cascade=record["cascade"],
        restart_identity=record["restart_identity"],
    )
