"""`penstock demo`: replicate a small database into a lake, and compare the two.

It starts a server of its own with a small shop and constant writes, and an ordinary pipeline from a config file. The
server is removed afterwards; config and lake stay.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

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
_BEST_CUSTOMERS = """
    select c.name, c.tier, count(distinct o.id) as orders, sum(i.quantity * i.price) as revenue
    from delta.`{lake}/shop/customers` c
    join delta.`{lake}/shop/orders` o on o.customer_id = c.id
    join delta.`{lake}/shop/order_items` i on i.order_id = o.id
    group by c.id, c.name, c.tier
    order by revenue desc
    limit 5
"""


@dataclass(frozen=True, slots=True)
class _Usual:
    rate: float
    orders: int
    master: str


_USUAL = _Usual(100.0, 50_000, "local[*]")
_USUAL_SEARCH = _Usual(10.0, 5_000, NO_SPARK)
"""A product is in the documents of nearly all customers, and each change to its price changes all of them."""
_FURTHER = """
the lake, one Delta table per folder: {place}/lake/shop
its config: {place}/penstock.toml
read it with Polars: {python} -c "import polars; print(polars.read_delta('{place}/lake/shop/orders'))"
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
            help="Spark master. Default: local\\[*]; with --search, none.", metavar="MASTER", show_default=False
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Replicate into search documents in OpenSearch instead of a lake.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep running afterwards, until Ctrl-C.")] = False,
) -> None:
    """Replicate a small Postgres database into Delta tables, and compare the two.

    Starts a server on a free port of 127.0.0.1 with a shop and constant writes, copies the tables, applies changes for
    a while, queries the lake, and compares every row of source and destination. Exits with 1 if rows differ. Needs the
    server's programs: pip install 'penstock\\[all]'.

    With --search it builds search documents instead: it searches, changes a row and finds its new document, rebuilds
    an index under load, and compares every document. Needs OpenSearch: make opensearch.
    """
    usual = _USUAL_SEARCH if search else _USUAL
    chosen = DemoChoice(
        seconds=seconds,
        rate=usual.rate if rate is None else rate,
        orders=usual.orders if orders is None else orders,
        folder=folder,
        master=master or usual.master,
        keep=keep,
    )
    equal: bool | None = None
    with Ending() as ending, opened_display(quiet=False, as_json=False, seconds=2.0) as display:
        if search:
            # Imported here: the lake demo needs no search server.
            from penstock.cli.demo_search import run_search_demo

            equal = run_search_demo(chosen, ending, display)
        else:
            equal = _run_lake_demo(chosen, ending, display)
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


def _run_lake_demo(chosen: DemoChoice, ending: Ending, display: Display) -> bool | None:
    binaries = find_binaries()
    load_destination("delta")
    if chosen.master != NO_SPARK:
        require_spark()
    place = fresh_folder(chosen.folder)
    display.say(f"starting PostgreSQL {binaries.version} in a temporary folder")
    with PostgresServer(binaries=binaries) as server:
        server.create_database(DATABASE)
        with server.connect(DATABASE) as connection:
            create_shop(connection)
            fill_shop(connection, orders=chosen.orders)
        config = load_config(_write_config(place, server.dsn(DATABASE), chosen.master))
        display.say(f"created a shop with {chosen.orders:,} orders: psql {server.dsn(DATABASE)}")
        with (
            ShopWriters(lambda: server.connect(DATABASE), rate=chosen.rate),
            started(config, ending, display.say) as running,
        ):
            equal = _show(config, running, ending, display, seconds=chosen.seconds, keep=chosen.keep)
    if equal:
        display.say(_FURTHER.format(place=place, python=sys.executable).strip())
    return equal


def _show(
    config: Config, running: Running, ending: Ending, display: Display, *, seconds: float, keep: bool
) -> bool | None:
    """The demo itself; whether all tables were equal, None if it was interrupted."""
    watch = watcher(running, display, ending)
    if not watch(_READY_SECONDS, lambda: _are_ready(running)):
        return None
    display.say(f"all tables are copied; applying changes for {seconds:g} s")
    watch(seconds, lambda: False)
    if ending.stop.is_set():
        return None
    if running.session is not None:
        _ask_the_lake(config, running.session, display)
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


def _write_config(place: Path, url: str, master: str) -> Path:
    # Imported here: commands without Spark start without it.
    from penstock.spark.lake import delta_options

    path = place / "penstock.toml"
    options = delta_options() if master != NO_SPARK else None
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
type = "delta"
path = "lake"

[spark]
master = "{master}"
{spark}"""
    )
    return path


def _ask_the_lake(config: Config, session: Any, display: Display) -> None:
    """Query the lake with Spark SQL."""
    from penstock.spark.lake import delta_options

    if delta_options() is None:
        display.say(
            "Spark's jars for Delta are missing, so the demo does not query the lake (`make setup` fetches them)"
        )
        return
    lake = config.outputs[0].destination_options["path"]
    display.say("the best customers, queried from the lake with Spark SQL:")
    for row in session.sql(_BEST_CUSTOMERS.format(lake=lake)).collect():  # five rows
        display.say(f"  {row.name:<20} {row.tier:<8} {row.orders:>5} orders {row.revenue:>12,}")


def _compare(config: Config, running: Running, display: Display) -> bool:
    """Whether every row of every table is equal, at one position, while writes continue."""
    display.say("comparing every row of source and lake, while writes continue:")
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
