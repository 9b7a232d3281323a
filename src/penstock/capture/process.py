"""Capture as a child process, and its supervisor.

The child has its own interpreter, so decoding never waits for the parent. It reads its settings from standard input,
which stays open as a sign of life: when the parent ends, even by SIGKILL, the child reads end-of-file and exits. It
reports its state on standard output, one JSON object per line, and logs to standard error.

The supervisor restarts the child after an error that may pass, and keeps the error otherwise.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from penstock.capture.engine import Capture, CaptureSettings, CaptureStatus, Reading
from penstock.errors import CaptureStopped, PenstockError, Retry, SpoolDiskFull
from penstock.lsn import Lsn, reaches
from penstock.retry import Backoff
from penstock.spool.folder import naming_full_disk

logger = logging.getLogger(__name__)

STOP_SECONDS = 30.0
"""A child that has not stopped after this long is killed; the spool tolerates that."""
FRUITLESS_RESTARTS = 6
"""The supervisor gives up after this many restarts in a row that captured nothing."""
HEALTHY_SECONDS = 600.0
"""A child that ran for this long starts the count over: on an idle server there is nothing to capture."""
CHILD_SETTINGS = {
    # Returning blocks of some megabytes to the kernel each time costs a tenth of the CPU time.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    # Starting threads for linear algebra, which is not used, takes a fifth of the child's start.
    "OPENBLAS_NUM_THREADS": "1",
}
"""Defaults for the child's environment."""


class CaptureProcess:
    """The supervisor; use it as a context manager."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._backoff = Backoff(first=0.2, longest=15.0)
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._status = CaptureStatus(Reading.CONNECTING)
        self._captured: Lsn | None = None
        """The last reported position; a child that just started reports none."""
        self._error: PenstockError | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self.restarts = 0

    def __enter__(self) -> CaptureProcess:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def status(self) -> CaptureStatus:
        """The last report. Raises the error that ended capture for good."""
        self.check()
        return self._status

    @property
    def last_status(self) -> CaptureStatus:
        """The last report, also of a capture that has ended."""
        return self._status

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the child and watch it."""
        if self._thread is not None:
            raise RuntimeError("capture has already been started")
        self._thread = threading.Thread(target=self._supervise, name="capture-supervisor", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended capture for good, if there is one."""
        if self._error is not None:
            raise self._error

    def wait_until_streaming(self, timeout: float = 60.0) -> CaptureStatus:
        """Wait until capture reads the slot; raise what prevents it, even if capture still retries."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._status.reading not in (Reading.STREAMING, Reading.SPOOL_FULL, Reading.DISK_FULL):
                self.check()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise self._status.error or CaptureStopped("capture did not connect in time")
            return self._status

    def wait_captured(self, position: Lsn, timeout: float) -> bool:
        """Wait until everything before a boundary is in the spool; False on timeout."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._captured is None or not reaches(self._captured, position):
                self.check()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return True

    def stop(self) -> None:
        """Stop the child: it publishes complete transactions, answers the server and exits."""
        self._stopping.set()
        child = self._child
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("capture does not stop, killing it pid=%d", child.pid)
                child.kill()
        if self._thread is not None:
            self._thread.join()

    def _supervise(self) -> None:
        try:
            self._keep_running()
        except BaseException as error:
            # Otherwise nothing would show it: the status would stay as it was.
            logger.exception("the supervisor of capture failed")
            self._fail(CaptureStopped(f"capture cannot be supervised: an unexpected {type(error).__name__}"))

    def _keep_running(self) -> None:
        fruitless = 0
        while not self._stopping.is_set():
            captured, begun = self._captured, time.monotonic()
            error = self._run_child()
            if self._stopping.is_set():
                break
            if not isinstance(error, SpoolDiskFull):
                has_worked = self._captured != captured or time.monotonic() - begun >= HEALTHY_SECONDS
                fruitless = 0 if has_worked else fruitless + 1
            if error.retry is not Retry.TIMED or self._settings.temporary or fruitless >= FRUITLESS_RESTARTS:
                self._fail(error)
                return
            delay = self._backoff.next_delay()
            self.restarts += 1
            logger.warning("capture ended, restarting it in=%.1fs error=%s", delay, error)
            self._update(CaptureStatus(Reading.RETRYING, self._status.captured, self._status.acknowledged, error=error))
            self._stopping.wait(delay)
        self._update(CaptureStatus(Reading.STOPPED, self._status.captured, self._status.acknowledged))

    def _run_child(self) -> PenstockError:
        """Run a child until it ends; return why it ended."""
        try:
            return self._run_started_child()
        except OSError as error:
            # No process or no pipe: the machine lacks a resource now, and may have it at the next attempt.
            return CaptureStopped(f"the capture process could not be started: {error.strerror or error}")

    def _run_started_child(self) -> PenstockError:
        with start_child() as child:
            self._child = child
            if self._stopping.is_set():
                child.terminate()
            assert child.stdin is not None
            assert child.stdout is not None
            error: PenstockError | None = None
            # Unbuffered: data left in a buffer when the child is gone would fail again on close.
            with contextlib.suppress(BrokenPipeError):
                os.write(child.stdin.fileno(), base64.b64encode(pickle.dumps(self._settings)) + b"\n")
            for line in child.stdout:
                report = _read_report(line)
                if isinstance(report, CaptureStatus):
                    if report.reading is Reading.STREAMING:
                        self._backoff.reset()
                    self._update(report)
                elif report is not None:
                    error = report
            code = child.wait()
        return error or CaptureStopped(f"the capture process ended unexpectedly ({_describe_exit(code)})", code=code)

    def _update(self, status: CaptureStatus) -> None:
        with self._changed:
            self._status = status
            self._captured = status.captured or self._captured
            self._changed.notify_all()

    def _fail(self, error: PenstockError) -> None:
        logger.error("capture stopped error=%s", error)
        with self._changed:
            self._error = error
            self._changed.notify_all()


def start_child() -> subprocess.Popen[bytes]:
    """Start the child; it waits for its settings."""
    command = [sys.executable, "-m", "penstock.capture"]
    environment = CHILD_SETTINGS | os.environ
    # In its own process group: Ctrl-C in a terminal goes to the parent, which then stops the child cleanly.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0, env=environment)


def run_child() -> int:
    """The child's main function."""
    # Imported modules stay until the end: keep them out of garbage collection.
    gc.freeze()
    logging.basicConfig(level=logging.WARNING, handlers=[_ToParent()])
    # The parent shows what its own level lets through.
    logging.getLogger("penstock").setLevel(logging.INFO)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings: CaptureSettings = pickle.loads(base64.b64decode(sys.stdin.buffer.readline()))
    stop = threading.Event()
    connected = False

    def report(status: CaptureStatus) -> None:
        nonlocal connected
        connected = status.reading not in (Reading.CONNECTING, Reading.RETRYING)
        _write_status(status)

    def terminate(*_: object) -> None:
        stop.set()
        if not connected:
            # It may be waiting for the server and has nothing to finish; the spool tolerates that.
            os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
    threading.Thread(target=_exit_with_parent, daemon=True, name="parent").start()
    try:
        with naming_full_disk(settings.spool.path):
            Capture(settings, stop, report).run()
    except PenstockError as error:
        _write_line({"error": _dump(error)})
        return 1
    except Exception as error:
        # Neither its text nor a traceback: libraries quote values in their messages.
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-8:]))
        logger.error("capture failed error=%s at=%s", type(error).__name__, where)
        return 1
    return 0


def _exit_with_parent() -> None:
    """Exit when standard input ends, as it does when the parent ends or is killed."""
    while os.read(0, 4096):
        pass
    os._exit(3)


def _write_status(status: CaptureStatus) -> None:
    _write_line(
        {
            "reading": status.reading.value,
            "captured": None if status.captured is None else str(status.captured),
            "acknowledged": None if status.acknowledged is None else str(status.acknowledged),
            "unreleased_bytes": status.unreleased_bytes,
            "why": None if status.error is None else _dump(status.error),
        }
    )


class _ToParent(logging.Handler):
    """Sends log lines to the parent, which logs them in its own format and above its progress."""

    def __init__(self) -> None:
        super().__init__()
        # The parent adds the level and the name; `basicConfig` would set a format that has them.
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        _write_line({"log": self.format(record), "level": record.levelno, "logger": record.name})


def _write_line(record: dict[str, Any]) -> None:
    # One write: several threads log.
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _read_report(line: bytes) -> CaptureStatus | PenstockError | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    try:
        if "log" in record:
            logging.getLogger(record["logger"]).log(record["level"], "%s", record["log"])
            return None
        if "error" in record:
            return _load(record["error"])
        return CaptureStatus(
            reading=Reading(record["reading"]),
            captured=None if record["captured"] is None else Lsn.parse(record["captured"]),
            acknowledged=None if record["acknowledged"] is None else Lsn.parse(record["acknowledged"]),
            unreleased_bytes=record["unreleased_bytes"],
            error=None if record["why"] is None else _load(record["why"]),
        )
    except Exception as error:  # unpickling may raise anything
        return CaptureStopped(f"a report of the capture process cannot be read: {type(error).__name__}")


def _dump(error: PenstockError) -> str:
    return base64.b64encode(pickle.dumps(error)).decode()


def _load(text: str) -> PenstockError:
    return pickle.loads(base64.b64decode(text))


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
