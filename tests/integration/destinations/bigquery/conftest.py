"""An emulated BigQuery for the tests of this folder."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from penstock.destinations.bigquery import append
from penstock.testing.bigquery import EmulatedBigQuery, why_not


@pytest.fixture(scope="session")
def emulator() -> Iterator[EmulatedBigQuery]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with EmulatedBigQuery() as server:
        yield server


@pytest.fixture
def server(emulator: EmulatedBigQuery) -> Iterator[EmulatedBigQuery]:
    yield emulator
    emulator.heal()


@pytest.fixture
def dataset() -> str:
    return f"d_{secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first break of a connection end an append."""
    monkeypatch.setattr(append, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(append, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def patient(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an append be repeated."""
    monkeypatch.setattr(append, "RETRY_SECONDS", 600.0)
