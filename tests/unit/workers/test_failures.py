"""What an error means for a table."""

from __future__ import annotations

import psycopg
import pytest

from penstock.errors import Retry, TableRewritten
from penstock.state import Init
from penstock.workers.failures import errored


@pytest.mark.parametrize(
    "error",
    [psycopg.OperationalError("the connection is lost"), psycopg.errors.AdminShutdown("terminating connection")],
    ids=["lost", "ended"],
)
def test_a_lost_connection_is_tried_again_wherever_it_was_noticed(error: psycopg.Error) -> None:
    found = errored(Init(), error, position=None)
    assert found.retry_policy.retry is Retry.TIMED
    assert str(error) in found.reason


def test_an_error_without_a_name_waits_for_a_person_and_quotes_nothing() -> None:
    found = errored(Init(), ValueError("cell value 42"), position=None)
    assert found.retry_policy.retry is not Retry.TIMED
    assert "42" not in found.reason
    assert "ValueError" in found.reason


def test_an_error_with_a_name_keeps_it() -> None:
    found = errored(Init(), TableRewritten("t was emptied"), position=None)
    assert found.reason == "t was emptied"
