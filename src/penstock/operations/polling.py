"""Running a pipeline with `[polling]`, in this process: search documents kept up to date without logical decoding.

It needs no slot, publication or spool: the engine takes changes from `penstock.documents.polling`. Lease, relation maps
and quarantine are those of any other run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext

from penstock.config import Config, DocumentsChoice, PollingChoice
from penstock.config.units import count_of
from penstock.documents import Engine, Observer, PostgresDocuments, Sink
from penstock.documents.base import BatchStatistics
from penstock.documents.builder import fitting
from penstock.documents.catalog import load_catalog
from penstock.documents.polling import PollingCapture, PollPositions, polled_catalog, polled_tables
from penstock.documents.relation_map import RelationMap, open_relation_map
from penstock.documents.statements import POOL, SESSION, require_primary
from penstock.documents.writer import DocumentsSettings
from penstock.errors import PenstockError, Retry
from penstock.lsn import Lsn
from penstock.operations.running import Say
from penstock.operations.signals import Ending
from penstock.operations.stores import require_stopped
from penstock.retry import Backoff
from penstock.source import Role, connect
from penstock.state import CommandKind, CommandStatus, Store
from penstock.state.quarantine import Quarantine

logger = logging.getLogger(__name__)


def run_polling(config: Config, polling: PollingChoice, ending: Ending, say: Say, *, once: bool) -> None:
    """Fill indexes that are not complete, then poll until a signal arrives; with `once`, until nothing is left.

    A source or a sink that is away is waited for; with `once` the run ends.
    """
    choice = config.indexes
    sink = choice.create_sink()
    backoff = Backoff(first=0.5, longest=30.0)
    with _opened(config, choice) as (store, relations):
        while True:
            try:
                _run_engine(config, polling, sink, store, relations, ending, backoff, say, once=once)
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
    store: Store,
    relations: RelationMap,
    ending: Ending,
    backoff: Backoff,
    say: Say,
    *,
    once: bool,
) -> None:
    """Run the engine over connections of its own until it ends."""
    source, choice, owner = config.pipeline.source, config.indexes, config.indexes.settings.output_id
    settings = DocumentsSettings(choice.batch, choice.failure_policies, choice.skip_backfill)
    with (
        connect(source, Role.DOCUMENTS, parameters=SESSION) as resolving,
        connect(source, Role.DOCUMENTS, parameters=SESSION) as building,
    ):
        require_primary(building)
        names = {name for each in choice.specifications for name in each.tables()}
        catalog = polled_catalog(load_catalog(building, names))
        specifications, stopped = fitting(building, choice.specifications, catalog, store.get_index_builds())
        documents = PostgresDocuments(
            resolving,
            building,
            specifications,
            relations,
            catalog=catalog,
            stopped=stopped,
            chunk=settings.chunk_documents,
            owner=owner,
            source=source,
        )
        tables = polled_tables(documents.catalog, documents.wanted, polling.cursors, polling.cursor)
        capture = PollingCapture(
            source,
            tables,
            PollPositions(store.database),
            settings=polling.settings,
            stop=ending.stop,
            once=once,
        )
        engine = Engine(
            capture,
            documents,
            sink,
            observer=_Reporting(backoff, say),
            quarantine=Quarantine(store.database),
            settings=settings,
            store=store,
            stop=ending.stop,
        )

        if not capture.resumes():
            relations.prepare([])  # old maps are useless: changes were missed since

        def fill_maps() -> None:
            # Polling has a position by now, and repeats changes that happen while maps and indexes are filled.
            engine.readiness.learn(documents, relations, lambda: nullcontext((building, Lsn(0))))

        say(
            f"polling {count_of(len(tables), 'table')} on {source.location} every "
            f"{polling.settings.interval:g} s, into {choice.sink_type}; deleted rows are not noticed; press Ctrl-C to "
            "stop"
        )
        engine.run(fill_maps, lambda: _obey_commands(engine, store))


@contextmanager
def _opened(config: Config, choice: DocumentsChoice) -> Iterator[tuple[Store, RelationMap]]:
    """Open the state under its lease, and the relation maps."""
    with ExitStack() as stack:
        store = stack.enter_context(config.open_store(choice))
        require_stopped(config, store)
        store.acquire_lease()
        stack.callback(store.release_lease)
        stack.callback(POOL.clear)
        yield store, stack.enter_context(closing(open_relation_map(config.state_url, choice.settings.output_id)))


def _obey_commands(engine: Engine, store: Store) -> None:
    for command in store.take_commands():
        try:
            if command.kind is not CommandKind.REBUILD_INDEX:
                raise PenstockError("a polling pipeline accepts only the command `penstock index rebuild`")
            engine.rebuild(command.options.get("indexes", ()))
        except PenstockError as error:
            store.answer_command(command.number, CommandStatus.REFUSED, error.message)
        else:
            store.answer_command(command.number, CommandStatus.DONE)


class _Reporting(Observer):
    """Reports events."""

    def __init__(self, backoff: Backoff, say: Say) -> None:
        """`backoff` is reset when a batch is durable."""
        self._backoff = backoff
        self._say = say

    def on_backfill_started(self, indexes: Sequence[str]) -> None:
        for name in indexes:
            self._say(f"filling index {name}")

    def on_index_seeded(self, index: str) -> None:
        self._say(f"index {index} is complete and in use")

    def on_batch_committed(self, statistics: BatchStatistics) -> None:
        self._backoff.reset()
