"""Documents in a real search server: equal to the database after everything that happens to the server."""

from __future__ import annotations

import contextlib
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.documents.base import FailurePolicies, FailurePolicy
from penstock.documents.output import DocumentsSettings
from penstock.errors import DocumentsRejected, IndexUnusable
from penstock.sinks.opensearch import OpenSearchSink
from penstock.source.connections import Role, SourceSettings, connect
from penstock.spark.tasks import SparkTasks
from penstock.state.quarantine import open_quarantine
from penstock.testing.opensearch import ExistingOpenSearch, OpenSearchServer
from tests.e2e.documents import ORDERS, PEOPLE, Site, run, specifications
from tests.e2e.support import wait_for
from tests.integration.documents import world

TOO_LONG = "x" * 40_000
"""More than a keyword can have."""
MAKE_TOO_LONG = "update w.orders set status = %s where id = (select min(id) from w.orders)"
MAKE_SHORT = "update w.orders set status = 'short' where length(status) > 1000"


def site_on(server: ExistingOpenSearch, prefix: str, database: Any, folder: Path, *, shards: int = 1) -> Site:
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        world.create(connection)
        world.fill(Random(1), connection)
    sink = OpenSearchSink(server.url, replicas=0, shards=shards)

    def read(index: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for ids in sink.scan(index):
            found |= sink.fetch(index, ids)
        return found

    indexes = specifications(**{f"{prefix}-people": PEOPLE, f"{prefix}-orders": ORDERS})
    return Site(database, folder, indexes, sink, read)


@pytest.fixture
def site(opensearch: ExistingOpenSearch, index_name: str, database: Any, tmp_path: Path) -> Iterator[Site]:
    made = site_on(opensearch, index_name, database, tmp_path)
    yield made
    made.sink.close()  # type: ignore[attr-defined]


class Neighbours:
    """Others who write to the same server as fast as it lets them: nearly every bulk is told to come again."""

    def __init__(self, server: OpenSearchServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(number,)) for number in range(6)]

    def __enter__(self) -> None:
        self._server.request("PUT", "/neighbours", {"settings": {"number_of_shards": 8, "number_of_replicas": 0}})
        for each in self._threads:
            each.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _write(self, number: int) -> None:
        body = "".join(f'{{"index": {{"_id": "{number}-{each}"}}}}\n{{"n": {each}}}\n' for each in range(2000)).encode()
        headers = {"Content-Type": "application/x-ndjson"}
        while not self._stop.is_set():
            request = urllib.request.Request(f"{self._server.url}/neighbours/_bulk", body, headers)
            # Refused as a whole or in part: it comes again anyway.
            with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()


def told_of(caplog: pytest.LogCaptureFixture, what: str) -> bool:
    return any(what in record.getMessage() for record in caplog.records)


def change(site: Site, seed: int, count: int) -> None:
    random = Random(seed)
    with connect(SourceSettings(site.database.dsn), Role.CATALOG) as connection:
        for _ in range(count):
            world.random_transaction(random, connection, 5)


def generations(site: Site) -> dict[str, str | None]:
    """What serves, by index."""
    assert isinstance(site.sink, OpenSearchSink)
    return {each.name: site.sink.facts(each.name).generation for each in site.specifications}


@pytest.mark.trap(47)
def test_indexes_are_filled_follow_and_are_built_anew_while_they_follow(site: Site) -> None:
    output = site.output()
    with run(output):
        site.wait_settled(output)
        site.check()
        change(site, 2, 20)
        site.wait_settled(output)
        site.check()
        before = generations(site)
        writer = threading.Thread(target=change, args=(site, 3, 20))
        writer.start()
        site.database.execute("truncate w.lines cascade")
        writer.join(120)
        site.wait_settled(output)
        site.check()
        assert before != generations(site), "an emptied table makes a new generation"


def test_tasks_of_spark_write_to_a_search_server(site: Site, spark: Any) -> None:
    site.settings = DocumentsSettings(local_documents=0, chunk_documents=100, range_bytes=8192)
    site.database.execute("insert into w.orders select n, n from generate_series(1000, 3000) n")
    output = site.output(SparkTasks(spark))
    with run(output):
        site.wait_settled(output)
        site.check()
        change(site, 7, 10)
        site.wait_settled(output)
        site.check()


@pytest.mark.trap(46)
def test_a_search_server_that_is_pressed_and_then_killed_loses_nothing(
    pressed: OpenSearchServer, database: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    server = pressed.start()
    site = site_on(server, "pressed", database, tmp_path, shards=8)
    output = site.output()
    with run(output):
        site.wait_settled(output)
        with Neighbours(server):
            for seed in count(8):
                change(site, seed, 2)
                if told_of(caplog, "429"):
                    break
        site.wait_settled(output)
        site.check()
        writer = threading.Thread(target=change, args=(site, 4, 60))
        writer.start()
        server.kill()
        writer.join(120)
        server.start()
        site.wait_settled(output)
        site.check()
    assert told_of(caplog, "busy or unavailable")
    site.sink.close()  # type: ignore[attr-defined]


@pytest.mark.remedy("IndexUnusable")
def test_an_index_deleted_by_hand_ends_the_output_and_is_built_anew(site: Site, opensearch: ExistingOpenSearch) -> None:
    output = site.output()
    people = site.specifications[0].name
    with run(output):
        site.wait_settled(output)
        opensearch.request("DELETE", f"/{generations(site)[people]}")
        change(site, 5, 20)
        with pytest.raises(IndexUnusable, match=people) as caught:
            wait_for(lambda: output.wait(0), "the output to end")
    assert "rebuild" in caught.value.hint
    again = site.output()
    with run(again):
        site.wait_settled(again)
        site.check()


@pytest.mark.remedy("DocumentsRejected")
@pytest.mark.trap(46)
def test_a_document_that_cannot_be_mapped_stops_the_output_until_it_can(site: Site) -> None:
    output = site.output()
    with run(output):
        site.wait_settled(output)
        site.database.execute(MAKE_TOO_LONG, [TOO_LONG])
        with pytest.raises(DocumentsRejected, match="too long for a keyword") as caught:
            wait_for(lambda: output.wait(0), "the output to end")
    assert TOO_LONG[:100] not in str(caught.value)
    site.database.execute(MAKE_SHORT)
    again = site.output()
    with run(again):
        site.wait_settled(again)
        site.check()


@pytest.mark.trap(46)
def test_a_document_that_cannot_be_mapped_is_set_aside_and_the_others_follow(site: Site, tmp_path: Path) -> None:
    site.settings = DocumentsSettings(failure_policies=FailurePolicies(default=FailurePolicy.SKIP))
    with closing(open_quarantine(f"sqlite:///{tmp_path}/state.db", "e2e")) as quarantine:
        output = site.output(quarantine=quarantine)
        with run(output):
            site.wait_settled(output)
            site.database.execute(MAKE_TOO_LONG, [TOO_LONG])
            site.wait_settled(output)
            orders = site.specifications[1].name
            assert quarantine.counts()[orders] == 1
            assert not any(TOO_LONG[:100] in each.reason for each in quarantine.entries())
            change(site, 6, 10)
            site.database.execute(MAKE_SHORT)
            site.wait_settled(output)
            site.check()
            assert quarantine.counts() == {}, "what was taken is not kept"
