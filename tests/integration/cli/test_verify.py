"""`penstock verify` on real servers: equal while both live, faults found and named, and what its end says."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from penstock.source import Role, SourceSettings, connect
from penstock.source.catalog import load_table, load_types, schema_from_catalog
from penstock.testing.destinations.script import ScriptedTransaction
from tests.integration.cli.support import PATIENCE, Site, Terminal, check_discreet
from tests.integration.comparison.support import plant_in

DELTA = '[destination]\ntype = "delta"\npath = "lake"'


@contextmanager
def writers(site: Site) -> Iterator[None]:
    """Transactions that change rows from 100 on, all the time; and some work is seen before the block begins."""
    stop, seen = threading.Event(), threading.Event()

    def write() -> None:
        with psycopg.connect(site.database.dsn, autocommit=True) as connection:
            number = 0
            while not stop.wait(0.01):
                number += 1
                with connection.transaction():
                    connection.execute(
                        "update orders set note = 'n' || %s where id %% 10 = %s and id > 100", [number, number % 10]
                    )
                    connection.execute("insert into items values (%s, 'new') on conflict do nothing", [10_000 + number])
                    connection.execute("delete from items where id = %s", [10_000 + number - 20])
                seen.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert seen.wait(PATIENCE)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def stop(process: Any) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


def schema_of(site: Site, table: str) -> Any:
    [[oid]] = site.database.execute("select %s::regclass::oid::int8", [table])
    with connect(SourceSettings(site.database.dsn), Role.CATALOG) as connection:
        found = load_table(connection, oid)
        assert found is not None
        types = load_types(connection, [attribute.type_oid for attribute in found.live_attributes])
        return schema_from_catalog(found, types)


@pytest.mark.parametrize("destination", [pytest.param("parquet", marks=pytest.mark.soak), "delta"])
def test_equal_while_writers_and_pipeline_go_on_and_faults_are_found(site: Site, destination: str) -> None:
    site.configure(destination=DELTA.replace("delta", destination))
    process = site.start("run")
    site.wait_ready(3)
    with writers(site):
        result = site.run("verify", "--json")
        assert result.returncode == 0, result.stdout + result.stderr
        report = json.loads(result.stdout)
        [output] = report["outputs"]
        assert report["result"] == "equal"
        assert [each["table"] for each in output["tables"]] == ["public.items", "public.nothing", "public.orders"]
        assert {each["result"] for each in output["tables"]} == {"equal"}
        assert output["tables"][2]["source_rows"] == output["tables"][2]["destination_rows"] == 500
        assert process.poll() is None
    stop(process)

    schema = schema_of(site, "orders")

    def faults(plant: ScriptedTransaction) -> None:
        plant.update(schema, {"id": 7, "note": "wrong"})
        plant.delete(schema, {"id": 8})
        plant.insert(schema, {"id": 9999, "note": "extra"})

    plant_in(destination, site.folder / "lake", "shop", schema, faults)
    process = site.start("run")
    site.wait_output(process, "following publication")
    with writers(site):
        result = site.run("verify")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "DIFFERENT: 1 missing, 1 extra, 1 changed; 498 equal" in result.stdout
    assert "changed  id=7: note\n" in result.stdout
    assert "missing  id=8\n" in result.stdout
    assert "extra    id=9999\n" in result.stdout
    assert "public.nothing  0 rows, equal" in result.stdout
    assert "wrong" not in result.stdout + result.stderr
    shown = site.run("verify", "orders", "--show-values", "--json")
    assert shown.returncode == 1
    [table] = json.loads(shown.stdout)["outputs"][0]["tables"]
    changed = next(each for each in table["differences"] if each["kind"] == "changed")
    assert (changed["source"], changed["destination"]) == ({"note": "x" * 7}, {"note": "wrong"})
    assert site.run("verify", "items").returncode == 0
    stop(process)
    check_discreet(site, result.stdout + result.stderr)


def test_a_pipeline_that_does_not_run_is_started_and_ended(site: Site) -> None:
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("insert into orders values (1000, 'since then')")
    result = site.run("verify")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "is not running: starting it" in result.stderr
    assert "public.orders   501 rows, equal" in result.stdout
    assert "3 equal, at " in result.stdout
    assert site.rows("orders") == site.source_rows("orders")
    # Nobody holds the lease any more.
    assert site.run("run", "--once", "-q").returncode == 0


def test_what_cannot_be_compared_ends_with_2(site: Site) -> None:
    never = site.run("verify")
    assert never.returncode == 2
    assert "has not run yet" in never.stderr
    site.configure(destination='[destination]\ntype = "stdout"')
    unreadable = site.run("verify")
    assert unreadable.returncode == 2
    assert "cannot be read back" in unreadable.stderr
    site.configure()
    assert site.run("run", "--once", "-q").returncode == 0
    both = '[[destination]]\nname = "tables"\ntype = "parquet"\npath = "lake"\n'
    site.configure(destination=f'{both}[[destination]]\nname = "out"\ntype = "stdout"')
    assert site.run("run", "--once", "-q").returncode == 0
    partly = site.run("verify", "--json")
    assert partly.returncode == 2
    report = json.loads(partly.stdout)
    assert [each["output"] for each in report["outputs"]] == ["tables"]
    assert {table["result"] for table in report["outputs"][0]["tables"]} == {"equal"}
    assert "stdout destinations cannot be read back" in report["unreadable"]["out"]
    unknown = site.run("verify", "public.ordrs")
    assert unknown.returncode == 2
    assert "public.orders" in unknown.stderr
    wrong = site.run("verify", "--sample", "120%")
    assert wrong.returncode == 2
    assert "is not a fraction" in wrong.stderr
    check_discreet(site, never.stderr + unreadable.stderr + unknown.stderr + wrong.stderr)


def test_an_open_transaction_is_waited_for_and_named(site: Site) -> None:
    process = site.start("run")
    site.wait_ready(3)
    with psycopg.connect(site.database.dsn) as blocker:
        blocker.execute("create table unfinished (id int)")
        given_up = site.run("verify", "--wait", "0")
        assert given_up.returncode == 2
        assert str(blocker.info.backend_pid) in given_up.stderr
        ended = site.start("verify")
        site.wait_output(ended, "changes flow meanwhile")
        ended.send_signal(signal.SIGINT)
        assert ended.wait(PATIENCE) == 130, site.output(ended)
        assert site.output(ended).splitlines()[-1] == "interrupted"
        check_discreet(site, site.output(ended))
        waiting = site.start("verify")
        site.wait_output(waiting, "changes flow meanwhile")
        assert f"{blocker.info.backend_pid}" in site.output(waiting)
        site.database.execute("insert into orders values (1000, 'meanwhile')")
        site.wait_rows("orders")
        blocker.rollback()
    assert waiting.wait(PATIENCE) == 0, site.output(waiting)
    stop(process)


def test_a_terminal_shows_bars_and_the_report(site: Site) -> None:
    process = site.start("run")
    site.wait_ready(3)
    with Terminal("verify", "--sample", "50%", cwd=site.folder, environment=site.environment) as terminal:
        terminal.wait_for("source and destination are both at")
        terminal.wait_for("changes flow again")
        terminal.wait_for("3 equal in a sample of 0.5 of the rows")
        assert terminal.wait() == 0
    stop(process)
