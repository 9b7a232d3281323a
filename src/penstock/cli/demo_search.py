"""`penstock demo --search`: replicate a small database into search documents, and compare the two.

It starts PostgreSQL and OpenSearch servers of its own with constant writes, and an ordinary pipeline. It searches,
changes a row and finds its new document, rebuilds an index under load, and compares every document with the database.
The servers are removed afterwards; config and specifications stay.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.cli.demo import DATABASE, DemoChoice, Watch, fresh_folder, watcher
from penstock.cli.display import Display
from penstock.config import Config, load_config
from penstock.config.units import format_seconds
from penstock.documents.diff import Kind, Patience
from penstock.errors import ConfigError, PenstockError
from penstock.operations.indexes import compare_indexes
from penstock.operations.running import Running, started
from penstock.operations.signals import Ending
from penstock.sinks.base import readable
from penstock.sinks.registry import load_sink
from penstock.state import CommandKind, IndexStatus
from penstock.testing import shop
from penstock.testing.opensearch import OpenSearchServer, why_not
from penstock.testing.postgres import PostgresServer
from penstock.testing.postgres_binaries import find_binaries

INDEXES = ("customers", "products")
_SPECIFICATIONS = Path(shop.__file__).parent / "shop_indexes"
_PATIENCE_SECONDS = 600.0
"""A guard against waiting forever."""
_SETTLE_SECONDS = 30.0
_NEW_NAME = "Wilhelmina Featherstonehaugh"

_FURTHER = """
config and specifications: {place}
to use your own server: copy these files, then run 'penstock index check' and 'penstock run'
"""
_LOOK_AROUND = """
still running; try these, and press Ctrl-C to stop:
  curl '{search}/customers/_search?q=tier:gold&size=1&pretty'
  psql {source}
  penstock index list -c {place}/penstock.toml
  penstock index preview -c {place}/penstock.toml customers {id}
"""


def run_search_demo(chosen: DemoChoice, ending: Ending, display: Display) -> bool | None:
    """The whole demo; whether all documents were equal, None if it was interrupted."""
    binaries = find_binaries()
    load_sink("opensearch")
    if reason := why_not():
        raise ConfigError(reason, hint="In a clone of the repository: make opensearch")
    place = fresh_folder(chosen.folder)
    display.say(f"starting PostgreSQL {binaries.version} and OpenSearch in temporary folders")
    with ExitStack() as stack:
        search = stack.enter_context(_starting_search())
        server = stack.enter_context(PostgresServer(binaries=binaries))
        server.create_database(DATABASE)
        with server.connect(DATABASE) as connection:
            shop.create_shop(connection)
            shop.fill_shop(connection, orders=chosen.orders)
            # What `penstock index check` asks for: documents are built and found through foreign keys.
            connection.execute("create index on shop.orders (customer_id)")
            connection.execute("create index on shop.order_items (sku)")
            connection.execute("analyze")
        opened = search.wait()
        config = load_config(_write_config(place, server.dsn(DATABASE), opened.url, chosen.master))
        display.say(f"created a shop with {chosen.orders:,} orders; building the indexes {', '.join(INDEXES)}")
        writers = stack.enter_context(shop.ShopWriters(lambda: server.connect(DATABASE), rate=chosen.rate))
        running = stack.enter_context(started(config, ending, display.say))
        demo = _Demo(config, running, server, opened, display, watcher(running, display, ending))
        equal = demo.show(writers, chosen.seconds)
        if equal and chosen.keep:
            around = {"search": opened.url, "source": server.dsn(DATABASE), "place": place, "id": demo.shown}
            display.say(_LOOK_AROUND.format(**around).strip())
            demo.watch(float("inf"), lambda: False)
        if equal:
            display.say(_FURTHER.format(place=place).strip())
        return equal


class _Demo:
    """The steps of the demo; each returns False if it was interrupted."""

    def __init__(
        self,
        config: Config,
        running: Running,
        server: PostgresServer,
        search: OpenSearchServer,
        display: Display,
        watch: Watch,
    ) -> None:
        self._config = config
        self._running = running
        [self._output] = running.outputs
        self._server = server
        self._search = search
        self._display = display
        self.watch = watch
        self.shown = ""
        """Id of the document that was shown last."""

    def show(self, writers: shop.ShopWriters, seconds: float) -> bool | None:
        started = time.monotonic()
        if not self.watch(_PATIENCE_SECONDS, self._running.is_ready):
            return None
        self._show_search()
        if not self._show_change() or not self._show_rebuild():
            return None
        self.watch(max(0.0, seconds - (time.monotonic() - started)), lambda: False)
        writers.stop()
        end = self._running.current_position()
        if not self.watch(_PATIENCE_SECONDS, lambda: self._running.has_reached(end) and self._running.is_ready()):
            return None
        return self._compare()

    def _show_search(self) -> None:
        question = {
            "size": 3,
            "query": {
                "bool": {
                    "filter": [{"term": {"tier": "gold"}}],
                    "must": [
                        {"nested": {"path": "orders.lines", "query": {"match": {"orders.lines.product.name": "lamp"}}}}
                    ],
                }
            },
            "sort": [{"paid": "desc"}],
        }
        found = self._search.request("POST", "/customers/_search", question)["hits"]
        self._display.say(
            f"{found['total']['value']:,} gold customers have bought a lamp; those who have paid the most:"
        )
        for hit in found["hits"]:
            document = hit["_source"]
            paid = document["paid"] or 0
            self._display.say(f"  {document['name']:<20} {document['orderCount']:>5} orders {paid:>12,.2f}")

    def _show_change(self) -> bool:
        with self._server.connect(DATABASE) as connection:
            [row] = connection.execute(
                b"update shop.customers set name = %s where id = (select min(id) from shop.customers)"
                b" returning id::text, (select name from shop.customers c where c.id = customers.id)",
                [_NEW_NAME],
            ).fetchall()
        committed = time.monotonic()
        self.shown, before = row
        self._display.say(f"renamed customer {self.shown} from {before} to {_NEW_NAME}")
        question = {"query": {"match": {"name": _NEW_NAME.split()[1]}}, "_source": ["name", "tier", "orderCount"]}
        hits: list[Any] = []

        def is_found() -> bool:
            hits[:] = self._search.request("POST", "/customers/_search", question)["hits"]["hits"]
            return bool(hits)

        # More often than the pipeline is shown: this latency is what people care about.
        deadline = committed + _PATIENCE_SECONDS
        while not is_found() and time.monotonic() < deadline and not self.watch(0.0, lambda: False):
            time.sleep(0.02)
        if not hits:
            return False
        waited = format_seconds(time.monotonic() - committed)
        self._display.say(f"{waited} later, a search finds the new name: {hits[0]['_source']}")
        return True

    def _show_rebuild(self) -> bool:
        before = self._serving()
        self._output.store.add_command(CommandKind.REBUILD_INDEX, options={"indexes": ["customers"]})
        self._display.say("rebuilding the index customers while writes and searches continue")
        started = time.monotonic()
        with _Searches(self._search) as searches:
            if not self.watch(_PATIENCE_SECONDS, lambda: self._serving() != before and self._running.is_ready()):
                return False
        empty = searches.empty
        seconds = format_seconds(time.monotonic() - started)
        self._display.say(
            f"  searches use the new index after {seconds}; {empty} of {searches.count:,} searches so far found nothing"
        )
        if empty:
            raise PenstockError(
                "searches found nothing during a rebuild", hint="This is a bug in Penstock: please report it."
            )
        return True

    def _serving(self) -> str | None:
        build = self._output.store.get_index_builds().get("customers")
        sink = readable(self._config.indexes.create_sink(), self._config.indexes.sink_type)
        return sink.facts("customers").generation if build and build.status is IndexStatus.SEEDED else None

    def _compare(self) -> bool:
        self._display.say("comparing every document with the database:")
        indexes = self._config.indexes
        reader = readable(indexes.create_sink(), indexes.sink_type)
        patience = Patience(_SETTLE_SECONDS)
        reports = compare_indexes(self._config, indexes.indexes, reader, sample=None, patience=patience)
        for report in reports:
            counts = ", ".join(f"{report.count(kind)} {kind.value}" for kind in Kind if report.count(kind))
            self._display.say(f"  {report.index:<12} {report.compared:>7,} documents, {counts or 'equal'}")
        return all(report.equal and report.compared > 0 for report in reports)


class _Searches:
    """Searches continuously in a thread, and counts searches that found nothing."""

    def __init__(self, search: OpenSearchServer) -> None:
        self._search = search
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-searches", daemon=True)
        self.count = 0
        self.empty = 0

    def __enter__(self) -> _Searches:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        question = {"size": 0, "track_total_hits": True, "query": {"term": {"tier": "gold"}}}
        while not self._stop.wait(0.05):
            found = self._search.request("POST", "/customers/_search", question)["hits"]["total"]["value"]
            self.count += 1
            self.empty += found == 0


class _Starting:
    """A search server that starts in a thread, because it takes longest."""

    def __init__(self, server: OpenSearchServer) -> None:
        self._server = server
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="demo-opensearch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._server.start()
        except BaseException as error:
            self._error = error

    def wait(self) -> OpenSearchServer:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._server


@contextmanager
def _starting_search() -> Iterator[_Starting]:
    server = OpenSearchServer()
    try:
        yield _Starting(server)
    finally:
        server.close()


def _write_config(place: Path, source: str, search: str, master: str) -> Path:
    for name in INDEXES:
        shutil.copy(_SPECIFICATIONS / f"{name}.schema.yml", place)
    path = place / "penstock.toml"
    indexes = "".join(f'[[index]]\nspecification = "{name}.schema.yml"\n\n' for name in INDEXES)
    path.write_text(
        f"""# The pipeline of the demo. Its servers are removed when the demo ends.
[pipeline]
id = "demo-search"
spool = {{path = "work/spool"}}

[source]
url = "{source}"

[spark]
master = "{master}"

{indexes}[sink]
type = "opensearch"
url = "{search}"
replicas = 0
"""
    )
    return path
