"""`penstock index`: the commands about search indexes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from difflib import unified_diff
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text
from rich.tree import Tree

from penstock.cli.check import findings_table
from penstock.cli.commands import Wait, print_answer, print_json
from penstock.cli.display import (
    echo,
    is_terminal,
    make_table,
    print_unwrapped,
    stderr_console,
    wide_console,
    write_line,
)
from penstock.cli.options import DEFAULT_PATH, AsJson, ConfigPath, Quiet, configured, configured_path
from penstock.cli.status import index_reason, index_status
from penstock.cli.verify import not_compared
from penstock.config import IndexChoice, load_config
from penstock.config.units import count_of
from penstock.documents.diff import DiffObserver, DiffReport, Kind, Patience, without_fields
from penstock.documents.explain import Branch, Explanation, Statement
from penstock.documents.mapping import index_mapping
from penstock.errors import PenstockError
from penstock.operations.commands import WAIT_SECONDS, send_command
from penstock.operations.indexes import (
    check_indexes,
    chosen_indexes,
    compare_indexes,
    explain_indexes,
    index_states,
    live_documents,
    open_reader,
    require_built,
)
from penstock.operations.signals import Ending
from penstock.operations.status_model import IndexState
from penstock.operations.stores import existing_store, require_shared_state, running
from penstock.operations.verify import DIFFERENT, NOT_COMPARED
from penstock.sinks.base import ReadableSink
from penstock.source.preflight import Report, Severity
from penstock.specification.models import json_schema
from penstock.state import CommandKind

_SAMPLE = 1_000
_SHOWN = 10

index = typer.Typer(
    name="index",
    help="Check, explain, preview, list, rebuild and compare search indexes.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def complete_index(context: typer.Context, incomplete: str) -> list[str]:
    """Names of indexes for shell completion; empty if no config can be read."""
    try:
        documents = load_config(configured_path(context)).documents
    except (PenstockError, OSError):
        return []
    names = [each.name for each in documents.indexes] if documents is not None else []
    return [name for name in names if name.startswith(incomplete)]


IndexName = Annotated[str, typer.Argument(help="Name of the index.", metavar="NAME", autocompletion=complete_index)]
IndexNames = Annotated[
    list[str] | None,
    typer.Argument(help="Names of indexes. Default: all indexes.", metavar="NAME", autocompletion=complete_index),
]


@index.command("check")
def check(names: IndexNames = None, config_path: ConfigPath = DEFAULT_PATH, as_json: AsJson = False) -> None:
    """Check index specifications against the database, and say what to do about each finding.

    Finds missing tables and columns, types that an index cannot hold, keys that are not unique, deletes that the server
    would not send, and lookups without an index. Changes nothing. Exits with 1 if a finding is critical, else with 0.

    Examples:

        penstock index check
        penstock index check customers --json | jq '.indexes[].checks[]'
    """
    with configured(config_path) as config:
        reports = check_indexes(config, chosen_indexes(config, names))
    ready = all(report.ready for report in reports.values())
    if as_json:
        facts = {"ready": ready, "indexes": [{"index": name, **each.to_dict()} for name, each in reports.items()]}
        echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _print_checks(reports)
    if not ready:
        raise typer.Exit(1)


@index.command("explain")
def explain(
    names: IndexNames = None,
    config_path: ConfigPath = DEFAULT_PATH,
    plans: Annotated[
        bool, typer.Option("--plans", help="Also print the statements that run, with the server's plans.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which tables an index reads, and how a change of each table finds the documents that show it.

    Names lookups without an index, which read a whole table for each batch of changes. The server plans the statements
    but does not run them; nothing is written.

    Examples:

        penstock index explain customers
        penstock index explain customers --plans
        penstock index explain --json | jq '.indexes[].paths[] | {table, columns, through}'
    """
    with configured(config_path) as config:
        found = explain_indexes(config, chosen_indexes(config, names))
    if as_json:
        indexes = [{**asdict(each), "findings": [check.to_dict() for check in each.findings]} for each in found]
        echo(json.dumps({"indexes": indexes}, indent=2, ensure_ascii=False))
        return
    for each in found:
        _print_explanation(each, plans=plans)


@index.command("preview")
def preview(
    name: IndexName,
    key: Annotated[
        list[str],
        typer.Argument(help="Key of the document: the values of its key columns, or its id.", metavar="KEY..."),
    ],
    config_path: ConfigPath = DEFAULT_PATH,
    diff: Annotated[
        bool, typer.Option("--diff", help="Compare with the document in the sink, and print the lines that differ.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build a document from the current rows of the database, and print it.

    Nothing is written, and without `--diff` the sink is not queried. The exit status is 1 if there is no such document;
    with `--diff`, 0 if the stored document is equal, 1 if it differs or exists on one side only.

    Examples:

        penstock index preview customers 42
        penstock index preview order_items 1001 2
        penstock index preview customers 42 --diff
    """
    with configured(config_path) as config:
        index = config.indexes.index(name)
        reader = open_reader(config) if diff else None
        with live_documents(config, (index,)) as live:
            [row] = live.documents.build(live.keys(index).named(live.connection, key)).to_pylist()
        stored = None if reader is None else reader.fetch(name, [row["id"]]).get(row["id"])
    built = None if row["body"] is None else json.loads(row["body"])
    if built is None and stored is None:
        raise PenstockError(
            f"index {name!r} has no document {row['id']!r}",
            hint=f"{index.specification.table} has no such row, or filters or soft_delete exclude it.",
        )
    if diff:
        stored, built = (without_fields(each, index.specification.source_excludes) for each in (stored, built))
        _print_both(name, row["id"], stored, built, as_json=as_json)
        raise typer.Exit(0 if stored == built else DIFFERENT)
    shown = {"index": name, "id": row["id"], "version": row["version"], "document": built} if as_json else built
    echo(json.dumps(shown, indent=2, ensure_ascii=False))


@index.command("mapping")
def mapping(name: IndexName, config_path: ConfigPath = DEFAULT_PATH) -> None:
    """Print the mappings and settings that an index is created with, as JSON.

    They depend on the specification alone; the database is not queried.

    Examples:

        penstock index mapping customers | jq .mappings.properties
    """
    with configured(config_path) as config:
        found = index_mapping(config.indexes.index(name).specification)
    echo(json.dumps(found.body(), indent=2, ensure_ascii=False))


@index.command("schema")
def schema() -> None:
    """Print the JSON Schema of index specifications, for completion and checks in editors.

    Examples:

        penstock index schema > index.schema.json
        sed -i '1i # yaml-language-server: $schema=index.schema.json' customers.schema.yml
    """
    echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@index.command("list")
def list_indexes(config_path: ConfigPath = DEFAULT_PATH, as_json: AsJson = False) -> None:
    """List the indexes: their generation, whether they are complete, and how many documents they have.

    Works whether the pipeline runs or not; changes nothing. If the sink cannot be read, a message on stderr says why.

    Examples:

        penstock index list
        penstock index list --json | jq '.indexes[] | select(.seeded | not)'
    """
    with configured(config_path) as config:
        found, trouble = index_states(config)
        with existing_store(config, config.indexes) as store:
            driver = None if store is None else running(store)
        if as_json:
            facts = {
                "pipeline": config.pipeline.id,
                "running": driver is not None,
                "sink": config.indexes.sink_type,
                "sink_error": None if trouble is None else trouble.message,
                "indexes": [asdict(each) for each in found],
            }
            echo(json.dumps(facts, indent=2, ensure_ascii=False))
            return
        _print_states(found)
        if trouble is not None:
            echo(f"the sink cannot be read: {trouble.message}", err=True)


@index.command("rebuild")
def rebuild(
    name: IndexName,
    config_path: ConfigPath = DEFAULT_PATH,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Rebuild an index from the database, while the current generation keeps serving.

    Searches use the old index until the new one is complete, then switch at once; changes go to both meanwhile. The
    running pipeline does the work; a stopped one begins at its next start.

    Examples:

        penstock index rebuild customers
        penstock index rebuild customers --wait 60 && penstock index list
    """
    with configured(config_path) as config:
        require_shared_state(config)
        options = {"indexes": [config.indexes.index(name).name]}
        [sent] = send_command(config, CommandKind.REBUILD_INDEX, output=config.indexes.name, options=options, wait=wait)
        if as_json:
            print_json(config, sent, {"index": name})
        else:
            print_answer(
                config, sent, f"rebuilding {name}; `penstock index list` shows when the new generation is in use"
            )


@index.command("diff")
def diff(
    names: IndexNames = None,
    config_path: ConfigPath = DEFAULT_PATH,
    sample: Annotated[
        int, typer.Option(min=1, help="Number of documents to sample from each side.", metavar="N")
    ] = _SAMPLE,
    full: Annotated[bool, typer.Option("--full", help="Compare all documents of both sides.")] = False,
    wait: Annotated[
        float,
        typer.Option(min=0, help="How long to wait for a differing document to catch up.", metavar="SECONDS"),
    ] = Patience().seconds,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare documents in the sink with documents built from the current rows of the database.

    Lists missing, extra and different documents, and the fields that differ, but no values. Works while the pipeline
    runs: documents that do not match are checked again. Exits with 0 if everything is equal, 1 if documents differ, 2
    if something could not be compared.

    Examples:

        penstock index diff
        penstock index diff customers --full
        penstock index diff --full --json | jq '.indexes[].differences'
    """
    with configured(config_path) as config, Ending() as ending, ending.interruptible(), not_compared():
        indexes = chosen_indexes(config, names)
        reader = open_reader(config)
        require_built(config, indexes)
        with _watching(indexes, reader, full=full, quiet=quiet or as_json) as observer:
            reports = compare_indexes(
                config, indexes, reader, sample=None if full else sample, patience=Patience(wait), observer=observer
            )
        if as_json:
            echo(json.dumps(_to_json(reports), indent=2, ensure_ascii=False))
        else:
            for report in reports:
                _print_diff(report)
        raise typer.Exit(_exit_status(reports))
    # `Ending` suppressed what a signal or a closed pipe raised.
    raise typer.Exit(ending.exit_status or NOT_COMPARED)


def _print_checks(reports: dict[str, Report]) -> None:
    console = wide_console()
    for name, report in reports.items():
        console.print(Text(name, style="bold"))
        console.print(findings_table(report.checks, console.width))
        console.print()
    bad = [name for name, report in reports.items() if not report.ready]
    if bad:
        console.print(Text(f"not ready: {', '.join(bad)}", style="bold red"), soft_wrap=True)
        return
    warnings = sum(each.severity is Severity.WARNING for report in reports.values() for each in report.failed)
    ending = f" ({warnings} warning{'s' * (warnings > 1)})" if warnings else ""
    console.print(Text(f"{', '.join(reports)}: ready{ending}", style="green"), soft_wrap=True)


def _print_explanation(found: Explanation, *, plans: bool) -> None:
    console = wide_console()
    console.print(Text(f"{found.index}: a document for each row of {found.table}, by {', '.join(found.key)}"))
    tree = Tree(Text(found.table, style="bold"), guide_style="dim")
    _grow(tree, found.branches)
    console.print(tree)
    console.print()
    table = make_table("a change of", "finds its documents through", "old values")
    for path in found.paths:
        way = " → ".join((", ".join(path.columns), *path.through))
        table.add_row(Text(path.table), Text(way), Text("relation map" if path.in_relation_map else "from the server"))
    console.print(table)
    if found.findings:
        console.print()
        console.print(findings_table(found.findings, console.width))
    if plans:
        _print_statement("build documents", found.build)
        for path in found.paths:
            _print_statement(f"find the documents of a changed row of {path.table}", path.statement)
    console.print()


def _grow(tree: Tree, branches: Sequence[Branch]) -> None:
    for each in branches:
        label = Text.assemble((each.field, "bold"), f": {each.kind} {each.table}, ", (each.condition, "dim"))
        _grow(tree.add(label), each.branches)


def _print_statement(what: str, statement: Statement) -> None:
    console = wide_console()
    console.print()
    console.print(Text(what, style="bold"))
    console.print(Text(statement.query), soft_wrap=True)
    for line in statement.plan:
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)


def _print_both(name: str, id_: str, stored: Any, built: Any, *, as_json: bool) -> None:
    """Print how a stored document differs from the one that the database gives now."""
    if as_json:
        facts = {"index": name, "id": id_, "equal": stored == built, "stored": stored, "built": built}
        echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    if stored == built:
        echo(f"{name} {id_}: the stored document equals the database")
        return
    lines = unified_diff(
        _lines_of(stored), _lines_of(built), "stored in the sink", "built from the database", lineterm=""
    )
    for line in lines:
        echo(line)


def _lines_of(document: Any) -> list[str]:
    return [] if document is None else json.dumps(document, indent=2, ensure_ascii=False, sort_keys=True).splitlines()


def _print_states(found: Sequence[IndexState]) -> None:
    titles = ("index", "table", "status", "documents", "quarantined", "generation")
    table = make_table(*titles, right=("documents", "quarantined"))
    for each in found:
        generation = each.generation or ""
        if each.filling is not None:
            generation = f"{generation} → {each.filling}" if generation else each.filling
        table.add_row(
            Text(each.index),
            Text(each.table),
            index_status(each),
            Text("" if each.documents is None else f"{each.documents:,}"),
            Text(f"{each.quarantined:,}"),
            Text(generation),
        )
    console = wide_console()
    print_unwrapped(console, table)
    for reason in filter(None, map(index_reason, found)):
        console.print(reason, soft_wrap=True)


def _exit_status(reports: list[DiffReport]) -> int:
    if any(report.differs for report in reports):
        return DIFFERENT
    return 0 if all(report.equal for report in reports) else NOT_COMPARED


def _to_json(reports: list[DiffReport]) -> dict[str, Any]:
    results = {0: "equal", DIFFERENT: "different", NOT_COMPARED: "not compared"}
    return {
        "result": results[_exit_status(reports)],
        "indexes": [
            {
                "index": report.index,
                "compared": report.compared,
                "complete": report.complete,
                **{kind.value: report.count(kind) for kind in Kind},
                "differences": [
                    {"id": each.id, "kind": each.kind.value, "fields": list(each.fields)} for each in report.differences
                ],
            }
            for report in reports
        ],
    }


def _print_diff(report: DiffReport) -> None:
    compared = count_of(report.compared, "document")
    if report.equal:
        echo(f"{report.index}: {compared} compared, all equal")
        return
    counts = ", ".join(f"{report.count(kind):,} {kind.value}" for kind in Kind if report.count(kind))
    echo(f"{report.index}: {compared} compared: {counts}")
    shown = report.differences[:_SHOWN]
    width = max(len(each.kind) for each in shown)
    for each in shown:
        echo(f"  {each.kind.value:<{width}}  {each.id}  {', '.join(each.fields)}".rstrip())
    if len(report.differences) > _SHOWN:
        echo(f"  … and {len(report.differences) - _SHOWN:,} more; --json lists all")
    if report.differs:
        echo(
            "a document is rewritten when one of its rows changes;"
            f" `penstock index rebuild {report.index}` rewrites all documents"
        )


@contextmanager
def _watching(
    indexes: tuple[IndexChoice, ...], reader: ReadableSink, *, full: bool, quiet: bool
) -> Iterator[DiffObserver]:
    """A bar in a terminal, lines elsewhere."""
    if quiet:
        yield _Lines(lambda _: None)
    elif is_terminal():
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        totals = {index.name: reader.facts(index.name).documents for index in indexes} if full else {}
        with Progress(*columns, console=stderr_console(), transient=True) as progress:
            yield _Bars(progress, totals)
    else:
        yield _Lines(write_line)


class _Lines(DiffObserver):
    """For files and pipes: only what takes long."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._reported: set[str] = set()

    def on_rechecking(self, index: str, suspects: int) -> None:
        if index not in self._reported:
            self._reported.add(index)
            self._write(f"{index}: checking {count_of(suspects, 'document')} again, not equal yet")


class _Bars(DiffObserver):
    """For terminals."""

    def __init__(self, progress: Progress, totals: dict[str, int]) -> None:
        self._progress = progress
        self._totals = totals
        self._bars: dict[str, TaskID] = {}

    def on_compared(self, index: str, compared: int) -> None:
        if index not in self._bars:
            self._bars[index] = self._progress.add_task(index, total=self._totals.get(index))
        self._progress.update(self._bars[index], completed=compared)

    def on_rechecking(self, index: str, suspects: int) -> None:
        if index in self._bars:
            self._progress.update(self._bars[index], description=f"{index} ({suspects:,} still differ)")
