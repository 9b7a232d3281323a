"""A store: everything a pipeline remembers, over any database of records.

`Store` has all the rules: which phase may follow which, that progress never moves back, that writes need the lease.
A subclass only says where the records are: `MemoryStore`, `SqliteStore`, `PostgresStore`, or your own over a
`records.Database`. `penstock.testing.stores.StoreContract` is the suite that each must pass.

**Threads.** Calls are synchronous and thread-safe: the apply worker, table sync workers, the coordinator and commands
share a store.

**Durability.** A write goes to the database first and then to the cache. When it returns, it is durable. When it raises
because the database cannot be reached, it may have happened, and may be repeated. A write that concerns several tables
is atomic. Reads come from the cache unless their docstring says otherwise.

**Lease.** Only the holder of the lease writes. Every write but `add_command` raises `LeaseLost` without it, and after
another process has taken it over. Other processes (`penstock tables`) see the state as it was when they loaded it.
"""

from __future__ import annotations

from typing import Self

from penstock.errors import ConfigError
from penstock.state.commands import CommandStore
from penstock.state.indexes import IndexStatus, IndexStore
from penstock.state.phases import Errored, Ready, SyncDone
from penstock.state.progress import ProgressStore
from penstock.state.records import Database
from penstock.state.tables import TableStore

_LONGEST_ID = 100


class Store(TableStore, ProgressStore, CommandStore, IndexStore):
    """The state of one pipeline; see the module for what all methods have in common."""

    def __init__(self, database: Database) -> None:
        name = database.pipeline_id
        if not name or len(name) > _LONGEST_ID or not name.isprintable():
            database.close()
            raise ConfigError(f"a pipeline id must have 1 to {_LONGEST_ID} printable characters: {name!r}")
        super().__init__(database)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def needs_every_change(self) -> bool:
        """True if a table or search index needs every change after its position."""
        return any(
            isinstance(phase, SyncDone | Ready) or (isinstance(phase, Errored) and phase.holds)
            for phase in self.get_table_replication_states().values()
        ) or any(build.status is not IndexStatus.WANTED for build in self.get_index_builds().values())
