"""`penstock demo`: replicate a small database into a lake or another destination, and compare the two.

It starts a server of its own with a small shop and constant writes, and an ordinary pipeline from a config file. The
server is removed afterwards; config and lake stay.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer

from penstock.cli.demo_places import DEMO_PLACES, DemoPlace
from penstock.cli.display import Display, opened_display, show_running
from penstock.comparison.verification import verify_tables
from penstock.config import Config, load_config
from penstock.config.models import NO_SPARK
from penstock.destinations.registry import load_destination
from penstock.errors import ConfigError, PenstockError, Retry
from penstock.operations.running import POLL_SECONDS, Running, started
from penstock.operations.signals import Ending
from penstock.spark.java import require_spark
from penstock.state import Ready
from penstock.testing.postgres import PostgresServer
from penstock.testing.postgres_binaries import find_binaries
from penstock.testing.shop import PUBLICATION, ShopWriters, create_shop, fill_shop

DATABASE = "shop"
MARKER = ".penstock-demo"
_COMPARISONS = 10
_READY_SECONDS = 600.0
"""A guard against waiting forever."""


@dataclass(frozen=True, slots=True)
class _Usual:
    rate: float
    orders: int


_USUAL = _Usual(100.0, 50_000)
_USUAL_SEARCH = _Usual(10.0, 5_000)
"""A product is in the documents of nearly all customers, and each change to its price changes all of them."""
_REPLICA = "replica"
_FURTHER = """
its config: {place}/penstock.toml
for your own server: penstock init, then penstock run
"""


@dataclass(frozen=True, slots=True)
class DemoChoice:
    """What a person chose."""

    seconds: float
    rate: float
    orders: int
    folder: Path
    master: str
    keep: bool


class Watch(Protocol):
    """Show progress until `done` or until the time is over; whether it is done."""

    def __call__(self, seconds: float, done: Callable[[], bool]) -> bool: ...


def demo(
    seconds: Annotated[
        float, typer.Option(min=1, help="How long to apply changes once all tables are copied.", metavar="S")
    ] = 20.0,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Approximate transactions per second. Default: 100; with --search, 10.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    orders: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of initial orders. Default: 50,000; with --search, 5,000.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Folder for config and lake; an older demo in it is replaced.", metavar="FOLDER")
    ] = Path("penstock-demo"),
    master: Annotated[
        str | None,
        typer.Option(
            help="Spark master. Default: local\\[*] for Delta tables, otherwise none.",
            metavar="MASTER",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(help=f"The destination: {', '.join(DEMO_PLACES)}.", metavar="NAME"),
    ] = "delta",
    search: Annotated[
        bool, typer.Option("--search", help="Replicate into search documents in OpenSearch instead of a lake.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep running afterwards, until Ctrl-C.")] = False,
) -> None:
    """Replicate a small Postgres database into Delta tables, or into what --to names, and compare the two.

    Starts a server on a free port of 127.0.0.1 with a shop and constant writes, copies the tables, applies changes for
    a while, queries the copy, and compares every row of source and destination. Exits with 1 if rows differ. Needs the
    server's programs: pip install 'penstock\\[all]'.

    With --search it builds search documents instead: it searches, changes a row and finds its new document, rebuilds
    an index under load, and compares every document. Needs OpenSearch: make opensearch.
    """
    if to not in DEMO_PLACES:
        raise ConfigError(f"the demo has no destination {to!r}", hint=f"Use one of: {', '.join(DEMO_PLACES)}.")
    if search and to != "delta":
        raise ConfigError("--search and --to exclude each other", hint="Name one of them.")
    usual = _USUAL_SEARCH if search else _USUAL
    chosen = DemoChoice(
        seconds=seconds,
        rate=usual.rate if rate is None else rate,
        orders=usual.orders if orders is None else orders,
        folder=folder,
        master=master or (NO_SPARK if search else DEMO_PLACES[to].master),
        keep=keep,
    )
    equal: bool | None = None
    with Ending() as ending, opened_display(quiet=False, as_json=False, seconds=2.0) as display:
        if search:
            # Imported here: the lake demo needs no search server.
            from penstock.cli.demo_search import run_search_demo

            equal = run_search_demo(chosen, ending, display)
        else:
            equal = _run_tables_demo(to, chosen, ending, display)
    if equal is False:
        raise PenstockError("source and destination differ", hint="This is a bug in Penstock: please report it.")


def fresh_folder(folder: Path) -> Path:
    """The folder, empty; only the content of an older demo is removed."""
    place = folder.absolute()
    if place.exists():
        if not (place / MARKER).is_file() and any(place.iterdir()):
            raise ConfigError(
                f"{folder} is not empty and does not contain an earlier demo", hint="Name another folder with --folder."
            )
        shutil.rmtree(place)
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create {folder}: {error.strerror}", hint="Name another folder with --folder."
        ) from None
    (place / MARKER).touch()
    return place


def watcher(running: Running, display: Display, ending: Ending) -> Watch:
    """A way to wait that shows progress, and ends with the pipeline."""

    def watch(seconds: float, done: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while not ending.stop.is_set() and not running.wait(0):
            running.check()
            show_running(running, display)
            if done():
                return True
            if time.monotonic() >= deadline:
                return False
            ending.stop.wait(POLL_SECONDS)
        return False

    return watch


def _run_tables_demo(to: str, chosen: DemoChoice, ending: Ending, display: Display) -> bool | None:
    binaries = find_binaries()
    load_destination(to)
    if chosen.master != NO_SPARK:
        require_spark()
    place, destination = fresh_folder(chosen.folder), DEMO_PLACES[to]
    display.say(f"starting PostgreSQL {binaries.version} in a temporary folder")
    with PostgresServer(binaries=binaries) as server:
        for database in (DATABASE, _REPLICA):
            server.create_database(database)
        with server.connect(DATABASE) as connection:
            create_shop(connection)
            fill_shop(connection, orders=chosen.orders)
        places = {"place": str(place), "replica": server.dsn(_REPLICA)}
        options = {name: value.format(**places) for name, value in destination.options.items()}
        config = load_config(_write_config(place, server.dsn(DATABASE), chosen.master, {"type": to, **options}))
        display.say(f"created a shop with {chosen.orders:,} orders: psql {server.dsn(DATABASE)}")
        if to == "postgres":
            display.say(f"its copy: psql {server.dsn(_REPLICA)}")
        with (
            ShopWriters(lambda: server.connect(DATABASE), rate=chosen.rate),
            started(config, ending, display.say) as running,
        ):
            equal = _show(destination, config, running, ending, display, seconds=chosen.seconds, keep=chosen.keep)
    if equal:
        display.say((destination.further + _FURTHER).format(place=place, python=sys.executable).strip())
    return equal


def _show(
    place: DemoPlace,
    config: Config,
    running: Running,
    ending: Ending,
    display: Display,
    *,
    seconds: float,
    keep: bool,
) -> bool | None:
    """The demo itself; whether all tables were equal, None if it was interrupted."""
    watch = watcher(running, display, ending)
    if not watch(_READY_SECONDS, lambda: _are_ready(running)):
        return None
    display.say(f"all tables are copied; applying changes for {seconds:g} s")
    watch(seconds, lambda: False)
    if ending.stop.is_set():
        return None
    best = place.best_customers(config, running.session)
    if best is not None:
        display.say("the best customers, queried from the copy:")
        for name, tier, orders, revenue in best:  # five rows
            display.say(f"  {name:<20} {tier:<8} {orders:>5} orders {revenue:>12,}")
    equal = _compare(config, running, display)
    if keep:
        display.say(f"still running; inspect it with: penstock status -c {config.path}; press Ctrl-C to stop")
        watch(float("inf"), lambda: False)
    return equal


def _are_ready(running: Running) -> bool:
    for phase in running.errored.values():
        if phase.retry_policy.retry is Retry.OPERATOR:
            raise PenstockError(f"a table stopped: {phase.reason}", hint=phase.solution or None)
    phases = [phase for output in running.outputs for phase in output.phases.values()]
    return bool(phases) and all(isinstance(phase, Ready) for phase in phases)


def _write_config(place: Path, url: str, master: str, destination: Mapping[str, str]) -> Path:
    # Imported here: commands without Spark start without it.
    from penstock.spark.lake import delta_options

    path = place / "penstock.toml"
    options = delta_options() if master != NO_SPARK and destination["type"] == "delta" else None
    # Spark's defaults mean hundreds of tasks for a few thousand rows.
    small = {"spark.sql.shuffle.partitions": "4", "spark.databricks.delta.snapshotPartitions": "2"}
    spark = "".join(f'"{name}" = "{value}"\n' for name, value in {**options, **small}.items()) if options else ""
    path.write_text(
        f"""# The pipeline of the demo. Its server is removed when the demo ends.
[pipeline]
id = "demo"
spool = {{path = "work/spool"}}

[source]
url = "{url}"
publication = "{PUBLICATION}"
manage_publication = false

[destination]
{"".join(f"{name} = {json.dumps(value)}" + chr(10) for name, value in destination.items())}
[spark]
master = "{master}"
{spark}"""
    )
    return path


def _compare(config: Config, running: Running, display: Display) -> bool:
    """Whether every row of every table is equal, at one position, while writes continue."""
    display.say("comparing every row of source and destination, while writes continue:")
    tables: list[str] = []
    for _ in range(_COMPARISONS):
        report = verify_tables(
            config.pipeline, running.outputs[0].store, config.create_destination(), running.tasks, tables=tables
        )
        # A table that a writer has just truncated cannot be read as it was: it is compared again.
        tables = [table.table for table in report.tables if table.reason is not None]
        for table in report.tables:
            if table.reason is None:
                display.say(f"  {table.table:<20} {table.counts.source_rows:>9,} rows, {table.result}")
        display.say(f"  at {report.position}; changes waited for {report.held_seconds:.1f} s")
        if not tables or report.exit_code == 1:
            return report.exit_code == 0
    display.say(f"these tables could not be compared: {', '.join(tables)}")
    return False
