"""A whole pipeline as the role that the guide describes, through TLS with a checked certificate."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.destinations.parquet.reader import ParquetReader
from penstock.testing.postgres import PostgresServer
from tests.program import penstock

PAGE = Path(__file__).parents[2] / "docs/guides/postgres.md"
PASSWORD = "a password"


def blocks(title: str) -> list[tuple[str, str]]:
    """The language and text of each block of code in a section of the guide."""
    _, _, rest = PAGE.read_text().partition(f"\n## {title}\n")
    return re.findall(r"```(\w+)\n(.*?)```", rest.partition("\n## ")[0], re.DOTALL)


@pytest.fixture
def server(make_server: Callable[..., PostgresServer], tmp_path: Path) -> PostgresServer:
    """Debian's 15, which has TLS, and accepts nothing else."""
    made = make_server(major=15)
    request = "openssl req -new -x509 -days 2 -nodes -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", "server.key", "-out", "server.crt"]
    subprocess.run([*request.split(), *files], cwd=tmp_path, check=True, capture_output=True)
    for name in ("server.crt", "server.key"):
        made.write_file(name, (tmp_path / name).read_text())
    made.execute("alter system set ssl = on")
    (made.data_dir / "pg_hba.conf").write_text(
        "hostssl all,replication penstock 127.0.0.1/32 scram-sha-256\nhost all postgres 127.0.0.1/32 scram-sha-256\n"
    )
    made.restart()
    return made


def test_the_documented_grants_are_enough_for_every_command(server: PostgresServer, tmp_path: Path) -> None:
    (role, publication), (toml,) = (
        [text for language, text in blocks("A role with minimal privileges") if language == wanted]
        for wanted in ("sql", "toml")
    )
    server.create_database("shop")
    server.execute("revoke all on database shop from public; create role owner_of_sales")
    server.execute("grant create on database shop to owner_of_sales")
    server.execute(
        """
        create schema sales authorization owner_of_sales;
        set role owner_of_sales;
        create table sales.orders (id int primary key, note text);
        create table sales.items (id int primary key, note text);
        insert into sales.orders select n, 'first' from generate_series(1, 100) n;
        """,
        database="shop",
    )
    server.execute(role.replace("…", PASSWORD), database="shop")
    server.execute(f"set role owner_of_sales; {publication}", database="shop")
    (tmp_path / "penstock.toml").write_text(
        f"""
        [pipeline]
        id = "shop"
        spool = {{path = "work/spool", min_free_bytes = 0}}
        [spark]
        master = "none"
        [destination]
        type = "parquet"
        path = "lake"
        {toml}
        url = "${{SOURCE_URL}}"
        """
    )
    url = f"postgresql://penstock@localhost:{server.port}/shop?hostaddr=127.0.0.1&sslmode=verify-full&sslrootcert=server.crt"
    environment = {"PATH": "", "SOURCE_URL": url, "PGPASSWORD": PASSWORD, "COLUMNS": "160"}

    def run(*arguments: str, code: int = 0) -> str:
        done = penstock(*arguments, environment=environment, folder=tmp_path)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        return done.stdout

    run("check")
    run("run", "--plan")
    run("run", "--once", "-q")
    server.execute(
        "update sales.orders set note = 'second' where id < 10; delete from sales.orders where id > 90; "
        "insert into sales.items values (1, 'new')",
        database="shop",
    )
    run("run", "--once", "-q")
    run("status", code=3)  # it is not running
    assert "equal" in run("verify")
    rows = ParquetReader(tmp_path / "lake").read_table("sales.orders").to_pylist()
    assert [row["note"] for row in rows].count("second") == 9
    assert len(rows) == 90
    run("teardown", "--yes")
    assert server.execute("select slot_name from pg_replication_slots") == []
    assert server.execute("select usesuper, usecreatedb, userepl from pg_user where usename = 'penstock'") == [
        (False, False, True)
    ]
