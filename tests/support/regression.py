"""PostgreSQL's own regression scripts as a workload.

The scripts are not part of this repository. `PENSTOCK_REGRESSION_SCRIPTS` names a folder with one subfolder per major
version, each with the files of `src/test/regress` of that version: `15/sql`, `15/data`, `15/parallel_schedule` …

`psql` runs them as `pg_regress` does: group by group, the scripts of a group at the same time. Nothing judges their
output here, and statements that need the C library of the regression tests fail; what counts is what they leave behind.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.testing.postgres_binaries import clean_environment

VARIABLE = "PENSTOCK_REGRESSION_SCRIPTS"
SCRIPT_SECONDS = 900.0
"""A guard against hangs."""
HOW_TO_GET_THEM = (
    f"set {VARIABLE} to a folder with PostgreSQL's src/test/regress of each version; in a clone of PostgreSQL's "
    "repository: mkdir -p /folder/{major}; git archive REL_{major}_STABLE src/test/regress | "
    "tar x --strip-components=3 -C /folder/{major}"
)
HBA = ("host all all 127.0.0.1/32 trust",)
"""Scripts connect as roles of their own, which have no passwords."""
SETTINGS = {
    "lc_messages": "C",
    "lc_monetary": "C",
    "lc_numeric": "C",
    "lc_time": "C",
    "timezone_abbreviations": "Default",
}
"""What `pg_regress` sets for its database."""
_ENVIRONMENT = {
    "PGTZ": "America/Los_Angeles",
    "PGDATESTYLE": "Postgres, MDY",
    "PGOPTIONS": "-c intervalstyle=postgres_verbose",
    "PG_DLSUFFIX": ".so",
}
# Without it the server would refuse updates and deletes of published tables without a key. The scripts drop and count
# things of their own schemas only, so these functions have one.
_FULL_IDENTITY = """
    create schema penstock_regression;
    grant usage on schema penstock_regression to public;
    create function penstock_regression.identify() returns event_trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp set client_min_messages = error as $$
    declare
        found record;
    begin
        for found in
            select distinct c.oid::regclass as name
            from pg_event_trigger_ddl_commands() d join pg_class c on c.oid = d.objid
            where d.classid = 'pg_class'::regclass and c.relkind in ('r', 'p') and c.relpersistence <> 't'
              -- PostgreSQL 18 refuses updates of published tables that have both.
              and not exists (select from pg_attribute a where a.attrelid = c.oid and a.attgenerated = 'v')
        loop
            begin
                execute format('alter table only %s replica identity full', found.name);
            exception when others then
                null;
            end;
        end loop;
    end
    $$;
    create event trigger penstock_regression on ddl_command_end
        when tag in ('CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO', 'CREATE SCHEMA', 'IMPORT FOREIGN SCHEMA')
        execute function penstock_regression.identify()
"""
_PAUSE = """
    create function penstock_regression.pause() returns event_trigger language plpgsql as $$
    begin perform pg_catalog.pg_sleep({seconds}); end $$;
    create event trigger penstock_regression_pause on ddl_command_start
        when tag in ('DROP TABLE', 'DROP SCHEMA', 'ALTER TABLE') execute function penstock_regression.pause()
"""
_ERROR = re.compile(r"^(?:psql:\S+ )?(ERROR|FATAL|PANIC): +(.*)$", re.MULTILINE)
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Scripts:
    """The scripts of one version."""

    folder: Path

    def groups(self) -> list[list[str]]:
        """Return the names of the scripts, in the order of `parallel_schedule`."""
        lines = (self.folder / "parallel_schedule").read_text().splitlines()
        return [line.partition(":")[2].split() for line in lines if line.startswith("test:")]


def find_scripts(major: int) -> Scripts | None:
    """Return the scripts of a version; None if they are not on this machine."""
    folder = Path(os.environ.get(VARIABLE, "")) / str(major)
    return Scripts(folder) if os.environ.get(VARIABLE) and (folder / "parallel_schedule").is_file() else None


class Workload:
    """Runs scripts in a database of its own server."""

    def __init__(self, scripts: Scripts, database: Any, *, pause: float = 0.0) -> None:
        """`pause` is how long every DROP and ALTER TABLE waits first, so that tables live long enough to be copied."""
        self.scripts = scripts
        self._database = database
        self._server = database.server
        # The server reads and writes files, too, as a user of its own.
        self.folder: Path = self._server.folder / "regression"
        (self.folder / "results").mkdir(parents=True)
        self._sources = self._server.folder / "scripts"
        shutil.copytree(scripts.folder, self._sources)
        for folder in (self.folder, self.folder / "results", self._sources):
            folder.chmod(0o777)
        for name, value in SETTINGS.items():
            database.execute(f"alter database {database.name} set {name} = '{value}'")
        database.execute(_FULL_IDENTITY)
        if pause:
            database.execute(_PAUSE.format(seconds=pause))
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def run(self, names: Sequence[str]) -> None:
        """Run scripts at the same time, each to its end."""
        threads = [threading.Thread(target=self._run, args=(name,), name=name) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def errors(self, name: str) -> list[str]:
        """Return the errors of a script, without numbers and folders, which differ from run to run."""
        text = self._output(name).read_text(errors="replace").replace(str(self._server.folder), "")
        return [_NUMBERS.sub("#", message) for _, message in _ERROR.findall(text)]

    def _run(self, name: str) -> None:
        begun = time.monotonic()
        command = [str(self._server.bin_dir / "psql"), "-X", "-a", "-q", "-v", "HIDE_TABLEAM=on"]
        command += ["-v", "HIDE_TOAST_COMPRESSION=on", "-f", str(self._sources / "sql" / f"{name}.sql")]
        with self._output(name).open("wb") as output:
            try:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env=self._environment(),
                    timeout=SCRIPT_SECONDS,
                    check=False,
                )
                self.counts["scripts"] += 1
            except subprocess.TimeoutExpired:
                self.counts["scripts that hung"] += 1
        self.seconds[name] = time.monotonic() - begun

    def _output(self, name: str) -> Path:
        return self.folder / "results" / f"{name}.out"

    def _environment(self) -> dict[str, str]:
        server = self._server
        return {
            **clean_environment(),
            **_ENVIRONMENT,
            "PGHOST": "127.0.0.1",
            "PGPORT": str(server.port),
            "PGUSER": server.user,
            "PGPASSWORD": server.password,
            "PGDATABASE": self._database.name,
            "PG_ABS_SRCDIR": str(self._sources),
            "PG_ABS_BUILDDIR": str(self.folder),
            "PG_LIBDIR": str(server.folder / "lib"),
        }


def differing_errors(here: Workload, there: Workload, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the errors that a script had here and not there, with its name."""
    for name in names:
        for message in (Counter(here.errors(name)) - Counter(there.errors(name))).elements():
            yield name, message
