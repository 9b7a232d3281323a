"""`penstock init`: from a database to a config that runs, asked for or told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from penstock.config import load_config
from tests.integration.cli.support import Terminal
from tests.program import penstock

SECRET = "pa ss'w@rd/2%"


@pytest.fixture
def source(database: Any) -> Any:
    """A database with a role of its own, whose password is awkward."""
    database.execute(
        """
        create table orders (id int primary key, note text);
        create table visits (page text);
        create table wide (id int, word text);
        alter table wide replica identity full;
        insert into orders select i, 'x' from generate_series(1, 1000) i;
        analyze orders;
        """
    )
    role = f"role_{database.name[-12:]}"
    database.execute(f"create role {role} login replication password '{SECRET.replace(chr(39), chr(39) * 2)}'")
    database.execute(f"grant pg_read_all_data to {role}; grant create on database {database.name} to {role}")
    database.execute(f"alter table orders owner to {role}")
    yield database
    database.execute(f"drop owned by {role} cascade")
    database.execute(f"drop role {role}")


def environment(**more: str) -> dict[str, str]:
    hidden = ("PENSTOCK_URL", "PENSTOCK_CONFIG", "PGPASSWORD")
    return {**{name: value for name, value in os.environ.items() if name not in hidden}, "COLUMNS": "160", **more}


def address(database: Any) -> tuple[str, str]:
    """Host, port and database, and the role."""
    return database.dsn.rpartition("@")[2], f"role_{database.name[-12:]}"


def run(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    result = penstock(*arguments, environment=environment(**more), folder=folder)
    for secret in (SECRET, quote(SECRET, safe="")):
        assert secret not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def test_what_is_told_becomes_a_config_that_runs(source: Any, tmp_path: Path):
    where, role = address(source)
    url = f"postgresql://{role}:{quote(SECRET, safe='')}@{where}"
    arguments = ("--id", "my-shop", "--table", "orders", "--destination", "parquet", "--master", "none", "--yes")
    result = run(tmp_path, "init", *arguments, PENSTOCK_URL=url)
    assert result.returncode == 0, result.stderr
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.startswith("public.")}
    assert rows["public.orders"][-3:] == ["~1,000", "primary", "key"]
    assert rows["public.visits"][-1] == "none"
    assert rows["public.wide"][-1] == "full"
    assert "export MY_SHOP_PASSWORD=…   # percent-encode special characters" in result.stdout
    written = (tmp_path / "penstock.toml").read_text()
    assert SECRET not in written
    assert quote(SECRET, safe="") not in written
    assert f'url = "postgresql://{role}:${{MY_SHOP_PASSWORD}}@{where}"' in written

    refused = run(tmp_path, "init", "--yes", PENSTOCK_URL=url)
    assert refused.returncode == 1
    assert "'penstock.toml' already exists" in refused.stderr
    assert (tmp_path / "penstock.toml").read_text() == written

    password = {"MY_SHOP_PASSWORD": quote(SECRET, safe="")}
    plan = run(tmp_path, "run", "--plan", **password)
    assert "public.orders  would be copied" in plan.stdout, plan.stderr
    done = run(tmp_path, "run", "--once", **password)
    assert done.returncode == 0, done.stderr
    assert "copied public.orders: 1,000 rows" in done.stderr
    assert run(tmp_path, "teardown", "--yes", **password).returncode == 0


def test_a_password_outside_the_user_part_is_taken_out_too(source: Any, tmp_path: Path):
    where, role = address(source)
    host, _, rest = where.partition(":")
    port, _, name = rest.partition("/")
    quoted = SECRET.replace("\\", "\\\\").replace("'", "\\'")
    conninfo = f"host={host} port={port} dbname={name} user={role} password='{quoted}'"
    result = run(tmp_path, "init", "--yes", "--id", "shop", "--destination", "stdout", PENSTOCK_URL=conninfo)
    assert result.returncode == 0, result.stderr
    assert "warning: 1 table without a replica identity" in result.stdout
    # Left out, it does not keep the pipeline from starting, and `check` agrees.
    assert "the server is not ready" not in result.stdout
    assert SECRET not in (tmp_path / "penstock.toml").read_text()
    config = load_config(tmp_path / "penstock.toml", {"SHOP_PASSWORD": quoted})
    assert config.pipeline.source.parameters()["password"] == SECRET


def test_a_person_is_asked(source: Any, tmp_path: Path):
    where, role = address(source)
    with Terminal("init", cwd=tmp_path, environment=environment()) as terminal:
        # The last space of a question comes when the terminal is ready for the answer.
        terminal.wait_for("source URL, like postgresql://user@host:5432/database: ")
        terminal.type(f"postgresql://{role}@{where}")
        terminal.wait_for(f"password for {role}: ")
        terminal.type(SECRET)
        terminal.wait_for("3 tables")
        terminal.wait_for("tables (names or patterns) [*.*]: ")
        terminal.type("public.nope")
        terminal.wait_for("no table matches public.nope")
        terminal.wait_for("tables (names or patterns) [*.*]: ")
        terminal.type("orders, public.w*")
        terminal.wait_for(f"name of the pipeline [{source.name}]: ")
        terminal.type("shop")
        terminal.wait_for("type of the destination (delta, parquet, stdout) [delta]: ")
        terminal.type("parquet")
        terminal.wait_for("path (a folder or s3://…) [lake]: ")
        terminal.type("")
        assert terminal.wait() == 0, terminal.text
    assert SECRET not in terminal.text
    config = load_config(tmp_path / "penstock.toml", {"SHOP_PASSWORD": quote(SECRET, safe="")})
    assert config.pipeline.tables == ("orders", "public.w*")
    assert config.pipeline.source.parameters()["password"] == SECRET
    assert config.outputs[0].destination_options["path"] == str(tmp_path / "lake")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "missing: source URL"),
        (("--url", "postgresql://nobody@127.0.0.1:1/shop"), "cannot connect (127.0.0.1:1/shop)"),
    ],
)
def test_without_a_server_nothing_is_written(arguments: tuple[str, ...], problem: str, tmp_path: Path):
    result = run(tmp_path, "init", "--yes", *arguments)
    assert result.returncode == 1
    assert problem in result.stderr
    assert "keeps trying" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_used_leaves_no_file(source: Any, tmp_path: Path):
    result = run(tmp_path, "init", "--yes", "--id", "not/good", PENSTOCK_URL=source.dsn)
    assert result.returncode == 1
    assert "pipeline.id" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_at_a_question_writes_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    with Terminal("init", cwd=tmp_path, environment=environment) as terminal:
        terminal.wait_for("source URL")
        assert terminal.interrupt() == 130, terminal.text
    assert terminal.text.count("Aborted.") == 1
    assert "Traceback" not in terminal.text
    assert list(tmp_path.iterdir()) == []
