"""An emulated Snowflake for the tests of this folder."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from penstock.testing.snowflake import EmulatedSnowflake, why_not


@pytest.fixture(scope="session")
def emulator() -> Iterator[EmulatedSnowflake]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with EmulatedSnowflake() as server:
        yield server


@pytest.fixture
def server(emulator: EmulatedSnowflake) -> Iterator[EmulatedSnowflake]:
    yield emulator
    emulator.heal()


@pytest.fixture
def place() -> str:
    return f"S_{secrets.token_hex(4)}".upper()
