"""A trial of search documents: random indexes follow random writes through DDL, kills and nonsense, and end up equal.

    python -m tests.support.document_trial --seed 7
    python -m tests.support.document_trial --seed 7 --events "kill driver,nonsense {},alias moved"

The seed determines the specifications, the partitioned tables, the sink, the statements and the DDL of each session,
and the events with the number of transactions before each. How far a pipeline is at that moment depends on the machine,
as in `tests.support.trial`. Half of the trials write to an SQLite file (`FileSink`), the others to OpenSearch through
`NonsenseProxy`. A pipeline that has ended is restarted, as a supervisor would do, and nothing is typed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import psycopg

from penstock import failpoints
from penstock.documents.base import FailurePolicy, ReadableSink
from penstock.lsn import Lsn, reaches
from penstock.sinks.opensearch import OpenSearchSink
from penstock.source.connections import Role, SourceSettings, connect
from penstock.specification import IndexSpecification, parse_specification
from penstock.state import CommandKind, open_store
from penstock.state.quarantine import Quarantine, open_quarantine
from penstock.testing.opensearch import ExistingOpenSearch, OpenSearchServer, why_not
from penstock.testing.postgres import PostgresServer
from penstock.testing.server import free_port
from tests.e2e.documents import documents_of
from tests.integration.documents import world
from tests.support.document_ddl import TEXTS, DocumentDdl, prepare
from tests.support.document_sink import FileSink
from tests.support.document_writers import LEFT_ALONE, POISONED, DocumentWriters, random_indexes
from tests.support.drive_pipeline import DriveSettings
from tests.support.faults import FAULTS, IN_STATE_SERVER, SERVER_SETTINGS, Scene, open_scene
from tests.support.nonsense import KINDS, NonsenseProxy
from tests.support.oracle import current_position
from tests.support.pipeline_process import PipelineEnded, PipelineProcess
from tests.support.processes import Part
from tests.support.replay import Discrepancy
from tests.support.trial import kill_backend, run_each, tally
from tests.support.writers import when_recovered

PUBLICATION = "trial"
STANDBY = "standby"
_ASKED_SECONDS = 20.0
_LOOKS = 3
"""So many looks at the catalog after the last statement, everything that the stream does not carry was noticed."""
_LAST_DDL = 8
_LONGEST_FAULT = 3.0
_UNFIT = frozenset(
    {"lake disk full", "second driver", "taken over", "destination failing", "destination slow"}
    | {"destination loses answers", "destination accepts and the driver dies", "destination rejects a table"}
)
"""Faults that concern a destination of tables, or that are an event of their own here."""
_FAULTS = [
    name for name, each in FAULTS.items() if each.seconds <= _LONGEST_FAULT and name not in _UNFIT | IN_STATE_SERVER
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to a pipeline."""

    name: str
    """`kill driver`, `nonsense HTML`, `fault network cut`, `rebuild`, …"""
    after: int
    """The number of transactions since the event before."""


@dataclass(frozen=True, slots=True)
class DocumentTrialSettings:
    """The settings of a trial; everything else follows from the seed."""

    seed: int
    events: int | tuple[str, ...] = 7
    """How many events, or which."""

    @property
    def in_search_server(self) -> bool:
        """True if documents go to OpenSearch."""
        return self.seed % 2 == 0

    @property
    def fails_over(self) -> bool:
        return self.seed % 5 == 1

    @property
    def skips(self) -> bool:
        """True if rejected documents are quarantined."""
        return self.seed % 4 < 2

    @property
    def master(self) -> str | None:
        """Spark's master; None runs tasks in the pipeline's process."""
        return "local[2]" if self.seed % 10 == 3 else None

    @property
    def command(self) -> str:
        """The command that repeats the trial."""
        events = self.events if isinstance(self.events, int) else f'"{",".join(self.events)}"'
        return f"python -m tests.support.document_trial --seed {self.seed} --events {events}"

    def plan(self) -> list[Event]:
        """Plan the events from the seed."""
        random = Random(f"{self.seed}-events")
        if isinstance(self.events, int):
            likely = self._likely(random)
            names = random.choices([*likely], [*likely.values()], k=self.events)
            if self.fails_over:
                names[random.randrange(len(names))] = f"failover{random.choice(['', ' with the slot'])}"
        else:
            names = list(self.events)
        return [Event(name, random.choice([0, 5, 20, 60]) + random.randrange(20)) for name in names]

    def _likely(self, random: Random) -> dict[str, float]:
        likely: dict[str, float] = {"kill driver": 4, "kill capture": 2, "kill at a point": 3, "rebuild": 2}
        likely |= {"alias moved": 3, "second pipeline": 1}
        if self.skips:
            likely |= {"poison": 3}
        if not self.fails_over:
            likely |= {"kill backend": 1} | {f"fault {name}": 2 / len(_FAULTS) for name in _FAULTS}
        if self.master:
            likely |= {"kill jvm": 1, "kill worker": 2}
        if self.in_search_server:
            kinds = [name for name in KINDS if self.skips or name != "413 for every document"]
            likely |= {f"nonsense {name}": 6 / len(kinds) for name in kinds}
        return likely


@dataclass(slots=True)
class DocumentTrialReport:
    """What happened in a trial."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter[str])
    events: Counter[str] = field(default_factory=Counter[str])
    """Everything else that happened to the pipeline, by name."""
    ddl: Counter[str] = field(default_factory=Counter[str])
    missed: int = 0
    """Kills whose victim was not running at the time."""
    starts: int = 0
    transactions: int = 0
    indexes: int = 0
    documents: int = 0
    """How many documents were compared; each index is, twice."""
    quarantined: int = 0
    """Documents that were still in quarantine when all was compared; all of them left it."""
    poisoned: int = 0
    """Documents that were in quarantine while rows were poisoned."""
    seconds: float = 0.0
    timeline: list[str] = field(default_factory=list[str])


def run_document_trial(
    settings: DocumentTrialSettings, folder: Path, search: ExistingOpenSearch | None = None
) -> DocumentTrialReport:
    """Run a trial; an error carries the command that repeats it. `search` is used if documents go to OpenSearch."""
    with ExitStack() as stack:
        timeline: list[str] = []
        try:
            if settings.in_search_server:
                search = search or stack.enter_context(OpenSearchServer())
            else:
                search = None
            return _Trial(settings, folder, stack, search, timeline).run()
        except BaseException as error:
            error.add_note("\n".join([*timeline, f"to see it again: {settings.command}"]))
            raise


def run_document_trials(
    trials: Sequence[DocumentTrialSettings],
    folder: Path,
    search: ExistingOpenSearch,
    note: Callable[[str, object], None],
) -> None:
    """Run all trials, then fail if any failed; `note` receives the seeds and the totals."""
    reports, failures = run_each(
        trials, folder, lambda settings, place: run_document_trial(settings, place, search), note
    )
    for name in ("kills", "events", "ddl"):
        note(name, tally(getattr(report, name) for report in reports))
    for name in ("starts", "transactions", "indexes", "documents", "quarantined", "poisoned"):
        note(name, sum(getattr(report, name) for report in reports))
    assert not failures, "\n".join(failures)


class _Trial:
    def __init__(
        self,
        settings: DocumentTrialSettings,
        folder: Path,
        stack: ExitStack,
        search: ExistingOpenSearch | None,
        timeline: list[str],
    ) -> None:
        self._settings = settings
        self._report = DocumentTrialReport(settings.seed, timeline=timeline)
        self._begun = time.monotonic()
        self._random = Random(f"{settings.seed}-trial")
        self._folder = folder
        self._stack = stack
        self._search = search
        self._server = stack.enter_context(closing(PostgresServer(settings=SERVER_SETTINGS).start()))
        self._ports = (self._server.port, free_port())
        self._database = self._server.create_database()
        self._dsn = self._server.dsn(self._database)
        if settings.fails_over:
            hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
            self._dsn = self._dsn.replace(f"127.0.0.1:{self._server.port}", hosts).partition("?")[0]
            self._dsn += "?target_session_attrs=read-write&connect_timeout=5"
        self._others: dict[str, Callable[[str], bool]] = {
            "rebuild": self._rebuild,
            "nonsense": self._answer_nonsense,
            "alias": self._move_alias,
            "second": self._start_second,
            "failover": self._fail_over,
            "poison": self._poison,
        }
        with connect(SourceSettings(self._dsn), Role.CATALOG) as connection:
            world.create(connection, recorded=False)
            split = prepare(self._random, connection)
            world.fill(self._random, connection)
            world.fill(self._random, connection, numbers=LEFT_ALONE)
        self._stop = threading.Event()
        self._ddl = DocumentDdl(Random(f"{settings.seed}-ddl"), split, PUBLICATION, self._stop.wait)
        prefix = f"trial-{settings.seed}-{self._database[-8:].lower().replace('_', '-')}-"
        self._indexes = random_indexes(self._random, prefix)
        self._proxy: NonsenseProxy | None = None
        sink: dict[str, Any] = {}
        if settings.in_search_server:
            assert search is not None
            self._proxy = stack.enter_context(NonsenseProxy(search.url, Random(f"{settings.seed}-nonsense")))
            sink = {"type": "opensearch", "url": self._proxy.url, "replicas": 0}
            stack.callback(self._remove_indexes, prefix)
        self._scene = self._open(sink, stack)
        self._pipeline = self._scene.pipeline

    def _open(self, sink: dict[str, Any], stack: ExitStack) -> Scene:
        own = self._folder / "pipeline"
        own.mkdir(parents=True)
        random = self._random
        driven = DriveSettings(
            dsn=self._dsn,
            folder=str(own),
            slot=f"trial_{self._database[-12:]}",
            id=PUBLICATION,
            tables=("w.*",),
            indexes=self._indexes,
            sink=sink,
            master=self._settings.master,
            documents={
                "fan_out_documents": random.choice([3, 1000]),
                "chunk_documents": random.choice([2, 1000]),
                "on_failure": (FailurePolicy.SKIP if self._settings.skips else FailurePolicy.STOP).value,
                **({"local_documents": 0} if self._settings.master else {}),
            },
        )
        return stack.enter_context(open_scene(driven, self._server, Random(f"{self._settings.seed}-scene")))

    def run(self) -> DocumentTrialReport:
        report = self._report
        self._tell(f"indexes {', '.join(self._indexes)} in {'OpenSearch' if self._search else 'a file'}")
        self._pipeline.start()
        with DocumentWriters(self._dsn, self._settings.seed, self._ddl, self._stop) as writers:
            for event in self._settings.plan():
                self._happen(event, writers)
            # Changes must also be followed after the last of them.
            self._keep_running(lambda: self._pipeline.seen.applied is not None)
            writers.wait(30)
        when_recovered(lambda: self._set_poison("null where poison = 0"))
        # Twice: what is altered last leads to builds, which would hide documents that were lost before.
        self._check()
        when_recovered(self._alter_last)
        report.transactions, report.ddl = writers.transactions, self._ddl.done
        self._check()
        code = self._pipeline.stop()
        if code != 0:
            raise PipelineEnded(f"exit code {code} after SIGTERM")
        report.starts = self._pipeline.starts
        report.seconds = time.monotonic() - self._begun
        self._tell(f"equal: {report.documents} documents, {report.starts} starts")
        return report

    def _tell(self, what: str) -> None:
        line = f"seed {self._settings.seed}, {time.monotonic() - self._begun:6.1f} s: {what}"
        self._report.timeline.append(line)
        print(line, file=sys.stderr, flush=True)

    def _keep_running(self, is_done: Callable[[], bool]) -> None:
        self._pipeline.keep_running(is_done)

    # Events

    def _happen(self, event: Event, writers: DocumentWriters) -> None:
        if not self._pipeline.running:
            self._pipeline.start()
        writers.wait(event.after)
        what, _, detail = event.name.partition(" ")
        match what:
            case "kill" if detail == "at a point":
                self._kill_at_point(writers)
            case "kill" if detail == "backend":
                self._count_kill(detail, kill_backend(writers.backends[-1:]))
            case "kill":
                self._count_kill(detail, self._pipeline.kill(Part(detail)))
            case "fault":
                fault = FAULTS[detail]
                if fault.can_strike(self._scene):
                    self._keep_running(lambda: self._pipeline.seen.applied is not None)
                    self._tell(str(self._scene.disturb(fault)))
                    self._report.events[event.name] += 1
            case _:
                if self._others[what](detail):
                    self._report.events[event.name] += 1
                    self._tell(event.name)

    def _count_kill(self, victim: str, struck: bool) -> None:
        if struck:
            self._report.kills[victim] += 1
            self._tell(f"killed {victim}")
        else:
            self._report.missed += 1

    def _kill_at_point(self, writers: DocumentWriters) -> None:
        """Kill the driver between two steps; if it does not come by, at any moment."""
        point = self._random.choice([*failpoints.DOCUMENT_POINTS])
        self._pipeline.kill()
        self._pipeline.start(armed=f"{point}=kill:{self._random.randint(1, 3)}")
        if self._random.random() < 0.5:
            self._rebuild("")
        writers.wait(self._random.randint(10, 50))
        struck = not self._pipeline.running
        self._pipeline.close()
        self._count_kill(f"driver {point}" if struck else "driver", struck=True)

    def _rebuild(self, detail: str) -> bool:
        settings = self._pipeline.settings
        with open_store(settings.state_url, f"{settings.id}:documents") as store:
            store.add_command(CommandKind.REBUILD_INDEX)
        return True

    def _answer_nonsense(self, kind: str) -> bool:
        """Let the search server, or what is in front of it, answer nonsense for a while."""
        proxy = self._proxy
        assert proxy is not None, "documents do not go to a search server"
        before = proxy.told[kind]
        proxy.share, proxy.kind = self._random.choice([0.2, 0.6, 1.0]), kind
        until = time.monotonic() + self._random.choice([0.5, 1.5, 2.5])
        if self._random.random() < 0.3:
            # At a start, other requests are sent.
            self._pipeline.kill()
        try:
            when_recovered(self._touch)
            # On a busy machine it may take a while until something is asked.
            self._keep_running(lambda: time.monotonic() >= until + (0 if proxy.told[kind] > before else _ASKED_SECONDS))
        finally:
            proxy.kind = None
        return proxy.told[kind] > before

    def _touch(self) -> None:
        """Change rows that writers leave alone: no later write hides it if these changes are lost."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute("set lock_timeout = '300ms'")
            for table in ("people", "orders", "products", "teams", "tags"):
                column, key = TEXTS[table][0], world.KEYS[table][0]
                text = f"update w.{table} set {column} = reverse({column}) where {key}::text ~ '[12][0-9]'"
                with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.ProgrammingError):
                    connection.execute(text.encode())

    def _poison(self, detail: str) -> bool:
        """Let documents of some people fail to build for a while; the pipeline may be killed or build meanwhile."""
        if not any(POISONED in each for each in self._indexes.values()):
            return False
        every = self._random.choice([1, 2, 5])
        poisoned = when_recovered(lambda: self._set_poison(f"0 where id % {every} = 0"))
        match self._random.choice(["", "kill", "rebuild"]):
            case "kill":
                self._pipeline.kill()
            case "rebuild":
                self._rebuild("")
            case _:
                pass
        until = time.monotonic() + self._random.choice([0.5, 2.5, 10.0])
        with self._quarantine() as quarantine:
            self._keep_running(lambda: bool(quarantine.entries()) or time.monotonic() >= until)
            self._report.poisoned += len(quarantine.entries())
        when_recovered(lambda: self._set_poison("null where poison = 0"))
        return poisoned > 0

    def _set_poison(self, text: str) -> int:
        with (
            psycopg.connect(self._dsn, autocommit=True) as connection,
            suppress(psycopg.errors.ProgrammingError),  # the table may have another name for a while
        ):
            connection.execute("set lock_timeout = '300ms'")
            return connection.execute(f"update w.people set poison = {text}".encode()).rowcount
        return 0

    def _move_alias(self, detail: str) -> bool:
        """Move the alias of an index by hand: to an older generation, or away."""
        index = self._random.choice([*self._indexes])
        if self._search is not None:
            return self._move_in_server(self._search, index)
        moved = self._file_sink().move_alias(index)
        if moved:
            # A file is looked at by a start only.
            self._pipeline.kill()
        return moved

    def _move_in_server(self, search: ExistingOpenSearch, index: str) -> bool:
        found = search.request("GET", f"/{index}_*/_alias")
        serving = [name for name, each in found.items() if index in each["aliases"]]
        others = sorted(found.keys() - set(serving))
        if not serving:
            return False
        actions: list[Any] = [{"remove": {"index": serving[0], "alias": index}}]
        if others and self._random.random() < 0.7:
            actions.append({"add": {"index": self._random.choice(others), "alias": index}})
        with suppress(OSError):  # a generation may just have been removed
            search.request("POST", "/_aliases", {"actions": actions})
            return True
        return False

    def _start_second(self, detail: str) -> bool:
        """Another pipeline must not write the same indexes; nor may a second process of this one."""
        folder = self._folder / f"second-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        settings = replace(self._pipeline.settings, folder=str(folder), master=None)
        is_other = self._search is not None
        if is_other:
            if not self._owns_indexes():
                return False
            settings = replace(settings, id="other", slot=f"{settings.slot[:50]}_b", state=f"sqlite:///{folder}/s.db")
        else:
            self._keep_running(lambda: self._pipeline.seen.applied is not None)
        second = PipelineProcess(settings)
        try:
            second.start()
            if second.wait_ended() == 0:
                raise Discrepancy("a second pipeline ended well although the indexes belong to another")
        finally:
            second.close()
            if is_other:
                when_recovered(self._drop_other)
        return True

    def _owns_indexes(self) -> bool:
        """Return whether each index has a generation, and thereby an owner."""
        with self._readable() as sink:
            found = [sink.facts(name) for name in self._indexes]
        return all(each.generation or each.filling for each in found)

    def _drop_other(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                " where slot_name like %s and not active",
                ["trial%\\_b"],
            )
            connection.execute("drop publication if exists other")

    def _fail_over(self, detail: str) -> bool:
        """End the primary, and promote a standby that may lack its last changes."""
        self._keep_running(lambda: self._pipeline.seen.applied is not None)
        port = next(port for port in self._ports if port != self._server.port)
        standby = self._stack.enter_context(closing(self._server.standby(STANDBY, port=port)))
        standby.start()
        if detail:
            with suppress(Exception):  # the pipeline may have to wait, and so would the slot
                standby.sync_slots(self._pipeline.settings.slot, timeout=10)
        if self._random.random() < 0.5:
            self._server.kill()
        else:
            self._server.stop()
        standby.execute("select pg_promote()")
        self._server.close()
        self._server = self._scene.server = standby
        return True

    # The end

    def _alter_last(self) -> None:
        """Alter tables once more: no later change, and no build that waits, hides what the pipeline does not notice."""
        if self._random.random() < 0.5:
            self._pipeline.close()
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            for _ in range(_LAST_DDL):
                self._ddl.act(connection, silent=True)

    def _is_seeded(self) -> bool:
        return self._pipeline.seen.phases == dict.fromkeys(self._indexes, "seeded")

    def _check(self) -> None:
        """Nobody writes: everything arrives, and every document equals the one of the database."""
        self._settle()
        self._empty_quarantine()
        specifications = [parse_specification(text, name) for name, text in self._indexes.items()]
        self._compare(specifications)

    def _settle(self) -> None:
        """Wait until the pipeline has noticed everything, and all indexes serve everything that is committed."""
        pipeline = self._pipeline
        if not pipeline.running:
            pipeline.start()
        starts, looks = pipeline.starts, pipeline.seen.looks

        def has_looked() -> bool:
            return pipeline.seen.looks > _LOOKS + (looks if pipeline.starts == starts else 0)

        self._keep_running(has_looked)
        # Between batches the pipeline acts on what it saw, so this comes after it.
        end = self._position()

        def is_settled() -> bool:
            durable = pipeline.seen.durable
            return self._is_seeded() and durable is not None and reaches(durable, end)

        self._keep_running(is_settled)

    def _position(self) -> Lsn:
        def ask() -> Lsn:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                return current_position(connection)

        return when_recovered(ask)

    def _empty_quarantine(self) -> None:
        """Retry the quarantined documents: nonsense put them there, and the sink takes them now."""
        with self._quarantine() as quarantine:
            entries = quarantine.entries()
            self._report.quarantined += len(entries)
            for name in {each.index for each in entries}:
                quarantine.retry(name)
            self._keep_running(lambda: not quarantine.entries())

    @contextmanager
    def _quarantine(self) -> Iterator[Quarantine]:
        settings = self._pipeline.settings
        with closing(open_quarantine(settings.state_url, f"{settings.id}:documents")) as quarantine:
            yield quarantine

    def _compare(self, specifications: list[IndexSpecification]) -> None:
        with self._readable() as sink:
            for name, wanted in documents_of(self._dsn, specifications).items():
                facts = sink.facts(name)
                if facts.generation is None or facts.filling is not None:
                    raise Discrepancy(f"{name}: {facts} is not one complete generation")
                ids = [id_ for chunk in sink.scan(name) for id_ in chunk]
                found = sink.fetch(name, ids)
                if len(ids) != len(found):
                    raise Discrepancy(f"{name}: {len(ids)} ids of {len(found)} documents")
                _check_equal(name, self._indexes[name], found, wanted)
                self._report.indexes += 1
                self._report.documents += len(wanted)

    @contextmanager
    def _readable(self) -> Iterator[ReadableSink]:
        if self._search is None:
            yield self._file_sink()
            return
        with closing(OpenSearchSink(self._search.url)) as sink:
            yield sink

    def _file_sink(self) -> FileSink:
        return FileSink(self._pipeline.settings.sink_file)

    def _remove_indexes(self, prefix: str) -> None:
        assert self._search is not None
        for each in self._search.request("GET", f"/_cat/indices/{prefix}*?format=json&h=index&expand_wildcards=all"):
            with suppress(OSError):
                self._search.request("DELETE", f"/{each['index']}")


def _check_equal(name: str, text: str, found: Any, wanted: dict[str, Any]) -> None:
    if found == wanted:
        return
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    differing = [id_ for id_ in sorted(wanted.keys() & found.keys()) if wanted[id_] != found[id_]]
    lines = [f"{name}: missing {missing}, extra {extra}, different {differing}"]
    lines += [f"{id_}: found {json.dumps(found[id_])}\n  wanted {json.dumps(wanted[id_])}" for id_ in differing[:2]]
    raise Discrepancy("\n".join([*lines, text]))


def _parse_events(text: str) -> int | tuple[str, ...]:
    return int(text) if text.isdecimal() else tuple(each.strip() for each in text.split(","))


def main(arguments: Iterable[str] | None = None) -> None:
    """Run one trial and print its report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.document_trial", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--events", type=_parse_events, default=7, help="how many, or which, with commas")
    given = parser.parse_args(None if arguments is None else list(arguments))
    settings = DocumentTrialSettings(given.seed, given.events)
    if settings.in_search_server and (missing := why_not()):
        parser.error(missing)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as folder:
        report = run_document_trial(settings, Path(folder))
    sys.stdout.write(json.dumps({each.name: getattr(report, each.name) for each in fields(report)}) + "\n")


if __name__ == "__main__":
    main()
