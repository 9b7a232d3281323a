"""Delta tables in a catalog: Spark's Hive metastore, in a Derby database."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.delta_jars import find_delta_jars

PROGRAM = """
import logging, sys
from pathlib import Path

from penstock.destinations.delta.destination import DeltaDestination
from penstock.spark.session import SparkSettings, build_session
from penstock.testing.destinations import ScriptedSource, make_context
from penstock.testing.destinations.contract import ORDERS
from tests.support.delta_jars import delta_spark_options
from tests.unit.destinations.delta.orders import order
from dataclasses import replace

folder = Path(sys.argv[1])
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
session = build_session(SparkSettings(master="local[1]", options={
    **delta_spark_options(),
    "spark.sql.catalogImplementation": "hive",
    "spark.sql.warehouse.dir": str(folder / "warehouse"),
    "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:{folder / 'metastore'};create=true",
    "spark.hadoop.datanucleus.schema.autoCreateAll": "true",
    "spark.hadoop.hive.metastore.schema.verification": "false",
    "spark.driver.extraJavaOptions": f"-Dderby.stream.error.file={folder / 'derby.log'}",
}))
source = ScriptedSource(folder / "segments")
destination = DeltaDestination(folder / "it's a lake", maintenance=False, register={"schema": "shop"})
destination.startup(replace(make_context(), open_session=lambda: session))


def copy(attempt):
    destination.drop_table_for_copy(ORDERS, attempt)
    rows = [order(number) for number in range(10)]
    destination.write_table_rows(ORDERS, source.copy(ORDERS, rows, attempt=attempt))


def count():
    print("rows", session.sql(f"select count(*) from shop.{ORDERS.name}").first()[0])


copy("attempt-1")
count()
copy("attempt-2")
session.sql(f"alter table shop.{ORDERS.name} set tblproperties ('team' = 'sales')")
with source.transaction() as transaction:
    transaction.insert(ORDERS, order(10))
result = destination.write_events(source.batch()).result().of(ORDERS.table_id)
print("result", result.durable, result.error)
session.catalog.refreshTable(f"shop.{ORDERS.name}")
count()
print("team", session.sql(f"show tblproperties shop.{ORDERS.name} ('team')").first()[1])
other = DeltaDestination(folder / "other", maintenance=False, register={"schema": "shop"})
other.startup(replace(make_context(), open_session=lambda: session))
destination = other
copy("attempt-3")
"""


@pytest.mark.timeout(600)
def test_a_copied_table_is_in_the_hive_metastore_and_properties_of_others_do_not_stop_it(tmp_path: Path) -> None:
    if not find_delta_jars():
        pytest.skip("needs Delta's jars for Spark: make jars")
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True)
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("rows", "result", "team", "another", "table"))
    ]
    assert lines[:4] == ["rows 10", "result True None", "rows 11", "team sales"], done.stdout + done.stderr
    assert lines[4].startswith("another table is registered under this name"), done.stdout
