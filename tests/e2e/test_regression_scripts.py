"""PostgreSQL's own regression scripts as a workload: no table stops, all compare equal, the source notices nothing.

See `tests.support.regression` for the scripts, which are not part of this repository. `PENSTOCK_SOAK_SCRIPTS` limits
the run to the set-up and some of them, separated by spaces.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.comparison.report import Report
from penstock.comparison.verification import verify_tables
from penstock.destinations.delta.destination import DeltaDestination
from penstock.errors import Retry
from penstock.lsn import reaches
from penstock.state import Errored, Ready, open_store
from penstock.testing.postgres import PostgresServer
from penstock.workers.process_tasks import ProcessTasks
from tests.conftest import Database
from tests.e2e.support import Alone, current_position, tables_alone, tables_settings, wait_for
from tests.support.regression import HBA, HOW_TO_GET_THEM, Scripts, Workload, differing_errors, find_scripts

SETTLE_SECONDS = 600.0
"""A guard against hangs."""
CHOSEN = os.environ.get("PENSTOCK_SOAK_SCRIPTS", "").split()
PAUSE_SECONDS = float(os.environ.get("PENSTOCK_SOAK_PAUSE", "0.05"))
EXPECTED_ERRORS = (
    # A script took the replica identity away, or PostgreSQL 18 refuses it because of a virtual generated column:
    # docs/guides/postgres.md, "Replica identity".
    "^cannot (update|delete from) table ",
    # A published table cannot become unlogged.
    "^cannot change table .* to unlogged because it is part of a publication",
)
"""Errors of scripts that come from publishing a table, as patterns."""
LIMITS: dict[str, str] = {}
"""Reasons of tables that may stop, as patterns, with the page that documents each."""

MakeServer = Callable[..., PostgresServer]


def start_workload(
    make_server: MakeServer, major: int, scripts: Scripts, pause: float = 0.0
) -> tuple[Database, Workload]:
    server = make_server(major=major, hba=HBA)
    database = Database(server, server.create_database("regression", template="template0"))
    return database, Workload(scripts, database, pause=pause)


class Followed:
    """A pipeline of all tables of a database, and what was found wrong with it."""

    def __init__(self, database: Database, folder: Path, *, managed: bool) -> None:
        self.database = database
        self.lake = folder / "lake"
        self.store = open_store(f"sqlite:///{folder / 'state.db'}", "regression")
        # PostgreSQL 18 refuses updates of tables with replica identity full whose generated columns are not sent.
        generated = ", publish_generated_columns = stored" if database.server.major >= 18 else ""
        options = f"publish_via_partition_root = true{generated}"
        database.execute(f"create publication regression{'' if managed else ' for all tables'} with ({options})")
        settings = tables_settings(database, folder, "regression", tables=("*.*",), manage_publication=managed)
        self.pipeline: Alone = tables_alone(settings, self.store, DeltaDestination(self.lake), ProcessTasks())
        self.findings: list[str] = []

    def settle(self) -> None:
        """Wait until all tables are followed, or have stopped for good, and have everything."""
        pipeline = self.pipeline
        looks, end = pipeline.coordinator.looks, current_position(self.database)

        def waiting() -> list[str]:
            pipeline.wait(0)
            pipeline.coordinator.check()
            return [name for name, phase in pipeline.phases.items() if not _is_settled(phase)]

        def settled() -> bool:
            time.sleep(0.2)  # the pipeline needs the processor more
            return pipeline.coordinator.looks > looks + 1 and reaches(pipeline.status.applied, end) and not waiting()

        try:
            wait_for(settled, "all tables to be followed", SETTLE_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {[(each, pipeline.phases[each]) for each in waiting()[:5]]}") from None

    def verify(self, when: str, tables: Sequence[str] = ()) -> Report:
        """Compare tables, or all; note what stopped and what differs."""
        report = verify_tables(
            self.pipeline.settings, self.store, DeltaDestination(self.lake), ProcessTasks(), tables=tables
        )
        for name, phase in self.pipeline.phases.items():
            if isinstance(phase, Errored) and not any(re.search(limit, phase.reason) for limit in LIMITS):
                self._note(f"{name} stopped: {phase.reason}", when)
        for each in report.tables:
            if each.result == "different":
                columns = f" columns {each.columns}" if each.columns else ""
                self._note(f"{each.table} differs: {each.counts}{columns} {each.differences[:3]}", when)
            elif each.result == "not compared" and "stopped" not in (each.reason or ""):
                self._note(f"{each.table} not compared: {each.reason}", when)
        return report

    def _note(self, finding: str, when: str) -> None:
        if not any(each.startswith(finding) for each in self.findings):
            self.findings.append(f"{finding} (after {when})")


def _is_settled(phase: Any) -> bool:
    return isinstance(phase, Ready) or (isinstance(phase, Errored) and phase.retry_policy.retry is not Retry.TIMED)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("major", "managed"), [(15, False), (18, False), (18, True)], ids=["pg15", "pg18", "pg18 managed"]
)
def test_the_servers_own_scripts_leave_equal_tables(
    major: int, managed: bool, make_server: MakeServer, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    scripts = find_scripts(major)
    if scripts is None:
        pytest.skip(HOW_TO_GET_THEM.format(major=major))
    groups = [["test_setup"], CHOSEN] if CHOSEN else scripts.groups()
    database, workload = start_workload(make_server, major, scripts, PAUSE_SECONDS)
    followed = Followed(database, tmp_path, managed=managed)
    known: set[str] = set()
    with followed.pipeline as pipeline:
        for group in groups:
            begun = time.monotonic()
            workload.run(group)
            written = time.monotonic() - begun
            followed.settle()
            settled = time.monotonic() - begun - written
            # All tables are compared at the end; those of this group now, before other scripts drop them.
            new = pipeline.phases.keys() - known
            known |= new
            report = followed.verify(" ".join(group), sorted(new)) if new else None
            took = f"{written:.0f} s, settled after {settled:.0f} s, {time.monotonic() - begun:.0f} s in all"
            print(f"{' '.join(group)}: {took}; {len(new)} tables, {len(followed.findings)} findings", flush=True)
        report = followed.verify("all")
        phases = Counter(phase.name for phase in pipeline.phases.values())
    _, undisturbed = start_workload(make_server, major, scripts)
    for group in groups:
        undisturbed.run(group)
    for script, message in differing_errors(workload, undisturbed, [name for group in groups for name in group]):
        if not any(re.search(known, message) for known in EXPECTED_ERRORS):
            followed.findings.append(f"{script} met an error that it does not meet without the pipeline: {message}")
    rows = sum(each.counts.source_rows for each in report.tables)
    record_property("PostgreSQL", database.server.version)
    record_property("scripts", workload.counts["scripts"])
    record_property("tables", len(known))
    record_property("tables at the end", len(report.tables))
    record_property("rows at the end", rows)
    print(phases, workload.counts, rows)
    assert not followed.findings, "\n".join(followed.findings)
    assert workload.counts["scripts that hung"] == 0
    assert {each.result for each in report.tables} <= {"equal", "not compared"}
