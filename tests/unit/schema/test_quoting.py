"""Names and texts inside of SQL and replication commands."""

from __future__ import annotations

import pytest

from penstock.schema import quote_identifier, quote_literal


@pytest.mark.parametrize(("name", "quoted"), [("orders", '"orders"'), ('a"b', '"a""b"'), ("", '""'), ("a'b", '"a\'b"')])
def test_identifiers_are_quoted_and_quotes_doubled(name: str, quoted: str) -> None:
    assert quote_identifier(name) == quoted


@pytest.mark.parametrize(("text", "quoted"), [("on", "'on'"), ("it's", "'it''s'"), ("", "''"), ('"a"', "'\"a\"'")])
def test_literals_are_quoted_and_quotes_doubled(text: str, quoted: str) -> None:
    assert quote_literal(text) == quoted
