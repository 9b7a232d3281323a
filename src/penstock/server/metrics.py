"""Metrics for Prometheus: made at each scrape from the monitor, the status and the tallies of the outputs.

Names and units follow Prometheus' conventions; docs/reference/metrics.md lists them all. Labels are bounded: at most
`server.metric_tables` tables of an output have counters of their own, the first ones that change. The others are added
up under `table=""`. A table keeps its counters, because a counter must not become smaller.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest

from penstock.capture import Reading
from penstock.headroom import Room
from penstock.observe.tally import Distribution
from penstock.operations.lag import Behind
from penstock.operations.status_model import PipelineStatus
from penstock.operations.verify import verifications
from penstock.output import RunningOutput
from penstock.server.monitor import Monitor, load_status
from penstock.server.openapi import package_version

__all__ = ["CONTENT_TYPE", "Metrics"]

STATES = ("streaming", "paused", "waiting", "stopped")
PHASES = ("init", "data_sync", "finished_copy", "sync_wait", "catchup", "sync_done", "ready", "errored")


class Metrics:
    """A registry of its own for one pipeline."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._counted: dict[str, set[str]] = {}
        """By output: the tables that have counters of their own."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing: a registry otherwise collects once to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; called at each scrape."""
        status = load_status(self._monitor)
        yield InfoMetricFamily(
            "penstock_pipeline",
            "The pipeline and its version.",
            {"pipeline": self._monitor.config.pipeline.id, "version": package_version()},
        )
        yield from self._pipeline()
        yield from self._outputs()
        yield from self._tallies()
        yield from self._tables(status)
        if status is not None:
            yield from _slot(status)
            yield from _indexes(status)
        yield from self._verifications()

    def _pipeline(self) -> Iterator[Metric]:
        moment, running = self._monitor.moment, self._monitor.running
        yield _gauge("penstock_ready", "1 if the pipeline streams and its lag is below server.ready_lag.").of(
            float(self._monitor.is_ready)
        )
        yield _gauge("penstock_source_last_answer_seconds", "Time since the source last answered.").of(
            running.source_age
        )
        states = _gauge("penstock_capture_state", "1 for the state that capture is in.", "state")
        for each in Reading:
            states.of(float(moment.capture is not None and moment.capture.reading is each), each.value)
        yield states
        yield from _lag_pair("received", "capture", {"": moment.received}, labelled=False)
        headroom = running.headroom
        yield from _room("penstock_spool", "the spool", headroom.spool)
        yield from _room("penstock_wal", "WAL that the server may retain for the slot", headroom.wal)
        yield _gauge(
            "penstock_children_resident_memory_bytes",
            "Memory of child processes: capture, Spark's JVM and its workers.",
        ).of(children_memory())

    def _outputs(self) -> Iterator[Metric]:
        moment = self._monitor.moment
        states = _gauge("penstock_output_state", "1 for the state that an output is in.", "output", "state")
        phases = _gauge("penstock_tables", "Tables by phase.", "output", "phase")
        stalled = _gauge(
            "penstock_stalled_seconds",
            "For how long nothing was applied although changes wait; 0 if they are applied.",
            "output",
        )
        for each in moment.outputs:
            for state in STATES:
                states.of(float(each.state == state), each.output, state)
            for phase in PHASES:
                phases.of(each.phases.get(phase, 0), each.output, phase)
            stalled.of(each.unmoved_seconds, each.output)
        yield states
        yield phases
        yield stalled
        yield from _lag_pair("applied", "each output", {each.output: each.applied for each in moment.outputs})
        yield from _lag_pair(
            "acknowledged",
            "the position up to which each output lets the server forget",
            {each.output: each.acknowledged for each in moment.outputs},
        )
        copies = _gauge("penstock_copy_progress_ratio", "Progress of the copies that run.", "output", "table")
        left = self._monitor.config.server.metric_tables if self._monitor.config.server else 0
        for look in self._monitor.running.last[1]:
            for copy in look.copies[:left]:
                copies.of(copy.fraction, look.output, copy.table)
        yield copies

    def _tallies(self) -> Iterator[Metric]:
        outputs = self._monitor.running.outputs
        for name, text in _PLAIN.items():
            yield _counter(name, text, outputs, (), name.removeprefix("penstock_"))
        yield _counter("penstock_retries", "Attempts that failed and are repeated.", outputs, ("worker", "class"))
        yield _counter("penstock_errors", "Errors that stopped a table, by class.", outputs, ("class",))
        yield _counter(
            "penstock_documents",
            "Documents: sent, removed, or rejected.",
            outputs,
            ("index", "outcome"),
        )
        yield _histogram(
            "penstock_batch_seconds", "Duration of a batch: build, write, record.", outputs, "batch_seconds", "stage"
        )
        yield _histogram("penstock_batch_rows", "Changes in a batch.", outputs, "batch_rows")

    def _tables(self, status: PipelineStatus | None) -> Iterator[Metric]:
        """Yield the metrics of tables; those that have no series of their own are added up."""
        choice = self._monitor.config.server
        most = 0 if choice is None else choice.metric_tables
        changes = CounterMetricFamily(
            "penstock_changes", "Changes that were applied.", labels=("output", "table", "operation")
        )
        sizes = CounterMetricFamily(
            "penstock_changes_bytes", "Size of applied changes, as files of the spool.", labels=("output", "table")
        )
        lag = _gauge("penstock_table_lag_bytes", "How far a table is behind the server.", "output", "table")
        for output in self._monitor.running.outputs:
            counted = output.tally.counts("changes")
            shown = self._counted.setdefault(output.output, set())
            new = [table for table in dict.fromkeys(labels[0] for labels in counted) if table not in shown]
            shown.update(new[: most - len(shown)])
            for (table, operation), count in _merged(counted, shown).items():
                changes.add_metric((output.output, table, operation), count)
            for (table,), count in _merged(output.tally.counts("bytes"), shown).items():
                sizes.add_metric((output.output, table), count)
            for table, size in _largest_lags(status, output.output, most):
                lag.of(size, output.output, table)
        yield changes
        yield sizes
        yield lag

    def _verifications(self) -> Iterator[Metric]:
        # One that failed says nothing about the tables.
        runs = [run for run in verifications(self._monitor.config.pipeline.spool.path) if run["outputs"]]
        at = _gauge("penstock_verify_timestamp_seconds", "When `penstock verify` last ended on this machine.")
        tables = _gauge("penstock_verify_tables", "Tables of the last comparison, by result.", "output", "result")
        rows = _gauge("penstock_verify_rows", "Rows of the last comparison, by result.", "output", "result")
        if runs:
            at.of(runs[-1]["at"])
            for output, found in runs[-1]["outputs"].items():
                for result, count in found["tables"].items():
                    tables.of(count, output, result)
                for result, count in found["rows"].items():
                    rows.of(count, output, result)
        yield from (at, tables, rows)


_PLAIN = {
    "penstock_batches": "Batches that were written.",
    "penstock_transactions": "Transactions of the source that were applied.",
    "penstock_copies": "Tables that were copied.",
    "penstock_copied_rows": "Rows that finished copies have read.",
    "penstock_copied_bytes": "Bytes on the source's disk that finished copies have read.",
}


class _Gauge(GaugeMetricFamily):
    def of(self, value: float, *labels: str) -> _Gauge:
        self.add_metric(labels, value)
        return self


def _gauge(name: str, text: str, *labels: str) -> _Gauge:
    return _Gauge(name, text, labels=labels)


def _counter(
    name: str, text: str, outputs: list[RunningOutput], labels: tuple[str, ...], key: str | None = None
) -> Metric:
    family = CounterMetricFamily(name, text, labels=("output", *labels))
    for output in outputs:
        found = output.tally.counts(key or name.removeprefix("penstock_"))
        for values, count in (found or ({} if labels else {(): 0})).items():
            family.add_metric((output.output, *values), count)
    return family


def _histogram(name: str, text: str, outputs: list[RunningOutput], key: str, *labels: str) -> Metric:
    family = HistogramMetricFamily(name, text, labels=("output", *labels))
    for output in outputs:
        for values, found in output.tally.distributions(key).items():
            family.add_metric((output.output, *values), _buckets(found), found.total)
    return family


def _buckets(found: Distribution) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(str, found.bounds), "+Inf"), found.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def _lag_pair(what: str, whose: str, found: Mapping[str, Behind | None], *, labelled: bool = True) -> Iterator[Metric]:
    labels = ("output",) if labelled else ()
    size = _gauge(f"penstock_{what}_lag_bytes", f"How far {whose} is behind the server.", *labels)
    age = _gauge(f"penstock_{what}_lag_seconds", f"Age of the oldest change that {whose} does not have.", *labels)
    for name, lag in found.items():
        if lag is not None:
            size.of(lag.bytes, *([name] if labelled else []))
            age.of(lag.seconds, *([name] if labelled else []))
    yield size
    yield age


def _room(name: str, what: str, room: Room | None) -> Iterator[Metric]:
    used = _gauge(f"{name}_used_bytes", f"Used: {what}.")
    left = _gauge(f"{name}_left_bytes", f"Left: {what}.")
    lasts = _gauge(
        f"{name}_left_seconds", f"How long it lasts at the current rate; none if it does not shrink: {what}."
    )
    if room is not None:
        used.of(room.used)
        left.of(room.left)
        if room.seconds_left is not None:
            lasts.of(room.seconds_left)
    yield from (used, left, lasts)


def _slot(status: PipelineStatus) -> Iterator[Metric]:
    slot = status.source.slot
    active = _gauge("penstock_slot_active", "1 if the slot is being read.")
    retained = _gauge("penstock_slot_retained_bytes", "WAL that the server retains for the slot.")
    lost = _gauge("penstock_slot_lost", "1 if the slot is lost or does not exist.")
    up = _gauge("penstock_source_up", "1 if the source answers.").of(float(status.source.error is None))
    problems = _gauge("penstock_problems", "What needs attention, as `penstock status` lists it.").of(
        len(status.problems)
    )
    if slot is not None:
        active.of(float(slot.active_pid is not None))
        lost.of(float(slot.lost or not slot.exists))
        if slot.retained_bytes is not None:
            retained.of(slot.retained_bytes)
    yield from (up, problems, active, lost, retained)


def _indexes(status: PipelineStatus) -> Iterator[Metric]:
    seeded = _gauge("penstock_index_seeded", "1 if the index is complete.", "index")
    quarantined = _gauge("penstock_index_quarantined_documents", "Documents in quarantine.", "index")
    for output in status.outputs:
        for index in output.indexes:
            seeded.of(float(index.seeded), index.index)
            quarantined.of(index.quarantined, index.index)
    yield from (seeded, quarantined)


def _largest_lags(status: PipelineStatus | None, output: str, most: int) -> list[tuple[str, int]]:
    tables = [table for each in (status.outputs if status else ()) if each.output == output for table in each.tables]
    known = [(table.table, table.lag_bytes) for table in tables if table.lag_bytes is not None]
    return sorted(known, key=lambda each: (-each[1], each[0]))[:most]


def _merged(counted: Mapping[tuple[str, ...], int], shown: Collection[str]) -> Counter[tuple[str, ...]]:
    found: Counter[tuple[str, ...]] = Counter()
    for (table, *rest), count in counted.items():
        found[(table if table in shown else "", *rest)] += count
    return found


def children_memory(root: Path = Path("/proc")) -> int:
    """Return the resident memory of all descendants of this process; 0 where the system does not tell."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, waiting = 0, [str(os.getpid())]
    while waiting:
        process = waiting.pop()
        for child in _children(root / process):
            try:
                total += int((root / child / "statm").read_text().split()[1]) * page
            except (OSError, IndexError, ValueError):
                continue
            waiting.append(child)
    return total


def _children(process: Path) -> Iterator[str]:
    """Yield the processes that the threads of a process have started; it, and each thread, may end meanwhile."""
    with suppress(OSError):
        for thread in list((process / "task").iterdir()):
            with suppress(OSError):
                yield from (thread / "children").read_text().split()


def metric_names(text: str) -> set[str]:
    """Return the names in a scrape, as its TYPE lines have them."""
    return {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")}
