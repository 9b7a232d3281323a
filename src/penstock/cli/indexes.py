"""What the commands of `penstock index` share: names of indexes, and documents as the database would have them now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer

from penstock.cli.configured import DEFAULT_PATH
from penstock.config import Config, IndexChoice, load_config
from penstock.documents import PostgresDocuments
from penstock.documents.builder import DocumentKeys
from penstock.documents.catalog import SourceCatalog, load_catalog
from penstock.errors import PenstockError
from penstock.source import Role, connect


def complete_index(context: typer.Context, incomplete: str) -> list[str]:
    """The names of indexes that begin so, for the shell; none if there is no config that can be read."""
    path = context.params.get("config_path") or os.environ.get("PENSTOCK_CONFIG") or DEFAULT_PATH
    try:
        documents = load_config(Path(path)).documents
    except (PenstockError, OSError):
        return []
    names = [each.name for each in documents.indexes] if documents is not None else []
    return [name for name in names if name.startswith(incomplete)]


IndexName = Annotated[str, typer.Argument(help="The index.", metavar="NAME", autocompletion=complete_index)]
IndexNames = Annotated[
    list[str] | None,
    typer.Argument(help="Indexes; all if none is named.", metavar="NAME", autocompletion=complete_index),
]


def chosen_indexes(config: Config, names: list[str] | None) -> tuple[IndexChoice, ...]:
    """The indexes that a person named, or all of them."""
    documents = config.indexes
    return tuple(documents.index(name) for name in dict.fromkeys(names)) if names else documents.indexes


@dataclass(frozen=True, slots=True)
class LiveDocuments:
    """Documents from the database as it is."""

    connection: psycopg.Connection[Any]
    """For what is asked besides; not while keys are being listed."""
    catalog: SourceCatalog
    documents: PostgresDocuments

    def keys(self, index: IndexChoice) -> DocumentKeys:
        """How the documents of an index are named."""
        return DocumentKeys.of(index.specification, self.catalog)


@contextmanager
def live_documents(config: Config, indexes: tuple[IndexChoice, ...]) -> Iterator[LiveDocuments]:
    """Connections to the source that build documents of these indexes."""
    source = config.pipeline.source
    specifications = [each.specification for each in indexes]
    with connect(source, Role.CATALOG) as one, connect(source, Role.CATALOG) as other:
        catalog = load_catalog(other, {table for each in specifications for table in each.tables()})
        yield LiveDocuments(one, catalog, PostgresDocuments(one, other, specifications, catalog=catalog))
