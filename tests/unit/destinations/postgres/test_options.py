"""The options of the postgres destination: checked at once, and all of them on its page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from penstock.destinations.base import (
    DroppingDestination,
    FolderDestination,
    ProbedDestination,
    ReadableDestination,
)
from penstock.destinations.postgres import PostgresDestination
from penstock.errors import ConfigError

PAGE = Path(__file__).parents[4] / "docs/reference/destinations/postgres.md"
URL = "postgresql://me@127.0.0.1/x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "mirrored"}, "unknown mode 'mirrored'"),
        ({"transactional": "all"}, "unknown transactional 'all'"),
        ({"lock_timeout": 0}, "lock_timeout must be"),
        ({"commit_interval": True}, "commit_interval must be"),
        ({"control_schema": ""}, "must be names of schemas"),
        ({"control_schema": "100%"}, "cannot contain %"),
        ({"indexes": "yes"}, "indexes must be"),
        ({"indexes": True, "mode": "history"}, "indexes must be"),
        ({"url": "postgresql://me:pass/word@host/db"}, "the URL of the destination is not a valid connection string"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        PostgresDestination(**{"url": URL, **options})


def test_the_page_has_every_option_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| (required|`[^`]*`) \|", PAGE.read_text(), re.MULTILINE)
    shown = {name: default.strip("`").strip('"') for name, default in rows}
    parameters = inspect.signature(PostgresDestination).parameters
    expected = {
        name: "required" if each.default is each.empty else "500ms" if name == "commit_interval" else each.default
        for name, each in parameters.items()
    }
    assert {name: shown.get(name) for name in expected} == {
        name: f"{default:g}" if isinstance(default, float) else "false" if default is False else default
        for name, default in expected.items()
    }
    documented = re.findall(r"^    \| `(\w+)` \|", PostgresDestination.__doc__ or "", re.MULTILINE)
    assert documented == list(expected)


@pytest.mark.parametrize("mode", ["mirror", "soft_delete", "history"])
def test_capabilities_depend_on_the_mode(mode):
    destination = PostgresDestination(URL, mode=mode)
    capabilities = destination.capabilities
    assert capabilities.records_position
    assert capabilities.updates_rows == (mode != "history")
    assert capabilities.allows_copies == (mode != "history")
    for protocol in (ProbedDestination, FolderDestination, DroppingDestination, ReadableDestination):
        assert isinstance(destination, protocol)


def test_a_password_is_never_shown():
    destination = PostgresDestination("postgresql://me:hidden@127.0.0.1/x")
    assert "hidden" not in repr(destination._server)
