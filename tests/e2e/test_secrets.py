"""Planted passwords and cell values, searched wherever they must not be: in what is said, in status, state, reports,
temporary files and the list of processes."""

from __future__ import annotations

import signal
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from tests.integration.cli.support import Site
from tests.program import PATIENCE

IN_URL, IN_PGPASSWORD, IN_SINK, IN_STORAGE, IN_HASH = (
    f"hunter2-{place}" for place in ("u", "pg", "sink", "s3", "hash00")
)
WRONG = "hunter2-wrong"
PASSWORDS = (IN_URL, IN_PGPASSWORD, IN_SINK, IN_STORAGE, IN_HASH, WRONG)
CELL = "planted-cell-value"
YEAR = 481516
"""Of a date that destinations cannot represent."""
CELLS = (CELL, str(YEAR))
SPECIFICATION = """
version: 1
table: followed
fields:
  - {text: note}
"""


def config(user: str, database: dict[str, Any], slot: str, more: str) -> str:
    return f"""
        [pipeline]
        id = "shop"
        spool = {{path = "work/spool", min_free_bytes = 0}}
        [source]
        url = "postgresql://{user}:{IN_URL}@{database["host"]}:{database["port"]}/{database["dbname"]}"
        tables = ["public.*"]
        slot = "{slot}"
        publication = "shop"
        [hash]
        key = "{IN_HASH}-0123456789"
        [spark]
        master = "none"
        {more}
    """


WORKING = """
        [[destination]]
        name = "lake"
        type = "parquet"
        path = "lake"
        [[index]]
        specification = "followed.schema.yml"
        failure_policy = "skip"
        [sink]
        type = "tests.support.document_sink:FileSink"
        path = "documents.db"
        refuse = "planted"
        [tables."public.errored".types]
        out_of_range = "error"
"""
UNREACHABLE = f"""
        [[destination]]
        name = "lake"
        type = "delta"
        path = "s3://bucket/lake"
        storage.access_key_id = "me"
        storage.secret_access_key = "{IN_STORAGE}"
        storage.endpoint = "http://127.0.0.1:1"
        storage.allow_http = true
        [[index]]
        specification = "followed.schema.yml"
        [sink]
        type = "opensearch"
        url = "http://127.0.0.1:1"
        username = "me"
        password = "{IN_SINK}"
"""


@dataclass
class SecretSite(Site):
    """A site with another password in the environment, and its own folder for temporary files."""

    temporary: Path = Path()

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "PGPASSWORD": IN_PGPASSWORD, "TMPDIR": str(self.temporary)}


def searched(folder: Path) -> Iterable[tuple[str, bytes]]:
    """All files except the config, with their contents."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "penstock.toml":
            yield str(path.relative_to(folder)), path.read_bytes()
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                for member in archive.getmembers():
                    file = archive.extractfile(member)
                    assert file is not None
                    yield member.name, file.read()


def is_data(name: str) -> bool:
    """Where rows belong."""
    return name.startswith(("lake/", "documents.db", "work/spool/segments/", "work/spool/open/"))


def command_lines() -> str:
    found = ""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_text(errors="replace")
        except OSError:
            continue
    return found


def test_planted_secrets_and_values_are_nowhere(database: Any, tmp_path: Path) -> None:
    user = f"secret_{database.name[-12:]}"
    slot = f"secret_{database.name[-12:]}"
    place = conninfo_to_dict(database.dsn)
    database.execute(f"create role {user} superuser login password '{IN_URL}'")
    for table in ("followed", "errored"):
        database.execute(f"create table {table} (id int primary key, note text, day date)")
        database.execute(f"insert into {table} values (1, '{CELL}', '2024-01-01')")
    folder, temporary = tmp_path / "site", tmp_path / "temporary"
    for each in (folder, temporary):
        each.mkdir()
    (folder / "followed.schema.yml").write_text(SPECIFICATION)
    site = SecretSite(database, folder, [], temporary)
    said: list[str] = []

    def run(*arguments: str) -> int:
        done = site.run(*arguments)
        said.append(f"{arguments} {done.stdout} {done.stderr}")
        return done.returncode

    try:
        (folder / "penstock.toml").write_text(config(user, place, slot, WORKING))
        assert run("--log-level", "debug", "run", "--once") == 0, said[-1]
        process = site.start("--log-level", "debug", "run")
        site.wait_output(process, "following")
        database.execute(f"insert into followed values (2, '{CELL}', make_date({YEAR}, 2, 3))")
        database.execute(f"insert into errored values (2, '{CELL}', make_date({YEAR}, 2, 3))")
        site.wait_output(process, "public.errored")
        lines = command_lines()
        assert "penstock.capture" in lines
        assert run("status", "--json") == 3, said[-1]  # public.errored has stopped
        for command in (["tables"], ["status"], ["index", "list"], ["index", "quarantine", "list"], ["verify"]):
            run(*command)
        run("report", "--to", "running.tar.gz", "--log", str(folder / "stderr-0"))
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
        said.append(site.output(process))
        assert "refused by the test" in "".join(said)
        assert "public.errored" in said[-1]
        # A wrong password, one that libpq quotes, and destinations that cannot be reached.
        good = config(user, place, slot, WORKING)
        for wrong in (WRONG, f"{WRONG}%zz"):
            (folder / "penstock.toml").write_text(good.replace(IN_URL, wrong))
            assert run("--log-level", "debug", "check") != 0
            run("report", "--to", f"{len(said)}.tar.gz")
        (folder / "penstock.toml").write_text(config(user, place, slot, UNREACHABLE))
        assert run("--log-level", "debug", "run", "--once") != 0
        run("status")
        run("report", "--to", f"{len(said)}.tar.gz")
    finally:
        for each in site.processes:
            if each.poll() is None:
                each.kill()
                each.wait(PATIENCE)
        database.execute(f"drop owned by {user} cascade")
        database.execute(f"drop role {user}")
    everywhere = [("said", text.encode()) for text in said] + [("processes", lines.encode())]
    files = [*searched(folder), *searched(temporary)]
    assert {"work/state.db", "work/spool/status.json", "running/state.json"} <= {name for name, _ in files}
    for name, content in everywhere + files:
        for secret in PASSWORDS:
            assert secret.encode() not in content, (name, secret)
    for name, content in [*everywhere, *(file for file in files if not is_data(file[0]))]:
        for cell in CELLS:
            assert cell.encode() not in content, (name, cell)
