"""What a check found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.errors import PenstockError, Retry


class Severity(StrEnum):
    """How serious a failed check is."""

    CRITICAL = "critical"
    """Replication will not start, will stop, or will make statements of other sessions fail."""
    WARNING = "warning"
    """Replication works, with a cost or a risk that you should know about."""
    INFO = "info"
    """Good to know."""


class Status(StrEnum):
    """The result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """The check could not run."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `subjects` are all tables, columns or sessions that it is about; `error` is why something failed."""

    id: str
    severity: Severity
    status: Status
    what: str
    remedy: str = ""
    subjects: tuple[str, ...] = ()
    error: PenstockError | None = None

    @property
    def heals(self) -> bool:
        """True if it may be over at the next attempt, without a change."""
        return self.error is not None and self.error.retry is Retry.TIMED

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; its keys are stable."""
        return {
            "id": self.id,
            "severity": self.severity.value,
            "status": self.status.value,
            "what": self.what,
            "remedy": self.remedy,
            "subjects": list(self.subjects),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All findings for one source, in the order of the checks."""

    location: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status is not Status.PASSED)

    @property
    def critical(self) -> tuple[Check, ...]:
        return tuple(
            each for each in self.checks if each.severity is Severity.CRITICAL and each.status is Status.FAILED
        )

    @property
    def ready(self) -> bool:
        """True if no critical check failed; checks that could not run do not count."""
        return not self.critical

    def find(self, id_: str) -> Check | None:
        """The finding of a check; None if it did not apply."""
        return next((check for check in self.checks if check.id == id_), None)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; its keys are stable."""
        return {
            "source": self.location,
            "ready": self.ready,
            "checks": [check.to_dict() for check in self.checks],
        }


def passed(id_: str, what: str, subjects: Sequence[str] = ()) -> Check:
    """A finding that all is well."""
    return Check(id_, Severity.INFO, Status.PASSED, what, "", tuple(subjects))


def failed(
    id_: str,
    severity: Severity,
    what: str,
    remedy: str,
    subjects: Sequence[str] = (),
    error: PenstockError | None = None,
) -> Check:
    """A finding that something is wrong."""
    return Check(id_, severity, Status.FAILED, what, remedy, tuple(subjects), error)


def unknown(id_: str, reason: str) -> Check:
    """A finding that the check could not run."""
    return Check(id_, Severity.WARNING, Status.UNKNOWN, f"could not be checked: {reason}", "")


def listed(names: Sequence[str], limit: int = 5) -> str:
    """The first few names for a sentence, and the number of the others."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def counted(names: Sequence[str], noun: str = "table") -> str:
    """`1 table` or `3 tables`."""
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'}"
