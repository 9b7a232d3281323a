"""Where `penstock demo --to NAME` replicates to: one entry for each destination that needs no account and no server.

An entry has the options of `[destination]`, and a way to query the copy. In options and texts, `{place}` stands for the
folder of the demo, and `{replica}` for the URL of a second database on its server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from penstock.config import Config
from penstock.config.models import NO_SPARK

Customers = Iterable[Sequence[Any]]
"""Name, tier, orders and revenue of each."""
_BEST_CUSTOMERS = """
    select c.name, c.tier, count(distinct o.id) as orders, sum(i.quantity * i.price) as revenue
    from {customers} c
    join {orders} o on o.customer_id = c.id
    join {order_items} i on i.order_id = o.id
    group by c.id, c.name, c.tier
    order by revenue desc
    limit 5
"""


@dataclass(frozen=True, slots=True)
class DemoPlace:
    """A destination of the demo."""

    options: Mapping[str, str]
    further: str
    """What a person can do with it after the demo; `{python}` is the interpreter."""
    best_customers: Callable[[Config, Any], Customers | None] = field(default=lambda _, __: None)
    """Queries the copy, given the config and the Spark session; None if nothing here can."""
    master: str = NO_SPARK
    """The default of `--master`."""


def _ask_delta(config: Config, session: Any) -> Customers | None:
    # Imported here: commands without Spark start without it.
    from penstock.spark.lake import delta_options

    if session is None or delta_options() is None:
        return None
    lake = config.outputs[0].destination_options["path"]
    return session.sql(_query(f"delta.`{lake}/shop/{{}}`")).collect()


def _ask_postgres(config: Config, _: Any) -> Customers:
    with psycopg.connect(config.outputs[0].destination_options["url"]) as connection:
        return connection.execute(_query("shop.{}").encode()).fetchall()


def _ask_clickhouse(config: Config, _: Any) -> Customers:
    from penstock.destinations.clickhouse.server import Server

    options = config.outputs[0].destination_options
    return Server(options["url"], options["database"]).rows(_query(f"{options['database']}.shop__{{}}"))


def _query(pattern: str) -> str:
    names = ("customers", "orders", "order_items")
    return _BEST_CUSTOMERS.format(**{name: pattern.format(name) for name in names})


DEMO_PLACES: Mapping[str, DemoPlace] = {
    "delta": DemoPlace(
        {"path": "lake"},
        "the lake, one Delta table per folder: {place}/lake/shop\n"
        "read it with Polars: {python} -c \"import polars; print(polars.read_delta('{place}/lake/shop/orders'))\"",
        _ask_delta,
        master="local[*]",
    ),
    "parquet": DemoPlace({"path": "lake"}, "the changes and copies of each table, as Parquet files: {place}/lake/shop"),
    "postgres": DemoPlace(
        {"url": "{replica}"},
        "the copy was a second database on the server of the demo; with --keep you can query it",
        _ask_postgres,
    ),
    "clickhouse": DemoPlace(
        {"url": "chdb://{place}/clickhouse", "database": "shop"},
        "the tables of ClickHouse's engine, for its client chdb: {place}/clickhouse",
        _ask_clickhouse,
    ),
}
"""By the name of the destination, in the order of the help."""
