"""Running a pipeline with `[polling]`, in this process: search documents kept up to date without logical decoding.

It needs no slot, publication or spool: the engine takes changes from `penstock.documents.polling`. Lease, relation maps
and quarantine are those of any other run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.config import Config, DocumentsChoice, PollingChoice
from penstock.config.units import count_of
from penstock.documents import Engine, Observer, PostgresDocuments, Sink
from penstock.documents.base import Rejection
from penstock.documents.build import require_primary
from penstock.documents.catalog import SourceCatalog, load_catalog
from penstock.documents.mapping import build_fingerprint, index_mapping
from penstock.documents.polling import PollingCapture, PollPositions, open_positions, polled_catalog, polled_tables
from penstock.documents.quarantine import Quarantine, open_quarantine
from penstock.documents.relation_map import RelationMap, open_relation_map
from penstock.lsn import Lsn
from penstock.operations.running import Say
from penstock.operations.signals import Ending
from penstock.operations.stores import require_stopped
from penstock.source import Role, connect
from penstock.source.connections import NO_TIMEOUTS
from penstock.state import Command, CommandKind, CommandStatus, IndexBuild, IndexStatus, Store


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a run holds open."""

    store: Store
    positions: PollPositions
    relations: RelationMap
    quarantine: Quarantine
    resolving: psycopg.Connection[Any]
    building: psycopg.Connection[Any]


def run_polling(config: Config, polling: PollingChoice, ending: Ending, say: Say, *, once: bool) -> None:
    """Fill indexes that are not complete, then poll until a signal arrives; with `once`, until nothing is left."""
    choice = config.indexes
    sink = choice.create_sink()
    with _opened(config, choice) as opened:
        require_primary(opened.building)
        catalog = load_catalog(opened.building, {name for each in choice.specifications for name in each.tables()})
        catalog = polled_catalog(catalog)
        documents = PostgresDocuments(
            opened.resolving, opened.building, choice.specifications, opened.relations, catalog=catalog
        )
        tables = polled_tables(catalog, documents.resolver.wanted, polling.cursors, polling.cursor)
        capture = PollingCapture(
            config.pipeline.source, tables, opened.positions, settings=polling.settings, stop=ending.stop, once=once
        )
        # In this order: polling repeats changes that happen while maps and indexes are filled.
        capture.prepare()
        _seed_relations(choice, catalog, sink, documents, opened)
        for command in opened.store.take_commands():
            _obey(command, choice, catalog, sink, opened.store)
        engine = Engine(
            capture,
            documents,
            sink,
            observer=_Reporting(choice, catalog, opened.store, opened.quarantine, say),
            batch=choice.batch,
            queue_capacity=max(1, choice.batch.max_changes),
            skip_backfill=choice.skip_backfill,
            failure_policies=choice.failure_policies,
        )
        say(
            f"polling {count_of(len(tables), 'table')} on {config.pipeline.source.location} every "
            f"{polling.settings.interval:g} s, into {choice.sink_type}; deleted rows are not noticed; press Ctrl-C to "
            "stop"
        )
        engine.run()
        say("caught up, stopping" if once and not ending.stop.is_set() else "stopped")


@contextmanager
def _opened(config: Config, choice: DocumentsChoice) -> Iterator[_Opened]:
    source, owner = config.pipeline.source, choice.settings.output_id
    with ExitStack() as stack:
        store = stack.enter_context(config.open_store(choice))
        require_stopped(config, store)
        store.acquire_lease()
        stack.callback(store.release_lease)
        yield _Opened(
            store,
            stack.enter_context(closing(open_positions(config.state_url, owner))),
            stack.enter_context(closing(open_relation_map(config.state_url, owner))),
            stack.enter_context(closing(open_quarantine(config.state_url, owner))),
            stack.enter_context(connect(source, Role.DOCUMENTS, parameters=NO_TIMEOUTS)),
            stack.enter_context(connect(source, Role.DOCUMENTS, parameters=NO_TIMEOUTS)),
        )


def _seed_relations(
    choice: DocumentsChoice, catalog: SourceCatalog, sink: Sink, documents: PostgresDocuments, opened: _Opened
) -> None:
    """Fill the relation maps; indexes that use a new relation are rebuilt."""
    new = opened.relations.prepare(documents.resolver.tracked)
    for relation in new:
        opened.relations.seed(opened.building, relation, Lsn(0))
    for name in sorted(documents.resolver.indexes_using(new)):
        _rebuild(choice, catalog, sink, name)


def _obey(command: Command, choice: DocumentsChoice, catalog: SourceCatalog, sink: Sink, store: Store) -> None:
    if command.kind is not CommandKind.REBUILD_INDEX:
        reason = "a polling pipeline accepts only the command `penstock index rebuild`"
        store.answer_command(command.number, CommandStatus.REFUSED, reason)
        return
    for name in command.options.get("indexes", ()):
        _rebuild(choice, catalog, sink, name)
    store.answer_command(command.number, CommandStatus.DONE)


def _rebuild(choice: DocumentsChoice, catalog: SourceCatalog, sink: Sink, name: str) -> None:
    mapping = index_mapping(choice.index(name).specification, catalog)
    sink.ensure_index(mapping)
    if sink.is_seeded(name):
        sink.reindex(mapping)


class _Reporting(Observer):
    """Reports events, and records them for `index list` and `index quarantine`."""

    def __init__(
        self,
        choice: DocumentsChoice,
        catalog: SourceCatalog,
        store: Store,
        quarantine: Quarantine,
        say: Say,
    ) -> None:
        self._choice = choice
        self._catalog = catalog
        self._store = store
        self._quarantine = quarantine
        self._say = say

    def on_backfill_started(self, indexes: Sequence[str]) -> None:
        for name in indexes:
            self._note(name, IndexStatus.FILLING)
            self._say(f"filling index {name}")

    def on_index_seeded(self, index: str) -> None:
        self._note(index, IndexStatus.SEEDED)
        self._say(f"index {index} is complete and in use")

    def on_backfill_completed(self) -> None:
        # Includes those that the sink had already, and those that are not to be filled.
        for each in self._choice.indexes:
            self._note(each.name, IndexStatus.SEEDED)

    def on_document_quarantined(self, rejection: Rejection) -> None:
        self._quarantine.add([rejection], None)

    def _note(self, name: str, status: IndexStatus) -> None:
        mark = build_fingerprint(self._choice.index(name).specification, self._catalog)
        self._store.store_index_build(IndexBuild(name, "polling", mark, status, "changes are polled"))
