"""Names and texts inside of SQL and replication commands."""

from __future__ import annotations

import pytest

from penstock.schema import fold_case, quote_identifier, quote_literal


@pytest.mark.parametrize(("name", "quoted"), [("orders", '"orders"'), ('a"b', '"a""b"'), ("", '""'), ("a'b", '"a\'b"')])
def test_identifiers_are_quoted_and_quotes_doubled(name: str, quoted: str) -> None:
    assert quote_identifier(name) == quoted


@pytest.mark.parametrize(("text", "quoted"), [("on", "'on'"), ("it's", "'it''s'"), ("", "''"), ('"a"', "'\"a\"'")])
def test_literals_are_quoted_and_quotes_doubled(text: str, quoted: str) -> None:
    assert quote_literal(text) == quoted


@pytest.mark.parametrize("letters", ["aA", "sſS", "kK\u212a", "iİıI", "µμΜ", "ςσΣ", "ßẞ", "éÉ", "ǆǅǄ"])
def test_letters_that_spark_takes_for_the_same_are_folded_to_one(letters: str) -> None:
    assert len({fold_case(f"a{letter}b") for letter in letters}) == 1


def test_other_letters_stay_apart() -> None:
    assert fold_case("é") != fold_case("e\u0301")
    assert fold_case("ß") != fold_case("ss")
    assert len(fold_case("🚰ŉﬁ")) == 3
