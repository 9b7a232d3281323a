"""What the server knows of its pipeline: the last moment, the last hour, and the status.

A thread takes a sample every second from what the process has in memory. The status (`penstock.operations.status`)
queries the source and the state, so it is loaded only if somebody asks, and at most every few seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from penstock.capture import CaptureStatus, Reading
from penstock.config import Config
from penstock.config.units import format_bytes, format_seconds
from penstock.errors import PenstockError
from penstock.observe import redact, scrub
from penstock.operations.lag import Behind
from penstock.operations.progress import OutputLook, format_time
from penstock.operations.running import Running
from penstock.operations.status import pipeline_status
from penstock.operations.status_model import PipelineStatus
from penstock.operations.verify_process import VerifyProcess

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 1.0
STALL_SECONDS = 7.0
"""A pipeline that has something to do and did nothing for this long is not ready."""
HISTORY_SECONDS = 3600.0
HISTORY_STEP = 5.0
STATUS_SECONDS = 5.0
"""The status is at most this old when it is asked for, unless loading it takes long."""
STATUS_SHARE = 4
"""Loading it takes at most a fifth of the time."""
STATUS_PATIENCE = 1.0
"""How long a client waits for a new status before it gets the last one: Prometheus gives up after some seconds."""

_FREE_TEXT = frozenset({"reason", "solution", "hint", "error", "failing", "text", "last_run", "last_end", "blockers"})


@dataclass(frozen=True, slots=True)
class OutputMoment:
    """One output at one moment."""

    output: str
    state: str
    """streaming, paused, waiting or stopped."""
    reason: str | None
    """Why it waits or has stopped."""
    changes: int
    changes_per_second: float
    applied: Behind | None
    acknowledged: Behind | None
    phases: Mapping[str, int]
    """Number of tables by phase."""
    copied_bytes: int
    """Of the copies in progress."""
    unmoved_seconds: float
    """How long nothing has moved although there is something to do; 0 if it moves."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The pipeline at one moment."""

    at: float
    """Unix time."""
    capture: CaptureStatus | None
    received: Behind | None
    """How far capture is behind the server."""
    outputs: tuple[OutputMoment, ...]
    unready: tuple[str, ...]
    """Why the pipeline is not ready; empty if it is."""


class Unmoved:
    """Measures for how long something has not moved although it should."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since: float | None = None

    def seconds(self, now: float, position: object, *, is_idle: bool) -> float:
        """Return for how long `position` is the same; 0 while there is nothing to do."""
        if is_idle or self._since is None or position != self._seen:
            self._seen, self._since = position, now
        return now - self._since


class Monitor:
    """Watches one running pipeline; a context manager, inside of which its thread runs."""

    def __init__(self, config: Config, running: Running, clock: Callable[[], float] = time.time) -> None:
        self.config = config
        self.running = running
        self._clock = clock
        self._unmoved: dict[str, Unmoved] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=int(HISTORY_SECONDS / HISTORY_STEP))
        self._status: tuple[float, PipelineStatus] | None = None
        """The last status, and until when it is new enough."""
        self._lock = threading.Lock()
        self._loading: Future[PipelineStatus] | None = None
        self.verifying = VerifyProcess()
        self.ending = threading.Event()
        """Set when the pipeline stops: pages that follow it are let go."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self.moment = Moment(clock(), None, None, (), ("starting",))

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(2)
        self.verifying.stop()

    @property
    def is_ready(self) -> bool:
        """False also if no sample was taken for long."""
        return not self.unready

    @property
    def unready(self) -> tuple[str, ...]:
        """Why the pipeline is not ready."""
        moment = self.moment
        if self._clock() - moment.at > STALL_SECONDS:
            return ("the process does not report its state",)
        return moment.unready

    @property
    def history(self) -> list[dict[str, Any]]:
        """The last hour, oldest first."""
        return list(self._history)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The last events, newest first."""
        return [
            self.discreet(
                {
                    "at": format_time(at),
                    "event": each.event,
                    "output": each.output,
                    "table": each.table,
                    "text": each.text,
                }
            )
            # Not in the order in which they were noticed: a table may have stopped before this process started.
            for at, each in sorted(self.running.events, key=lambda event: event[0])[::-1]
        ]

    def status(self) -> PipelineStatus:
        """The status, at most a few seconds old; older if loading it takes longer than a client may wait."""
        known = self._status
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        loading = self._load(known)
        try:
            return loading.result(None if known is None else STATUS_PATIENCE)
        except TimeoutError:
            if known is None:
                raise
            return known[1]

    def _load(self, known: tuple[float, PipelineStatus] | None) -> Future[PipelineStatus]:
        """Load a status newer than this one, in a thread; all who ask meanwhile get the same."""
        with self._lock:
            if self._loading is None or (self._loading.done() and self._status is known):
                self._loading = Future()
                threading.Thread(target=self._finish, args=(self._loading,), name="status", daemon=True).start()
            return self._loading

    def _finish(self, loading: Future[PipelineStatus]) -> None:
        begun = time.monotonic()
        try:
            found = pipeline_status(self.config, running_here=self.running.outputs)
        except BaseException as error:
            loading.set_exception(error)
            return
        took = time.monotonic() - begun
        # With thousands of tables, or while the source is slow, loading must not fill the time.
        self._status = (begun + took + max(STATUS_SECONDS, STATUS_SHARE * took), found)
        loading.set_result(found)

    def discreet(self, value: Any, name: str = "") -> Any:
        """Remove secrets from free text in plain values; names and numbers stay as they are."""
        if isinstance(value, str):
            return redact(scrub(value, self.config.secrets)) if name in _FREE_TEXT else value
        if isinstance(value, Mapping):
            return {key: self.discreet(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            inner = "text" if name == "problems" else name
            return [self.discreet(each, inner) for each in value]
        return value

    def _run(self) -> None:
        recorded = 0.0
        while not self._stop.wait(SAMPLE_SECONDS):
            try:
                self.moment = self.look()
                if self.moment.at - recorded >= HISTORY_STEP:
                    recorded = self.moment.at
                    self._history.append(history_point(self.moment))
            except Exception:
                # The state of the last sample gets old, which makes the pipeline not ready.
                logger.warning("cannot take a sample of the pipeline", exc_info=True)

    def look(self) -> Moment:
        """Take a sample."""
        now = self._clock()
        looked_at, looks = self.running.last
        capture = self.running.capture
        captured = None if capture is None else capture.captured
        received = self.running.received
        outputs = tuple(self._output(now, look) for look in looks)
        idle = received is None or received.bytes == 0
        stuck = self._unmoved_seconds("", now, captured, is_idle=idle)
        unready = list(unready_reasons(outputs, self.config.server.ready_lag if self.config.server else 60.0))
        if now - looked_at > STALL_SECONDS or not looks:
            unready.append("the process does not report its state")
        if self.running.source_age > STALL_SECONDS:
            unready.append(f"the source has not answered for {format_seconds(self.running.source_age)}")
        if capture is not None and capture.reading is not Reading.STREAMING:
            unready.append(f"capture: {capture.reading.value}")
        elif received is not None and stuck > STALL_SECONDS and received.seconds > STALL_SECONDS:
            unready.append(f"capture has received nothing for {format_seconds(stuck)}")
        return Moment(now, capture, received, outputs, tuple(unready))

    def _output(self, now: float, look: OutputLook) -> OutputMoment:
        copied = sum(copy.bytes_done for copy in look.copies)
        position = (str(look.applied), look.changes, copied)
        # While the source is away, nothing new arrives: that is not this output's fault.
        idle = look.paused or look.lag is None or look.lag.bytes == 0
        phases: dict[str, int] = {}
        for phase in look.phases.values():
            phases[phase.name] = phases.get(phase.name, 0) + 1
        return OutputMoment(
            output=look.output,
            state=_state(look),
            reason=self.discreet(look.error or (look.outage.reason if look.outage else None), "reason"),
            changes=look.changes,
            changes_per_second=round(look.changes_per_second, 1),
            applied=look.lag,
            acknowledged=look.acknowledged,
            phases=phases,
            copied_bytes=copied,
            unmoved_seconds=self._unmoved_seconds(look.output, now, position, is_idle=idle),
        )

    def _unmoved_seconds(self, name: str, now: float, position: object, *, is_idle: bool) -> float:
        return self._unmoved.setdefault(name, Unmoved()).seconds(now, position, is_idle=is_idle)


def unready_reasons(outputs: Sequence[OutputMoment], ready_lag: float) -> list[str]:
    """Say why outputs are not ready: stopped, paused, waiting, without a table, stalled, or too far behind."""
    found: list[str] = []
    for each in outputs:
        lag = each.applied
        if each.state != "streaming":
            found.append(f"{each.output}: {each.state}")
        elif set(each.phases) == {"errored"}:
            found.append(f"{each.output}: every table has stopped")
        elif lag is not None and each.unmoved_seconds > STALL_SECONDS:
            what = f"nothing was applied for {format_seconds(each.unmoved_seconds)}"
            found.append(f"{each.output}: {what}, and {format_bytes(lag.bytes)} of WAL wait")
        elif lag is not None and lag.seconds > ready_lag:
            found.append(f"{each.output}: the lag is {format_seconds(lag.seconds)}")
    return found


def history_point(moment: Moment) -> dict[str, Any]:
    """A sample as plain values, small enough to keep hundreds of them."""
    return {
        "at": round(moment.at, 1),
        "received_lag_bytes": None if moment.received is None else moment.received.bytes,
        "outputs": {
            each.output: {
                "changes_per_second": each.changes_per_second,
                "lag_bytes": None if each.applied is None else each.applied.bytes,
                "lag_seconds": None if each.applied is None else round(each.applied.seconds, 1),
            }
            for each in moment.outputs
        },
    }


def describe(monitor: Monitor) -> dict[str, Any]:
    """The last moment as plain values, for the API and the page."""
    moment = monitor.moment
    capture = moment.capture
    headroom, verifying = monitor.running.headroom, monitor.verifying.progress
    return {
        "at": round(moment.at, 1),
        "pipeline": monitor.config.pipeline.id,
        "ready": monitor.is_ready,
        "unready": list(monitor.unready),
        "capture": {
            "state": None if capture is None else capture.reading.value,
            "position": None if capture is None or capture.captured is None else str(capture.captured),
            "lag": _lag(moment.received),
        },
        "spool": None if headroom.spool is None else {"used": headroom.spool.used, "left": headroom.spool.left},
        "wal": None if headroom.wal is None else {"used": headroom.wal.used, "left": headroom.wal.left},
        "outputs": [
            {
                "output": each.output,
                "state": each.state,
                "reason": each.reason,
                "changes": each.changes,
                "changes_per_second": each.changes_per_second,
                "applied_lag": _lag(each.applied),
                "acknowledged_lag": _lag(each.acknowledged),
                "phases": dict(each.phases),
            }
            for each in moment.outputs
        ],
        "verifying": None if verifying is None else asdict(verifying),
    }


def load_status(monitor: Monitor) -> PipelineStatus | None:
    """The status, or None if it cannot be loaded; the reason is logged."""
    try:
        return monitor.status()
    except PenstockError as error:
        logger.warning("cannot load the status error=%s", error)
        return None


def _lag(behind: Behind | None) -> dict[str, Any] | None:
    return None if behind is None else {"bytes": behind.bytes, "seconds": round(behind.seconds, 1)}


def _state(look: OutputLook) -> str:
    if look.error is not None:
        return "stopped"
    if look.paused:
        return "paused"
    return "streaming" if look.outage is None else "waiting"
