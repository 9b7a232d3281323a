"""A whole store, made of its parts, over any database of records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.state.commands import Commands
from penstock.state.destination_tables import DestinationTables
from penstock.state.indexes import IndexBuilds
from penstock.state.lifecycle import Lifecycle
from penstock.state.memberships import Memberships
from penstock.state.progress import Progress
from penstock.state.records import Database
from penstock.state.schemas import TableSchemas
from penstock.state.tables import TableStates

_LONGEST_ID = 100


class Store(TableSchemas, TableStates, Progress, DestinationTables, Memberships, IndexBuilds, Lifecycle, Commands):
    """All of `stores.PipelineStore`; a subclass only says where the records are."""

    def __init__(self, database: Database) -> None:
        name = database.pipeline_id
        if not name or len(name) > _LONGEST_ID or not name.isprintable():
            database.close()
            raise ConfigError(f"a pipeline's id has 1 to {_LONGEST_ID} printable characters: {name!r}")
        super().__init__(database)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if TYPE_CHECKING:
    from penstock.state.stores import PipelineStore

    _complete: type[PipelineStore] = Store
