"""From a TOML file, or from values, to settings: parse, insert the environment, validate, build plain objects.

One error lists all problems, each with its key. It never shows a value, which may be secret.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.changes.column_rules import ColumnRule
from penstock.changes.conditions import parse_filter
from penstock.changes.transform import TableRules, Transforms
from penstock.config.documents import DocumentsChoice, documents_choice, tables_of
from penstock.config.environment import Substitution, join
from penstock.config.models import (
    NO_SPARK,
    ConfigFile,
    DestinationSection,
    SchemaChangesSection,
    TypeChoices,
)
from penstock.config.problems import REFERENCE, explain, problems_error
from penstock.config.units import parse_duration
from penstock.copy import CopySettings
from penstock.destinations.base import Destination
from penstock.destinations.folders import RenameRules
from penstock.destinations.registry import create_destination
from penstock.errors import ConfigError, PenstockError
from penstock.observe import LogFormat, redact, scrub
from penstock.private import private_folder
from penstock.source.connections import SourceSettings
from penstock.source.patterns import TablePattern
from penstock.source.slots import check_slot_name
from penstock.spool import SpoolSettings
from penstock.state import open_store
from penstock.state.store import Store
from penstock.tables import TablesSettings
from penstock.values import TypeOverride, TypeSettings
from penstock.workers import BatchSettings, ErrorHold, SchemaChanges

_SQLITE = "sqlite:///"


@dataclass(frozen=True, slots=True)
class SparkChoice:
    """Where tasks run."""

    master: str | None = None
    """None if the config names none: that of `spark-submit` or `spark-defaults.conf`, or else `local[*]`."""
    memory: str | None = None
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    segment_port: int = 0
    """Where executors of a cluster read changes from the driver; 0 for any free port."""

    @property
    def is_used(self) -> bool:
        """False if tasks run in this process, without Spark."""
        return self.master != NO_SPARK


@dataclass(frozen=True, slots=True)
class LogChoice:
    """Log lines of `penstock run`, unless its options or the environment say otherwise."""

    level: str = "warning"
    format: LogFormat = LogFormat.TEXT


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """Where the HTTP server listens, and what it allows."""

    host: str = "127.0.0.1"
    port: int = 8321
    """0 for any free port."""
    token: str | None = field(repr=False, default=None)
    """Allows actions; None if there are none."""
    hosts: tuple[str, ...] = ()
    """Names under which people reach it, besides `localhost` and IP addresses."""
    ready_lag: float = 60.0
    """Seconds of lag up to which the pipeline is ready."""
    metric_tables: int = 100
    """How many tables have metrics of their own."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """A tables output."""

    settings: TablesSettings
    destination_type: str
    destination_options: Mapping[str, Any] = field(repr=False, default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return self.settings.output


@dataclass(frozen=True, slots=True)
class Config:
    """A valid config."""

    path: Path | None
    """The file; None for a config that was made from values."""
    outputs: tuple[OutputChoice, ...]
    """The tables outputs; empty if there are only documents."""
    spark: SparkChoice
    documents: DocumentsChoice | None = None
    """The documents output."""
    copy_tasks: int | None = None
    """Most tasks that read tables at the same time; None for the default of Spark or of this process."""
    log: LogChoice = field(default_factory=LogChoice)
    server: ServerChoice | None = None
    """The HTTP server; None if there is none."""
    traces: str | None = None
    """The base URL of a collector for traces; None if there is none."""
    state_url: str = field(repr=False, default="memory:")
    secrets: frozenset[str] = field(repr=False, default=frozenset())
    """Values from the environment, which must not be shown."""

    @property
    def name(self) -> str:
        """How messages name the config."""
        return "config" if self.path is None else str(self.path)

    @property
    def pipeline(self) -> TablesSettings:
        """The settings of the first output; those of the stream are the same for all outputs."""
        return self.every_output[0].settings

    @property
    def every_output(self) -> tuple[OutputChoice | DocumentsChoice, ...]:
        """The tables outputs, then the documents output; there is at least one."""
        return (*self.outputs, *([self.documents] if self.documents is not None else []))

    @property
    def indexes(self) -> DocumentsChoice:
        """The documents output; raises if the config has none."""
        if self.documents is None:
            raise ConfigError(f"{self.name} has no [[index]]", hint=REFERENCE)
        return self.documents

    def output(self, name: str) -> OutputChoice:
        """The tables output with this name."""
        found = [output for output in self.outputs if output.name == name]
        if not found:
            known = ", ".join(output.name for output in self.every_output)
            raise ConfigError(f"{self.name} has no destination {name!r}", hint=f"It has: {known}.")
        return found[0]

    @property
    def state_file(self) -> Path | None:
        """The file that holds the state; None if it is not in a file."""
        return Path(self.state_url.removeprefix(_SQLITE)) if self.state_url.startswith(_SQLITE) else None

    @property
    def state_location(self) -> str:
        """Where the state is, for messages."""
        if self.state_file is not None:
            return str(self.state_file)
        return "memory" if self.state_url == "memory:" else SourceSettings(self.state_url).location

    def open_store(self, output: OutputChoice | DocumentsChoice | None = None) -> Store:
        """Open the store of an output (of the first by default); creates the folder of its file."""
        if self.state_file is not None:
            try:
                private_folder(self.state_file.parent)
            except OSError as error:
                raise ConfigError(
                    f"cannot create the folder {self.state_file.parent}: {error.strerror}",
                    hint="Set another state.url or spool.path.",
                ) from None
        return open_store(self.state_url, (output or self.every_output[0]).settings.output_id)

    def create_destination(self, output: OutputChoice | None = None) -> Destination:
        """Create the destination of an output (of the first by default); does not start it."""
        chosen = output or self.outputs[0]
        try:
            return create_destination(chosen.destination_type, chosen.destination_options)
        except PenstockError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name}: destination: {chosen.destination_type!r} does not accept these options: {error}"
            ) from None

    @contextmanager
    def discreet(self) -> Iterator[None]:
        """Remove values from the environment from errors that leave this block."""
        try:
            yield
        except PenstockError as error:
            error.message = scrub(error.message, self.secrets)
            error.hint = scrub(error.hint, self.secrets)
            error.args = (error.message,)
            raise


def load_config(path: str | Path, environment: Mapping[str, str] | None = None) -> Config:
    """Load a config file; `ConfigError` lists everything that is wrong with it."""
    path = Path(path)
    written = _parse(path)
    substitution = Substitution(os.environ if environment is None else environment)
    values = substitution.apply(written)
    if substitution.problems:
        problems = [f"{where}: {what}" for where, what in substitution.problems]
        raise problems_error(
            str(path), problems, "${NAME} stands for an environment variable; export it in this shell first."
        )
    secrets = frozenset(each for each in substitution.secrets if each)
    return _validated(values, path, path.absolute().parent, secrets)


def make_config(sections: Mapping[str, Any], folder: str | Path = ".") -> Config:
    """Make a config from values instead of a file, with the same keys, checks and errors.

    Relative paths are relative to `folder`. `${NAME}` has no meaning here: a program reads the environment itself.
    """
    return _validated(sections, None, Path(folder).absolute(), frozenset())


def _validated(values: Mapping[str, Any], path: Path | None, folder: Path, secrets: frozenset[str]) -> Config:
    name = "config" if path is None else str(path)
    try:
        file = ConfigFile.model_validate(values)
    except ValidationError as error:
        problems = dict.fromkeys(scrub(redact(each), secrets) for each in explain(error))
        raise problems_error(name, list(problems)) from None
    try:
        return _build(path, folder, file, secrets)
    except ConfigError as error:
        said, hint = (scrub(redact(each), secrets) for each in (f"{name}: {error.message}", error.hint))
        raise ConfigError(said, hint=hint) from None


def _parse(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no config file {str(path)!r}",
            hint="Name one with -c or PENSTOCK_CONFIG; `penstock init` writes one.",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {str(path)!r}: {error.strerror}",
            hint="Check that it is a file and that you have permission to read it.",
        ) from None
    except ValueError as error:
        # Not TOML, not UTF-8, or a number with thousands of digits.
        # The message may quote the text; its position is enough.
        place = re.search(r"\(at ([^)]*)\)", str(error))
        raise ConfigError(
            f"{path} is not TOML{f', {place[1]}' if place else ''}", hint="Strings need double quotes."
        ) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply", hint=REFERENCE) from None


def _build(path: Path | None, folder: Path, file: ConfigFile, secrets: frozenset[str]) -> Config:
    pipeline, source = file.pipeline, file.source
    default_name = "penstock_" + re.sub(r"[^a-z0-9_]", "_", pipeline.id.lower())[:50]
    slot = source.slot or default_name
    check_slot_name(slot)
    spool = folder / (pipeline.spool.path or f".penstock/{pipeline.id}/spool")
    settings = TablesSettings(
        id=pipeline.id,
        source=SourceSettings(source.url.get_secret_value()),
        publication=source.publication or default_name,
        slot=slot,
        spool=SpoolSettings(
            path=spool,
            max_bytes=pipeline.spool.max_bytes,
            copy_max_bytes=pipeline.spool.copy_max_bytes,
            min_free_bytes=pipeline.spool.min_free_bytes,
        ),
        tables=_tables(file, folder),
        exclude=tuple(source.exclude),
        manage_publication=source.manage_publication,
        generated_columns=source.generated_columns,
        unidentified=frozenset(name for name, each in file.tables.items() if each.publish_without_identity),
        on_lost_slot=source.on_lost_slot,
        max_retained_wal=source.max_retained_wal,
        on_retained_wal=source.on_retained_wal,
        failover_slot=source.failover_slot,
        ddl_trigger=source.ddl_trigger,
        max_table_sync_workers=file.copy_.max_table_sync_workers,
        batches=BatchSettings(
            max_rows=pipeline.batch.max_rows,
            max_bytes=pipeline.batch.max_bytes,
            interval=pipeline.batch.interval.total_seconds(),
        ),
        error_hold=ErrorHold(time=pipeline.error_hold.time, bytes=pipeline.error_hold.bytes),
        copy=CopySettings(
            lock_timeout=file.copy_.lock_timeout.total_seconds(),
            max_bytes_per_second=file.copy_.max_bytes_per_second,
            resume_max_bytes=file.copy_.resume_max_bytes,
        ),
        rename_tables=_rename_rules(file),
        transforms=Transforms(_table_rules(file)),
        types=_type_settings(file),
        schema_changes=_schema_changes(file.schema_changes),
        of_tables={
            name: _schema_changes(file.schema_changes, section.schema_changes)
            for name, section in file.tables.items()
            if section.schema_changes.model_fields_set - {"rename_table"}
        },
    )
    return Config(
        path=path,
        outputs=tuple(_output_choice(each, settings, folder) for each in file.destination),
        spark=_spark_choice(file),
        documents=documents_choice(file, settings, folder),
        copy_tasks=file.copy_.max_connections,
        log=LogChoice(file.log.level, file.log.format),
        server=_server_choice(file, folder),
        traces=None if file.telemetry is None else file.telemetry.endpoint,
        state_url=_state_url(file, folder, spool),
        secrets=secrets,
    )


def _schema_changes(*sections: SchemaChangesSection) -> SchemaChanges:
    """The settings of these sections; what a later one says counts."""
    said: dict[str, Any] = {}
    for section in sections:
        said |= {name: getattr(section, name) for name in section.model_fields_set - {"rename_table"}}
    return SchemaChanges(**said)


def _rename_rules(file: ConfigFile) -> RenameRules:
    written = {name: section.schema_changes.rename_table for name, section in file.tables.items()}
    own = {name: rule for name, rule in written.items() if rule is not None}
    for name in own:
        if name.count(".") < 2:  # more dots are part of a schema or table
            TablePattern(name)  # raises if it is not a name
    return RenameRules(file.schema_changes.rename_table, own)


def _table_rules(file: ConfigFile) -> dict[str, TableRules]:
    key = b"" if file.hash is None else file.hash.key.get_secret_value().encode()
    found: dict[str, TableRules] = {}
    for table, section in file.tables.items():
        if not section.columns and section.where is None and section.transform is None:
            continue
        TablePattern(table)  # raises if it is not a name
        try:
            condition = None if section.where is None else parse_filter(section.where)
        except ConfigError as error:
            raise ConfigError(f"{join('tables', table, 'where')}: {error.message}", hint=error.hint) from None
        rules = tuple(
            (name, ColumnRule(**column.model_dump(exclude_none=True))) for name, column in section.columns.items()
        )
        found[table] = TableRules(rules, section.where, condition, key, section.transform)
    return found


def _type_settings(file: ConfigFile) -> TypeSettings:
    settings = TypeSettings(
        out_of_range=file.types.out_of_range, numeric=file.types.numeric, unknown_types=file.types.unknown_types
    )
    overrides: list[TypeOverride] = []
    for table, section in file.tables.items():
        if not section.types.model_fields_set:
            continue
        own = _overridden(settings, section.types)
        overrides.append(TypeOverride(table, None, own))
        columns = section.types.columns.items()
        overrides += [TypeOverride(table, column, _overridden(own, choices)) for column, choices in columns]
        renamed = {name: each.rename for name, each in section.columns.items() if each.rename is not None}
        # At the destination the column has its new name.
        overrides += [
            TypeOverride(table, renamed[column], _overridden(own, choices))
            for column, choices in columns
            if column in renamed and renamed[column] not in section.types.columns
        ]
    return replace(settings, overrides=tuple(overrides))


def _overridden(settings: TypeSettings, choices: TypeChoices) -> TypeSettings:
    return replace(settings, **choices.model_dump(exclude_none=True, exclude={"columns"}))


def _tables(file: ConfigFile, folder: Path) -> tuple[str, ...]:
    """The published tables; by default all of them, or for documents alone, those that they are built from."""
    if file.destination or not file.index or "tables" in file.source.model_fields_set:
        return tuple(file.source.tables)
    return tables_of(file.index, folder)


def _output_choice(section: DestinationSection, settings: TablesSettings, folder: Path) -> OutputChoice:
    options = dict(section.model_extra or {})
    if section.type == "spark":
        options.setdefault("checkpoint", str(settings.spool.path.parent / f"spark-{section.name}"))
    for name in ("path", "checkpoint"):
        if isinstance(options.get(name), str) and "://" not in options[name]:
            options[name] = str(folder / options[name])
    return OutputChoice(
        replace(settings, output=section.name, batches=_batches(settings, options)), section.type, options
    )


def _batches(settings: TablesSettings, options: dict[str, Any]) -> BatchSettings:
    """The size of an output's batches; the option `commit_interval` of a destination sets their interval."""
    if "commit_interval" not in options:
        return settings.batches
    try:
        options["commit_interval"] = parse_duration(options["commit_interval"]).total_seconds()
    except ValueError as error:
        raise ConfigError(f"destination.commit_interval: {error}", hint=REFERENCE) from None
    return replace(settings.batches, interval=options["commit_interval"])


def _state_url(file: ConfigFile, folder: Path, spool: Path) -> str:
    if file.state.url is None:
        return f"{_SQLITE}{spool.parent / 'state.db'}"
    url = file.state.url.get_secret_value()
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE) and "?" not in url:
        return f"{_SQLITE}{folder / url.removeprefix(_SQLITE)}"
    return url


def _server_choice(file: ConfigFile, folder: Path) -> ServerChoice | None:
    section = file.server
    if section is None:
        return None
    return ServerChoice(
        host=section.host,
        port=section.port,
        token=None if section.token is None else section.token.get_secret_value(),
        hosts=tuple(each.lower() for each in section.hosts),
        ready_lag=section.ready_lag.total_seconds(),
        metric_tables=section.metric_tables,
        tls_certificate=None if section.tls_certificate is None else folder / section.tls_certificate,
        tls_key=None if section.tls_key is None else folder / section.tls_key,
    )


def _spark_choice(file: ConfigFile) -> SparkChoice:
    options: dict[str, str] = {}
    for name, value in _flatten(file.spark.model_extra or {}):
        if not name.startswith("spark."):
            near = difflib.get_close_matches(name, ["master", "memory"], n=1)
            ending = f'; did you mean "{near[0]}"?' if near else "; names of Spark settings start with spark."
            raise ConfigError(f"spark.{name}: there is no such key{ending}", hint=REFERENCE)
        if not isinstance(value, str | int | float):
            raise ConfigError(f'spark."{name}": should be text, a number, true or false', hint=REFERENCE)
        options[name] = str(value).lower() if isinstance(value, bool) else str(value)
    if file.spark.master == NO_SPARK:
        if options or file.spark.memory is not None:
            raise ConfigError('spark: with master = "none", no other keys are allowed')
        return SparkChoice(NO_SPARK)
    return SparkChoice(file.spark.master, file.spark.memory, options, file.spark.segment_port)


def _flatten(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Join keys that were written without quotes: TOML makes them tables."""
    for key, value in values.items():
        name = f"{before}.{key}" if before else key
        if isinstance(value, dict):
            yield from _flatten(value, name)
        else:
            yield name, value
