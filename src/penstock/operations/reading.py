"""Reading a table back from its destination, as the source has it."""

from __future__ import annotations

import pyarrow as pa

from penstock.changes.segment import UNREPRESENTABLE, segment_layout
from penstock.comparison.scan import fit_type
from penstock.comparison.verification import require_readable
from penstock.config import Config, OutputChoice
from penstock.destinations.base import PinnedTable
from penstock.errors import ConfigError, PenstockError
from penstock.operations.stores import choose_tables, chosen_outputs
from penstock.schema import TableSchema
from penstock.state import Store
from penstock.values import TypeSettings


def choose_output(config: Config, name: str | None) -> OutputChoice:
    """The output with this name; a config with one output needs no name."""
    found = chosen_outputs(config, name)
    if len(found) > 1:
        raise ConfigError("the config has several outputs", hint=f"Name one: {', '.join(each.name for each in found)}.")
    return found[0]


def read_rows(config: Config, output: OutputChoice, store: Store, table: str) -> pa.Table:
    """The current rows of a table, in memory."""
    destination = require_readable(config.create_destination(output))
    schema = _schema(config, store, table)
    pinned = destination.pin(schema)
    if pinned is None:
        raise PenstockError(
            f"{schema} has no complete copy in {output.name} yet", hint="`penstock tables` shows its phase."
        )
    try:
        return _read(pinned, output.settings.types)
    finally:
        pinned.close()


def _schema(config: Config, store: Store, table: str) -> TableSchema:
    chosen = choose_tables(config, store, [table])
    if len(chosen) > 1:
        raise ConfigError(f"{table!r} matches several tables", hint=f"Name one: {', '.join(chosen)}.")
    schemas = [version.schema for version in store.get_table_schemas() if str(version.schema) == chosen[0]]
    if not schemas:
        raise PenstockError(f"{chosen[0]} has not been copied yet", hint="`penstock tables` shows its phase.")
    return schemas[-1]


def _read(pinned: PinnedTable, types: TypeSettings) -> pa.Table:
    """All parts, with the names and types of the source.

    `_unrepresentable` is kept where a row has one: without it, its value would be taken for NULL.
    """
    layout = segment_layout(pinned.schema, types)
    fields = [pa.field(column.column.name, column.codec.arrow_type) for column in layout.columns]
    tables: list[pa.Table] = []
    for part in pinned.parts:
        for rows in pinned.reader.read(part):
            columns = [fit_type(rows.column(column.field_name), column.codec.arrow_type) for column in layout.columns]
            found = pa.Table.from_arrays(columns, schema=pa.schema(fields))
            if UNREPRESENTABLE in rows.schema.names and rows.column(UNREPRESENTABLE).null_count < rows.num_rows:
                found = found.append_column(UNREPRESENTABLE, rows.column(UNREPRESENTABLE))
            tables.append(found)
    return pa.concat_tables(tables, promote_options="default") if tables else pa.schema(fields).empty_table()
