"""Measure what the HTTP server costs a pipeline: with it, under requests, and without it, in turns.

    python benchmarks/served.py [--mode stream latency] [--requests 200] [--rounds 3] [--master local[2]] …

`stream` drains a slot into Delta, as bench-stream does, by `penstock run`. `latency` measures the time from commit to
visible, as bench-latency does. While a pipeline with a server works, clients send requests to it over loopback: health
checks, metrics, tables, the status, and pages that follow it. docs/reference/benchmarks.md has the goals.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from draining import SERVER_SETTINGS, Load, drop_slot, run_load, wait_for_start
from harness import BenchmarkFailed, format_table, load_average, median, print_result, say, spread, take_turns
from lakes import read_versions
from latency import transaction_into
from runs import Run, Site, Writer
from stages import CORES, Stage, open_stage
from workloads import PUBLICATION, create_orders, prepare_mixed_into

from penstock.testing.server import free_port

WITHOUT, WITH = "without a server", "with requests"
PATHS = (
    *("/healthz", "/readyz", "/metrics", "/api/v1/now", "/api/v1/tables?sort=lag_bytes", "/api/v1/pipeline"),
    *("/api/v1/errors", "/api/v1/history", "/api/v1/batches", "/api/v1/status", "/", "/page.js"),
)
CLIENTS = 8
PAGES = 3
"""Pages that follow the pipeline meanwhile."""
WARM_UP_SECONDS = 5.0


@dataclass
class Requests:
    """Clients that together send requests at a steady rate, and pages that follow the pipeline."""

    port: int
    rate: float
    answered: int = 0
    failed: int = 0
    seconds: list[float] = field(default_factory=list[float])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        work = [self._ask] * CLIENTS + [self._follow] * PAGES
        threads = [threading.Thread(target=each, args=[number], daemon=True) for number, each in enumerate(work)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            self._stop.set()
            for thread in threads:
                thread.join()
            p99 = float(np.percentile(self.seconds, 99)) if self.seconds else 0.0
            say(f"{self.answered / took:,.0f} requests/s were answered, {self.failed} failed, p99 {p99 * 1000:.0f} ms")

    def _ask(self, number: int) -> None:
        paths = itertools.cycle(PATHS[number % len(PATHS) :] + PATHS[: number % len(PATHS)])
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        next_at = time.monotonic() + number / self.rate
        while not self._stop.wait(max(0.0, next_at - time.monotonic())):
            next_at += CLIENTS / self.rate
            began = time.monotonic()
            try:
                connection.request("GET", next(paths))
                answer = connection.getresponse()
                answer.read()
                is_answer = answer.status in (200, 503)
            except (OSError, http.client.HTTPException):
                connection.close()
                is_answer = False
            with self._lock:
                self.answered += is_answer
                self.failed += not is_answer
                self.seconds.append(time.monotonic() - began)

    def _follow(self, number: int) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 30) as page:
                page.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while not self._stop.is_set() and page.recv(65536):
                    pass
        except OSError:
            with self._lock:
                self.failed += 1


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    with open_stage(arguments.server, SERVER_SETTINGS) as stage:
        if "stream" in arguments.mode:
            results["stream"] = stream(stage, arguments)
        if "latency" in arguments.mode:
            results["latency"] = latency(stage, arguments)
    print_result(results)


def stream(stage: Stage, arguments: argparse.Namespace) -> dict[str, float]:
    """Drain the same changes in turns; changes per second, and the ratio of their medians."""
    database = stage.server.create_database()
    turns = list(take_turns(WITHOUT, WITH, arguments.rounds))
    sites = [_site(stage, database, f"stream_{number}", way, arguments) for number, way in enumerate(turns)]
    rates: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    with stage.server.connect(database) as connection:
        say("making the table")
        prepare_mixed_into(connection, arguments.changes, arguments.rows)
        connection.execute(f"create publication {PUBLICATION} for table orders".encode())
        connection.execute("vacuum (freeze, analyze)")
        for site in sites:
            with site.start() as run:
                run.wait_for(site.all_ready, "the copy", seconds=0.5)
                run.terminate()
        load = run_load(connection, arguments.changes)
        for way, site in zip(turns, sites, strict=True):
            with site.start() as run:
                started = wait_for_start(connection, site.slot, lambda run=run: not run.ended)
                seconds = _drain(site, run, load, started.at, arguments)
                run.terminate()
            drop_slot(connection, site.slot)
            rates[way].append(load.changes / seconds)
            say(f"stream {way}: {rates[way][-1]:,.0f} changes/s, load average {load_average():.1f}")
    stage.server.drop_database(database)
    rows = [[way, f"{median(each):,.0f}", f"{spread(each):.0%}"] for way, each in rates.items()]
    ratio = median(rates[WITH]) / median(rates[WITHOUT])
    print(f"\n{load.changes:,} changes into Delta on {arguments.master}; {arguments.requests:g} requests/s")
    print(f"{format_table(['', 'changes/s', 'spread'], rows)}\nratio {ratio:.3f}\n", flush=True)
    return {"without": round(median(rates[WITHOUT])), "with": round(median(rates[WITH])), "ratio": round(ratio, 3)}


def latency(stage: Stage, arguments: argparse.Namespace) -> dict[str, float]:
    """Write at a steady rate, in turns; the 50th and 99th percentile of all rounds, and the ratio of the latter."""
    database, rows = stage.server.create_database(), arguments.latency_rows
    sites = {way: _site(stage, database, name, way, arguments) for way, name in ((WITHOUT, "plain"), (WITH, "served"))}
    with stage.server.connect(database) as connection:
        create_orders(connection, f"orders_{rows}", rows)
        connection.execute(f"create publication {PUBLICATION} for table orders_{rows}".encode())
    for site in sites.values():
        with site.start() as run:
            run.wait_for(site.all_ready, "the copy", seconds=0.5)
            run.terminate()
    lags: dict[str, list[np.ndarray]] = {WITHOUT: [], WITH: []}
    written = 0
    for way in take_turns(WITHOUT, WITH, arguments.rounds):
        site = sites[way]
        with site.start() as run:
            # What was written for the other one.
            run.wait_confirmed()
            with (
                _requests(site, run, arguments),
                Writer(site, arguments.rate, transaction_into(rows, written)) as writer,
            ):
                time.sleep(WARM_UP_SECONDS)
                began = time.time()
                time.sleep(arguments.seconds)
                ended = time.time()
            run.wait_confirmed()
            run.terminate()
        written += writer.transactions
        if writer.late_seconds > 1:
            say(f"the writer was late by up to {writer.late_seconds:.1f} s: the machine is too busy for its rate")
        found = [(visible, moments) for visible, moments in read_versions(site.lake / "public" / f"orders_{rows}")]
        lag = np.concatenate([visible - each[(each >= began) & (each < ended)] for visible, each in found])
        if len(lag) < 0.8 * arguments.rate * arguments.seconds:
            raise BenchmarkFailed(f"only {len(lag):,} rows were found in the lake")
        lags[way].append(lag)
        say(f"latency {way}: p99 {np.percentile(lag, 99):.2f} s, load average {load_average():.1f}")
    stage.server.drop_database(database)
    percentiles = {way: np.percentile(np.concatenate(each), (50, 99)) for way, each in lags.items()}
    ratio = float(percentiles[WITH][1] / percentiles[WITHOUT][1])
    table = [[way, *(f"{value:.2f}" for value in each)] for way, each in percentiles.items()]
    print(f"\n{arguments.rate:g} transactions/s into Delta on {arguments.master}; {arguments.requests:g} requests/s")
    print(f"{format_table(['', 'p50 s', 'p99 s'], table)}\nratio of p99 {ratio:.3f}\n", flush=True)
    figures = {f"{name}_p99_s": float(percentiles[way][1]) for way, name in ((WITHOUT, "without"), (WITH, "with"))}
    return {name: round(value, 3) for name, value in {**figures, "ratio": ratio}.items()}


def _site(stage: Stage, database: str, name: str, way: str, arguments: argparse.Namespace) -> Site:
    port = free_port() if way == WITH else None
    site = Site(stage.server, database, stage.folder / name, arguments.master, "delta", slot=name, port=port)
    site.configure()
    return site


def _drain(site: Site, run: Run, load: Load, started: float, arguments: argparse.Namespace) -> float:
    with _requests(site, run, arguments):
        run.wait_for(lambda: site.has_confirmed(load.end), "the load's end", seconds=0.05)
        return time.time() - started


@contextmanager
def _requests(site: Site, run: Run, arguments: argparse.Namespace) -> Iterator[None]:
    if site.port is None:
        yield
        return
    requests = Requests(site.port, arguments.requests)
    run.wait_for(lambda: _listens(site.port or 0), "the server", seconds=0.05)
    with requests.running():
        yield
    if requests.failed:
        raise BenchmarkFailed(f"{requests.failed} requests failed")


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False


def _parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what the HTTP server costs a pipeline.")
    parser.add_argument("--mode", nargs="+", choices=["stream", "latency"], default=["stream", "latency"])
    parser.add_argument("--requests", type=float, default=200.0, help="requests per second")
    parser.add_argument("--rounds", type=int, default=3, help="of each way")
    parser.add_argument("--changes", type=int, default=1_000_000, help="of each drain")
    parser.add_argument("--rows", type=int, default=2_000_000, help="initial rows of the table that is drained into")
    parser.add_argument("--latency-rows", type=int, default=200_000, help="initial rows of the table for `latency`")
    parser.add_argument("--rate", type=float, default=200.0, help="transactions per second, for `latency`")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds per round, for `latency`")
    parser.add_argument("--master", default=f"local[{CORES}]", help="of Spark; none for none")
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args(given)
    if arguments.changes % 100 or arguments.rounds < 1 or arguments.rows <= arguments.changes // 10:
        parser.error("--changes is a multiple of 100 and less than ten times --rows; --rounds is at least 1")
    return arguments


if __name__ == "__main__":
    main()
