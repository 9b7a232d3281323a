"""`penstock report`: one file with all that somebody needs who helps with an incident, and nothing secret."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.configured import DEFAULT_PATH, ConfigPath
from penstock.cli.formats import count_of
from penstock.cli.options import AsJson
from penstock.cli.redacted import hidden_texts
from penstock.cli.report_facts import Part, general_parts, pipeline_parts, plain
from penstock.config import Config, load_config
from penstock.errors import ConfigError, PenstockError
from penstock.observe import redact, scrub
from penstock.source import SourceSettings

LOG_LINES = 5000

_README = """A report about the Penstock pipeline {name!r}, made {time}.

config.json     the config file; what comes from the environment is not in it, nor are values that may be secret
versions.json   of Penstock, Python, Java and the libraries; names of environment variables
status.json     what `penstock status --json` shows
state.json      stored progress, the history of every table's phases, and the commands
spool.json      what waits in the spool, and who still needs it
server.json     the server's version, some settings, slots, senders, publications, open transactions
check.json      what `penstock check --json` finds
log.txt         the last lines of the log files that were named
*.error.txt     why a part is missing

It has names of tables and columns, of hosts, databases and users. It has no passwords and no rows. Look into it before
you send it.
"""


def report(
    config_path: ConfigPath = DEFAULT_PATH,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="The file to write; must not exist.", metavar="FILE.tar.gz", show_default=False),
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", help="A log file whose last lines go along; may be repeated.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a file for whoever helps with an incident: config, state, server, versions, last log lines. No secrets.

    Changes nothing, and works as far as possible whatever is broken: what could not be found out says why.

    Examples:

        penstock report
        penstock report --log /var/log/penstock.log --to incident.tar.gz
    """
    config, problem = _load(config_path)
    name = config.pipeline.id if config is not None else config_path.stem
    now = datetime.now(UTC)
    path = to or Path(f"penstock-report-{name}-{now:%Y%m%d-%H%M%S}.tar.gz")
    if path.exists():
        raise ConfigError(f"there is a file {str(path)!r} already", hint="Name another one with --to.")
    parts = general_parts(config_path) | (pipeline_parts(config) if config is not None else {})
    files = {"README.txt": _README.format(name=name, time=f"{now:%Y-%m-%d %H:%M:%S} UTC")}
    if problem is not None:
        files["config.error.txt"] = f"{problem.message}\n{problem.hint}\n"
    files |= dict(_collect(parts))
    if logs:
        files["log.txt"] = "".join(_last_lines(log) for log in logs)
    secrets = _secrets(config, config_path)
    _write(path, {each: redact(scrub(text, secrets)) for each, text in files.items()})
    if as_json:
        typer.echo(json.dumps({"path": str(path), "files": sorted(files)}))
        return
    typer.echo(f"wrote {path} ({count_of(len(files), 'file')}: {', '.join(sorted(files))})")
    typer.echo("it has names of tables, hosts and users, but no passwords and no rows; look into it before you send it")


def _load(path: Path) -> tuple[Config | None, ConfigError | None]:
    """The config; a broken one is what a report may be about. Without any file there is nothing to report."""
    try:
        return load_config(path), None
    except ConfigError as error:
        if not path.is_file():
            raise
        return None, error


def _collect(parts: Mapping[str, Part]) -> Iterable[tuple[str, str]]:
    for name, part in parts.items():
        try:
            yield name, json.dumps(plain(part()), indent=2, ensure_ascii=False) + "\n"
        except PenstockError as error:
            yield f"{Path(name).stem}.error.txt", f"{type(error).__name__}: {error.message}\n{error.hint}\n"
        except Exception:
            # Whatever is broken is what the report is for.
            yield f"{Path(name).stem}.error.txt", traceback.format_exc()


def _last_lines(path: Path) -> str:
    try:
        with open(path, errors="replace") as file:
            return f"==> {path} <==\n{''.join(deque(file, LOG_LINES))}\n"
    except OSError as error:
        return f"==> {path} <==\ncannot be read: {error.strerror}\n"


def _secrets(config: Config | None, path: Path) -> frozenset[str]:
    """All that is known to be secret, to be removed wherever it turns up."""
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
        with tarfile.open(path, "x:gz") as archive:
            for name, text in files.items():
                content = text.encode("utf-8", "backslashreplace")
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror}", hint="Name another file with --to."
        ) from None
