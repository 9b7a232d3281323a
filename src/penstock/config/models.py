"""The config file as Pydantic models, one for each section; docs/reference/config.md describes every key.

The models only validate. `loading` turns them into the settings that the rest of Penstock uses.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from penstock.changes.transform import TRANSFORM
from penstock.config.units import Duration, Size
from penstock.destinations.folders import RenameTable
from penstock.documents.base import FailurePolicy
from penstock.documents.output import DocumentsSettings
from penstock.documents.polling import XMIN, PollSettings
from penstock.errors import ConfigError
from penstock.observe import LogFormat
from penstock.source.patterns import TablePattern
from penstock.stream import OnRetainedWal
from penstock.tables import DEFAULT_OUTPUT, OnLostSlot
from penstock.values.settings import NumericPolicy, OutOfRange, UnknownTypes
from penstock.workers import DropColumn, DropTable, Partitions, Recopy

NO_SPARK = "none"
"""The master that runs tasks in this process."""
DOCUMENTS_OUTPUT = "documents"
"""The name of the documents output."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def _check_id(value: str) -> str:
    if _ID.fullmatch(value) is None:
        raise ValueError("should have 1 to 100 letters, digits, '_', '-' or '.', and start with a letter or digit")
    return value


class Section(BaseModel):
    """Rejects unknown keys; errors do not show values."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class SpoolSection(Section):
    """Where captured changes wait for the destination."""

    path: str | None = None
    max_bytes: Size = 4 << 30
    copy_max_bytes: Size = 4 << 30
    min_free_bytes: Size = 256 << 20


class ErrorHoldSection(Section):
    """How long an errored table may hold the slot."""

    time: Duration = timedelta(hours=1)
    bytes: Size = 1 << 30


class BatchSection(Section):
    """The size of batches."""

    max_rows: Annotated[int, Field(ge=1)] = 500_000
    max_bytes: Size = 128 << 20
    interval: Duration = timedelta(seconds=0.5)


class PipelineSection(Section):
    """The pipeline itself."""

    id: Annotated[str, AfterValidator(_check_id)]
    spool: SpoolSection = SpoolSection()
    error_hold: ErrorHoldSection = ErrorHoldSection()
    batch: BatchSection = BatchSection()


def _check_pattern(value: str) -> str:
    try:
        TablePattern(value)
    except ConfigError as error:
        raise ValueError(f"should be a table or a pattern. {error.hint}") from None
    return value


_Patterns = list[Annotated[str, AfterValidator(_check_pattern)]]


class SourceSection(Section):
    """The source database."""

    url: SecretStr
    publication: str | None = None
    manage_publication: bool = True
    tables: _Patterns = ["*.*"]
    exclude: _Patterns = []
    generated_columns: bool | None = None
    slot: str | None = None
    on_lost_slot: OnLostSlot = OnLostSlot.ERROR
    max_retained_wal: Size = 50 << 30
    on_retained_wal: OnRetainedWal = OnRetainedWal.WARN
    failover_slot: bool | None = None
    ddl_trigger: bool = False


class StateSection(Section):
    """Where the state is stored."""

    url: SecretStr | None = None


class CopySection(Section):
    """How tables are copied."""

    max_table_sync_workers: Annotated[int, Field(ge=1)] = 4
    max_connections: Annotated[int, Field(ge=1)] | None = None
    max_bytes_per_second: Size | None = None
    lock_timeout: Duration = timedelta(seconds=60)
    resume_max_bytes: Size = 4 << 30


class SparkSection(Section):
    """Where tasks run."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    master: str | None = None
    memory: str | None = None
    segment_port: Annotated[int, Field(ge=0, le=65535)] = 0


class DestinationSection(Section):
    """The destination of tables; unknown keys are options of its type."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: str
    name: Annotated[str, AfterValidator(_check_id)] = DEFAULT_OUTPUT


def _listed(written: Any) -> Any:
    return [written] if isinstance(written, dict) else written


def _check_names(destinations: list[DestinationSection]) -> list[DestinationSection]:
    if not destinations:
        raise ValueError("needs at least one destination")
    if len({each.name for each in destinations}) < len(destinations):
        raise ValueError("each of several destinations needs its own name")
    return destinations


class IndexSection(Section):
    """A search index."""

    specification: str
    name: str | None = None
    failure_policy: FailurePolicy = FailurePolicy.STOP
    aliases: tuple[str, ...] = ()
    id_prefix: str = ""


class SinkSection(Section):
    """The sink of all indexes; unknown keys are options of its type."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: str
    index_prefix: str = ""
    max_changes: Annotated[int, Field(ge=1)] = DocumentsSettings().batch.max_changes
    max_delay: Duration = timedelta(seconds=DocumentsSettings().batch.max_delay)
    skip_backfill: bool = False


class PollingSection(Section):
    """Polling, for servers without logical decoding."""

    cursor: str = XMIN
    tables: dict[str, str] = {}
    interval: Duration = timedelta(seconds=PollSettings().interval)
    overlap: Duration = timedelta(seconds=PollSettings().overlap)


class TypeChoices(Section):
    """The keys of [types] for a single column; None for those of its table."""

    numeric: NumericPolicy | None = None
    out_of_range: OutOfRange | None = None
    unknown_types: UnknownTypes | None = None


class TableTypesSection(TypeChoices):
    """The keys of [types] for a single table; None for those of all tables."""

    columns: dict[str, TypeChoices] = {}


class TypesSection(Section):
    """What types and values become that Arrow cannot represent."""

    numeric: NumericPolicy = NumericPolicy.STRING
    out_of_range: OutOfRange = OutOfRange.KEEP
    unknown_types: UnknownTypes = UnknownTypes.TEXT


class HashSection(Section):
    """The key of hashed columns."""

    key: Annotated[SecretStr, Field(min_length=16)]


class SchemaChangesSection(Section):
    """How tables follow changes of their schema."""

    recopy: Recopy = Recopy.AUTOMATIC
    recopy_max_bytes: Size | None = None
    partitions: Partitions = Partitions.MIRROR
    drop_column: DropColumn = DropColumn.FOLLOW
    drop_table: DropTable = DropTable.KEEP
    rename_table: RenameTable | None = None


class ColumnSection(Section):
    """What happens to a column before it reaches a destination."""

    exclude: Literal[True] | None = None
    hash: Literal[True] | None = None
    null: Literal[True] | None = None
    mask: str | None = None
    keep_last: Annotated[int, Field(ge=1)] | None = None
    rename: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _need_one(self) -> ColumnSection:
        said = self.model_fields_set
        if not said:
            raise ValueError("needs one of exclude, hash, null, mask, keep_last, rename")
        if len(said - {"rename"}) > 1 or {"exclude", "rename"} <= said:
            raise ValueError(f"{' and '.join(sorted(said))} cannot be combined")
        return self


def _check_transform(value: str) -> str:
    if TRANSFORM.fullmatch(value) is None:
        raise ValueError("should be one `select … from changes`, without where, group by or joins")
    return value


class TableSection(Section):
    """Settings of one table."""

    publish_without_identity: bool = False
    where: str | None = None
    transform: Annotated[str, AfterValidator(_check_transform)] | None = None
    columns: dict[str, ColumnSection] = {}
    types: TableTypesSection = TableTypesSection()
    schema_changes: SchemaChangesSection = SchemaChangesSection()


class LogSection(Section):
    """Log lines of `penstock run`."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    format: LogFormat = LogFormat.TEXT


class ServerSection(Section):
    """The HTTP server of a running pipeline."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8321
    token: Annotated[SecretStr, Field(min_length=16)] | None = None
    hosts: tuple[str, ...] = ()
    ready_lag: Duration = timedelta(seconds=60)
    metric_tables: Annotated[int, Field(ge=0, le=10_000)] = 100
    tls_certificate: str | None = None
    tls_key: str | None = None

    @field_validator("token")
    @classmethod
    def _fits_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not re.fullmatch("[!-~]*", token.get_secret_value()):
            raise ValueError("should be printable ASCII without spaces and line breaks, or no request can carry it")
        return token

    @model_validator(mode="after")
    def _need_both(self) -> ServerSection:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key need each other")
        return self


class TelemetrySection(Section):
    """Traces for OpenTelemetry."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s@]+$")]
    """The base URL of a collector that takes OTLP over HTTP; credentials belong into OTEL_EXPORTER_OTLP_HEADERS."""


class ConfigFile(Section):
    """A whole file."""

    pipeline: PipelineSection
    source: SourceSection
    state: StateSection = StateSection()
    copy_: Annotated[CopySection, Field(alias="copy")] = CopySection()
    spark: SparkSection = SparkSection()
    destination: Annotated[
        list[DestinationSection],
        BeforeValidator(_listed, json_schema_input_type=DestinationSection | list[DestinationSection]),
        AfterValidator(_check_names),
    ] = []
    """[destination] for one, [[destination]] for each of several."""
    index: Annotated[
        list[IndexSection], BeforeValidator(_listed, json_schema_input_type=IndexSection | list[IndexSection])
    ] = []
    """[[index]] for each."""
    sink: SinkSection | None = None
    polling: PollingSection | None = None
    types: TypesSection = TypesSection()
    schema_changes: SchemaChangesSection = SchemaChangesSection()
    hash: HashSection | None = None
    tables: dict[str, TableSection] = {}
    """What differs for single tables, by their names."""
    log: LogSection = LogSection()
    server: ServerSection | None = None
    """None: there is no server."""
    telemetry: TelemetrySection | None = None
    """None: no traces are sent."""

    @model_validator(mode="after")
    def _need_a_managed_publication(self) -> ConfigFile:
        if self.source.generated_columns is not None and not self.source.manage_publication:
            raise ValueError(
                "source.generated_columns needs manage_publication = true; otherwise alter the publication"
            )
        return self

    @model_validator(mode="after")
    def _need_to_choose_the_tables(self) -> ConfigFile:
        named = [name for name, section in self.tables.items() if section.publish_without_identity]
        if named and not self.source.manage_publication:
            raise ValueError(
                f'tables."{named[0]}".publish_without_identity needs manage_publication = true; otherwise the '
                "publication decides"
            )
        return self

    @model_validator(mode="after")
    def _need_a_place_to_go(self) -> ConfigFile:
        if not self.destination and not self.index:
            raise ValueError("needs a [destination] for tables or an [[index]] for documents")
        if self.index and self.sink is None:
            raise ValueError("[[index]] needs a [sink] for its documents")
        if self.polling is not None and self.destination:
            raise ValueError("[polling] is only for documents: a [destination] needs logical decoding")
        if self.polling is not None and self.server is not None:
            raise ValueError(
                "[server] shows a stream of changes, and [polling] has none: remove one of them; "
                "`penstock status` and `penstock index list` need no server"
            )
        if self.sink is not None and not self.index:
            raise ValueError("[sink] needs an [[index]]")
        if self.index and any(each.name == DOCUMENTS_OUTPUT for each in self.destination):
            raise ValueError(f"destination.name: {DOCUMENTS_OUTPUT!r} is reserved for the output of [[index]]")
        named = [name for name, table in self.tables.items() if table.transform is not None]
        if named and any(each.type != "spark" for each in self.destination):
            raise ValueError(
                f'tables."{named[0]}".transform needs a [destination] of type "spark"; [tables."{named[0]}".columns] '
                "hides and changes columns for every destination"
            )
        if self.hash is None and any(
            column.hash for table in self.tables.values() for column in table.columns.values()
        ):
            raise ValueError('[tables] hashes a column, which needs [hash] key = "${NAME}", a secret')
        return self
