"""Reads what the spark destination wrote back, for comparison with the source (`tests.support.readback.ReadBack`)."""

from __future__ import annotations

import json
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
        columns = {name: rows.column(name).cast(type_) for name, type_ in fields}
        return pa.table({**columns, UNREPRESENTABLE: rows.column(UNREPRESENTABLE).cast(UNREPRESENTABLE_TYPE)})

    def _folder(self, schema: TableSchema) -> Path:
        return self._lake / FOLDERS.table(schema)


class PostgresReadBack(_OfSource):
    """Tables of another database, as its server prints them."""

    def __init__(self, dsn: str, target: str) -> None:
        super().__init__(dsn)
        options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
        self._connection = psycopg.connect(target, autocommit=True, options=options)

    def tables(self) -> list[str]:
        rows = self._connection.execute("select schemaname || '.' || tablename from pg_tables").fetchall()
        return [name for (name,) in rows if name in self._schemas]

    def read_table(self, table: str) -> pa.Table:
        schema = self._schemas[table]
        layout = segment_layout(schema)
        names = [*(each.field_name for each in layout.columns), UNREPRESENTABLE]
        query = sql.SQL("select {} from {}").format(
            sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in names),
            sql.Identifier(schema.namespace, schema.name),
        )
        rows: list[tuple[Any, ...]] = self._connection.execute(query).fetchall()
        columns: dict[str, pa.Array] = {}
        for number, each in enumerate(layout.columns):
            decoded = each.codec.decode(pa.array([row[number] for row in rows], pa.large_string()))
            assert decoded.rejected is None, f"{table}.{each.field_name}"
            columns[each.field_name] = decoded.array
        texts = [list(json.loads(row[-1]).items()) if row[-1] else None for row in rows]
        return pa.table({**columns, UNREPRESENTABLE: pa.array(texts, UNREPRESENTABLE_TYPE)})
