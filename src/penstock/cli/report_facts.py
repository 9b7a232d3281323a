"""What a report holds, part by part. Each part is asked for alone: one that fails does not keep the others away."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from psycopg import pq
from psycopg.rows import dict_row

from penstock.cli.configured import existing_store, table_names
from penstock.cli.pipeline_status import pipeline_status
from penstock.cli.redacted import redact_config
from penstock.cli.status import status_facts
from penstock.config import Config
from penstock.errors import PenstockError
from penstock.lsn import Lsn
from penstock.source import Role, connect
from penstock.source.faults import translated
from penstock.source.preflight import Request, run_preflight
from penstock.source.slots import find_blockers
from penstock.spool.folder import SpoolFolder
from penstock.spool.log import read_parts
from penstock.spool.registry import Holds, Readers
from penstock.state import Errored

Part = Callable[[], Any]

_PACKAGES = (
    "penstock",
    "pyspark",
    "pyarrow",
    "numpy",
    "pandas",
    "psycopg",
    "pydantic",
    "deltalake",
    "obstore",
    "typer",
)
_SETTINGS = """
    wal_level max_wal_senders max_replication_slots max_slot_wal_keep_size max_wal_size wal_sender_timeout
    logical_decoding_work_mem max_connections idle_replication_slot_timeout hot_standby_feedback server_encoding
    track_commit_timestamp data_checksums tcp_keepalives_idle
"""
_SLOTS = """
    select slot_name, plugin, slot_type, database, temporary, active, active_pid, restart_lsn::text,
           confirmed_flush_lsn::text, wal_status, safe_wal_size
    from pg_catalog.pg_replication_slots order by 1
"""
_SENDERS = """
    select pid, application_name, state, sync_state, backend_start::text, sent_lsn::text, write_lsn::text,
           flush_lsn::text, replay_lsn::text, reply_time::text
    from pg_catalog.pg_stat_replication order by 1
"""
_SESSIONS = """
    select coalesce(state, backend_type) as state, count(*)::int
    from pg_catalog.pg_stat_activity group by 1 order by 1
"""
_PUBLICATIONS = """
    select pubname, puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
    from pg_catalog.pg_publication order by 1
"""


def general_parts(path: Path) -> dict[str, Part]:
    """What is known without a config that can be understood."""
    return {"config.json": lambda: redact_config(tomllib.loads(path.read_text())), "versions.json": _versions}


def pipeline_parts(config: Config) -> dict[str, Part]:
    """What is known of a pipeline."""
    return {
        "status.json": lambda: status_facts(pipeline_status(config)),
        "state.json": lambda: _state(config),
        "spool.json": lambda: _spool(config),
        "server.json": lambda: _server(config),
        "check.json": lambda: _check(config),
    }


def plain(value: Any) -> Any:
    """As JSON has it: positions as text, although they are numbers, and times by ISO 8601."""
    match value:
        case Lsn() | Path():
            return str(value)
        case datetime():
            return value.isoformat()
        case Enum():
            return value.value
        case Mapping():
            return {str(key): plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case _:
            return value


def _versions() -> Mapping[str, Any]:
    return {
        "packages": {name: _package(name) for name in _PACKAGES},
        "python": sys.version,
        "libpq": pq.version(),
        "java": _java(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "environment": sorted(name for name in os.environ if name.startswith(("PENSTOCK_", "PG", "SPARK_", "JAVA_"))),
    }


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _java() -> str:
    # Imported here: commands without Spark start without it.
    from penstock.spark.java import find_java

    try:
        java = find_java()
    except PenstockError as error:
        return error.message
    return f"{java.version} ({java.program})"


def _state(config: Config) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for output in config.every_output:
        with existing_store(config, output) as store:
            if store is None:
                continue
            names = table_names(config, store)
            found[output.name] = {
                "progress": _maybe(store.get_stored_progress()),
                "lease": _maybe(store.get_lease()),
                "history": {
                    names.get(table_id, str(table_id)): [
                        {"at": each.at, "epoch": each.epoch, **_phase(each.phase)}
                        for each in store.get_table_replication_history(table_id)
                    ]
                    for table_id in store.get_table_replication_states()
                },
                "indexes": {name: asdict(build) for name, build in store.get_index_builds().items()},
                "commands": [asdict(command) for command in store.get_commands()],
            }
    return found


def _phase(phase: Any) -> Mapping[str, Any]:
    if not isinstance(phase, Errored):
        return {"phase": phase.name}
    return {"phase": phase.name, "reason": phase.reason, "attempts": phase.attempts, "position": phase.position}


def _spool(config: Config) -> Mapping[str, Any]:
    path = config.pipeline.spool.path
    if not path.is_dir():
        return {"path": path, "exists": False}
    folder = SpoolFolder(path)
    entries = [entry for _, part in read_parts(folder, repair=False) for entry in part]
    disk = shutil.disk_usage(path)
    return {
        "path": path,
        "exists": True,
        "entries": len(entries),
        "begin": entries[0].begin if entries else None,
        "end": entries[-1].end if entries else None,
        "rows": sum(entry.rows for entry in entries),
        "bytes": sum(entry.bytes for entry in entries),
        "readers": Readers(folder).positions(),
        "holds": [asdict(hold) for hold in Holds(folder).all()],
        "disk": {"total": disk.total, "free": disk.free},
    }


def _server(config: Config) -> Mapping[str, Any]:
    with connect(config.pipeline.source, Role.CHECK, parameters={"statement_timeout": "30s"}) as connection:
        with translated(connection, "look at the server"), connection.cursor(row_factory=dict_row) as cursor:

            def rows(query: str, *parameters: Any) -> list[dict[str, Any]]:
                return cursor.execute(query.encode(), parameters or None).fetchall()

            settings = rows(
                "select name, setting, unit from pg_catalog.pg_settings where name = any(%s) order by 1",
                _SETTINGS.split(),
            )
            found = {
                "version": rows("select pg_catalog.version()")[0]["version"],
                "in_recovery": rows("select pg_catalog.pg_is_in_recovery() as it")[0]["it"],
                "settings": {each["name"]: f"{each['setting']} {each['unit'] or ''}".strip() for each in settings},
                "slots": rows(_SLOTS),
                "senders": rows(_SENDERS),
                "sessions": {each["state"]: each["count"] for each in rows(_SESSIONS)},
                "publications": rows(_PUBLICATIONS),
            }
        return {**found, "open_transactions": [str(blocker) for blocker in find_blockers(connection)]}


def _check(config: Config) -> Mapping[str, Any]:
    settings = config.pipeline
    request = Request(
        settings.publication,
        settings.slot,
        settings.tables,
        settings.exclude,
        manage_publication=settings.manage_publication,
    )
    return run_preflight(settings.source, request).to_dict()


def _maybe(value: Any) -> Any:
    return None if value is None else asdict(value)
