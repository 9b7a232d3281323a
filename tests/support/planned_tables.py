"""Random tables from a seed: types, keys, replica identities, and awkward names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from psycopg import sql

from tests.support.samples import Sample

_TABLE_NAMES = ('Weird "Table"', "select", "täble", "with space", "dots.in.name", "x" * 60, "plain", "_op")
_COLUMN_NAMES = (
    *(
        "_op",
        "_OP",
        "_commit_lsn",
        "_Ordinal",
        "_old",
        "_OLD",
        "_unchanged",
        "_unrepresentable",
        "_xid",
        "_commit_time",
    ),
    *("ID", "Id", "a.b", 'quo"te', "with space", "ünï", "select", "_op#2", "#", "y" * 63, "1", "{}", "\\"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a workload is."""

    tables: int = 4
    columns: int = 8
    actions: int = 150
    sessions: int = 3
    initial_rows: int = 6


@dataclass(frozen=True, slots=True)
class PlannedColumn:
    name: str
    sample: Sample
    external: bool = False
    """True if large values are stored out of line without compression."""


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A table with its columns and the identity of its rows."""

    name: str
    columns: tuple[PlannedColumn, ...]
    key: tuple[str, ...]
    """The columns of its unique key; empty if it has none."""
    identity: str
    """`default`, `index`, `full` or `nothing`."""
    dropped: frozenset[int] = frozenset()
    """The positions before which a column was dropped."""
    parent: PlannedTable | None = None
    """The table that the extra column `parent` references."""
    generated: bool = False

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier("public", self.name)

    @property
    def published(self) -> tuple[str, ...]:
        """The columns the server sends, in order."""
        return (*(column.name for column in self.columns), *(("parent",) if self.parent else ()))

    @property
    def insert_only(self) -> bool:
        return self.identity == "nothing"

    def statements(self) -> list[sql.Composed]:
        parts: list[sql.Composable] = []
        for position, column in enumerate(self.columns):
            if position in self.dropped:
                parts.append(sql.Identifier(f"gone {position}") + sql.SQL(" text default 'gone'"))
            null = sql.SQL(" not null" if column.name in self.key else "")
            parts.append(sql.Identifier(column.name) + sql.SQL(" ") + sql.SQL(column.sample.type) + null)
        if self.generated:
            parts.append(sql.SQL("generated int4 generated always as (42) stored"))
        if self.parent is not None:
            parts.append(sql.SQL("parent int8 references {}").format(self.parent.identifier))
        key = sql.SQL(", ").join(sql.Identifier(name) for name in self.key)
        if self.key and self.identity != "index":
            parts.append(sql.SQL("primary key ({})").format(key))
        made = [sql.SQL("create table {} ({})").format(self.identifier, sql.SQL(", ").join(parts))]
        index = sql.Identifier(f"{self.name[:50]}_key")
        if self.identity == "index":
            made.append(sql.SQL("create unique index {} on {} ({})").format(index, self.identifier, key))
            made.append(self._alter(sql.SQL("replica identity using index {}").format(index)))
        elif self.identity != "default":
            made.append(self._alter(sql.SQL("replica identity {}").format(sql.SQL(self.identity))))  # pyright: ignore[reportArgumentType]
        made += [
            self._alter(sql.SQL("alter {} set storage external").format(sql.Identifier(column.name)))
            for column in self.columns
            if column.external
        ]
        made += [self._alter(sql.SQL("drop {}").format(sql.Identifier(f"gone {at}"))) for at in sorted(self.dropped)]
        return made

    def _alter(self, what: sql.Composable) -> sql.Composed:
        return sql.SQL("alter table {} {}").format(self.identifier, what)


def plan_tables(random: Random, samples: Sequence[Sample], size: Size) -> list[PlannedTable]:
    """Return random tables. Keys have any ordered type, one or more columns, and may be stored out of line."""
    tables: list[PlannedTable] = []
    names = random.sample(_TABLE_NAMES, min(size.tables, len(_TABLE_NAMES)))
    for name in names:
        identity = random.choice(["default", "default", "default", "index", "full", "full", "nothing"])
        count = random.randint(2, size.columns)
        column_names = random.sample([*_COLUMN_NAMES, *(f"c{number}" for number in range(2 * count))], count)
        columns = [_plan_column(random, each, random.choice(samples)) for each in column_names]
        keyed = identity in ("default", "index") or (identity == "full" and random.random() < 0.5)
        key: tuple[str, ...] = ()
        if keyed:
            unique = random.choice([sample for sample in samples if sample.unique is not None])
            if random.random() < 0.15:
                unique = Sample("text", ("",), unique=_long_key)
            at = random.randrange(count)
            columns[at] = PlannedColumn(column_names[at], unique, external=unique.unique is _long_key)
            key = (column_names[at],)
            others = [column for column in columns if column.sample.type in ("oracle.mood", "bool", "int2")]
            if others and random.random() < 0.7:
                key = tuple(random.sample([others[0].name, *key], 2)) if others[0].name not in key else key
        parents = [table for table in tables if _is_parent(table)]
        parent = random.choice(parents) if parents and random.random() < 0.6 else None
        if parent is not None:
            columns = [column for column in columns if column.name != "parent"]
        # The server does not send generated columns, so they must not be part of an identity.
        generated = identity != "full" and random.random() < 0.3
        dropped = frozenset(at for at in range(count) if random.random() < 0.15)
        tables.append(PlannedTable(name, tuple(columns), key, identity, dropped, parent, generated))
        if len(tables) == 1 and size.tables > 1:
            # Other tables refer to it.
            tables[0] = PlannedTable(
                name, (PlannedColumn("id", _INT8), *columns[1:]), ("id",), random.choice(["default", "full"]), dropped
            )
    return tables


def _plan_column(random: Random, name: str, sample: Sample) -> PlannedColumn:
    return PlannedColumn(name, sample, external=sample.large is not None and random.random() < 0.5)


def _long_key(number: int) -> str:
    """Return a key that is stored out of line and just fits into an index."""
    return f"{number:08d}{Random(number).randbytes(1100).hex()}"


_INT8 = Sample("int8", ("0",), unique=lambda number: str(number))


def _is_parent(table: PlannedTable) -> bool:
    return table.key == ("id",) and table.columns[0].sample is _INT8
