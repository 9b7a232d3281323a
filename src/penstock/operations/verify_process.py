"""A comparison in a child process, for the server of a running pipeline.

The child does what `penstock verify` does, at a low priority. The pipeline shares neither its interpreter nor its
memory, and survives whatever happens to it. The child reads its request from standard input, which stays open as a sign
of life: when the pipeline's process ends, even by SIGKILL, the child reads end-of-file and stops as after SIGTERM. It
reports its progress on standard output, one JSON object per line.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from penstock.comparison.report import TableReport
from penstock.comparison.verification import Observer
from penstock.errors import PenstockError, SnapshotBlocked, with_hint
from penstock.lsn import Lsn
from penstock.observe import configure_logging, redact, scrub
from penstock.operations.signals import Ending
from penstock.operations.verify import VerifyRequest, remember_failure, require_comparable, verify_elsewhere
from penstock.source.slots import Blocker, name_blockers
from penstock.state import Store

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""A child that has not ended this long after it was told to is killed; the pipeline then ends its hold itself."""
LOW_PRIORITY = 10
_REPORT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """A comparison that runs."""

    requested_by: str
    since: float
    """Unix time."""
    step: str = "starting"
    """starting, waiting, held or comparing."""
    text: str = ""
    """What it waits for."""
    table: str | None = None
    """The table that is being compared."""
    fraction: float = 0.0
    """How much of that table."""
    compared: int = 0
    """Tables that are done."""


class VerifyProcess:
    """Runs at most one comparison at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._progress: VerifyProgress | None = None

    @property
    def progress(self) -> VerifyProgress | None:
        """The comparison that runs; None if none does."""
        return self._progress

    def start(self, request: VerifyRequest, stores: Mapping[str, Store]) -> VerifyProgress:
        """Start a comparison; raise if one runs, or if this one cannot succeed."""
        with self._lock:
            if self._progress is not None:
                raise PenstockError("a comparison runs already", hint="Wait until it has ended.")
            require_comparable(request, stores)
            begun = VerifyProgress(request.requested_by or "", time.time())
            self._child = start_child()
            self._progress = begun
            self._thread = threading.Thread(
                target=self._follow, args=(self._child, request), name="verify", daemon=True
            )
            self._thread.start()
            return begun

    def stop(self) -> None:
        """End a comparison that runs."""
        child, thread = self._child, self._thread
        if child is None or thread is None:
            return
        with suppress(OSError):
            child.terminate()
        thread.join(STOP_SECONDS)
        if child.poll() is None:
            with suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            thread.join(STOP_SECONDS)

    def _follow(self, child: subprocess.Popen[bytes], request: VerifyRequest) -> None:
        """Read the reports of the child until it ends."""
        reason = None
        try:
            with child:
                assert child.stdin is not None
                assert child.stdout is not None
                with suppress(BrokenPipeError):
                    os.write(child.stdin.fileno(), base64.b64encode(pickle.dumps(request)) + b"\n")
                for line in child.stdout:
                    reason = self._take(json.loads(line), reason)
            if child.returncode < 0 and reason is None:
                reason = f"the process of the comparison was ended by signal {-child.returncode}"
            elif child.returncode and reason is None:
                reason = "the process of the comparison failed; the log has the reason"
        except Exception as error:  # of this thread alone: the pipeline does not depend on it
            reason = f"unexpected {type(error).__name__}"
            logger.warning("a comparison was not followed to its end", exc_info=True)
        finally:
            if reason is not None:
                reason = redact(scrub(reason, request.config.secrets))
                logger.warning("a comparison failed reason=%s", reason)
                remember_failure(request, reason)
            self._progress = None

    def _take(self, report: dict[str, Any], reason: str | None) -> str | None:
        """Take over a report; return why the comparison failed, if it says so."""
        if "failed" in report:
            return report["failed"]
        if self._progress is not None:
            self._progress = replace(self._progress, **report)
        return reason


def start_child() -> subprocess.Popen[bytes]:
    """Start the child; it waits for its request."""
    command = [sys.executable, "-m", "penstock.operations.verify_process"]
    # Destinations of people's own are found where this process finds them.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    # In its own process group: Ctrl-C in a terminal goes to the parent, which then stops the child.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0, env=environment)


def run_child() -> int:
    """The child's main function."""
    os.nice(LOW_PRIORITY)
    # Reports have a descriptor of their own: what libraries print goes to standard error.
    reports = os.dup(1)
    os.dup2(2, 1)
    request: VerifyRequest = pickle.loads(base64.b64decode(sys.stdin.buffer.readline()))
    configure_logging(request.config.log.level, request.config.log.format)
    threading.Thread(target=_end_with_parent, daemon=True, name="parent").start()
    observer = _Reporting(reports)
    with Ending() as ending:
        try:
            verify_elsewhere(request, ending, observing=lambda: nullcontext(observer))
        except PenstockError as error:
            observer.write({"failed": "it was stopped" if ending.stop.is_set() else with_hint(error)})
        except Exception as error:
            # Not its text: libraries quote values in their messages.
            observer.write({"failed": f"unexpected {type(error).__name__}"})
        return 0
    observer.write({"failed": "it was stopped"})
    return 0


class _Reporting(Observer):
    """Writes the progress for the parent."""

    def __init__(self, reports: int) -> None:
        self._reports = reports
        self._compared = 0
        self._reported = ("", 0.0)

    def write(self, report: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):
            os.write(self._reports, json.dumps(report).encode() + b"\n")

    def blocked(self, error: SnapshotBlocked) -> None:
        self.write({"step": "waiting", "text": error.message})

    def going_around(self, error: SnapshotBlocked) -> None:
        self.write({"step": "waiting", "text": error.message})

    def waiting(self, blockers: list[Blocker]) -> None:
        self.write({"step": "waiting", "text": f"open transactions: {name_blockers(blockers)}"})

    def held(self, position: Lsn, *, until_the_end: bool) -> None:
        text = "changes wait until the comparison ends" if until_the_end else ""
        self.write({"step": "held", "text": text})

    def released(self, seconds: float) -> None:
        self.write({"step": "comparing", "text": ""})

    def comparing(self, table: str, fraction: float) -> None:
        last, at = self._reported
        if table != last or time.monotonic() - at > _REPORT_SECONDS:
            self._reported = table, time.monotonic()
            self.write({"step": "comparing", "table": table, "fraction": round(fraction, 3)})

    def compared(self, report: TableReport) -> None:
        self._compared += 1
        self.write({"compared": self._compared})


def _end_with_parent() -> None:
    """Stop when standard input ends, as it does when the parent ends or is killed."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(run_child())
