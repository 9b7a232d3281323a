"""A table at one version of its log: the live files with their vectors, positions, schema and protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from urllib.parse import quote, unquote

import pyarrow as pa

from penstock.destinations.delta.actions import Action, Add, CommitInfo, Metadata, Protocol, Remove, Txn
from penstock.destinations.delta.schema import OWNER, arrow_schema
from penstock.destinations.delta.vectors import vector_file

_APPLICATION = "penstock"


@dataclass(frozen=True, slots=True)
class Application:
    """Identifies a recorded position: a pipeline, a table, a lineage, and an attempt of a copy."""

    pipeline: str
    table: str
    lineage: str
    attempt: str

    @property
    def id(self) -> str:
        """The id in `txn` actions."""
        parts = (self.pipeline, self.table, self.lineage, self.attempt)
        return "/".join((_APPLICATION, *(quote(part, safe="") for part in parts)))

    @classmethod
    def parse(cls, app_id: str) -> Application | None:
        """Return the application for an id; None if it is not one of Penstock's."""
        parts = app_id.split("/")
        return cls(*map(unquote, parts[1:])) if len(parts) == 5 and parts[0] == _APPLICATION else None


_FREE_PROPERTIES = frozenset(
    {
        "delta.autoOptimize.autoCompact",
        "delta.autoOptimize.optimizeWrite",
        "delta.checkpointInterval",
        "delta.dataSkippingNumIndexedCols",
        "delta.dataSkippingStatsColumns",
        "delta.deletedFileRetentionDuration",
        "delta.logRetentionDuration",
        "delta.targetFileSize",
        "delta.tuneFileSizesForRewrites",
    }
)
"""Properties of Delta that say nothing about what a file or the log may contain."""


class Verdict(Enum):
    """What other writers' commits mean for a writer that wanted to commit the same version."""

    MAINTENANCE = auto()
    """The rows are the same, stored differently: find the rows to replace again."""
    OWN_POSITION = auto()
    """The same application has recorded a position: read it, skip the changes it covers, and write the rest again."""
    SUPERSEDED = auto()
    """The same pipeline has copied this table again, or another one to this folder, or reads another lineage: this
    writer must stop."""
    FOREIGN = auto()
    """Another program has changed rows, columns or features: the table stops."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of the log."""

    version: int
    actions: tuple[Action, ...]

    @property
    def info(self) -> CommitInfo | None:
        return next((action for action in self.actions if isinstance(action, CommitInfo)), None)

    @property
    def changes_rows(self) -> bool:
        """Return True if readers may see other rows, columns or features after this commit."""
        return any(
            action.data_change if isinstance(action, Add | Remove) else isinstance(action, Metadata | Protocol)
            for action in self.actions
        )

    def describes(self, before: Metadata) -> bool:
        """Return True if the commit changes only how the table is described: its name, its comment, and properties that
        mean nothing to its writer."""
        metadata = [action for action in self.actions if isinstance(action, Metadata)]
        if any(isinstance(action, Add | Remove | Protocol | Txn) for action in self.actions):
            return False
        return bool(metadata) and all(_essence(each) == _essence(before) for each in metadata)

    def verdict(self, application: Application) -> Verdict:
        """Return what the commit means for the table's writer."""
        found = [Application.parse(action.app_id) for action in self.actions if isinstance(action, Txn)]
        own = [each for each in found if each is not None and each.pipeline == application.pipeline]
        if own:
            return Verdict.OWN_POSITION if application in own else Verdict.SUPERSEDED
        return Verdict.FOREIGN if self.changes_rows else Verdict.MAINTENANCE


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version of a table. `files` has the live files by their paths in the log."""

    version: int
    protocol: Protocol
    metadata: Metadata
    files: Mapping[str, Add] = field(default_factory=dict[str, Add])
    transactions: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def schema(self) -> pa.Schema:
        """The columns, with the types that they have in files."""
        return arrow_schema(self.metadata.schema_string)

    @property
    def owner(self) -> str | None:
        """The pipeline that writes the table; None if Penstock does not write it."""
        return self.metadata.configuration.get(OWNER)

    def position(self, application: Application) -> int | None:
        """Return the boundary recorded with the rows; None if this application has recorded none."""
        return self.transactions.get(application.id)

    @property
    def row_count(self) -> int | None:
        """Number of live rows; None if a writer omitted it."""
        counts = [_live_rows(add) for add in self.files.values()]
        return None if any(count is None for count in counts) else sum(count or 0 for count in counts)

    def stored_files(self) -> Iterator[str]:
        """Yield the files that a reader of this version needs: data and vectors, below the table's folder."""
        for add in self.files.values():
            yield add.file
            vector = None if add.vector is None else vector_file(add.vector)
            if vector is not None:
                yield vector

    def actions(self) -> Iterator[Action]:
        """Yield actions that make this version from nothing."""
        yield self.protocol
        yield self.metadata
        for app_id, position in self.transactions.items():
            yield Txn(app_id, position)
        yield from self.files.values()

    def followed_by(self, commit: Commit) -> Snapshot:
        """Return the table after the next commit."""
        files = dict(self.files)
        apply_files(files, commit.actions)
        protocols = [action for action in commit.actions if isinstance(action, Protocol)]
        metadata = [action for action in commit.actions if isinstance(action, Metadata)]
        return replace(
            self,
            version=commit.version,
            protocol=protocols[-1] if protocols else self.protocol,
            metadata=metadata[-1] if metadata else self.metadata,
            files=files,
            transactions={**self.transactions, **apply_transactions(commit.actions)},
        )


def apply_files(files: dict[str, Add], actions: Iterable[Action]) -> None:
    """Update the live files with the actions of one version, whose order does not matter."""
    adds: list[Add] = []
    for action in actions:
        if isinstance(action, Remove):
            live = files.get(action.path)
            if live is not None and _vector_id(live) == _vector_id(action):
                del files[action.path]
        elif isinstance(action, Add):
            adds.append(action)
    files.update((add.path, add) for add in adds)


def apply_transactions(actions: Iterable[Action]) -> dict[str, int]:
    """Return the positions that the actions of one version record."""
    return {action.app_id: action.version for action in actions if isinstance(action, Txn)}


def record_removals(removals: dict[str, Remove], actions: Iterable[Action]) -> None:
    """Update the newest removal of each stored file: data files and files of vectors.

    A data file is removed with each of its vectors, and a file of vectors with each data file that it describes. An old
    version may need a stored file until the newest of these removals. The order of the actions does not matter.
    """
    for action in actions:
        if isinstance(action, Remove):
            vector = None if action.vector is None else vector_file(action.vector)
            for path in (action.file, vector):
                if path is not None and (path not in removals or removals[path].time <= action.time):
                    removals[path] = action


def _essence(metadata: Metadata) -> Metadata:
    """Return metadata without what any program may change."""
    kept = {
        name: value
        for name, value in metadata.configuration.items()
        if name.startswith(("delta.", "penstock.")) and name not in _FREE_PROPERTIES
    }
    return replace(metadata, configuration=kept, name=None, description=None)


def _vector_id(action: Add | Remove) -> str | None:
    return None if action.vector is None else action.vector.unique_id


def _live_rows(add: Add) -> int | None:
    count = add.row_count
    return None if count is None else count - (0 if add.vector is None else add.vector.cardinality)
