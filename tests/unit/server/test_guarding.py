"""Limits and checks of requests, without a server."""

from __future__ import annotations

import pytest

from penstock.config import ServerChoice
from penstock.server.guarding import Bucket, Guard, Refused, check_host


def test_a_bucket_allows_a_burst_and_then_a_rate() -> None:
    now = 0.0
    bucket = Bucket(2, 0.5, lambda: now)
    for _ in range(2):
        assert bucket.wait() == 0
        bucket.take()
    assert bucket.wait() == 2
    now = 2.0
    assert bucket.wait() == 0
    now = 1000.0
    bucket.take()
    assert bucket.wait() == 0, "no more than the burst is saved up"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:8321", "10.1.2.3", "[::1]:8321", "a.example", "a.example:1"]
)
def test_known_hosts_are_accepted(host: str) -> None:
    check_host(host, ServerChoice(hosts=("a.example",)))


@pytest.mark.parametrize("host", ["", "b.example", "a.example.evil", "127.0.0.1.evil", "localhost.evil", "::1x"])
def test_other_hosts_are_refused(host: str) -> None:
    with pytest.raises(Refused):
        check_host(host, ServerChoice(hosts=("a.example",)))


def test_only_the_exact_token_is_accepted() -> None:
    guard = Guard(None, ServerChoice(token="secret-0123456789"))  # pyright: ignore[reportArgumentType]
    assert guard.is_authorized({"authorization": "Bearer secret-0123456789"})
    assert guard.is_authorized({"authorization": "bearer secret-0123456789"})
    for wrong in ("", "Bearer", "Bearer secret-012345678", "Basic secret-0123456789", "secret-0123456789", "Bearer é"):
        assert not guard.is_authorized({"authorization": wrong})
    without = Guard(None, ServerChoice())  # pyright: ignore[reportArgumentType]
    assert not without.is_authorized({"authorization": "Bearer "})
