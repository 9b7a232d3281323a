"""What a config file may hold. Each section is a model; docs/reference/config.md describes every key.

The models only say what people may write. `loading` turns them into the settings that the rest of Penstock knows.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from penstock.config.units import Duration, Size
from penstock.pipeline import DEFAULT_OUTPUT, OnLostSlot
from penstock.values.settings import NumericPolicy, OutOfRange, UnknownTypes

NO_SPARK = "none"
"""As the master: tasks run in this process."""

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


def _check_names(destinations: list[DestinationSection]) -> list[DestinationSection]:
    if not destinations:
        raise ValueError("should have at least one")
    if len({each.name for each in destinations}) < len(destinations):
        raise ValueError("several of them need a name each, and different ones")
    return destinations


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
        BeforeValidator(
            lambda written: [written] if isinstance(written, dict) else written,
            json_schema_input_type=DestinationSection | list[DestinationSection],
        ),
        AfterValidator(_check_names),
    ]
    """[destination] for one, [[destination]] for each of several."""
    types: TypesSection = TypesSection()
    tables: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _refuse_what_is_reserved(self) -> ConfigFile:
        for table, settings in self.tables.items():
            if settings:
                key = next(iter(settings))
                raise ValueError(f'tables."{table}".{key}: settings of single tables are not supported yet')
        return self
