"""What a run leaves for `penstock status`: a small file in the spool, replaced every second.

Phases and positions are in the state; how far a copy is, how many changes go through and how far behind they are is
known only to the process that runs. After its end the file says how it was last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.cli.display import Interval
from penstock.cli.progress import OutputLook, copy_facts
from penstock.spool.folder import SpoolFolder, read_file, replace_file

WRITE_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LastLook:
    """An output, as the process that runs it saw it last."""

    at: float
    """Unix time."""
    paused: bool
    changes: int
    changes_per_second: float
    position: str
    lag_bytes: int | None
    lag_seconds: float | None
    phases: Mapping[str, str] = field(default_factory=dict[str, str])
    """By table; also those that are not stored."""
    copies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """By table: the copies that were under way."""


class StatusFile:
    """Written by one process, read by any."""

    def __init__(self, spool: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = SpoolFolder(spool).status
        self._clock = clock
        self._interval = Interval(WRITE_SECONDS)
        self._is_new = True

    def write(self, looks: Sequence[OutputLook]) -> None:
        """Replace it, unless it was replaced a moment ago. A disk that is full is not its business."""
        if not looks or not (self._is_new or self._interval.is_over()):
            return
        self._is_new = False
        try:
            replace_file(self._path, {look.output: asdict(self._last(look)) for look in looks})
        except OSError as error:
            logger.debug("the status could not be written error=%s", error)

    def read(self) -> dict[str, LastLook]:
        """The last looks by output; none if there is no file, or one that cannot be understood."""
        try:
            return {output: LastLook(**values) for output, values in (read_file(self._path) or {}).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.debug("the status could not be read error=%s", error)
            return {}

    def _last(self, look: OutputLook) -> LastLook:
        return LastLook(
            at=self._clock(),
            paused=look.paused,
            changes=look.changes,
            changes_per_second=round(look.changes_per_second, 1),
            position=str(look.applied),
            lag_bytes=None if look.behind is None else look.behind.bytes,
            lag_seconds=None if look.behind is None else round(look.behind.seconds, 1),
            phases={table: phase.name for table, phase in look.phases.items()},
            copies={copy.table: copy_facts(copy) for copy in look.copies},
        )
