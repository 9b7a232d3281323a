"""What a config file may hold. Each section is a model; docs/reference/config.md describes every key.

The models only say what people may write. `loading` turns them into the settings that the rest of Penstock knows.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from penstock.config.units import Duration, Size
from penstock.documents.base import FailurePolicy
from penstock.documents.output import DocumentsSettings
from penstock.documents.polling import XMIN, PollSettings
from penstock.tables import DEFAULT_OUTPUT, OnLostSlot
from penstock.values.settings import NumericPolicy, OutOfRange, UnknownTypes

NO_SPARK = "none"
"""As the master: tasks run in this process."""
DOCUMENTS_OUTPUT = "documents"
"""What all indexes together are called among the outputs of a stream."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def _check_id(value: str) -> str:
    if _ID.fullmatch(value) is None:
        raise ValueError("should have 1 to 100 letters, digits, '_', '-' or '.', and begin with a letter or digit")
    return value


class Section(BaseModel):
    """Unknown keys are errors, and errors do not show values."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class SpoolSection(Section):
    """Where changes wait between the server and the destination."""

    path: str | None = None
    max_bytes: Size = 4 << 30
    copy_max_bytes: Size = 4 << 30
    min_free_bytes: Size = 256 << 20


class ErrorHoldSection(Section):
    """How long a table that failed may hold the slot."""

    time: Duration = timedelta(hours=1)
    bytes: Size = 1 << 30


class BatchSection(Section):
    """How much goes to the destination at once."""

    max_rows: Annotated[int, Field(ge=1)] = 500_000
    max_bytes: Size = 128 << 20
    interval: Duration = timedelta(seconds=0.5)


class PipelineSection(Section):
    """The pipeline itself."""

    id: Annotated[str, AfterValidator(_check_id)]
    spool: SpoolSection = SpoolSection()
    error_hold: ErrorHoldSection = ErrorHoldSection()
    batch: BatchSection = BatchSection()


class SourceSection(Section):
    """The Postgres that is read."""

    url: SecretStr
    publication: str | None = None
    manage_publication: bool = True
    tables: list[str] = ["*.*"]
    exclude: list[str] = []
    slot: str | None = None
    on_lost_slot: OnLostSlot = OnLostSlot.ERROR
    ddl_trigger: bool = False


class StateSection(Section):
    """Where the pipeline remembers how far it is."""

    url: SecretStr | None = None


class CopySection(Section):
    """How tables are copied."""

    max_table_sync_workers: Annotated[int, Field(ge=1)] = 4
    max_connections: Annotated[int, Field(ge=1)] | None = None
    max_bytes_per_second: Size | None = None
    lock_timeout: Duration = timedelta(seconds=60)


class SparkSection(Section):
    """Where tasks run."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    master: str = "local[*]"
    memory: str | None = None


class DestinationSection(Section):
    """Where the tables go; all other keys are options of that destination."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: str
    name: Annotated[str, AfterValidator(_check_id)] = DEFAULT_OUTPUT


def _listed(written: Any) -> Any:
    return [written] if isinstance(written, dict) else written


def _check_names(destinations: list[DestinationSection]) -> list[DestinationSection]:
    if not destinations:
        raise ValueError("should have at least one")
    if len({each.name for each in destinations}) < len(destinations):
        raise ValueError("several of them need a name each, and different ones")
    return destinations


class IndexSection(Section):
    """A search index."""

    specification: str
    name: str | None = None
    failure_policy: FailurePolicy = FailurePolicy.STOP


class SinkSection(Section):
    """Where the documents of all indexes go; keys that are not here are options of that sink."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    type: str
    max_changes: Annotated[int, Field(ge=1)] = DocumentsSettings().batch.max_changes
    max_delay: Duration = timedelta(seconds=DocumentsSettings().batch.max_delay)
    skip_backfill: bool = False


class PollingSection(Section):
    """How changes are asked for on servers without logical decoding."""

    cursor: str = XMIN
    tables: dict[str, str] = {}
    interval: Duration = timedelta(seconds=PollSettings().interval)
    overlap: Duration = timedelta(seconds=PollSettings().overlap)


class TypesSection(Section):
    """What awkward types and values become."""

    numeric: NumericPolicy = NumericPolicy.STRING
    out_of_range: OutOfRange = OutOfRange.KEEP
    unknown_types: UnknownTypes = UnknownTypes.TEXT


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
    tables: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _need_a_place_to_go(self) -> ConfigFile:
        if not self.destination and not self.index:
            raise ValueError("there is neither a [destination] for tables nor an [[index]] for documents")
        if self.index and self.sink is None:
            raise ValueError("[[index]] needs a [sink]: where its documents go")
        if self.polling is not None and self.destination:
            raise ValueError("[polling] is for documents: the tables of a [destination] need logical decoding")
        if self.sink is not None and not self.index:
            raise ValueError("[sink] needs an [[index]] whose documents go there")
        if self.index and any(each.name == DOCUMENTS_OUTPUT for each in self.destination):
            raise ValueError(f"destination.name: the documents of [[index]] are called {DOCUMENTS_OUTPUT!r} already")
        return self

    @model_validator(mode="after")
    def _refuse_what_is_reserved(self) -> ConfigFile:
        for table, settings in self.tables.items():
            if settings:
                key = next(iter(settings))
                raise ValueError(f'tables."{table}".{key}: settings of single tables are not supported yet')
        return self
