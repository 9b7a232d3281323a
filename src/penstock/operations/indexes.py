"""Search indexes of a pipeline: their state, checks before they are built, and documents compared with the database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from penstock.config import Config, IndexChoice
from penstock.destinations.base import ProbedDestination
from penstock.documents import PostgresDocuments
from penstock.documents.builder import DocumentKeys
from penstock.documents.catalog import SourceCatalog, load_catalog
from penstock.documents.checks import check_index, check_polling
from penstock.documents.diff import DiffObserver, DiffReport, IndexDiff, Patience
from penstock.documents.explain import Explanation, explain_index
from penstock.documents.mapping import index_mapping
from penstock.documents.polling import polled_catalog
from penstock.errors import DestinationUnavailable, PenstockError, Retry
from penstock.operations.status import stored_indexes
from penstock.operations.status_model import IndexState
from penstock.operations.stores import existing_store
from penstock.sinks.base import IndexFacts, ReadableSink, Sink, readable
from penstock.source import Role, connect
from penstock.source.identity import quote_if_needed
from penstock.source.preflight import Check, Report, Severity, Status
from penstock.source.preflight.report import failed
from penstock.source.publications import inspect_publication, published_tables

_FORBIDDEN = 403


def chosen_indexes(config: Config, names: list[str] | None) -> tuple[IndexChoice, ...]:
    """The indexes with these names, or all of them."""
    documents = config.indexes
    return tuple(documents.index(name) for name in dict.fromkeys(names)) if names else documents.indexes


@dataclass(frozen=True, slots=True)
class LiveDocuments:
    """Documents built from the current rows of the database."""

    connection: psycopg.Connection[Any]
    """For other queries; not while keys are being listed."""
    catalog: SourceCatalog
    documents: PostgresDocuments

    def keys(self, index: IndexChoice) -> DocumentKeys:
        """The keys of an index's documents."""
        return DocumentKeys.of(index.specification, self.catalog)


@contextmanager
def live_documents(config: Config, indexes: Sequence[IndexChoice]) -> Iterator[LiveDocuments]:
    """Connect to the source, to build documents of these indexes."""
    source = config.pipeline.source
    specifications = [each.specification for each in indexes]
    with connect(source, Role.CATALOG) as one, connect(source, Role.CATALOG) as other:
        catalog = load_catalog(other, {table for each in specifications for table in each.tables()})
        yield LiveDocuments(one, catalog, PostgresDocuments(one, other, specifications, catalog=catalog))


def index_states(config: Config) -> tuple[list[IndexState], PenstockError | None]:
    """All indexes, with what the sink knows of them; or the error if the sink does not answer."""
    with existing_store(config, config.indexes) as store:
        stored = stored_indexes(config, store)
    facts, trouble = _load_facts(config)
    return [_with_facts(each, facts.get(each.index)) for each in stored], trouble


def check_indexes(config: Config, indexes: Sequence[IndexChoice]) -> dict[str, Report]:
    """Compare specifications with the database; the findings by index."""
    with connect(config.pipeline.source, Role.CATALOG) as connection:
        catalog = load_catalog(connection, {table for each in indexes for table in each.specification.tables()})
        polling = config.indexes.polling
        published = _published(connection, config) if polling is None else None
        catalog = catalog if polling is None else polled_catalog(catalog)
        sink = config.indexes.create_sink()
        found: dict[str, Report] = {}
        for each in indexes:
            tables = each.specification.tables()
            checks = [*check_sink(each, sink)]
            if polling is None:
                checks += _check_published(each, catalog, published, config.pipeline.publication)
            else:
                cursors = {name: polling.cursors.get(name, polling.cursor) for name in tables}
                checks += check_polling(connection, tables, catalog, cursors)
            report = check_index(connection, each.specification, catalog)
            if polling is not None:  # It always needs the relation map, whatever the replica identity is.
                kept = [one for one in report.checks if (one.id, one.severity) != ("identity", Severity.INFO)]
                report = replace(report, checks=tuple(kept))
            found[each.name] = _with(report, checks)
        return found


def check_sink(index: IndexChoice, sink: Sink) -> Iterator[Check]:
    """Try the sink, and ask whether it would take an index. What it writes it removes again."""
    try:
        if isinstance(sink, ProbedDestination):
            sink.probe()
        refused = sink.check(index_mapping(index.specification))
    except PenstockError as error:
        # A sink that is away is waited for. A user who may write documents may lack the privilege to ask this.
        if error.retry is Retry.TIMED or error.facts.get("status") == _FORBIDDEN:
            what = f"settings and mappings were not checked: {error.message}"
            yield failed("sink", Severity.WARNING, what, error.hint)
        else:
            yield failed("sink", Severity.CRITICAL, error.message, error.hint, [index.name], error)
        return
    if refused:
        what = f"the sink would refuse the index: {refused}"
        remedy = f"Correct settings or options in {index.file.name}, or install what the search server lacks."
        yield failed("sink", Severity.CRITICAL, what, remedy, [index.name])


def explain_indexes(config: Config, indexes: Sequence[IndexChoice]) -> list[Explanation]:
    """Explain how indexes are built and how changes find their documents."""
    with connect(config.pipeline.source, Role.CATALOG) as connection:
        catalog = load_catalog(connection, {table for each in indexes for table in each.specification.tables()})
        return [explain_index(connection, each.specification, catalog) for each in indexes]


def open_reader(config: Config) -> ReadableSink:
    """Return the sink, to read documents; raise if it keeps none or does not answer."""
    sink = config.indexes.create_sink()
    reader = readable(sink, config.indexes.sink_type)
    _require_answer(config, sink)
    return reader


def require_built(config: Config, indexes: Sequence[IndexChoice]) -> None:
    """Raise `PenstockError` if an index was never complete: each of its documents would count as missing."""
    states, trouble = index_states(config)
    if trouble is not None:
        raise trouble
    chosen = {index.name for index in indexes}
    for each in states:
        if each.index in chosen and not (each.seeded or each.generation or each.documents):
            raise PenstockError(
                f"index {each.index!r} is not complete yet, so its documents cannot be compared",
                hint="Wait until `penstock index list` shows it as seeded."
                if each.filling
                else "Run: penstock run. It fills the index.",
            )


def compare_indexes(
    config: Config,
    indexes: Sequence[IndexChoice],
    reader: ReadableSink,
    *,
    sample: int | None,
    patience: Patience,
    observer: DiffObserver | None = None,
) -> list[DiffReport]:
    """Compare documents in the sink with the database; `sample` is a number of documents, None for all."""
    with live_documents(config, indexes) as live:
        reports: list[DiffReport] = []
        for index in indexes:
            diff = IndexDiff(live.documents, live.keys(index), reader, patience=patience, observer=observer)
            reports.append(diff.full() if sample is None else diff.sample(live.connection, sample))
        return reports


def _load_facts(config: Config) -> tuple[dict[str, IndexFacts], PenstockError | None]:
    try:
        sink = config.indexes.create_sink()
        # A sink in memory belongs to another process.
        if config.indexes.sink_type == "memory" or not isinstance(sink, ReadableSink):
            return {}, None
        _require_answer(config, sink)
        return {each.name: sink.facts(each.name) for each in config.indexes.indexes}, None
    except PenstockError as error:
        return {}, error


def _require_answer(config: Config, sink: Sink) -> None:
    """Raise `DestinationUnavailable` at once if the sink does not answer. Reading would retry for minutes."""
    try:
        sink.check(index_mapping(config.indexes.indexes[0].specification))
    except DestinationUnavailable:
        raise
    except PenstockError:
        return  # It answers; a user who may read documents may lack the privilege to check mappings.


def _with_facts(state: IndexState, facts: IndexFacts | None) -> IndexState:
    if facts is None:
        return state
    return replace(state, generation=facts.generation, filling=facts.filling, documents=facts.documents)


def _published(connection: psycopg.Connection[Any], config: Config) -> set[str] | None:
    """The published tables; None if the pipeline manages the publication."""
    settings = config.pipeline
    if settings.manage_publication or inspect_publication(connection, settings.publication) is None:
        return None
    return {str(table) for table in published_tables(connection, settings.publication)}


def _check_published(
    index: IndexChoice, catalog: SourceCatalog, published: set[str] | None, publication: str
) -> Iterator[Check]:
    if published is None:
        return
    for name in sorted(index.specification.tables()):
        leaves = catalog.tables[name].leaves if name in catalog.tables else ()
        sent = str(name) in published or (leaves and all(str(leaf) in published for leaf in leaves))
        if name in catalog.tables and not sent:
            yield failed(
                "publication",
                Severity.CRITICAL,
                f"publication {publication} does not send changes of {name}",
                f"Run: alter publication {quote_if_needed(publication)} add table {name};",
                [str(name)],
            )


def _with(report: Report, more: Iterable[Check]) -> Report:
    """The report with further findings, and then without its passed checks."""
    added = tuple(more)
    kept = tuple(each for each in report.checks if not added or each.status is not Status.PASSED)
    return Report(report.location, (*kept, *added))
