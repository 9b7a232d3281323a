"""Log lines for people (text) or for machines (one JSON object per line), on standard error, without secrets.

Messages are lowercase prose followed by `key=value`; the formatter masks whatever looks like a password, tracebacks
included, as a second net below `SourceSettings` and the named errors.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

from penstock.observe.batches import current_batch
from penstock.observe.redact import redact
from penstock.observe.terminal import one_line, printable

ROOT_LOGGER = "penstock"


class LogFormat(StrEnum):
    """How a line looks."""

    TEXT = "text"
    JSON = "json"


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z info penstock.source.slots slot created slot=…`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname.lower()} {record.name} {one_line(record.getMessage())}"
        if record.exc_info and record.exc_info[0] is not None:
            line = f"{line}\n{printable(self.formatException(record.exc_info))}"
        return redact(line)


class JsonFormatter(logging.Formatter):
    """One object per line: `time`, `level`, `logger`, `message`, `process`, and `exception` if there is one.

    A line about a batch whose trace is sent has its `trace_id`.
    A record with `extra={"facts": {…}}` has these as fields, too.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            "process": record.process,
        }
        if (batch := current_batch()) is not None and batch.trace_id is not None:
            fields["trace_id"] = batch.trace_id
        facts: dict[str, object] = getattr(record, "facts", {})
        fields |= {name: redact(value) if isinstance(value, str) else value for name, value in facts.items()}
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = redact(self.formatException(record.exc_info))
        return printable(json.dumps(fields, ensure_ascii=False))


def configure_logging(
    level: int | str = logging.INFO, format_: LogFormat = LogFormat.TEXT, stream: TextIO | None = None
) -> None:
    """Send Penstock's log lines to a stream (standard error by default). May be called again; the last call counts.

    Only the logger `penstock` is set up: a program that uses the library keeps its own logging.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format_ is LogFormat.JSON else TextFormatter())
    logger = logging.getLogger(ROOT_LOGGER)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    logger.propagate = False


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
