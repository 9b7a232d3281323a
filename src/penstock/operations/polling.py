"""Running a pipeline with `[polling]`, in this process: search documents kept up to date without logical decoding.

It needs no slot, publication or spool: the engine takes changes from `penstock.documents.polling`. Lease, relation maps
and quarantine are those of any other run.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.config import Config, DocumentsChoice, PollingChoice
from penstock.config.units import count_of
from penstock.documents import Engine, Observer, PostgresDocuments, Sink
from penstock.documents.base import BatchStatistics
from penstock.documents.build import require_primary
from penstock.documents.catalog import SourceCatalog, load_catalog
from penstock.documents.mapping import build_fingerprint
from penstock.documents.polling import PollingCapture, PollPositions, open_positions, polled_catalog, polled_tables
from penstock.documents.quarantine import Quarantine, open_quarantine
from penstock.documents.relation_map import RelationMap, open_relation_map
from penstock.errors import PenstockError, Retry
from penstock.lsn import Lsn
from penstock.operations.running import Say
from penstock.operations.signals import Ending
from penstock.operations.stores import require_stopped
from penstock.retry import Backoff
from penstock.source import Role, connect
from penstock.source.connections import NO_TIMEOUTS
from penstock.state import Command, CommandKind, CommandStatus, IndexBuild, IndexStatus, Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a run holds open."""

    store: Store
    positions: PollPositions
    relations: RelationMap
    quarantine: Quarantine


def run_polling(config: Config, polling: PollingChoice, ending: Ending, say: Say, *, once: bool) -> None:
    """Fill indexes that are not complete, then poll until a signal arrives; with `once`, until nothing is left.

    A source or a sink that is away is waited for; with `once` the run ends.
    """
    choice = config.indexes
    sink = choice.create_sink()
    backoff = Backoff(first=0.5, longest=30.0)
    with _opened(config, choice) as opened:
        while True:
            try:
                _run_engine(config, polling, sink, opened, ending, backoff, say, once=once)
                break
            except PenstockError as error:
                if error.retry is not Retry.TIMED or once:
                    raise
                delay = backoff.next_delay()
                logger.warning("polling failed, retrying in=%.1fs error=%s", delay, error)
                if ending.stop.wait(delay):
                    break
    say("caught up, stopping" if once and not ending.stop.is_set() else "stopped")


def _run_engine(
    config: Config,
    polling: PollingChoice,
    sink: Sink,
    opened: _Opened,
    ending: Ending,
    backoff: Backoff,
    say: Say,
    *,
    once: bool,
) -> None:
    """Run the engine over connections of its own until it ends."""
    source, choice, owner = config.pipeline.source, config.indexes, config.indexes.settings.output_id
    with (
        connect(source, Role.DOCUMENTS, parameters=NO_TIMEOUTS) as resolving,
        connect(source, Role.DOCUMENTS, parameters=NO_TIMEOUTS) as building,
    ):
        require_primary(building)
        catalog = load_catalog(building, {name for each in choice.specifications for name in each.tables()})
        catalog = polled_catalog(catalog)
        documents = PostgresDocuments(
            resolving, building, choice.specifications, opened.relations, catalog=catalog, owner=owner
        )
        tables = polled_tables(catalog, documents.resolver.wanted, polling.cursors, polling.cursor)
        capture = PollingCapture(
            source, tables, opened.positions, settings=polling.settings, stop=ending.stop, once=once
        )
        rebuild = _Rebuilding(documents, sink, skipped=choice.skip_backfill)
        if not capture.resumes():
            # Whatever the sink has, changes were missed since.
            rebuild([each.name for each in choice.indexes])
        # In this order: polling repeats changes that happen while maps and indexes are filled.
        capture.prepare()
        _seed_relations(documents, rebuild, building, opened)
        for command in opened.store.take_commands():
            _obey(command, rebuild, opened.store)
        engine = Engine(
            capture,
            documents,
            sink,
            observer=_Reporting(choice, catalog, opened.store, backoff, say),
            batch=choice.batch,
            skip_backfill=choice.skip_backfill,
            failure_policies=choice.failure_policies,
            quarantine=opened.quarantine,
        )
        say(
            f"polling {count_of(len(tables), 'table')} on {source.location} every "
            f"{polling.settings.interval:g} s, into {choice.sink_type}; deleted rows are not noticed; press Ctrl-C to "
            "stop"
        )
        engine.run()


@contextmanager
def _opened(config: Config, choice: DocumentsChoice) -> Iterator[_Opened]:
    owner = choice.settings.output_id
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
        )


@dataclass(frozen=True, slots=True)
class _Rebuilding:
    """Lets the engine fill indexes again; what it has to do is stored in the sink."""

    documents: PostgresDocuments
    sink: Sink
    skipped: bool
    """Nothing is filled (`skip_backfill`)."""

    def __call__(self, names: Collection[str]) -> None:
        for mapping in self.documents.index_mappings():
            if mapping.index in names and not self.skipped:
                self.sink.ensure_index(mapping)
                if self.sink.is_seeded(mapping.index):
                    self.sink.reindex(mapping)


def _seed_relations(
    documents: PostgresDocuments, rebuild: _Rebuilding, source: psycopg.Connection[Any], opened: _Opened
) -> None:
    """Fill the relation maps; indexes that use a new relation are rebuilt."""
    new = opened.relations.prepare(documents.resolver.tracked)
    # First: after a crash in between, a map that is filled must not make an index look complete.
    rebuild(documents.resolver.indexes_using(new))
    for relation in new:
        opened.relations.seed(source, relation, Lsn(0))


def _obey(command: Command, rebuild: _Rebuilding, store: Store) -> None:
    if command.kind is not CommandKind.REBUILD_INDEX:
        reason = "a polling pipeline accepts only the command `penstock index rebuild`"
        store.answer_command(command.number, CommandStatus.REFUSED, reason)
        return
    rebuild(command.options.get("indexes", ()))
    store.answer_command(command.number, CommandStatus.DONE)


class _Reporting(Observer):
    """Reports events, and records them for `index list`."""

    def __init__(
        self,
        choice: DocumentsChoice,
        catalog: SourceCatalog,
        store: Store,
        backoff: Backoff,
        say: Say,
    ) -> None:
        """`backoff` is reset when a batch is durable."""
        self._choice = choice
        self._catalog = catalog
        self._store = store
        self._backoff = backoff
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

    def on_batch_committed(self, statistics: BatchStatistics) -> None:
        self._backoff.reset()

    def _note(self, name: str, status: IndexStatus) -> None:
        mark = build_fingerprint(self._choice.index(name).specification, self._catalog)
        self._store.store_index_build(IndexBuild(name, "polling", mark, status, "changes are polled"))
