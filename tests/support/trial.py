"""A trial: pipelines replicate random writes through kills and faults; in the end the destination equals the source.

    python -m tests.support.trial --seed 7 --kills 6 --destination delta --master 'local[2]' --ddl structure
    python -m tests.support.trial --seed 7 --kills 0 --faults 8

The seed determines the tables, the statements and their order, the victims of kills, the faults
(`tests.support.faults`), and the number of statements before each of them. How far a pipeline is at that moment depends
on the machine, so a failing seed fails again often, but not always. Victims are the pipeline's processes and the
backends of writers; the server then ends all sessions and recovers. A pipeline that has ended is restarted, as a
supervisor would do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

import numpy as np
import psycopg
import pyarrow as pa

from penstock.destinations.parquet import ParquetReader
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema
from penstock.state import open_store
from penstock.state.commands import CommandKind
from penstock.testing.kafka import KafkaServer
from penstock.testing.postgres import PostgresServer
from tests.e2e.lake import HistoryReadBack, LakeReadBack
from tests.support.clickhouse import ExportedReadBack
from tests.support.delta_jars import delta_spark_options, jdbc_url
from tests.support.drive_pipeline import DriveSettings
from tests.support.duckdb import Duck
from tests.support.faults import FAULTS, IN_STATE_FILE, IN_STATE_SERVER, SERVER_SETTINGS, open_scene
from tests.support.kafka import KafkaReadBack
from tests.support.oracle import current_position
from tests.support.pipeline_process import HANG_SECONDS, PipelineEnded, PipelineProcess, Seen
from tests.support.planned_tables import Size, plan_tables
from tests.support.postgres_readback import PostgresReadBack
from tests.support.processes import Part
from tests.support.readback import ChangesReadBack, ReadBack, check_equal, check_exactly_once
from tests.support.replay import Discrepancy
from tests.support.restructure import SCHEMAS
from tests.support.samples import available_samples
from tests.support.spark_readback import JdbcReadBack, SparkDeltaReadBack
from tests.support.workload import Ddl
from tests.support.writers import PAUSE_SECONDS, Writers, when_recovered

_COLUMNS = """
    select c.relnamespace::regnamespace::text || '.' || c.relname, array_agg(a.attname::text)
    from pg_catalog.pg_class c join pg_catalog.pg_attribute a on a.attrelid = c.oid
    where c.relnamespace::regnamespace::text = any(%s) and c.relkind in ('r', 'p') and not c.relispartition
        and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
    group by c.oid
"""


JDBC_TYPES = ("int2", "int4", "int8", "text", "varchar(40)", "bool", "float8", "uuid")
"""Types that both ends of JDBC print alike."""


class Victim(StrEnum):
    """The process that is killed."""

    DRIVER = "driver"
    CAPTURE = "capture"
    JVM = "jvm"
    WORKER = "worker"
    BACKEND = "backend"


_LIKELIHOOD = {Victim.DRIVER: 5, Victim.CAPTURE: 3, Victim.JVM: 2, Victim.WORKER: 3, Victim.BACKEND: 2}
_NEEDS_SPARK = (Victim.JVM, Victim.WORKER)


class Milestone(StrEnum):
    """How far a pipeline is when the count of statements begins."""

    STARTED = "started"
    RUNNING = "running"
    """Capture and apply run; tables are being copied."""
    READY = "ready"
    """All tables are ready."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill."""

    victim: Victim
    pipeline: int
    milestone: Milestone
    after: int
    """The number of statements since the milestone."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One fault, and what comes before it."""

    fault: str
    pipeline: int
    after: int
    """The number of statements since all tables were ready."""
    longer: float
    """How many times longer it lasts than it must."""


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """The settings of a trial."""

    seed: int
    kills: int = 5
    pipelines: int = 1
    """The number of pipelines, each with its own slot, spool and destination."""
    master: str | None = None
    """Spark's master; None runs tasks in the pipelines' processes."""
    size: Size = field(default_factory=lambda: Size(tables=6, columns=8, sessions=4, initial_rows=40))
    destination: str = "parquet"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the destination."""
    ddl: Ddl = Ddl.NONE
    """What happens to columns."""
    faults: int | tuple[str, ...] = 0
    """How many faults come after the kills, or which."""
    split_rows: int | None = None
    """Parts of a batch with more changes of a Delta table are split over tasks; None for the usual limit."""

    @property
    def keeps_changes(self) -> bool:
        """True if the destination keeps every change."""
        return self.destination in ("parquet", "kafka") or self.options.get("mode") == "history"

    @property
    def writes_jdbc(self) -> bool:
        """True if the destination is another database, by JDBC."""
        return self.options.get("format") == "jdbc"

    @property
    def command(self) -> str:
        """The command that repeats the trial."""
        master = f" --master '{self.master}'" if self.master else ""
        options = f" --options '{json.dumps(self.options)}'" if self.options else ""
        chosen = self.faults if isinstance(self.faults, int) else shlex.quote(",".join(self.faults))
        faults = f" --faults {chosen}" if self.faults else ""
        split = f" --split-rows {self.split_rows}" if self.split_rows is not None else ""
        return (
            f"python -m tests.support.trial --seed {self.seed} --kills {self.kills} "
            f"--pipelines {self.pipelines}{master} --destination {self.destination}{options} --ddl {self.ddl}"
            f"{faults}{split}"
        )

    def plan_kills(self) -> list[Kill]:
        """Plan the kills from the seed."""
        random = Random(f"{self.seed}-kills")
        victims = {victim: odds for victim, odds in _LIKELIHOOD.items() if self.master or victim not in _NEEDS_SPARK}
        kills: list[Kill] = []
        for _ in range(self.kills):
            victim = random.choices([*victims], [*victims.values()])[0]
            # Not all processes of a pipeline run from the start.
            whole = victim in (Victim.DRIVER, Victim.BACKEND)
            milestone = random.choice([*Milestone] if whole else [Milestone.RUNNING, Milestone.READY])
            after = random.choice([0, 30, 100, 300]) + random.randrange(60)
            kills.append(Kill(victim, random.randrange(self.pipelines), milestone, after))
        return kills

    def plan_faults(self) -> list[Disturbance]:
        """Plan the faults from the seed; trials with consecutive seeds strike all of them, one after the other."""
        random = Random(f"{self.seed}-faults")
        if isinstance(self.faults, int):
            names = [
                name for _, name in zip(range(self.faults), self._faults_from(self.seed * self.faults), strict=False)
            ]
            random.shuffle(names)
        else:
            names = list(self.faults)
        return [
            Disturbance(
                name,
                random.randrange(self.pipelines),
                after=random.randrange(100),
                longer=random.uniform(1.0, 2.0) if isinstance(self.faults, int) else 1.0,
            )
            for name in names
        ]

    @property
    def has_state_server(self) -> bool:
        """True if the state of pipelines is in a server of its own; in trials without faults it never is."""
        return bool(self.faults) and self.seed % 2 == 1

    def _faults_from(self, first: int) -> Iterator[str]:
        """Yield the faults that fit, again and again, from the one with this number on."""
        unfit = {"jvm stopped"} if self.master is None else set[str]()
        unfit |= IN_STATE_FILE if self.has_state_server else IN_STATE_SERVER
        names = [name for name in FAULTS if name not in unfit]
        return itertools.cycle(names[first % len(names) :] + names[: first % len(names)])


@dataclass(slots=True)
class TrialReport:
    """What happened in a trial."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter[str])
    """The number of kills, by victim."""
    missed: int = 0
    """Kills whose victim was not running at the time."""
    resyncs: int = 0
    """New copies of tables whose destination could not follow a change of columns."""
    starts: int = 0
    statements: int = 0
    transactions: int = 0
    reconnects: int = 0
    tables: int = 0
    rows: int = 0
    changes: int = 0
    splits: int = 0
    """Parts of batches that were split over tasks."""
    restructured: Counter[str] = field(default_factory=Counter[str])
    """What was done to whole tables."""
    faults: Counter[str] = field(default_factory=Counter[str])
    """The number of faults, by name."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Faults that this machine does not allow."""
    recoveries: list[float] = field(default_factory=list[float])
    """The seconds from the end of each fault until every change before it was applied and all tables were ready."""
    timeline: list[str] = field(default_factory=list[str])


def run_trial(
    settings: TrialSettings,
    folder: Path,
    *,
    server: PostgresServer | None = None,
) -> TrialReport:
    """Run a trial; an error carries the command that repeats it. `server` crashes, so no other test may use it."""
    with ExitStack() as stack:
        own = SERVER_SETTINGS if settings.faults else {}
        server = server or stack.enter_context(PostgresServer(settings=own))
        timeline: list[str] = []
        trial: _Trial | None = None
        try:
            trial = _Trial(settings, server, folder, stack, timeline)
            return trial.run()
        except BaseException as error:
            seen = [f"a pipeline is at {each}" for each in (trial.seen if trial else ())]
            error.add_note("\n".join([*timeline, *seen, f"to see it again: {settings.command}"]))
            raise


class AnyTrial(Protocol):
    """The settings of a trial of any kind."""

    @property
    def seed(self) -> int: ...

    @property
    def command(self) -> str: ...


_Settings = TypeVar("_Settings", bound=AnyTrial)
_Report = TypeVar("_Report")


def run_each(
    trials: Sequence[_Settings],
    folder: Path,
    run: Callable[[_Settings, Path], _Report],
    note: Callable[[str, object], None],
) -> tuple[list[_Report], list[str]]:
    """Run all trials, each in a folder that stays only if it fails; return the reports, and what failed."""
    failures: list[str] = []
    reports: list[_Report] = []
    for settings in trials:
        place = folder / str(settings.seed)
        try:
            reports.append(run(settings, place))
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            failures.append(f"{settings.command}\n{type(error).__name__}: {error}\n{notes}")
            continue
        shutil.rmtree(place)
    note("seeds", f"{trials[0].seed}–{trials[-1].seed}")
    note("equal", f"{len(reports)} of {len(trials)}")
    return reports, failures


def run_trials(
    trials: Sequence[TrialSettings],
    folder: Path,
    note: Callable[[str, object], None],
) -> None:
    """Run all trials, then fail if any failed; `note` receives the seeds and the totals."""
    reports, failures = run_each(trials, folder, run_trial, note)
    note("kills", tally(report.kills for report in reports))
    for name in ("starts", "statements", "resyncs", "rows", "changes", "splits"):
        note(name, sum(getattr(report, name) for report in reports))
    recoveries = [seconds for report in reports for seconds in report.recoveries]
    if recoveries:
        note("faults", tally(report.faults for report in reports))
        note("recovery", ", ".join(f"p{each} {np.percentile(recoveries, each):.1f} s" for each in (50, 99)))
        note("not possible here", tally(report.skipped for report in reports))
    assert not failures, "\n".join(failures)


def tally(counts: Iterable[Counter[str]]) -> str:
    """Return the total of some counts, and its parts."""
    total = sum(counts, Counter[str]())
    return f"{total.total()} ({', '.join(f'{name} {count}' for name, count in total.most_common())})"


class _Trial:
    def __init__(
        self,
        settings: TrialSettings,
        server: PostgresServer,
        folder: Path,
        stack: ExitStack,
        timeline: list[str],
    ) -> None:
        """`stack` closes what the trial opens; `timeline` receives what happens."""
        self._settings = settings
        self._target = ""
        """The database that the pipelines write to, if they write by JDBC."""
        self._database = server.create_database()
        self._dsn = server.dsn(self._database)
        self._report = TrialReport(settings.seed, timeline=timeline)
        self._begun = time.monotonic()
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            samples = available_samples(connection)
        if settings.writes_jdbc:
            samples = [sample for sample in samples if sample.type in JDBC_TYPES]
            self._target = server.create_database()
        self._broker = ""
        if settings.destination == "kafka" and "bootstrap_servers" not in settings.options:
            self._broker = stack.enter_context(KafkaServer()).bootstrap_servers
        self._server = server
        self._tables = plan_tables(Random(f"{settings.seed}-tables"), samples, settings.size)
        driven = [self._driven(folder, number) for number in range(settings.pipelines)]
        self._scenes = [
            stack.enter_context(
                open_scene(each, server, Random(f"{settings.seed}-scene"), with_state_server=settings.has_state_server)
            )
            for each in (driven if settings.faults else ())
        ]
        self._pipelines = [each.pipeline for each in self._scenes] or [PipelineProcess(each) for each in driven]
        for pipeline in self._pipelines:
            stack.callback(pipeline.close)

    @property
    def seen(self) -> list[Seen]:
        """The last status of each pipeline."""
        return [pipeline.seen for pipeline in self._pipelines]

    def run(self) -> TrialReport:
        settings, report = self._settings, self._report
        writers = Writers(
            self._dsn,
            Random(f"{settings.seed}-writes"),
            self._tables,
            settings.size,
            # A copy by Spark takes longer than the time from one truncate to the next, and a MERGE takes seconds: on a
            # busy machine faster writers would stay ahead of it.
            truncates=settings.destination != "spark",
            pause=0.03 if settings.destination == "spark" else PAUSE_SECONDS,
            ddl=settings.ddl,
        )
        for pipeline in self._pipelines:
            pipeline.start()
        with writers:
            for kill in settings.plan_kills():
                self._strike(kill, writers)
            for disturbance in settings.plan_faults():
                self._disturb(disturbance, writers)
            # Changes must also stream after the last of them.
            for pipeline in self._pipelines:
                self._settle(pipeline)
            writers.begin_truncates()
            writers.wait_for_actions(writers.actions + 100)
        report.statements, report.transactions = writers.actions, writers.transactions
        report.reconnects, report.restructured = writers.reconnects, writers.restructured
        self._finish()
        report.starts = sum(pipeline.starts for pipeline in self._pipelines)
        if settings.split_rows is not None:
            logs = [each.settings.splits for each in self._pipelines]
            report.splits = sum(len(log.read_text().splitlines()) for log in logs if log.exists())
        self._tell(f"equal: {report.rows} rows, {report.changes} changes, {report.starts} starts")
        return report

    def _driven(self, folder: Path, number: int) -> DriveSettings:
        own = folder / f"pipeline-{number}"
        own.mkdir(parents=True)
        options = dict(self._settings.options)
        if self._settings.writes_jdbc:
            options["options"] = {"url": jdbc_url(self._server.dsn(self._target))}
        if self._settings.destination == "postgres":
            options["url"] = self._server.dsn(self._server.create_database())
            if (self._settings.seed + number) % 2:
                # Types of one's own keep their names where the other database has them; otherwise they become text.
                with psycopg.connect(options["url"], autocommit=True) as connection:
                    available_samples(connection)
        if self._settings.destination == "clickhouse":
            options |= {"url": f"chdb://{own}/engine", "database": "trial", "fsync": False}
        if self._settings.destination == "duckdb":
            options |= {"path": f"{own}/lake.db"}
        if self._settings.destination == "kafka":
            names = {
                "control_topic": f"{self._database}-{number}-control",
                "topic_prefix": f"{self._database}-{number}",
            }
            options = {"bootstrap_servers": self._broker, **names} | options
        return DriveSettings(
            dsn=self._dsn,
            folder=str(own),
            tables=tuple(f"{schema}.*" for schema in SCHEMAS),
            unidentified=tuple(f"public.{table.name}" for table in self._tables if table.insert_only),
            slot=f"trial_{number}_{self._database[-12:]}",
            id=f"trial{number}",
            destination=self._settings.destination,
            options=options,
            master=self._settings.master,
            spark=delta_spark_options() if self._settings.destination == "spark" else {},
            # Delta tables are rewritten within the batch in one pipeline, by themselves in the other.
            rewrite_bytes=(None, 0)[(self._settings.seed + number) % 2],
            # Copies of these small tables are resumed, too.
            range_bytes=32 << 10 if self._settings.destination == "delta" else None,
            split_rows=self._settings.split_rows,
            max_rows=50_000 if self._settings.destination == "spark" else 2_000,
            # More segments of a table are in a batch.
            interval=0.1 if self._settings.split_rows is None else 2.0,
        )

    def _tell(self, what: str) -> None:
        line = f"seed {self._settings.seed}, {time.monotonic() - self._begun:6.1f} s: {what}"
        self._report.timeline.append(line)
        print(line, file=sys.stderr, flush=True)

    def _strike(self, kill: Kill, writers: Writers) -> None:
        pipeline = self._pipelines[kill.pipeline]
        self._revive()
        match kill.milestone:
            case Milestone.RUNNING:
                # An earlier kill may just be taking it down.
                with suppress(PipelineEnded):
                    pipeline.wait_for("it to run", lambda seen: seen.applied is not None)
            case Milestone.READY:
                self._settle(pipeline)
                writers.begin_truncates()
            case _:
                pass
        writers.wait_for_actions(writers.actions + kill.after)
        if kill.victim is Victim.BACKEND:
            struck = kill_backend(writers.backends)
        else:
            struck = pipeline.kill(Part(kill.victim.value))
        if struck:
            self._report.kills[kill.victim.value] += 1
            self._tell(f"killed {kill.victim.value}")
        else:
            self._report.missed += 1

    def _disturb(self, disturbance: Disturbance, writers: Writers) -> None:
        """Strike a fault while the writers write, heal it, and wait until changes flow again."""
        scene, fault = self._scenes[disturbance.pipeline], FAULTS[disturbance.fault]
        if not fault.can_strike(scene):
            self._report.skipped[fault.name] += 1
            return
        self._settle(scene.pipeline)
        writers.wait_for_actions(writers.actions + disturbance.after)
        ready = dict.fromkeys(self._columns(), "ready")
        struck = scene.disturb(fault, ready=ready, longer=disturbance.longer)
        self._report.faults[fault.name] += 1
        self._report.recoveries.append(struck.recovery)
        self._tell(str(struck))

    def _revive(self) -> None:
        for pipeline in self._pipelines:
            if not pipeline.running:
                pipeline.start()

    def _finish(self) -> None:
        """After the writers ended, check that every change arrived exactly once."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            end = current_position(connection)
        report, columns = self._report, self._columns()
        for pipeline in self._pipelines:
            self._settle(pipeline, end)
            code = pipeline.stop()
            if code != 0:
                raise PipelineEnded(f"exit code {code} after SIGTERM")
            readback = _read_back(pipeline.settings, self._server.dsn(self._target) if self._target else "")
            if self._settings.ddl is Ddl.STRUCTURE:
                # Rows of a table that was dropped stay.
                readback = _Existing(readback, columns)
            report.tables += len(columns)
            report.rows += check_equal(self._dsn, readback, [name.partition(".")[2] for name in columns])
            for table in readback.tables():
                # The last rows of all tables came after the last change of columns.
                found = {column.name for column in readback.schema(table).columns}
                if found != columns[table]:
                    raise Discrepancy(f"{table} has the columns {sorted(found)} instead of {sorted(columns[table])}")
            if isinstance(readback, ChangesReadBack):
                report.changes += check_exactly_once(readback)

    def _columns(self) -> dict[str, set[str]]:
        """The columns of each table that the source has now."""

        def load() -> dict[str, set[str]]:
            with psycopg.connect(self._dsn) as connection:
                return {name: set(columns) for name, columns in connection.execute(_COLUMNS, [[*SCHEMAS]]).fetchall()}

        return when_recovered(load)

    def _settle(self, pipeline: PipelineProcess, end: Lsn | None = None) -> None:
        """Wait until all tables are ready, and have reached `end` if it is given.

        A driver whose JVM was killed last notices this with its next batch, ends, and is restarted.
        """
        for attempt in (1, 2):
            self._revive()
            try:
                if end is None and self._settings.ddl.has_rewrites:
                    # There is always something that is being copied; on a busy machine, all tables are never ready.
                    self._wait_looks(pipeline)
                    return
                self._wait_ready(pipeline, end)
                if end is not None:
                    if self._settings.ddl.has_rewrites:
                        self._wait_looks(pipeline)
                    # What the catalog showed may have led to copies.
                    self._wait_ready(pipeline, end)
                    if self._settings.ddl is not Ddl.NONE and self._settings.keeps_changes:
                        # A log has what the stream carried; a copy adds what DDL did to existing rows.
                        tables = sorted(self._columns())
                        self._report.resyncs += len(tables)
                        self._resync(pipeline, tables)
                        self._wait_ready(pipeline, end)
                return
            except PipelineEnded:
                if attempt == 2:
                    raise

    def _wait_ready(self, pipeline: PipelineProcess, end: Lsn | None) -> None:
        """Wait until all tables are ready, and have everything before `end`; whatever happened, nothing is typed."""
        ready = dict.fromkeys(self._columns(), "ready")

        def is_ready(seen: Seen) -> bool:
            return seen.phases == ready and (end is None or (seen.durable is not None and reaches(seen.durable, end)))

        pipeline.wait_for("ready tables", is_ready, 2 * HANG_SECONDS)

    def _wait_looks(self, pipeline: PipelineProcess) -> None:
        """Wait until the pipeline has seen in the catalog what the stream does not carry."""
        looks = pipeline.seen.looks
        pipeline.wait_for("looks at the catalog", lambda seen: seen.looks > looks + 1)

    def _resync(self, pipeline: PipelineProcess, tables: Sequence[str]) -> None:
        with open_store(pipeline.settings.state_url, pipeline.settings.id) as store:
            number = store.add_command(CommandKind.RESYNC, tables).number

            def is_answered() -> bool:
                command = store.get_command(number)
                return command is not None and command.answered

            pipeline.wait_for("an answer to the resync", lambda _: is_answered())
            # What is seen may be from before the answer.
            self._wait_looks(pipeline)


def _read_back(driven: DriveSettings, target: str) -> ReadBack:
    if driven.destination == "postgres":
        return PostgresReadBack(driven.options["url"], driven.id)
    if driven.destination == "spark":
        is_delta = driven.options["format"] == "delta"
        return SparkDeltaReadBack(driven.dsn, driven.lake) if is_delta else JdbcReadBack(driven.dsn, target)
    if driven.destination == "clickhouse":
        return ExportedReadBack(driven.options["url"], driven.options["database"], driven.id)
    if driven.destination == "duckdb":
        return Duck(driven.options["path"]).readback(driven.id)
    if driven.destination == "kafka":
        return KafkaReadBack(driven.options["bootstrap_servers"], driven.options["control_topic"], driven.id)
    if driven.destination == "parquet":
        return ParquetReader(driven.lake)
    return (HistoryReadBack if driven.options.get("mode") == "history" else LakeReadBack)(driven.lake)


@dataclass(frozen=True, slots=True)
class _Existing:
    """The tables of a destination that the source still has."""

    whole: ReadBack
    names: Collection[str]

    def tables(self) -> list[str]:
        return [table for table in self.whole.tables() if table in self.names]

    def schema(self, table: str) -> TableSchema:
        return self.whole.schema(table)

    def read_table(self, table: str) -> pa.Table:
        return self.whole.read_table(table)


def kill_backend(backends: list[int]) -> bool:
    """Send SIGKILL to a backend; the server then ends all sessions and recovers."""
    try:
        os.kill(backends[0], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _parse_faults(text: str) -> int | tuple[str, ...]:
    return int(text) if text.isdecimal() else tuple(each.strip() for each in text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one trial and print its report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.trial", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument(
        "--master", default=None, help="Spark's master; by default tasks run in the pipelines' processes"
    )
    parser.add_argument(
        "--destination",
        choices=["parquet", "delta", "postgres", "clickhouse", "duckdb", "kafka", "spark"],
        default="parquet",
    )
    parser.add_argument("--options", type=json.loads, default={}, help="options of the destination, as JSON")
    parser.add_argument("--ddl", choices=[each.value for each in Ddl], default=Ddl.NONE.value)
    parser.add_argument(
        "--faults", type=_parse_faults, default=0, help=f"how many, or which, with commas: {', '.join(FAULTS)}"
    )
    parser.add_argument("--split-rows", type=int, help="changes from which a part of a batch is split over tasks")
    given = parser.parse_args(arguments)
    settings = TrialSettings(
        given.seed,
        given.kills,
        given.pipelines,
        given.master,
        destination=given.destination,
        options=given.options,
        ddl=Ddl(given.ddl),
        faults=given.faults,
        split_rows=given.split_rows,
    )
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as folder:
        report = run_trial(settings, Path(folder))
    # Not `asdict`, which cannot copy a Counter before Python 3.12.
    sys.stdout.write(json.dumps({each.name: getattr(report, each.name) for each in fields(report)}) + "\n")


if __name__ == "__main__":
    main()
