"""Compares the columns of both sides: which columns they have, what these are called, and their types.

Columns are matched by attribute number. Rows are compared in the columns that both sides have in comparable types; the
others are differences of the table's schema, reported once each instead of once per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.changes.segment import SegmentColumn, field_names, segment_layout
from penstock.comparison.report import ColumnDifference, ColumnKind
from penstock.copy import CopyRows
from penstock.destinations.base import PinnedTable
from penstock.values import merging_setting


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """A column that both sides have, in types that can be compared."""

    column: SegmentColumn
    destination: str
    """Its name in the destination's rows."""
    type: pa.DataType
    """Holds the values of both sides."""


@dataclass(frozen=True, slots=True)
class ColumnComparison:
    """The columns of a table, compared."""

    same: tuple[ComparedColumn, ...]
    differences: tuple[ColumnDifference, ...]
    not_compared: tuple[str, ...]
    """What the comparison of rows does not cover, as phrases for people."""
    rows: bool
    """False if rows cannot be matched, because a column of the key differs."""


def compare_columns(rows: CopyRows, pinned: PinnedTable) -> ColumnComparison:
    """Compare the published columns of a table with those of the destination."""
    schema = rows.schema
    layout = segment_layout(schema, rows.reader.types)
    # Once: a table may have more than a thousand columns.
    fields = {field.name: field.type for field in pinned.arrow_schema}
    there = {
        column.attnum: (column, name)
        for column, name in zip(pinned.schema.columns, field_names(pinned.schema), strict=True)
        if name in fields
    }
    same: list[ComparedColumn] = []
    differences: list[ColumnDifference] = []
    for column in layout.columns:
        name = column.column.name
        if column.column.attnum not in there:
            differences.append(ColumnDifference(ColumnKind.MISSING, name, str(column.column.type), None))
            continue
        other, field = there.pop(column.column.attnum)
        if other.name != name:
            differences.append(ColumnDifference(ColumnKind.RENAMED, name, name, other.name))
        wanted, found = column.codec.arrow_type, fields[field]
        common = common_type(wanted, found)
        if common is None:
            differences.append(ColumnDifference(ColumnKind.TYPE, name, str(wanted), str(found)))
        else:
            same.append(ComparedColumn(column, field, common))
    differences += [
        ColumnDifference(ColumnKind.EXTRA, other.name, None, str(other.type)) for other, _ in there.values()
    ]
    compared = {each.column.column.attnum for each in same}
    lost = [column.name for column in schema.key if column.attnum not in compared]
    return ColumnComparison(tuple(same), tuple(differences), tuple(_not_compared(rows, same, lost)), rows=not lost)


def common_type(source: pa.DataType, destination: pa.DataType) -> pa.DataType | None:
    """Return a type that holds the values of both sides unchanged; None if there is none.

    `source` is the type that the source's values should have at the destination. The destination may use a wider one:
    more bits, more digits, larger offsets. A narrower one, or one that only prints the same, is another type.
    """
    types = pa.types
    if source == destination or types.is_null(destination):
        return source
    if types.is_dictionary(destination):
        return common_type(source, destination.value_type)
    if _is_list(source) and _is_list(destination):
        element = common_type(source.value_type, destination.value_type)
        return None if element is None else pa.list_(element)
    if types.is_signed_integer(source) and types.is_signed_integer(destination):
        return destination if destination.bit_width > source.bit_width else None
    if types.is_floating(source) and types.is_floating(destination):
        return destination if destination.bit_width > source.bit_width else None
    if types.is_decimal(source) and types.is_decimal(destination):
        digits = destination.precision - destination.scale >= source.precision - source.scale
        return destination if digits and destination.scale >= source.scale else None
    if types.is_timestamp(source) and types.is_timestamp(destination):
        return source if (source.tz is None) == (destination.tz is None) and destination.unit in ("us", "ns") else None
    # A destination without times of day holds them as text.
    is_held = types.is_time(source) and (_is_text(destination) or types.is_time(destination))
    is_wider = (_is_text(source) and _is_text(destination)) or (_is_binary(source) and _is_binary(destination))
    return source if is_held or is_wider else None


def _not_compared(rows: CopyRows, same: Sequence[ComparedColumn], lost: Sequence[str]) -> list[str]:
    found: list[str] = []
    if lost:
        found.append(f"rows, because {', '.join(lost)} in the key differs between the sides")
    if rows.unpublished:
        found.append(f"columns that are not published: {', '.join(rows.unpublished)}")
    if rows.reader.row_filter:
        found.append("rows that the publication's row filter excludes")
    if rows.reader.where:
        found.append("rows that `where` in the config excludes")
    changed: dict[str, list[str]] = {}
    table, types = str(rows.schema), rows.reader.types
    for each in same:
        column = each.column.column
        settings = types.of(table, column.name)
        setting = merging_setting(column.type, column.type_modifier, settings)
        if setting is not None:
            changed.setdefault(f'{setting} = "{getattr(settings, setting)}"', []).append(column.name)
    rules = rows.reader.transform.rules if rows.reader.transform is not None else None
    for name, rule in () if rules is None else rules.columns:
        if rule.loses_values:
            found.append(f"{'values of ' * (not rule.exclude)}column {name} ({rule})")
    found += [f"values that {setting} changes, in {', '.join(names)}" for setting, names in changed.items()]
    return found


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
