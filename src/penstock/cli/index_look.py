"""`penstock index check`, `preview`, `mapping` and `schema`: indexes before anything is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import psycopg
import typer
from rich.text import Text

from penstock.cli.check import findings_table
from penstock.cli.configured import DEFAULT_PATH, ConfigPath, configured
from penstock.cli.indexes import IndexName, IndexNames, chosen_indexes, live_documents
from penstock.cli.options import AsJson
from penstock.cli.tables import wide_console
from penstock.config import Config, IndexChoice
from penstock.documents.catalog import SourceCatalog, load_catalog
from penstock.documents.checks import check_index, check_polling
from penstock.documents.mapping import index_mapping
from penstock.documents.polling import polled_catalog
from penstock.documents.specification.models import json_schema
from penstock.errors import PenstockError
from penstock.source import Role, connect
from penstock.source.preflight import Check, Report, Severity, Status
from penstock.source.preflight.report import failed
from penstock.source.publications import inspect_publication, published_tables


def check(names: IndexNames = None, config_path: ConfigPath = DEFAULT_PATH, as_json: AsJson = False) -> None:
    """Compare index specifications with the database, and say what to do about each finding.

    Tables and columns that are not there, types that an index cannot take, keys that are not unique, deletes that the
    server would not tell, lookups without an index. Changes nothing. The exit status is 0 if nothing critical was
    found, and 1 otherwise.

    Examples:

        penstock index check
        penstock index check customers --json | jq '.indexes[].checks[]'
    """
    with configured(config_path) as config:
        reports = _check(config, chosen_indexes(config, names))
    ready = all(report.ready for report in reports.values())
    if as_json:
        facts = {"ready": ready, "indexes": [{"index": name, **each.to_dict()} for name, each in reports.items()]}
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _print(reports)
    if not ready:
        raise typer.Exit(1)


def preview(
    name: IndexName,
    key: Annotated[
        list[str],
        typer.Argument(help="The document: the values of its key columns, or its id.", metavar="KEY..."),
    ],
    config_path: ConfigPath = DEFAULT_PATH,
    as_json: AsJson = False,
) -> None:
    """Show a document as it would be now, built from the rows of the database.

    Nothing is written, and the sink is not asked. Ends with 1 if there is no such document.

    Examples:

        penstock index preview customers 42
        penstock index preview order_items 1001 2
    """
    with configured(config_path) as config:
        index = config.indexes.index(name)
        with live_documents(config, (index,)) as live:
            [row] = live.documents.build(live.keys(index).named(key)).to_pylist()
    if row["body"] is None:
        raise PenstockError(
            f"index {name!r} has no document {row['id']!r} now",
            hint=f"{index.specification.table} has no such row, or filters or soft_delete leave it out.",
        )
    document = json.loads(row["body"])
    shown = {"index": name, "id": row["id"], "version": row["version"], "document": document} if as_json else document
    typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))


def mapping(name: IndexName, config_path: ConfigPath = DEFAULT_PATH) -> None:
    """Print the mappings and settings that an index is created with, as JSON.

    They follow from the specification alone; the database is not asked.

    Examples:

        penstock index mapping customers | jq .mappings.properties
    """
    with configured(config_path) as config:
        found = index_mapping(config.indexes.index(name).specification)
    typer.echo(json.dumps(found.body(), indent=2, ensure_ascii=False))


def schema() -> None:
    """Print the JSON Schema of index specifications, for editors that complete and check them.

    Examples:

        penstock index schema > index.schema.json
        sed -i '1i # yaml-language-server: $schema=index.schema.json' customers.schema.yml
    """
    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def _check(config: Config, indexes: tuple[IndexChoice, ...]) -> dict[str, Report]:
    with connect(config.pipeline.source, Role.CATALOG) as connection:
        catalog = load_catalog(connection, {table for each in indexes for table in each.specification.tables()})
        polling = config.indexes.polling
        if polling is None:
            published = _published(connection, config)
            return {
                each.name: _with(
                    check_index(connection, each.specification, catalog),
                    _check_published(each, catalog, published, config.pipeline.publication),
                )
                for each in indexes
            }
        catalog = polled_catalog(catalog)
        found: dict[str, Report] = {}
        for each in indexes:
            tables = each.specification.tables()
            cursors = {name: polling.cursors.get(name, polling.cursor) for name in tables}
            report = check_index(connection, each.specification, catalog)
            found[each.name] = _with(report, check_polling(connection, tables, catalog, cursors))
        return found


def _published(connection: psycopg.Connection[Any], config: Config) -> set[str] | None:
    """The tables whose changes the server sends; None if the pipeline sees to that itself."""
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
                f"Run: alter publication {publication} add table {name};",
                [str(name)],
            )


def _with(report: Report, more: Iterable[Check]) -> Report:
    """Further findings; what said that everything fits does not stand beside them."""
    added = tuple(more)
    kept = tuple(each for each in report.checks if not added or each.status is not Status.PASSED)
    return Report(report.location, (*kept, *added))


def _print(reports: dict[str, Report]) -> None:
    console = wide_console()
    for name, report in reports.items():
        console.print(Text(name, style="bold"))
        console.print(findings_table(report.checks))
        console.print()
    bad = [name for name, report in reports.items() if not report.ready]
    if bad:
        console.print(Text(f"not ready: {', '.join(bad)}", style="bold red"), soft_wrap=True)
        return
    warnings = sum(each.severity is Severity.WARNING for report in reports.values() for each in report.failed)
    ending = f" ({warnings} warning{'s' * (warnings > 1)})" if warnings else ""
    console.print(Text(f"{', '.join(reports)}: ready{ending}", style="green"), soft_wrap=True)
