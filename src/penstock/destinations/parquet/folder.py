"""The folder of a Parquet destination, and the manifests that decide what is in it.

    <path>/_penstock.json                   the format
    <path>/public/orders/owner.json         the pipeline that writes the table, and the table's name;
                                            left.json if the table has moved to another folder
      generations/00000001/
        generation.json                     the attempt of the copy that this generation begins with
        log/000000000000.json …             manifests
        data/000000000000-….parquet         named after the manifest that they are meant for

**Manifests** make a batch atomic: a manifest names the files of a batch and the position after it. The manifests of a
copy and of all changes since are numbered without gaps. A writer takes the next number by creating its file, which
succeeds for one writer only. So a manifest decides at once what readers see, which position is recorded, and who may
write.

| kind | meaning |
|---|---|
| `copy` | number 0: the table as it was at `position` |
| `changes` | the files, truncations and schema changes of a batch, in order |
| `opened` | another process writes from here on; earlier writers have lost the table |
| `fenced` | nothing follows: a newer copy has started |

**Generations.** Every attempt of a copy is a generation of its own. When one is created, all earlier ones are *fenced*:
a `fenced` manifest takes their next number, so that a late write finds its number taken. Readers see them until the
new copy is complete, and can ask for them afterwards. Files that no manifest names were left by tasks that ran twice or
by processes that died. Readers ignore them, and the next process deletes them, after its `opened` manifest has made
sure that no manifest will ever name them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.changes.steps import Segment, Truncation
from penstock.durable import aside, sweep_aside, sync_folder, write_synced
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json, schema_to_json

_REMOVED = "removed-"
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
    """Name in the generation's `data` folder."""
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NewSchema:
    """The files that follow have this schema."""

    schema: TableSchema
    version: str
    """Empty for the schema of the copy."""


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
    """The epoch of the writer's lease."""
    begin: Lsn
    position: Lsn
    """The table's position with this manifest; `opened` and `fenced` repeat the previous one."""
    steps: tuple[ManifestStep, ...] = ()
    schema_version: int = 0
    """The number of the table's schema after this manifest; 0 in manifests of earlier releases of Penstock."""
    schema_at: int = 0
    """The number of the manifest that has this schema."""

    @property
    def files(self) -> tuple[DataFile, ...]:
        return tuple(step for step in self.steps if isinstance(step, DataFile))


@dataclass(frozen=True, slots=True)
class Owner:
    """The pipeline that writes a table, and the table's name in the source."""

    pipeline_id: str
    table: str


@dataclass(frozen=True, slots=True)
class Origin:
    """The copy that a generation started with."""

    table_id: int
    """The table's number in the source."""
    attempt: str


@dataclass(frozen=True, slots=True)
class Generation:
    """A copy and the changes since."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def data(self) -> Path:
        return self.path / "data"

    def origin(self) -> Origin:
        """The copy that it started with."""
        record: dict[str, Any] = json.loads((self.path / "generation.json").read_text())
        return Origin(**record)

    def segment(self, manifest: Manifest, file: DataFile, schema: TableSchema, version: str) -> Segment:
        """Return a file of changes as a segment; all its changes are between the manifest's boundaries."""
        return Segment(
            schema.table_id,
            str(schema),
            version,
            str(self.data / file.name),
            file.rows,
            file.bytes,
            OrderKey(manifest.begin, 0),
            OrderKey(manifest.position, 0),
        )

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests, in order."""
        return sorted(int(path.stem) for path in self.log.glob("[0-9]*.json"))

    def manifest(self, number: int) -> Manifest:
        """Read one manifest."""
        return from_json((self.log / f"{number:012d}.json").read_text())

    def manifests(self) -> Iterator[Manifest]:
        """Yield all manifests, in order."""
        for number in self.numbers():
            yield self.manifest(number)

    def last(self) -> tuple[int, Manifest] | None:
        """Return the last manifest with its number."""
        numbers = self.numbers()
        return (numbers[-1], self.manifest(numbers[-1])) if numbers else None

    def schema(self) -> tuple[TableSchema, int, int]:
        """Return the newest schema, its version, and the number of the manifest that has it."""
        last = self.last()
        if last is not None and last[1].schema_version:
            at = last[1].schema_at
            return _schemas(self.manifest(at))[-1], last[1].schema_version, at
        found = [(schema, at) for at in self.numbers() for schema in _schemas(self.manifest(at))]
        version = 1 + sum(not one.has_columns_of(other) for (one, _), (other, _) in pairwise(found))
        return found[-1][0], version, found[-1][1]

    def versions(self) -> Iterator[tuple[int, Path]]:
        """Yield the data files, in order, each with the version of its schema."""
        version, schema = 0, None
        for manifest in self.manifests():
            if manifest.kind is ManifestKind.COPY:
                version = (manifest.schema_version or 1) - 1
            for step in manifest.steps:
                if isinstance(step, NewSchema):
                    version += schema is None or not step.schema.has_columns_of(schema)
                    schema = step.schema
                elif isinstance(step, DataFile):
                    yield version, self.data / step.name

    def append(self, number: int, manifest: Manifest) -> bool:
        """Take a number; return False if another writer has it."""
        return put_if_absent(self.log / f"{number:012d}.json", to_json(manifest))

    def is_copied(self) -> bool:
        """Return True if the copy is complete, so that readers may use it."""
        return (self.log / f"{0:012d}.json").exists() and self.manifest(0).kind is ManifestKind.COPY

    def fence(self, fence: Manifest) -> None:
        """Fence off the generation, so that nothing can follow; other writers may append until this has succeeded."""
        while True:
            last = self.last()
            if last is not None and last[1].kind is ManifestKind.FENCED:
                return
            number, previous = (0, fence) if last is None else (last[0] + 1, last[1])
            kept = {"schema_version": previous.schema_version, "schema_at": previous.schema_at}
            if self.append(number, replace(fence, begin=previous.position, position=previous.position, **kept)):
                return

    def sweep(self, opened: int) -> list[Path]:
        """Delete the files that no manifest names, after this process's `opened` manifest; return them.

        Files meant for numbers before the previous `opened` manifest were deleted at that time.
        """
        numbers = [number for number in self.numbers() if number < opened]
        named: set[str] = set()
        first = 0
        for number in reversed(numbers):
            manifest = self.manifest(number)
            named.update(file.name for file in manifest.files)
            if manifest.kind is ManifestKind.OPENED:
                first = number
                break
        orphans = [
            path
            for path in self.data.iterdir()
            if first <= int(path.name.split("-", 1)[0]) <= opened and path.name not in named
        ]
        for path in orphans:
            path.unlink(missing_ok=True)
        for folder in (self.log, self.path, self.path.parent.parent):
            sweep_aside(folder)
        return orphans


@dataclass(frozen=True, slots=True)
class TableFolder:
    """One table."""

    path: Path

    def owner(self) -> Owner | None:
        """Return the owner, or None if no pipeline has claimed the table."""
        try:
            record: dict[str, Any] = json.loads((self.path / "owner.json").read_text())
        except FileNotFoundError:
            return None
        return Owner(record["pipeline"], record["table"])

    def claim(self, pipeline_id: str, schema: TableSchema) -> Owner:
        """Claim the table unless it has an owner; return its owner."""
        make_folder(self.path / "generations")
        record = {"pipeline": pipeline_id, "table": str(schema)}
        put_if_absent(self.path / "owner.json", json.dumps(record, ensure_ascii=False))
        owner = self.owner()
        assert owner is not None
        return owner

    def rename(self, owner: Owner) -> None:
        """Record another name of the table."""
        record = {"pipeline": owner.pipeline_id, "table": owner.table}
        with aside(self.path / "owner.json") as temporary:
            write_synced(temporary, json.dumps(record, ensure_ascii=False).encode())
            temporary.replace(self.path / "owner.json")
        sync_folder(self.path)

    def is_left(self) -> bool:
        """Return True if nothing follows here: the table is being copied, or was copied, to another folder."""
        generations = self.generations()
        last = generations[-1].last() if generations else None
        return last is not None and last[1].kind is ManifestKind.FENCED

    def release(self) -> None:
        """Give the folder up; its files stay."""
        (self.path / "owner.json").rename(self.path / "left.json")
        sync_folder(self.path)

    def generations(self) -> list[Generation]:
        """Return all generations, oldest first."""
        found = (self.path / "generations").glob("[0-9]*/generation.json")
        return sorted((Generation(path.parent) for path in found), key=lambda each: each.number)

    def begin_generation(self, origin: Origin) -> Generation:
        """Return the generation of an attempt, creating it unless it is already the newest."""
        while True:
            existing = self.generations()
            if existing and existing[-1].origin() == origin:
                return existing[-1]
            number = existing[-1].number + 1 if existing else 1
            generation = Generation(self.path / "generations" / f"{number:08d}")
            make_folder(generation.log)
            make_folder(generation.data)
            if put_if_absent(generation.path / "generation.json", json.dumps(asdict(origin), ensure_ascii=False)):
                return generation

    def current(self) -> Generation | None:
        """Return the generation that readers see: the newest complete copy."""
        return next((each for each in reversed(self.generations()) if each.is_copied()), None)

    def remove_incomplete(self, before: Generation) -> None:
        """Delete older generations whose copy failed. The others have changes that no other file has."""
        for each in self.generations():
            if each.number < before.number and not each.is_copied():
                # Renamed first, so that a kill in the middle leaves nothing that looks like a generation.
                each.path.rename(each.path.with_name(f"{_REMOVED}{each.path.name}"))
        for path in (self.path / "generations").glob(f"{_REMOVED}*"):
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class RootFolder:
    """All tables."""

    path: Path

    @property
    def marker(self) -> Path:
        """The file that states the format of the tables."""
        return self.path / "_penstock.json"

    def table(self, folder: str) -> TableFolder:
        """Return the folder with this path, whether or not it exists."""
        return TableFolder(self.path / folder)

    def readable(self, table: str | None = None) -> list[tuple[TableFolder, Owner, Generation]]:
        """Return the tables with a complete copy: folder, owner, and the generation that readers see.

        A table that is moving to another folder is listed in the old one until the copy in the new one is complete.
        With `table`, others may be left out.
        """
        claimed = [(folder, owner) for folder in self.tables() if (owner := folder.owner())]
        named = [(folder, owner) for folder, owner in claimed if table in (None, owner.table)]
        # A folder that its table has left depends on the others.
        found = claimed if any(folder.is_left() for folder, _ in named) else named
        copied = [(folder, owner, current) for folder, owner in found if (current := folder.current())]
        tables = {folder: (owner.pipeline_id, current.origin().table_id) for folder, owner, current in copied}
        left = {folder for folder in tables if folder.is_left()}
        followed = {table for folder, table in tables.items() if folder not in left}
        return [each for each in copied if each[0] not in left or tables[each[0]] not in followed]

    def tables(self) -> list[TableFolder]:
        """Return the tables that a pipeline has claimed."""
        return sorted(
            (TableFolder(path.parent) for path in self.path.glob("*/*/owner.json")), key=lambda each: each.path
        )


def to_json(manifest: Manifest) -> str:
    """Return the content of a manifest's file."""
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
        "schema_version": manifest.schema_version,
        "schema_at": manifest.schema_at,
    }
    return json.dumps(record, ensure_ascii=False)


def from_json(text: str) -> Manifest:
    """Parse the output of `to_json`."""
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
        schema_version=record.get("schema_version", 0),
        schema_at=record.get("schema_at", 0),
    )


def put_if_absent(path: Path, text: str) -> bool:
    """Create a file with its whole content, durably, unless it exists; return True if it was created.

    A file is linked to its name when it is complete and on disk, so no reader sees a part of it, and only one of
    several writers succeeds.
    """
    with aside(path) as temporary:
        write_synced(temporary, text.encode())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    sync_folder(path.parent)
    return True


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def _schemas(manifest: Manifest) -> list[TableSchema]:
    return [step.schema for step in manifest.steps if isinstance(step, NewSchema)]


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
    # The record does not name the table: a manifest belongs to one table.
    return Truncation(
        table_id=0,
        table="",
        key=OrderKey(Lsn.parse(record["truncate"]), record["ordinal"]),
        commit_time=record["commit_time"],
        xid=0,
        cascade=record["cascade"],
        restart_identity=record["restart_identity"],
    )
