"""Contents that are not what the DDL trigger writes."""

from __future__ import annotations

import json
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from penstock.capture.messages import parse_logical_message
from penstock.errors import DecodeError
from penstock.source.ddl_messages import parse_announcement, parse_rewrite

GENUINE = {
    "table": 1,
    "namespace": "public",
    "name": "t",
    "kind": "r",
    "persistence": "p",
    "identity": "d",
    "partition": False,
    "primary_key": [1],
    "deferrable": False,
    "identity_key": [1],
    "attributes": [[1, "id", 23, -1, False, "", True, False]],
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(GENUINE)), ANYTHING, max_size=3))
def test_content_is_read_or_refused_as_malformed(wrong: dict[str, object]) -> None:
    for parse in (parse_announcement, parse_rewrite):
        with suppress(DecodeError):
            parse(json.dumps(GENUINE | wrong).encode())


@given(st.binary(max_size=50))
def test_bytes_are_refused_as_malformed(content: bytes) -> None:
    for parse in (parse_announcement, parse_rewrite):
        with suppress(DecodeError):
            parse(content)


def test_deep_nesting_is_refused() -> None:
    for parse in (parse_announcement, parse_rewrite):
        with suppress(DecodeError):
            parse(b"[" * 100_000)


def test_a_prefix_in_another_encoding_is_read() -> None:
    message = parse_logical_message(b"M\x01" + bytes(8) + b"caf\xe9\0" + bytes(4))
    assert message.prefix == "caf\ufffd"
