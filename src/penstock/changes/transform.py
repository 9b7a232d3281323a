"""Transforms: what a table's settings in the config make of its rows before a destination gets them.

`TableRules` holds what the config says of a table, with a `ColumnRule` per column. `TableTransform` is the same for one
version of its schema. Tasks apply it to whole columns, to rows of a copy and to changes alike, where they read them:
`RangeReader` and `Segment`. So a destination only ever sees the resulting columns, and the schema of these
(`TableTransform.output`). `Transforms` has the rules of all tables; a renamed table or column keeps its rules.

The spool holds what the server sent.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.column_rules import ColumnRule, change_texts, is_printed, print_values
from penstock.changes.conditions import Condition, columns_of
from penstock.changes.filtering import array_of, field_of, filter_changes
from penstock.changes.filters import RowFilter, bind_filter
from penstock.changes.segment import (
    OLD,
    RESERVED,
    UNCHANGED,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    Texts,
    field_names,
    join_texts,
    pack_unsent,
    segment_layout,
    split_texts,
    unsent_cells,
)
from penstock.errors import RESYNC, ConfigError
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema, fold_case, resolve_domain
from penstock.values import TypeSettings, merging_setting

_TEXT = PostgresType(25, "text")
TRANSFORM = re.compile(r"\s*select\s+(?P<columns>.+?)\s+from\s+changes\s*;?\s*", re.IGNORECASE | re.DOTALL)
"""The form of `transform`: Spark SQL over the rows of a table, called `changes`."""


@dataclass(frozen=True, slots=True)
class TableRules:
    """What the config says of a table."""

    columns: tuple[tuple[str, ColumnRule], ...] = ()
    """By name."""
    where: str | None = None
    condition: Condition | None = None
    """`where`, parsed."""
    key: bytes = field(default=b"", repr=False)
    """Of hashes."""
    transform: str | None = None
    """A `select` in Spark SQL, which the spark destination applies after all others."""

    @property
    def excluded(self) -> tuple[str, ...]:
        """The columns that no destination gets."""
        return tuple(name for name, rule in self.columns if rule.exclude)

    @property
    def fingerprint(self) -> str:
        """Identifies the rules, and the key if there is a hash; another one means other rows at the destination."""
        key = hmac.digest(self.key, b"penstock", "sha256") if any(rule.hash for _, rule in self.columns) else b""
        said = repr((sorted(self.columns, key=lambda each: each[0]), self.where))
        said += "" if self.transform is None else self.transform
        return hashlib.sha256(said.encode() + key).hexdigest()[:16]

    def __str__(self) -> str:
        said = [f"{name} {rule}" for name, rule in self.columns]
        said += [] if self.where is None else [f"only rows where {self.where}"]
        return "; ".join([*said, *([] if self.transform is None else [f"transformed by {self.transform}"])])


class RuledColumn(NamedTuple):
    """A column for which the config had a rule when its table was found or copied."""

    attnum: int
    rule: str
    """For people, and to notice another one."""


class RulesInForce(NamedTuple):
    """The rules by which the rows of a table were made."""

    table: str
    """The name of the table in the config."""
    fingerprint: str
    columns: Mapping[str, RuledColumn] = MappingProxyType({})
    """By the names in the config."""


@dataclass(frozen=True, slots=True)
class Transforms:
    """The rules of all tables; pickles."""

    rules: Mapping[str, TableRules] = field(default_factory=dict[str, TableRules])
    """By the names of tables in the config."""
    known: dict[int, RulesInForce] = field(default_factory=dict[int, RulesInForce])
    """The names under which tables have rules, and their columns: whatever was renamed since keeps them."""

    def name_of(self, table_id: int, name: str) -> str | None:
        """The name under which the config has rules for a table; None if it has none."""
        if name in self.rules:
            return name
        former = self.known.get(table_id)
        return former.table if former is not None and former.table in self.rules else None

    def of(self, table_id: int, name: str) -> TableRules | None:
        """The rules for a table."""
        found = self.name_of(table_id, name)
        return None if found is None else self.rules[found]

    def remember(self, table_id: int, name: str, columns: Mapping[int, str], *, copied: bool = False) -> None:
        """Learn the current names of a table and its columns, these by attribute number.

        Columns that are known keep their rules, until the table is copied by the current ones.
        """
        found = self.name_of(table_id, name)
        if found is None:
            return
        rules, former = self.rules[found], self.known.get(table_id)
        kept = {} if copied or former is None or former.table != found else former.columns
        taken = {column.attnum for column in kept.values()}
        attnums = {column: attnum for attnum, column in columns.items() if attnum not in taken}
        ruled = {each: RuledColumn(attnums[each], str(rule)) for each, rule in rules.columns if each in attnums}
        self.known[table_id] = RulesInForce(found, rules.fingerprint, {**ruled, **kept})

    def in_force(self, table_id: int, name: str) -> RulesInForce | None:
        """What to store with a table that is copied by the current rules; None if it has none."""
        found, known = self.name_of(table_id, name), self.known.get(table_id)
        if found is None:
            return None
        columns = known.columns if known is not None and known.table == found else {}
        return RulesInForce(found, self.rules[found].fingerprint, columns)

    def renames(self, table_id: int, name: str) -> dict[str, str]:
        """The columns of a table that have other names at the destination."""
        rules = self.of(table_id, name)
        columns = () if rules is None else rules.columns
        return {column: rule.rename for column, rule in columns if rule.rename is not None}

    def statement_of(self, schema: TableSchema) -> str | None:
        """The `transform` of a table; None if it has none."""
        rules = self.of(schema.table_id, str(schema))
        return None if rules is None else rules.transform

    def excluded(self, schema: TableSchema) -> tuple[str, ...]:
        """The columns of a table that no destination gets."""
        rules = self.of(schema.table_id, str(schema))
        return () if rules is None else rules.excluded

    def resolve(self, schema: TableSchema, types: TypeSettings) -> TableTransform | None:
        """The transform of a table with this schema; None if it has no rules for reading. See `resolve_rules`."""
        rules = self.of(schema.table_id, str(schema))
        if rules is None or not (rules.columns or rules.where):
            return None
        found = resolve_rules(rules, schema, types)
        known = self.in_force(schema.table_id, str(schema))
        _require_same_columns(schema, rules, {} if known is None else known.columns)
        return found


class KeptColumn(NamedTuple):
    """What becomes of one column that stays."""

    source: str
    """Its name in the rows that are read."""
    target: str
    attnum: int
    identity: bool
    rule: ColumnRule
    type: str
    """The name of its Postgres type."""


@dataclass(frozen=True)
class TableTransform:
    """The rules of a table for one version of its schema."""

    rules: TableRules
    source: TableSchema
    """Of the rows that are read."""
    filter: RowFilter | None = None

    @cached_property
    def output(self) -> TableSchema:
        """The schema of the resulting rows. Columns keep their attribute numbers."""
        rules = dict(self.rules.columns)
        kept = [column for column in self.source.columns if column.name not in self.rules.excluded]
        columns = tuple(_output_column(column, rules.get(column.name), self.rules.key) for column in kept)
        return replace(self.source, columns=columns)

    def for_copy(self) -> TableTransform:
        """The transform of rows that the server has filtered, and that lack excluded columns."""
        read = tuple(column for column in self.source.columns if column.name not in self.rules.excluded)
        return TableTransform(self.rules, replace(self.source, columns=read))

    @cached_property
    def kept(self) -> tuple[KeptColumn, ...]:
        """The columns that stay."""
        rules = dict(self.rules.columns)
        names = dict(zip((each.attnum for each in self.source.columns), field_names(self.source), strict=True))
        sources = {column.attnum: column for column in self.source.columns}
        return tuple(
            KeptColumn(
                names[column.attnum],
                name,
                column.attnum,
                column.identity,
                rules.get(sources[column.attnum].name, ColumnRule()),
                resolve_domain(sources[column.attnum].type, -1)[0].name,
            )
            for column, name in zip(self.output.columns, field_names(self.output), strict=True)
        )

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Transform rows of a copy; columns that the table does not have stay as they are."""
        table = self._columns(pa.Table.from_batches([batch])).combine_chunks()
        return pa.RecordBatch.from_arrays(
            [array_of(table.column(name)) for name in table.column_names], schema=table.schema
        )

    def arrow_schema(self, schema: pa.Schema) -> pa.Schema:
        """The schema that rows or changes with this schema get."""
        return self._columns(schema.empty_table()).schema

    def segment(self, table: pa.Table) -> pa.Table:
        """Transform changes; see `penstock.changes.segment` for their columns."""
        if self.filter is not None:
            table = filter_changes(self.filter, table)
        return self._columns(table)

    def _columns(self, table: pa.Table) -> pa.Table:
        texts = split_texts(table)
        kept: dict[str, pa.Array] = {}
        own = set(field_names(self.source))
        done: dict[str, tuple[pa.Field, pa.Array | pa.ChunkedArray]] = {}
        for column in self.kept:
            cells, left = self._cells(column, table.column(column.source), texts.get(column.source))
            done[column.source] = pa.field(column.target, cells.type), cells
            if left is not None:
                kept[column.target] = left
        if OLD in table.column_names:
            old = self._old(array_of(table.column(OLD)), texts, kept)
            done[OLD] = pa.field(OLD, old.type), old
        if UNCHANGED in table.column_names:
            bitmap = self._unsent(table.column(UNCHANGED))
            done[UNCHANGED] = pa.field(UNCHANGED, bitmap.type), bitmap
        if UNREPRESENTABLE in table.column_names:
            maps = join_texts(kept, table.num_rows)
            maps = pa.nulls(table.num_rows, UNREPRESENTABLE_TYPE) if maps is None else maps
            done[UNREPRESENTABLE] = pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE), maps
        columns = [
            done.get(name, (table.schema.field(name), table.column(name)))
            for name in table.column_names
            if name in done or name not in own
        ]
        schema = pa.schema([field for field, _ in columns])
        return pa.Table.from_arrays([cells for _, cells in columns], schema=schema)

    def _old(self, old: pa.StructArray, texts: Texts, kept: dict[str, pa.Array]) -> pa.Array:
        names = {each.name for each in old.type}
        fields: list[pa.Field] = []
        arrays: list[pa.Array] = []
        for column in self.kept:
            if column.source in names:
                name = f"{OLD}.{column.source}"
                cells, left = self._cells(column, field_of(old, column.source), texts.get(name))
                fields.append(pa.field(column.target, cells.type))
                arrays.append(array_of(cells))
                if left is not None:
                    kept[f"{OLD}.{column.target}"] = left
        if not fields:
            return pa.nulls(len(old), pa.struct([]))
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=old.is_null())

    def _unsent(self, bitmaps: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
        if bitmaps.null_count == len(bitmaps) or len(self.kept) == len(self.source.columns):
            return bitmaps
        places = {name: place for place, name in enumerate(field_names(self.source))}
        at, bits = unsent_cells(bitmaps)
        flags = np.zeros((len(bitmaps), len(self.kept)), np.bool_)
        flags[at] = bits[:, [places[column.source] for column in self.kept]]
        return pack_unsent(flags)

    def _cells(
        self, column: KeptColumn, cells: pa.ChunkedArray | pa.Array, texts: pa.Array | None
    ) -> tuple[pa.ChunkedArray | pa.Array, pa.Array | None]:
        """The resulting cells of a column, and the texts of those that its type cannot hold."""
        rule = column.rule
        if rule.null:
            return pa.nulls(len(cells), cells.type), None
        if not rule.becomes_text:
            return cells, texts
        if rule.mask is not None:
            is_null = cells.is_null() if texts is None else pc.and_(cells.is_null(), texts.is_null())
            return pc.if_else(is_null, pa.scalar(None, pa.string()), pa.scalar(rule.mask)), None
        printed = print_values(array_of(cells), column.type)
        if texts is not None:
            printed = pc.coalesce(printed, texts.cast(printed.type))
        return change_texts(rule, printed, self.rules.key), None


def resolve_rules(rules: TableRules, schema: TableSchema, types: TypeSettings) -> TableTransform:
    """Return the transform of a table with this schema.

    Raises `ConfigError` if the rules do not fit: a column that does not exist must not flow under another name.
    """
    named = [*(name for name, _ in rules.columns), *(columns_of(rules.condition) if rules.condition else ())]
    columns = {column.name: column for column in schema.columns}
    lost = [name for name in dict.fromkeys(named) if name not in columns]
    if lost:
        listed = ", ".join(map(repr, lost))
        raise _refused(
            schema,
            f"names {'a column' if len(lost) == 1 else 'columns'} that the table does not have: {listed}",
            "If a column was renamed, use its new name; if it was dropped, remove it from the config. Then restart the "
            f"pipeline and copy the table again: {RESYNC}.",
        )
    key = {column.attnum for column in schema.key}
    for name, rule in rules.columns:
        if rule.loses_values and columns[name].attnum in key:
            raise _refused(
                schema,
                f"hides column {name!r}, which identifies rows",
                "Use `hash` for columns of a key: it keeps different values different.",
            )
        if (rule.hash or rule.keep_last is not None) and not is_printed(columns[name]):
            raise _refused(
                schema,
                f"cannot {'hash' if rule.hash else 'keep the last characters of'} column {name!r} of type "
                f"{columns[name].type}",
                "Both work for text, integers, uuid, date, enums and network addresses; use `exclude`, `null` or "
                "`mask` for other types.",
            )
    transform = TableTransform(rules, schema)
    _require_distinct(schema, transform.output, rules)
    if rules.condition is None:
        return transform
    bound = bind_filter(rules.condition, schema)
    _require_exact(bound, types)
    hashes_key = any(rule.hash and columns[name].attnum in key for name, rule in rules.columns)
    if hashes_key and schema.replica_identity is not ReplicaIdentity.FULL:
        raise _refused(
            schema,
            "has a filter and hashes a column of the key, so values that the server leaves out could not be fetched",
            f"Run: alter table {schema} replica identity full; or do without one of them.",
        )
    return replace(transform, filter=bound)


def _require_same_columns(schema: TableSchema, rules: TableRules, known: Mapping[str, RuledColumn]) -> None:
    """Raise if a column that had a rule has another name, and the config says nothing new of that name."""
    now = {column.attnum: column.name for column in schema.columns}
    ruled = {name: str(rule) for name, rule in rules.columns}
    for name, column in known.items():
        other = now.get(column.attnum, name)
        former = known[other].rule if other in known else None
        is_new = ruled.get(other) not in (None, former)
        if other != name and name in ruled and not is_new and ruled.get(other) != column.rule:
            raise _refused(
                schema,
                f"has a rule for {name!r}, but this is another column now: the former one is {other!r}",
                f"Add a rule for {other!r} to the config; to send its values as they are, "
                f'rename = "{other}" is enough. Then restart the pipeline and copy the table again: {RESYNC}.',
            )


def _require_distinct(schema: TableSchema, output: TableSchema, rules: TableRules) -> None:
    """Raise if two columns get one name."""
    before = {column.attnum: column.name for column in schema.columns}
    renamed = {name for name, rule in rules.columns if rule.rename is not None}
    taken: dict[str, str] = {}
    for column in output.columns:
        name = before[column.attnum]
        if name in renamed and column.name in RESERVED:
            raise _refused(
                schema, f"renames {name!r} to {column.name!r}, which Penstock uses itself", "Choose another name."
            )
        other = taken.setdefault(fold_case(column.name), name)
        if other != name and (name in renamed or other in renamed):
            raise _refused(
                schema,
                f"gives the columns {other!r} and {name!r} the same name, {column.name!r}",
                "Choose another name.",
            )


def _require_exact(bound: RowFilter, types: TypeSettings) -> None:
    """Raise if a setting in [types] changes values that the filter needs."""
    table = str(bound.schema)
    exact = {each.column.name: each.codec.arrow_type for each in segment_layout(bound.schema).columns}
    chosen = {each.column.name: each.codec.arrow_type for each in segment_layout(bound.schema, types).columns}
    for column in bound.columns:
        settings = types.of(table, column.name)
        merges = merging_setting(column.type, column.type_modifier, settings) is not None
        if merges or exact[column.name] != chosen[column.name]:
            raise _refused(
                bound.schema,
                f"filters by {column.name!r}, whose values a setting in [types] changes",
                f'Set out_of_range = "keep" in [tables."{table}".types.columns."{column.name}"].',
            )


def _output_column(column: Column, rule: ColumnRule | None, key: bytes) -> Column:
    if rule is None:
        return column
    name = rule.rename or column.name
    if rule.null:
        return replace(column, name=name, missing=None, backfilled=False)
    if not rule.becomes_text:
        return replace(column, name=name)
    missing = column.missing
    if missing is not None:
        printed = print_values(pa.array([missing], pa.string()), resolve_domain(column.type, -1)[0].name)
        missing = change_texts(rule, printed, key)[0].as_py()
    return replace(column, name=name, type=_TEXT, type_modifier=-1, missing=missing)


def _refused(schema: TableSchema, problem: str, hint: str) -> ConfigError:
    return ConfigError(f'[tables."{schema}"] {problem}', hint=hint, table=str(schema))
