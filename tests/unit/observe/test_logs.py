"""Log lines in both formats."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from penstock.observe import LogFormat, configure_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    logger = logging.getLogger("penstock")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before


def test_lines_are_readable_and_without_secrets() -> None:
    stream = io.StringIO()
    configure_logging("info", LogFormat.TEXT, stream)
    logger = logging.getLogger("penstock.x")
    logger.debug("unseen")
    logger.info("connected url=%s", "postgresql://me:hunter2@h/d")
    line = stream.getvalue()
    assert line.endswith("Z info penstock.x connected url=postgresql://me:***@h/d\n")
    assert "hunter2" not in line
    assert "unseen" not in line


def test_json_lines_are_objects_with_the_exception() -> None:
    stream = io.StringIO()
    configure_logging(logging.DEBUG, LogFormat.JSON, stream)
    try:
        raise ValueError("password=hunter2")
    except ValueError:
        logging.getLogger("penstock.x").exception("failed table=%s", "a.b")
    record = json.loads(stream.getvalue())
    assert (record["level"], record["logger"], record["message"]) == ("error", "penstock.x", "failed table=a.b")
    assert "ValueError" in record["exception"]
    assert "hunter2" not in stream.getvalue()


def test_the_last_set_up_counts() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", LogFormat.TEXT, first)
    configure_logging("info", LogFormat.TEXT, second)
    logging.getLogger("penstock.x").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
