"""The section [server]."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import make_config
from penstock.errors import ConfigError

BASE = {"pipeline": {"id": "a"}, "source": {"url": "postgresql://localhost/a"}, "destination": {"type": "memory"}}


def choice(**keys: Any) -> Any:
    return make_config({**BASE, "server": keys}).server


def test_there_is_no_server_by_default_and_then_only_on_this_machine() -> None:
    assert make_config(BASE).server is None
    assert (choice().host, choice().port, choice().token) == ("127.0.0.1", 8321, None)
    assert choice(ready_lag="2min").ready_lag == 120


def test_a_token_is_not_shown() -> None:
    assert "planted" not in repr(choice(token="planted-0123456789"))


@pytest.mark.parametrize(
    "keys",
    [
        {"token": "short"},
        {"token": "short-0123456789-\n"},
        {"token": "short 0123456789"},
        {"token": "shört-0123456789"},
        {"port": 70_000},
        {"tls_key": "a"},
        {"tls_certificate": "a"},
        {"host": ""},
        {"ready_lag": "x"},
    ],
)
def test_wrong_keys_are_refused_without_their_values(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="server") as refused:
        choice(**keys)
    assert "short" not in refused.value.message.replace("should", "")
    assert "0123456789" not in refused.value.message


def test_polling_has_no_server() -> None:
    documents = {"index": {"specification": "x"}, "sink": {"type": "memory"}, "polling": {}, "server": {}}
    with pytest.raises(ConfigError, match=r"\[polling\] has none: remove one of them"):
        make_config({**{key: BASE[key] for key in ("pipeline", "source")}, **documents})
