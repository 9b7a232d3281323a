"""The clickhouse destination over HTTP: the real client and the real engine, with a gateway of ours between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest

from penstock.destinations.clickhouse import ClickHouseDestination
from penstock.errors import ConfigError, DestinationUnavailable
from penstock.testing.destinations import DestinationContract, ScriptedSource
from penstock.testing.destinations.contract import ORDERS
from penstock.testing.destinations.script import make_context
from tests.integration.destinations.clickhouse.writing import copy
from tests.support.clickhouse import ClickHouse
from tests.support.clickhouse_gateway import PASSWORD, USER, Gateway, open_gateway


@pytest.fixture(scope="module")
def gateway(clickhouse_engine: str) -> Iterator[Gateway]:
    with open_gateway(clickhouse_engine) as gateway:
        yield gateway


def url_of(gateway: Gateway, database: str, password: str = PASSWORD) -> str:
    return f"http://{USER}:{quote(password, safe='')}@{gateway.url.partition('//')[2]}/{database}"


class OverHttp(ClickHouse):
    """Writes over HTTP; reads in this process."""

    @property
    def server(self) -> Any:
        return replace(super().server, url=self.options["engine"])

    def open(self, **options: Any) -> ClickHouseDestination:
        return ClickHouseDestination(self.url, **options)


class TestMirror(DestinationContract):
    @pytest.fixture
    def harness(self, clickhouse: ClickHouse, gateway: Gateway) -> ClickHouse:
        return OverHttp(url_of(gateway, clickhouse.database), clickhouse.database, {"engine": clickhouse.url})


def test_inserts_have_tokens_and_passwords_stay_secret(clickhouse, gateway, tmp_path):
    destination = ClickHouseDestination(url_of(gateway, clickhouse.database))
    destination.startup(make_context())
    copy(destination, ScriptedSource(tmp_path), ORDERS, [{"id": 1, "note": "x", "due": None}])
    assert clickhouse.rows(ORDERS) == [{"id": 1, "note": "x", "due": None}]
    assert any(request.lower().startswith("insert into") for request in gateway.requests)
    assert not any(PASSWORD in request for request in gateway.requests)


def test_user_and_password_can_be_options(clickhouse, gateway):
    url = f"{gateway.url}/{clickhouse.database}"
    ClickHouseDestination(url, user=USER, password=PASSWORD).probe()
    with pytest.raises(ConfigError, match="516") as caught:
        ClickHouseDestination(url, user=USER, password="other").probe()
    assert "other" not in str(caught.value)


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        ((252, "TOO_MANY_PARTS"), DestinationUnavailable),
        ((241, "MEMORY_LIMIT_EXCEEDED"), DestinationUnavailable),
        ((243, "NOT_ENOUGH_SPACE"), DestinationUnavailable),
        ((497, "ACCESS_DENIED"), ConfigError),
    ],
    ids=str,
)
def test_errors_of_the_server_are_named_by_what_to_do(clickhouse, gateway, tmp_path, refused, expected):
    source = ScriptedSource(tmp_path)
    destination = ClickHouseDestination(url_of(gateway, clickhouse.database))
    destination.startup(make_context())
    copy(destination, source, ORDERS, [])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, {"id": 1, "note": "x", "due": None})
    batch = source.batch()
    gateway.refuse = refused
    try:
        with pytest.raises(expected, match=refused[1]):
            destination.write_events(batch)
    finally:
        gateway.refuse = None
    destination.write_events(batch).result()
    assert clickhouse.rows(ORDERS) == [{"id": 1, "note": "x", "due": None}]
