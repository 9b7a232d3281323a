"""Secrets are masked wherever they turn up."""

from __future__ import annotations

import pytest

from penstock.observe import redact, scrub


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:PASS@h:5432/d",
        "see postgres://me:PA@SS@h/d now",
        "postgresql://me:PA/SS@h/d",
        "postgresql://h/d?password=PASS&sslmode=require",
        "host=h password=PASS dbname=d",
        "host=h password = 'PA SS' dbname=d",
        r"password='PA\'SS'",
        "sslpassword=PASS",
    ],
)
def test_what_looks_like_a_password_is_masked(text: str) -> None:
    masked = redact(text)
    assert "PA" not in masked
    assert "SS" not in masked.replace("SSL", "")
    assert "***" in masked


@pytest.mark.parametrize("text", ["postgresql://h:5432/d", "no secrets at 10:30 by me@example.com", "password reset"])
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


def test_known_secrets_are_removed_and_short_ones_only_as_words() -> None:
    assert scrub("a long-secret-1 in text", ["long-secret-1"]) == "a *** in text"
    assert scrub("cat catalog 'cat'", ["cat", ""]) == "*** catalog '***'"
