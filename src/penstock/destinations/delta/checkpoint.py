"""Reads checkpoints: a table at a version in one or more Parquet files, so that the log before it is not needed.

Supports all kinds that writers create: one file, several parts, and version 2 with its sidecars. delta-rs writes them
(`penstock.destinations.delta.maintenance.cleanup`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.destinations.delta.actions import Action, from_json
from penstock.destinations.delta.storage import Storage

LOG_FOLDER = "_delta_log"
LAST_CHECKPOINT = f"{LOG_FOLDER}/_last_checkpoint"
_NAME = re.compile(
    rf"{LOG_FOLDER}/(?P<version>\d{{20}})\.checkpoint"
    r"(?:\.(?P<part>\d{10})\.(?P<parts>\d{10})|\.(?P<uuid>[0-9a-f-]{36}))?\.(?P<kind>parquet|json)"
)
_ACTIONS = ("add", "remove", "txn", "metaData", "protocol", "sidecar")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    version: int
    paths: tuple[str, ...]


def last_checkpoint_hint(storage: Storage) -> int | None:
    """Return the version in `_last_checkpoint`; there may be newer ones, and this one may no longer exist."""
    content = storage.get(LAST_CHECKPOINT)
    if content is None:
        return None
    try:
        version = json.loads(content)["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None


def find_checkpoints(paths: Iterable[str]) -> list[Checkpoint]:
    """Return the complete checkpoints among the files of a log, oldest first."""
    parts: dict[tuple[int, int], dict[int, str]] = {}
    found: dict[int, Checkpoint] = {}
    for path in paths:
        match = _NAME.fullmatch(path)
        if match is None:
            continue
        version = int(match["version"])
        if match["part"] is None:
            found[version] = Checkpoint(version, (path,))
        else:
            parts.setdefault((version, int(match["parts"])), {})[int(match["part"])] = path
    for (version, count), by_number in parts.items():
        if sorted(by_number) == list(range(1, count + 1)):
            found.setdefault(version, Checkpoint(version, tuple(by_number[number] for number in sorted(by_number))))
    return [found[version] for version in sorted(found)]


def checkpoint_version(path: str) -> int | None:
    """Return the version of a file that belongs to a checkpoint; None for other files."""
    match = _NAME.fullmatch(path)
    return None if match is None else int(match["version"])


def read_checkpoint(storage: Storage, checkpoint: Checkpoint) -> Iterator[Action]:
    """Yield all actions of a checkpoint; raise `FileNotFoundError` if one of its files is missing."""
    for path in checkpoint.paths:
        for record in _records(storage, path):
            sidecar = record.get("sidecar")
            if sidecar is not None:
                yield from _actions(_records(storage, sidecar_path(sidecar["path"])))
        yield from _actions(_records(storage, path))


def sidecar_path(path: str) -> str:
    """Return the path of a sidecar file of a version 2 checkpoint."""
    return path if "/" in path else f"{LOG_FOLDER}/_sidecars/{path}"


def _actions(records: Iterable[Mapping[str, Any]]) -> Iterator[Action]:
    for record in records:
        action = from_json(record)
        if action is not None:
            yield action


def _records(storage: Storage, path: str) -> Iterator[Mapping[str, Any]]:
    if path.endswith(".json"):
        content = storage.get(path)
        if content is None:
            raise FileNotFoundError(path)
        for line in content.splitlines():
            if line.strip():
                yield json.loads(line)
        return
    # Row by row, because it is cold: it runs once when a table is opened, and a row is a file of the table.
    with storage.open(path) as source:
        file = pq.ParquetFile(source)
        present = [name for name in _ACTIONS if name in file.schema_arrow.names]
        columns = [leaf for leaf in _leaves(file) if leaf.split(".", 1)[0] in present and not _is_parsed(leaf)]
        for batch in file.iter_batches(columns=columns):
            yield from pa.Table.from_batches([batch]).to_pylist()


def _leaves(file: pq.ParquetFile) -> list[str]:
    return [file.schema.column(number).path for number in range(len(file.schema))]


def _is_parsed(leaf: str) -> bool:
    """Return True for statistics and partition values repeated as columns, which may have types that Penstock lacks."""
    return leaf.startswith(("add.stats_parsed.", "add.partitionValues_parsed."))
