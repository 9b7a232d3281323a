"""Fetches single rows by key, as they are now in the source, for values that no change contains.

When an update makes a row match a publication's row filter, the server sends an insert without its large values. The
fetched values are right, or a later change is about to overwrite them. This is rare, so rows pass through Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow as pa
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.changes.segment import UNREPRESENTABLE, SegmentColumn, join_texts, segment_layout, split_texts
from penstock.changes.transform import TableTransform, Transforms
from penstock.changes.wire import TEXT, decode_columns
from penstock.copy.resume import KEYS_AT_ONCE, cell_texts
from penstock.errors import SourceError, ValuesNotSent
from penstock.schema import TableSchema
from penstock.source.catalog import load_table, load_types, schema_from_catalog
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.values import TypeSettings


@dataclass(frozen=True, slots=True)
class SourceFetch:
    """See `penstock.destinations.base.SourceRows`; pickles."""

    source: SourceSettings
    types: TypeSettings = field(default_factory=TypeSettings)
    transforms: Transforms = field(default_factory=Transforms)

    def fetch(self, schema: TableSchema, keys: pa.Table) -> pa.Table:
        """Return the current rows with these keys; keys without a row are left out."""
        transform = self._transform(schema)
        if transform is None:
            return self._fetch(schema, keys)
        key = [column for column in transform.kept if column.target in keys.column_names]
        if any(column.rule.hash for column in key):
            raise ValuesNotSent(
                f"{schema}: a row has omitted values, and it cannot be fetched by a hashed key", table=str(schema)
            )
        names = {column.target: column.source for column in key}
        texts = {names[name]: column for name, column in split_texts(keys).items()}
        asked = keys.select(list(names)).rename_columns(list(names.values()))
        maps = join_texts(texts, keys.num_rows)
        rows = self._fetch(transform.source, asked if maps is None else asked.append_column(UNREPRESENTABLE, maps))
        return pa.Table.from_batches(map(transform.rows, rows.to_batches()), transform.arrow_schema(rows.schema))

    def _transform(self, schema: TableSchema) -> TableTransform | None:
        """Return the transform of a table whose columns are those of `schema` after it; None if it has none."""
        rules = self.transforms.of(schema.table_id, str(schema))
        if rules is None:
            return None
        with connect(self.source, Role.COPY) as connection:
            table = load_table(connection, schema.table_id)
            if table is None:
                raise ValuesNotSent(f"{schema} no longer exists", table=str(schema))
            types = load_types(connection, [attribute.type_oid for attribute in table.live_attributes])
        found = self.transforms.resolve(schema_from_catalog(table, types), self.types)
        if found is None:
            return None
        found = found.for_copy()
        wanted = {column.attnum for column in schema.columns}
        columns = tuple(column for column in found.source.columns if column.attnum in wanted)
        return TableTransform(rules, replace(found.source, columns=columns))

    def _fetch(self, schema: TableSchema, keys: pa.Table) -> pa.Table:
        columns = segment_layout(schema, self.types).columns
        named = [column for column in columns if column.field_name in keys.column_names]
        texts = _as_texts(keys, named)
        doing = f"fetch rows of {schema}"
        cells: list[list[str | None]] = [[] for _ in columns]
        with (
            connect(self.source, Role.COPY) as connection,
            translated(connection, doing),
            connection.cursor(row_factory=tuple_row) as cursor,
        ):
            for begin in range(0, keys.num_rows, KEYS_AT_ONCE):
                some = [text[begin : begin + KEYS_AT_ONCE] for text in texts]
                result = cursor.execute(_query(schema, columns, named), some).pgresult
                if result is None:
                    raise SourceError(f"cannot {doing}: the server did not answer")
                # Take the server's text instead of psycopg's Python values.
                for row in range(result.ntuples):
                    for number, values in enumerate(cells):
                        value = result.get_value(row, number)
                        values.append(None if value is None else value.decode())
        arrays = [pa.array(values, TEXT) for values in cells]
        decoded = decode_columns(columns, arrays, len(arrays[0]), str(schema))
        return pa.table(decoded, names=[*(column.field_name for column in columns), UNREPRESENTABLE])


def _query(schema: TableSchema, columns: tuple[SegmentColumn, ...], named: list[SegmentColumn]) -> sql.Composed:
    """Build the query. Keys are passed as text and cast to the types of their columns."""
    matched = [
        sql.SQL("t.{} = k.{}::{}").format(
            sql.Identifier(column.column.name),
            sql.Identifier(f"k{number}"),
            sql.Identifier(column.column.type.namespace, column.column.type.name),
        )
        for number, column in enumerate(named)
    ]
    return sql.SQL("select {} from unnest({}) as k ({}) join {} t on {}").format(
        sql.SQL(", ").join(sql.SQL("t.{}").format(sql.Identifier(column.column.name)) for column in columns),
        sql.SQL(", ").join(sql.SQL("%s::text[]") for _ in named),
        sql.SQL(", ").join(sql.Identifier(f"k{number}") for number in range(len(named))),
        sql.Identifier(schema.namespace, schema.name),
        sql.SQL(" and ").join(matched),
    )


def _as_texts(keys: pa.Table, named: list[SegmentColumn]) -> list[list[str]]:
    """Return each key column as text that the server can parse."""
    exact = split_texts(keys)
    return [cell_texts(keys.column(column.field_name), exact.get(column.field_name)) for column in named]
