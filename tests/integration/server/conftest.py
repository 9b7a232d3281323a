"""One pipeline with a server, shared by all tests of this folder: tables, a stopped one, and a search index."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from psycopg.conninfo import conninfo_to_dict

import penstock
from penstock import Pipeline, coordinator
from penstock.capture import process
from penstock.operations import verify_process
from tests.conftest import Database, DatabaseServer
from tests.program import Piped, start_capture
from tests.support.waiting import pause

TOKEN = "planted-token-0123456789"
PASSWORD = "planted-password"
CELL = "planted-cell-value"
YEAR = "481516"
"""Of a date that destinations cannot represent."""
SECRETS = (TOKEN, PASSWORD, CELL, YEAR)
HOSTILE = "public.a/../<img src=x onerror=alert(1)>?#%41"
"""A table that tries to be markup, and the path of another."""
PATIENCE = 60.0
SPECIFICATION = """
version: 1
table: followed
fields:
  - {text: note}
"""
CONFIG = """
[pipeline]
id = "shop"
spool = {{min_free_bytes = 0}}
batch = {{interval = "100ms"}}
[source]
url = "${{SOURCE_URL}}"
tables = ["public.*"]
slot = "{slot}"
[spark]
master = "none"
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
[server]
port = 0
token = "${{SERVER_TOKEN}}"
hosts = ["pipeline.example"]
"""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Site:
    """A running pipeline and its server."""

    pipeline: Pipeline
    database: Database
    folder: Path

    @property
    def address(self) -> str:
        assert self.pipeline.address is not None
        return self.pipeline.address

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: Any = None,
        *,
        token: str | None = None,
        client: str = "127.0.0.1",
        **headers: str,
    ) -> Answer:
        """Send one request over a connection of its own, from an address of this machine."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, PATIENCE, (client, 0))
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            given["Authorization"] = f"Bearer {token}"
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            given.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, body, given)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def act(self, path: str, body: Any, **headers: str) -> Answer:
        """Send an action with the token, as often as it takes: the shared pipeline limits all tests together."""
        return self.wait(
            lambda: (found := self.ask(path, "POST", body, token=TOKEN, **headers)).status != 429 and found, "an action"
        )

    def wait(self, look: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
        begun = time.monotonic()
        while not (seen := look()):
            assert time.monotonic() < begun + timeout, f"waited {timeout:g} s for {what}"
            pause(begun, longest=0.2)
        return seen


def start_comparison() -> Piped:
    """Start the process of a comparison; in the place of `penstock.operations.verify_process.start_child`."""
    return Piped("penstock.operations.verify_process", environment=os.environ)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integration/server" in str(item.path):
            item.add_marker(pytest.mark.xdist_group("server"))


@pytest.fixture(scope="package")
def site(server: DatabaseServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("server")
    name = server.create_database()
    database = Database(server, name)
    role = f"reader_{name}"
    database.execute(f"create role {role} login superuser replication password '{PASSWORD}'")
    database.execute(
        """
        create table followed (id int primary key, note text);
        create table errored (id int primary key, "<i>day</i>" date);
        create table many (id int primary key, note text);
        insert into followed select n, 'note ' || n from generate_series(1, 50) n;
        insert into many select n, 'note ' || n from generate_series(1, 500) n;
        insert into errored values (1, '2020-01-01');
        """
    )
    database.execute("insert into followed values (1000, %s)", [CELL])
    database.execute(f'create table "{HOSTILE.removeprefix("public.")}" (id int primary key, "<b>note</b>" text)')
    (folder / "followed.schema.yml").write_text(SPECIFICATION)
    at = conninfo_to_dict(database.dsn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start_child", start_capture)
        patch.setattr(verify_process, "start_child", start_comparison)
        patch.setattr(coordinator, "REFRESH_SECONDS", 0.5)
        patch.setenv("SOURCE_URL", f"postgresql://{role}:{PASSWORD}@{at['host']}:{at['port']}/{name}")
        patch.setenv("SERVER_TOKEN", TOKEN)
        (folder / "penstock.toml").write_text(CONFIG.format(slot=f"server_{name[-12:]}"))
        pipeline = penstock.open(folder / "penstock.toml")
        with pipeline:
            made = Site(pipeline, database, folder)
            made.wait(lambda: pipeline.address, "the server")
            pipeline.wait_until_ready(PATIENCE)
            database.execute(f"insert into errored values (2, '{YEAR}-01-01')")
            made.wait(lambda: made.ask("/api/v1/tables?phase=errored").json["tables"], "a stopped table")
            yield made
    server.drop_database(name)
    server.execute(f"drop role {role}")
