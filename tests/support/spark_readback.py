"""Reads what the spark destination wrote back, for comparison with the source (`tests.support.readback.ReadBack`)."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, segment_layout
from penstock.destinations.naming import FOLDERS
from penstock.schema import TableSchema
from penstock.source.catalog import load_tables, load_types, schema_from_catalog
from penstock.source.connections import PINNED_PARAMETERS
from penstock.values.datetimes import holds_times
from tests.support.delta_jars import delta_spark_options
from tests.support.restructure import SCHEMAS


class _OfSource:
    """The tables of the source, with the schemas that they have there."""

    def __init__(self, dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            oids = connection.execute(
                "select oid::int8 from pg_class where relnamespace::regnamespace::text = any(%s) and relkind = 'r'",
                [[*SCHEMAS]],
            ).fetchall()
            found = list(load_tables(connection, [oid for (oid,) in oids]).values())
            types = load_types(connection, [each.type_oid for table in found for each in table.live_attributes])
            generated = {
                (oid, number)
                for oid, number in connection.execute(
                    "select attrelid::int8, attnum from pg_attribute where attgenerated <> ''"
                ).fetchall()
            }
        schemas = [
            schema_from_catalog(
                table,
                types,
                [each.attnum for each in table.live_attributes if (table.oid, each.attnum) not in generated],
            )
            for table in found
        ]
        self._schemas = {str(schema): schema for schema in schemas}

    def schema(self, table: str) -> TableSchema:
        return self._schemas[table]


class SparkDeltaReadBack(_OfSource):
    """Delta tables, read by Spark."""

    def __init__(self, dsn: str, lake: Path) -> None:
        super().__init__(dsn)
        self._lake = lake

    def tables(self) -> list[str]:
        return [name for name, schema in self._schemas.items() if (self._folder(schema) / "_delta_log").exists()]

    def read_table(self, table: str) -> pa.Table:
        from penstock.spark.session import SparkSettings, build_session

        schema = self._schemas[table]
        session = build_session(SparkSettings(master="local[2]", options=delta_spark_options()))
        rows = session.read.format("delta").load(str(self._folder(schema))).toArrow()
        layout = segment_layout(schema)
        fields = [(each.field_name, each.codec.arrow_type) for each in layout.columns]
        columns = {
            name: _parse_times(rows.column(name).to_pylist(), type_)
            if holds_times(type_)
            else rows.column(name).cast(type_)
            for name, type_ in fields
        }
        return pa.table({**columns, UNREPRESENTABLE: rows.column(UNREPRESENTABLE).cast(UNREPRESENTABLE_TYPE)})

    def _folder(self, schema: TableSchema) -> Path:
        return self._lake / FOLDERS.table(schema)


def _parse_json(cells: list[str | None], wanted: pa.DataType) -> pa.Array:
    """Return arrays from JSON."""

    def element(text: Any) -> Any:
        if text is None:
            return None
        if pa.types.is_binary(wanted.value_type) or pa.types.is_large_binary(wanted.value_type):
            return base64.b64decode(text)
        if pa.types.is_floating(wanted.value_type):
            return float(text)
        if pa.types.is_date(wanted.value_type):
            return date.fromisoformat(text)
        return datetime.fromisoformat(text) if isinstance(text, str) else text

    parsed = [None if cell is None else json.loads(cell, parse_float=Decimal, parse_int=Decimal) for cell in cells]
    return pa.array([None if cell is None else [element(each) for each in cell] for cell in parsed], wanted)


def _parse_times(cells: list[Any], wanted: pa.DataType) -> pa.Array:
    """Return times of day, or arrays of them, from their text."""

    def parsed(cell: Any) -> Any:
        if cell is None:
            return None
        return [parsed(each) for each in cell] if isinstance(cell, list) else time.fromisoformat(cell)

    return pa.array([parsed(cell) for cell in cells], wanted)


class JdbcReadBack(_OfSource):
    """Tables of another database, as its server prints them."""

    def __init__(self, dsn: str, target: str) -> None:
        super().__init__(dsn)
        self._target = target

    def tables(self) -> list[str]:
        rows = self._fetch(sql.SQL("select schemaname || '.' || tablename from pg_tables"))
        return [name for (name,) in rows if name in self._schemas]

    def read_table(self, table: str) -> pa.Table:
        schema = self._schemas[table]
        layout = segment_layout(schema)
        names = [*(each.field_name for each in layout.columns), UNREPRESENTABLE]
        query = sql.SQL("select {} from {}").format(
            sql.SQL(", ").join(map(sql.Identifier, names)),
            sql.Identifier(schema.namespace, schema.name),
        )
        rows = self._fetch(query)
        columns: dict[str, pa.Array] = {}
        for number, each in enumerate(layout.columns):
            cells, type_ = [row[number] for row in rows], each.codec.arrow_type
            if pa.types.is_list(type_) and any(cell and cell.startswith("[") for cell in cells):
                columns[each.field_name] = _parse_json(cells, type_)
                continue
            decoded = each.codec.decode(pa.array(cells, pa.large_string()))
            assert decoded.rejected is None, f"{table}.{each.field_name}"
            columns[each.field_name] = decoded.array
        texts = [list(json.loads(row[-1]).items()) if row[-1] else None for row in rows]
        return pa.table({**columns, UNREPRESENTABLE: pa.array(texts, UNREPRESENTABLE_TYPE)})

    def _fetch(self, query: sql.Composed | sql.SQL) -> list[tuple[Any, ...]]:
        options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
        with psycopg.connect(self._target, autocommit=True, options=options) as connection:
            # As the server prints them: psycopg would parse some types, and a cast to text prints others.
            result = connection.execute(query).pgresult
            assert result is not None
            cells = [
                [result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)
            ]
        return [tuple(None if cell is None else cell.decode() for cell in row) for row in cells]
