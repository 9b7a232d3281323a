"""A report about a pipeline: one archive for support with an incident, without secrets.

Each part is collected on its own: one that fails leaves an `*.error.txt` and does not affect the others. Of the
config file, only values that are known to be harmless are included; a reference to the environment is not resolved.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import shutil
import sys
import tarfile
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

from psycopg import pq
from psycopg.rows import dict_row
from pydantic import BaseModel, SecretStr

from penstock.config import Config, load_config
from penstock.config.models import ConfigFile
from penstock.errors import ConfigError, PenstockError
from penstock.lsn import Lsn
from penstock.observe import printable, redact, scrub
from penstock.observe.redact import MASK
from penstock.operations.readiness import check_pipeline
from penstock.operations.status import pipeline_status
from penstock.operations.status_model import status_facts
from penstock.operations.stores import existing_store, table_names
from penstock.source import Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.source.slots import find_blockers
from penstock.spool.folder import SpoolFolder
from penstock.spool.log import read_parts
from penstock.spool.registry import Holds, Readers
from penstock.state import Errored

LOG_LINES = 5000
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
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_HARMLESS_OPTIONS = frozenset(
    {"type", "name", "path", "mode", "compression", "format", "commit_interval", "transactional"}
)
_SECRET_KEY = re.compile(r"(?i)pass|pwd|secret|token|key|pin|credential")
"""Keys whose values may be secret even if they are numbers."""
_SHORTEST_SECRET = 8
_README = """Report about the Penstock pipeline {name!r}, created {time}.

config.json     the config file, without values from the environment and without values that may be secret
versions.json   versions of Penstock, Python, Java and libraries; names of environment variables
status.json     output of `penstock status --json`
state.json      stored progress, the history of every table's phases, and the commands
spool.json      what is in the spool, and its readers
server.json     the server's version, some settings, slots, senders, publications, open transactions
check.json      output of `penstock check --json`
log.txt         the last lines of the log files given with --log
*.error.txt     why a part is missing

It contains names of tables, columns, hosts, databases and users, but no passwords and no rows. Check it before you send
it.
"""


def write_report(config_path: Path, path: Path | None = None, logs: Sequence[Path] = ()) -> tuple[Path, list[str]]:
    """Write a report; returns its path, by default named after the pipeline and the time, and the files in it.

    A config file with errors is reported like everything else. Raises `ConfigError` if there is no config file, or if
    `path` exists or cannot be written.
    """
    config, problem = _load(config_path)
    name = config.pipeline.id if config is not None else config_path.stem
    now = datetime.now(UTC)
    path = path or Path(f"penstock-report-{name}-{now:%Y%m%d-%H%M%S}.tar.gz")
    if path.exists():
        raise ConfigError(f"{str(path)!r} already exists", hint="Name another file with --to.")
    files = {"README.txt": _README.format(name=name, time=f"{now:%Y-%m-%d %H:%M:%S} UTC")}
    if problem is not None:
        files["config.error.txt"] = f"{problem.message}\n{problem.hint}\n"
    files |= dict(_collect(_general_parts(config_path) | (_pipeline_parts(config) if config is not None else {})))
    if logs:
        files["log.txt"] = "".join(_last_lines(log) for log in logs)
    secrets = _secrets(config, config_path)
    _write(path, {each: printable(redact(scrub(text, secrets))) for each, text in files.items()})
    return path, sorted(files)


def redact_config(file: dict[str, Any]) -> dict[str, Any]:
    """The parsed file without secrets; references to the environment are kept."""
    return _shown(file, ConfigFile)


def hidden_texts(file: dict[str, Any]) -> set[str]:
    """Texts that `redact_config` hides, to be hidden elsewhere too. Short texts are words, not secrets."""
    shown = _texts(redact_config(file))
    return {text for text in _texts(file) - shown if len(text) >= _SHORTEST_SECRET}


def _load(path: Path) -> tuple[Config | None, ConfigError | None]:
    """The config, or the error in it; raises if there is no file."""
    try:
        return load_config(path), None
    except ConfigError as error:
        if not path.is_file():
            raise
        return None, error


def _collect(parts: Mapping[str, Part]) -> Iterable[tuple[str, str]]:
    for name, part in parts.items():
        try:
            yield name, json.dumps(_plain(part()), indent=2, ensure_ascii=False) + "\n"
        except PenstockError as error:
            yield f"{Path(name).stem}.error.txt", f"{type(error).__name__}: {error.message}\n{error.hint}\n"
        except Exception as error:
            # A part may fail for any reason: the report is made when something is broken. Without the error's text,
            # because libraries quote values in it.
            frames = "".join(traceback.format_tb(error.__traceback__))
            yield f"{Path(name).stem}.error.txt", f"{type(error).__name__}\n{frames}"


def _last_lines(path: Path) -> str:
    try:
        with open(path, errors="replace") as file:
            return f"==> {path} <==\n{''.join(deque(file, LOG_LINES))}\n"
    except OSError as error:
        return f"==> {path} <==\ncannot read: {error.strerror}\n"


def _secrets(config: Config | None, path: Path) -> frozenset[str]:
    """All known secrets, to be removed from every file."""
    secrets = {os.environ.get("PGPASSWORD", "")}
    with contextlib.suppress(OSError, ValueError):
        secrets |= hidden_texts(tomllib.loads(path.read_text()))
    if config is not None:
        secrets |= config.secrets | config.pipeline.source.place.secrets
        if config.state_file is None and config.state_url != "memory:":
            secrets |= SourceSettings(config.state_url).place.secrets
    return frozenset(secrets - {""})


def _write(path: Path, files: Mapping[str, str]) -> None:
    folder = path.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    try:
        with open(path, "xb", opener=_private) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in files.items():
                content = text.encode("utf-8", "backslashreplace")
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror}", hint="Name another file with --to."
        ) from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _general_parts(path: Path) -> dict[str, Part]:
    """What is known without a valid config."""
    return {"config.json": lambda: redact_config(tomllib.loads(path.read_text())), "versions.json": _versions}


def _pipeline_parts(config: Config) -> dict[str, Part]:
    """What is known of the pipeline."""
    return {
        "status.json": lambda: status_facts(pipeline_status(config)),
        "state.json": lambda: _state(config),
        "spool.json": lambda: _spool(config),
        "server.json": lambda: _server(config),
        "check.json": lambda: check_pipeline(config).to_dict(),
    }


def _plain(value: Any) -> Any:
    """As JSON: positions as text, times in ISO 8601."""
    match value:
        case Lsn() | Path():
            return str(value)
        case datetime():
            return value.isoformat()
        case Enum():
            return value.value
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
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
        with translated(connection, "inspect the server"), connection.cursor(row_factory=dict_row) as cursor:

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


def _maybe(value: Any) -> Any:
    return None if value is None else asdict(value)


def _texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {text for each in value.values() for text in _texts(each)}
    if isinstance(value, list):
        return {text for each in value for text in _texts(each)}
    return {value} if isinstance(value, str) else set()


def _shown(value: Any, section: type[BaseModel]) -> Any:
    """A section as far as its model knows its keys; anything else may be secret."""
    if isinstance(value, list):
        return [_shown(each, section) for each in value]
    if not isinstance(value, dict):
        return _masked(value)
    fields = {field.alias or name: field for name, field in section.model_fields.items()}
    is_open = section.model_config.get("extra") == "allow"
    found: dict[str, Any] = {}
    for key, each in value.items():
        if key in fields:
            found[key] = _field(key, each, frozenset(_types(fields[key].annotation)))
        else:
            found[key] = _known(each) if is_open and key in _HARMLESS_OPTIONS else _masked(each, key)
    return found


def _field(key: str, value: Any, types: frozenset[Any]) -> Any:
    """The value of a known key, whose annotation consists of these types."""
    inner = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]
    if inner and dict in types and isinstance(value, dict):
        return {name: _shown(each, inner[0]) for name, each in value.items()}
    if inner:
        return _shown(value, inner[0])
    if SecretStr in types and key != "url":
        return _masked(value, key)
    # A known key whose value has another shape is as good as unknown.
    return _masked(value, key) if isinstance(value, dict) and dict not in types else _known(value)


def _types(annotation: Any) -> Iterable[Any]:
    yield get_origin(annotation) or annotation
    for each in get_args(annotation):
        yield from _types(each)


def _known(value: Any) -> Any:
    """The value of a known key: only a URL can contain a password."""
    if isinstance(value, dict):
        return {key: _known(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_known(each) for each in value]
    return redact(value) if isinstance(value, str) else value


def _masked(value: Any, key: str = "") -> Any:
    """The value of an unknown key; of a URL, the host is shown."""
    if isinstance(value, dict):
        return {name: _masked(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_masked(each, key) for each in value]
    if not isinstance(value, str):
        return MASK if _SECRET_KEY.search(key) else value
    if _REFERENCE.fullmatch(value):
        return value
    try:
        address = urlsplit(value)
        host = address.hostname
    except ValueError:
        return MASK
    return f"{address.scheme}://{host}/{MASK}" if address.scheme and host and "$" not in host else MASK
