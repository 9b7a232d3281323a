"""Run the long tests, stage by stage, and append a row per stage to the table in docs/soak/README.md.

    scripts/soak.py                  the full counts of every stage
    scripts/soak.py --minutes 20     as much as fits; each stage gets its share of the time, if a unit of it fits
    scripts/soak.py --stage trials   only some stages; --seed 7 repeats the seeds of a run, --count 9 runs 9 units

Every stage is a pytest process of its own. For a failed stage the tests and the command that repeats it are printed. A
stage that takes far longer than its share is stopped, which counts as a failure: it may hang.
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.handover_model import SCENARIOS  # noqa: E402

PAGE = ROOT / "docs" / "soak" / "README.md"
DOCUMENTED = (
    "tests/e2e",
    # Event triggers need a superuser; the database with a hostile name is created by its test, without grants.
    "-k",
    " and not ".join(
        (
            *("not trigger", "flows_in_clear", "failed_start_created", "filter_that_is_dropped_and_added"),
            *("hostile_names", "regression", "least_privilege"),
        )
    ),
)
"""What runs as the role that docs/guides/postgres.md describes."""
VERSIONED = (
    *("tests/integration/capture", "tests/integration/cli/test_tail.py", "tests/integration/comparison"),
    *("tests/integration/copy", "tests/integration/documents", "tests/integration/state"),
    *(f"tests/e2e/test_{each}.py" for each in ("faults", "generated_columns", "inexact_keys", "odd_tables")),
    *(f"tests/e2e/test_{each}.py" for each in ("one_column", "partition_identities", "refresh", "renames")),
    *(f"tests/e2e/test_{each}.py" for each in ("schema_changes", "transforms", "types")),
)
"""Where tests run on the newest version, or also on the oldest, in `make test`."""
MEMORY = "tests/e2e/test_memory_limits.py"
"""Where the memory of processes is compared with the limits in docs/guides/sizing.md."""
GRACE_SECONDS = 120.0
"""A stage that takes this much more than twice its share is stopped."""


@dataclass(frozen=True, slots=True)
class Run:
    """How to run a stage for a count and a seed: pytest's arguments and the environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def command(self) -> str:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return f"{variables} .venv/bin/python -m pytest {shlex.join(self.arguments)}".strip()


@dataclass(frozen=True, slots=True)
class Stage:
    """A kind of long test."""

    name: str
    unit: str
    full: int
    """How many units without a time limit."""
    share: float
    """Its share of the time, if that is limited."""
    seconds_each: float
    """A rough figure for two cores, to choose a count that fits."""
    fixed_seconds: float
    run: Callable[[int, int], Run]

    def fits(self, seconds: float) -> bool:
        """Return whether one unit fits."""
        return self.fixed_seconds + self.seconds_each <= seconds

    def count(self, seconds: float | None) -> int:
        """Return how many units fit."""
        if seconds is None:
            return self.full
        return max(1, min(self.full, int((seconds - self.fixed_seconds) / self.seconds_each)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one test of a stage."""

    test: str
    outcome: str
    seconds: float
    noted: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of a stage."""

    stage: Stage
    count: int
    run: Run
    begun: datetime
    seconds: float
    cut_off: bool
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> bool:
        return self.cut_off or not self.outcomes or any(each.outcome == "failed" for each in self.outcomes)


def _soak(*tests: str) -> tuple[str, ...]:
    return ("-q", "-m", "soak", "--timeout", "0", *tests)


def _model(count: int, seed: int) -> Run:
    test = "tests/unit/workers/test_handover_model.py::test_nothing_is_lost_or_doubled_in_larger_worlds"
    return Run(_soak(*(f"{test}[{name}]" for name in list(SCENARIOS)[:count])))


def _failpoints(count: int, seed: int) -> Run:
    return Run(
        ("-q", "--timeout", "0", "-p", "no:cacheprovider", f"--randomly-seed={seed}", "tests/e2e/test_failpoints.py"),
        {"PENSTOCK_SOAK_FAILPOINT_ROUNDS": str(count)},
    )


STAGES = (
    Stage("kills", "kills of capture under load", 50, 0.10, 6, 15, lambda count, seed: Run(
        _soak("tests/e2e/test_crash.py"), {"PENSTOCK_SOAK_KILLS": str(count), "PENSTOCK_SEED": str(seed)})),
    Stage("oracle", "random workloads per server version", 100, 0.15, 5, 10, lambda count, seed: Run(
        _soak("tests/e2e/test_oracle.py"), {"PENSTOCK_SOAK_SEEDS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("trials", "pipelines with writers and kills", 60, 0.25, 25, 5, lambda count, seed: Run(
        _soak("tests/e2e/test_trials.py"), {"PENSTOCK_SOAK_TRIALS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("postgres trials", "pipelines into another Postgres, with writers and kills", 20, 0.05, 40, 5,
        lambda count, seed: Run(
            _soak("tests/e2e/test_postgres.py"),
            {"PENSTOCK_SOAK_TRIALS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("duckdb trials", "pipelines into a DuckDB file, with writers and kills", 20, 0.05, 40, 5,
        lambda count, seed: Run(
            _soak("tests/e2e/test_duckdb.py"),
            {"PENSTOCK_SOAK_TRIALS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("kafka trials", "pipelines into Kafka, with writers and kills", 20, 0.05, 45, 5,
        lambda count, seed: Run(
            _soak("tests/e2e/test_kafka.py"),
            {"PENSTOCK_SOAK_TRIALS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("snowflake trials", "processes that write into an emulated Snowflake, four kills each", 20, 0.05, 20, 5,
        lambda count, seed: Run(
            _soak("tests/integration/destinations/snowflake/test_faults.py"),
            {"PENSTOCK_SOAK_TRIALS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("delta trials", "pipelines into Delta, with writers and kills", 200, 0.20, 40, 5, lambda count, seed: Run(
        _soak("tests/e2e/test_delta.py"), {"PENSTOCK_SOAK_TRIALS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("spark trials", "kills of upserts by Spark, into Delta and PostgreSQL each", 30, 0.10, 60, 5,
        lambda count, seed: Run(
            _soak("tests/e2e/test_spark_destination.py"),
            {"PENSTOCK_SOAK_KILLS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("faults", "faults of every kind, each trial with two kills", 500, 2.00, 12, 20, lambda count, seed: Run(
        _soak("tests/e2e/test_fault_trials.py"),
        {"PENSTOCK_SOAK_FAULTS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("model", "worlds of the hand-over model", len(SCENARIOS), 0.15, 90, 5, _model),
    Stage("failpoints", "rounds over all points", 10, 0.10, 110, 5, _failpoints),
    Stage("300 tables", "seconds of changes", 1800, 0.15, 1.2, 60, lambda count, seed: Run(
        _soak("tests/e2e/test_many_tables.py"), {"PENSTOCK_SOAK_ROUNDS": str(count)})),
    Stage("300 tables, memory", "seconds of changes, with Spark and without", 300, 0.10, 3, 60, lambda count, seed: Run(
        (*_soak(MEMORY), "-k", "300_tables"), {"PENSTOCK_SOAK_TABLES_SECONDS": str(count)})),
    Stage("huge transaction", "rows in one transaction", 10_000_000, 0.10, 0.00008, 60, lambda count, seed: Run(
        (*_soak(MEMORY), "-k", "huge"), {"PENSTOCK_SOAK_HUGE_ROWS": str(count)})),
    Stage("100 million rows", "rows in one transaction", 100_000_000, 0.10, 0.00003, 60, lambda count, seed: Run(
        (*_soak(MEMORY), "-k", "huge and soft_delete and none"), {"PENSTOCK_SOAK_HUGE_ROWS": str(count)})),
    Stage("gigabyte", "megabytes in a batch", 1024, 0.10, 0.5, 60, lambda count, seed: Run(
        (*_soak(MEMORY), "-k", "gigabyte"), {"PENSTOCK_SOAK_BATCH_MEGABYTES": str(count)})),
    Stage("full spool", "seconds without room, with Spark and without", 300, 0.10, 2.5, 60, lambda count, seed: Run(
        (*_soak(MEMORY), "-k", "full"), {"PENSTOCK_SOAK_FULL_SECONDS": str(count)})),
    Stage("fuzz", "mutated streams of messages", 100_000, 0.05, 0.003, 5, lambda count, seed: Run(
        ("-q", "--timeout", "0", "tests/unit/capture/test_fuzz.py"),
        {"PENSTOCK_FUZZ_CASES": str(count), "PENSTOCK_SEED": str(seed)})),
    Stage("documented role", "run of whole pipelines", 1, 0.10, 900, 5, lambda count, seed: Run(
        ("-q", "-n", "2", "--timeout", "900", f"--randomly-seed={seed}", *DOCUMENTED),
        {"PENSTOCK_TEST_ROLE": "documented"})),
    Stage("lakes", "random lives of a Delta table, judged by Spark", 300, 0.10, 8, 60, lambda count, seed: Run(
        (*_soak("tests/integration/destinations/delta/test_readers.py"), f"--hypothesis-seed={seed}"),
        {"PENSTOCK_SOAK_LAKES": str(count)})),
    Stage("verify", "thousand rows compared while they are written", 2000, 0.10, 0.05, 240, lambda count, seed: Run(
        _soak("tests/e2e/test_verify_large.py"), {"PENSTOCK_SOAK_VERIFY_ROWS": str(1000 * count)})),
    Stage("s3", "run of all tests on a real S3 server", 1, 0.05, 120, 5, lambda count, seed: Run((
        *_soak("tests/e2e/test_delta_on_s3.py"), "-k", "versitygw", f"--randomly-seed={seed}",
        "tests/integration/destinations/delta/test_s3.py",
        "tests/integration/destinations/delta/test_destination_on_s3.py"))),
    Stage("store away", "minutes without the store, at 5,000 changes/s", 15, 0.10, 75, 60, lambda count, seed: Run(
        (*_soak("tests/e2e/test_destination_away.py"), "-k", "versitygw"),
        {"PENSTOCK_SOAK_AWAY_MINUTES": str(count)})),
    Stage("documents", "kills of search documents under load", 100, 0.15, 12, 60, lambda count, seed: Run(
        _soak("tests/e2e/test_documents_kills.py", "tests/e2e/test_documents_fan_out.py"), {
            "PENSTOCK_SOAK_KILLS": str(count), "PENSTOCK_SEED": str(seed),
            "PENSTOCK_SOAK_FAN_OUT": str(10_000 * count)})),
    Stage("document trials", "documents with DDL, kills and nonsense", 200, 0.20, 20, 30, lambda count, seed: Run(
        _soak("tests/e2e/test_document_trials.py"),
        {"PENSTOCK_SOAK_TRIALS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("search server", "kills of documents, and of the search server", 100, 0.10, 15, 60, lambda count, seed: Run(
        _soak("tests/e2e/test_search_server_kills.py"),
        {"PENSTOCK_SOAK_KILLS": str(count), "PENSTOCK_SEED": str(seed)})),
    Stage("spark streams", "kills of a streaming query under load", 30, 0.10, 25, 60, lambda count, seed: Run(
        _soak("tests/e2e/test_spark_stream_trials.py"),
        {"PENSTOCK_SOAK_KILLS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("destinations", "run of their long tests", 1, 0.05, 60, 5, lambda count, seed: Run(
        (*_soak("tests/unit/destinations", "tests/integration/destinations"), "-k", "not versitygw"))),
    Stage("versions", "run on each version of the server", 1, 0.05, 400, 5, lambda count, seed: Run(
        (*_soak(*VERSIONED), "-k", "pg15 or pg16"))),
    Stage("regression", "run of the server's own scripts on 15, on 18, and on 18 managed", 1, 0.15, 2700, 5,
        lambda count, seed: Run(_soak("tests/e2e/test_regression_scripts.py"))),
    Stage("migrations", "steps of each history", 1000, 0.10, 20, 30, lambda count, seed: Run(
        ("-q", "--timeout", "0", "tests/e2e/test_migrations.py"),
        {"PENSTOCK_SOAK_MIGRATIONS": str(count), "PENSTOCK_SOAK_SEED": str(seed)})),
    Stage("properties", "times the examples of each property", 20, 0.05, 40, 30, lambda count, seed: Run(
        ("-q", "--timeout", "0", "-m", "hypothesis and not soak", f"--hypothesis-seed={seed}", "tests/unit"),
        {"PENSTOCK_SOAK_EXAMPLES": str(count)})),
    Stage("commands", "run of their long tests", 1, 0.05, 120, 5, lambda count, seed: Run(
        _soak("tests/integration/cli", "tests/integration/testing"))),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the stages; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=None, help="time limit; by default the full counts run")
    parser.add_argument("--seed", type=int, default=None, help="seed of all stages")
    parser.add_argument(
        "--stage",
        action="append",
        choices=[stage.name for stage in STAGES],
        help="run only this stage; may be repeated",
    )
    parser.add_argument("--count", type=int, default=None, help="units per stage, whatever the time limit")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    stages = [stage for stage in STAGES if given.stage is None or stage.name in given.stage]
    if given.minutes is not None and given.count is None:
        stages = _fitting(stages, given.minutes)
    # SIGTERM also ends the running stage.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    commit = _commit()
    results: list[StageResult] = []
    for stage in stages:
        results.append(_run(stage, seed, _share(stage, stages, given.minutes), given.count))
        with PAGE.open("a") as page:
            page.write(_row(results[-1], seed, commit))
        _print_failures(results[-1])
    print(f"soak: {len(results)} rows appended to {PAGE.relative_to(ROOT)}")
    return int(any(result.failed for result in results))


def _fitting(stages: list[Stage], minutes: float) -> list[Stage]:
    """Leave out stages of which not even one unit fits, beginning with the longest; the others get their time."""
    kept = stages
    while len(kept) > 1 and (long := [stage for stage in kept if not stage.fits(_share(stage, kept, minutes) or 0.0)]):
        longest = max(long, key=lambda stage: stage.fixed_seconds + stage.seconds_each)
        kept = [stage for stage in kept if stage is not longest]
    if len(kept) < len(stages):
        out = ", ".join(stage.name for stage in stages if stage not in kept)
        print(f"soak: {minutes:g} minutes are too short for: {out}", flush=True)
    return kept


def _share(stage: Stage, stages: list[Stage], minutes: float | None) -> float | None:
    """Return the seconds of a stage; stages that do not run leave their share to the others."""
    return None if minutes is None else 60 * minutes * stage.share / sum(each.share for each in stages)


def _run(stage: Stage, seed: int, seconds: float | None, count: int | None) -> StageResult:
    count = count or stage.count(seconds)
    run = stage.run(count, seed)
    print(f"soak: {stage.name}: {count} {stage.unit}", flush=True)
    when, begun = datetime.now(UTC), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        xml = Path(folder) / "results.xml"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", *run.arguments, f"--basetemp={folder}/files"),
                # This format has room for the properties that tests record.
                *(f"--junitxml={xml}", "-o", "junit_family=xunit1"),
            ],
            cwd=ROOT,
            env={**os.environ, **run.environment},
            start_new_session=True,
        )
        cut_off = not _ends(process, None if seconds is None else 2 * seconds + GRACE_SECONDS)
        outcomes = _read(xml) if xml.exists() else ()
    return StageResult(stage, count, run, when, time.monotonic() - begun, cut_off, outcomes)


def _ends(process: subprocess.Popen[bytes], timeout: float | None) -> bool:
    """Wait for the end; after the timeout, or on Ctrl-C, kill the process and everything it started."""
    try:
        process.wait(timeout)
        return True
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        for number in (signal.SIGINT, signal.SIGKILL):
            os.killpg(process.pid, number)
            try:
                process.wait(30)
                break
            except subprocess.TimeoutExpired:
                continue
        if isinstance(error, KeyboardInterrupt):
            raise
        return False


def _read(xml: Path) -> tuple[Outcome, ...]:
    """Read pytest's results."""
    outcomes: list[Outcome] = []
    for case in ElementTree.parse(xml).iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped") is not None
        noted = [f"{each.get('name')} = {each.get('value')}" for each in case.iter("property")]
        outcomes.append(
            Outcome(
                case.get("name", "?"),
                "failed" if bad is not None else "skipped" if skipped else "passed",
                float(case.get("time", 0)),
                ", ".join(noted),
                "" if bad is None else (bad.get("message") or bad.text or ""),
            )
        )
    return tuple(outcomes)


def _commit() -> str:
    """What runs; asked once, because the rows of this run change a file."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def _row(result: StageResult, seed: int, commit: str) -> str:
    """The row of the table of runs for one stage."""
    tally = {name: sum(each.outcome == name for each in result.outcomes) for name in ("passed", "failed")}
    outcome = "stopped" if result.cut_off else ", ".join(f"{count} {name}" for name, count in tally.items() if count)
    notes = [f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}"]
    notes += [each.noted for each in result.outcomes if each.noted]
    notes += [f"{each.test}: {_first_line(each.message)}" for each in result.outcomes if each.outcome == "failed"]
    cells = [
        *(f"{result.begun:%Y-%m-%d %H:%M}", commit, result.stage.name, result.count, seed),
        *(outcome or "no test ran", f"{result.seconds:.0f}", "; ".join(notes)),
    ]
    return f"| {' | '.join(str(cell).replace('|', '¦') for cell in cells)} |\n"


def _print_failures(result: StageResult) -> None:
    if result.failed:
        print(f"soak: {result.stage.name} failed; to repeat it: {result.run.command}")
    for each in result.outcomes:
        if each.outcome == "failed":
            print(f"soak: {each.test}:\n{each.message[:3000]}")


def _first_line(message: str) -> str:
    return message.partition("\n")[0][:200]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
