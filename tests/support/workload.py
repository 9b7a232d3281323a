"""Random tables and random transactions on a real server, from a seed.

One thread drives several sessions whose transactions interleave, so the seed determines everything that happens, even
lock conflicts: a statement that would wait gives up, and its savepoint or transaction is rolled back. The workload
counts what it commits, and reads the tables at some points together with the position; capture is checked against that.

Backends and the server may be killed meanwhile: their transactions are lost, and `reconnect` continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, LiteralString

import psycopg
from psycopg import pq, sql

from penstock.lsn import Lsn
from penstock.source.connections import PINNED_PARAMETERS
from tests.support.planned_tables import PlannedColumn, PlannedTable, Size
from tests.support.restructure import Restructuring
from tests.support.samples import Sample

LOCK_TIMEOUT = "30ms"
MESSAGE_PREFIX = "oracle"
_CONFLICTS = (psycopg.errors.LockNotAvailable, psycopg.errors.IntegrityError, psycopg.errors.DeadlockDetected)
"""Errors that sessions cause each other."""
_CONFLICTS_OF_DDL = (psycopg.errors.UndefinedColumn, psycopg.errors.ObjectInUse)
"""Errors of DDL: another session changed the columns, or the table has pending checks."""
_CONFLICTS_OF_STRUCTURE = (psycopg.ProgrammingError, psycopg.errors.ObjectNotInPrerequisiteState)
"""The name or the bounds are taken, or what was found in the catalog is not there any more."""
_PREPARED = "select gid from pg_prepared_xacts where database = current_database()"

_ADDED = "added "
"""The prefix of columns that a workload added."""
_ADDED_COLUMNS = """
    select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod)
    from pg_catalog.pg_attribute a join pg_catalog.pg_class c on c.oid = a.attrelid
    where c.relname = %s and c.relnamespace = 'public'::regnamespace and a.attname like %s and not a.attisdropped
    order by a.attnum
"""
_ADDED_SAMPLES = {
    "integer": Sample("int4", ("0", "-7", "2147483647")),
    "text": Sample("text", ("", "added", "\u00fc")),
    "numeric(12,3)": Sample("numeric(12,3)", ("1.500", "-0.001", "NaN")),
    "timestamp with time zone": Sample("timestamptz", ("2024-02-29 12:00:00+00", "infinity")),
    "boolean": Sample("bool", ("t", "f")),
    "jsonb": Sample("jsonb", ('{"a": 1}', "null")),
}
"""Keyed by the server's type names."""

Rows = list[tuple[str | None, ...]]


class Ddl(StrEnum):
    """Changes of columns in the middle of transactions."""

    NONE = "none"
    ADDED = "added"
    """Columns are added, some with a default for existing rows, and filled."""
    ANY = "any"
    """Added columns are also renamed or dropped."""
    REWRITES = "rewrites"
    """Added columns also get other types and values, and existing rows get values that the stream does not carry."""
    STRUCTURE = "structure"
    """Also partitions come and go, and tables get other names, schemas and keys, are created and dropped."""

    @property
    def has_rewrites(self) -> bool:
        """True if the catalog tells more than the stream."""
        return self in (Ddl.REWRITES, Ddl.STRUCTURE)


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction that changed published tables."""

    xid: int
    changes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of the tables at a boundary."""

    boundary: Lsn
    rows: dict[str, Rows]


@dataclass(slots=True)
class Truth:
    """What happened, in commit order."""

    tables: list[PlannedTable]
    initial: Checkpoint
    transactions: list[Committed] = field(default_factory=list)
    messages: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)


@dataclass(slots=True)
class _Session:
    """A connection with its open transaction."""

    connection: psycopg.Connection
    open: bool = False
    xid: int | None = None
    changes: int = 0
    messages: int = 0
    savepoints: list[tuple[int, int]] = field(default_factory=list)
    """The counts of changes and messages when each was set."""


class Workload:
    """Runs random transactions; close it, or use it as a context manager."""

    def __init__(
        self,
        dsn: str,
        random: Random,
        tables: Sequence[PlannedTable],
        size: Size,
        *,
        truncates: bool = True,
        ddl: Ddl = Ddl.NONE,
    ) -> None:
        self._dsn = dsn
        self._random = random
        self._tables = list(tables)
        self._size = size
        self.truncates = truncates
        self._ddl = ddl
        self._conflicts = _CONFLICTS if ddl is Ddl.NONE else (*_CONFLICTS, *_CONFLICTS_OF_DDL)
        self.restructuring = Restructuring(random) if ddl is Ddl.STRUCTURE else None
        self._observer = self._connect()
        self._sessions = [_Session(self._connect(LOCK_TIMEOUT)) for _ in range(size.sessions)]
        self._prepared: list[tuple[str, _Session]] = []
        self._number = 0
        self._used: dict[str, list[tuple[str, ...]]] = {table.name: [] for table in tables}

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in (self._observer, *(session.connection for session in self._sessions)):
            connection.close()

    @property
    def backends(self) -> list[int]:
        """The process ids of the sessions' backends."""
        return [session.connection.info.backend_pid for session in self._sessions]

    def reconnect(self) -> None:
        """Reopen lost sessions; raise if the server does not accept connections yet."""
        if self._observer.closed or self._observer.broken:
            self._observer = self._connect()
        for session in self._sessions:
            if session.connection.closed or session.connection.broken:
                session.connection = self._connect(LOCK_TIMEOUT)
                self._reset(session)
        # The answer to PREPARE or COMMIT PREPARED was lost.
        there = {name for (name,) in self._observer.execute(_PREPARED).fetchall()}
        self._prepared = [each for each in self._prepared if each[0] in there]
        for name in sorted(there - {name for name, _ in self._prepared}):
            self._observer.execute(sql.SQL("commit prepared {}").format(sql.Literal(name)))

    def create(self) -> Truth:
        """Create the tables with their first rows; return the truth that `run` completes."""
        for table in self._tables:
            for statement in table.statements():
                self._observer.execute(statement)
            for _ in range(self._random.randrange(self._size.initial_rows + 1)):
                self._insert_new(table)
        if self.restructuring is not None:
            self._create_structure(self.restructuring)
        return Truth(self._tables, self.look())

    def look(self) -> Checkpoint:
        """Return the committed rows of all tables, as the server's text, with their boundary."""
        rows = {table.name: read_rows(self._observer, table.identifier, table.published) for table in self._tables}
        found = self._observer.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert found is not None
        return Checkpoint(Lsn.parse(found[0]), rows)

    def run(self, truth: Truth) -> None:
        """Run all actions, end open transactions, and read the tables one last time."""
        for _ in range(self._size.actions):
            self.act(truth)
            if self._random.random() < 0.03:
                self._try_to_look(truth)
        self.end(truth)
        truth.checkpoints.append(self.look())

    def end(self, truth: Truth) -> None:
        """End all open transactions."""
        for session in self._sessions:
            if session.open:
                self._end(session, truth)
        for name, session in self._prepared:
            self._commit_prepared(name, session, truth)
        self._prepared.clear()

    def insert_everywhere(self) -> None:
        """Insert a row into each table, so that the stream describes its current columns."""
        for table in self._tables:
            self._insert_new(table)
        if self.restructuring is not None:
            self.restructuring.write_everywhere(self._observer)

    def sweep(self, truth: Truth) -> None:
        """Insert every sample value into every column, change it to the next, and delete some."""
        session = self._sessions[0]
        for table in self._tables:
            depth = max(len(_all_values(column)) for column in table.columns)
            session.connection.execute("begin")
            session.open = True
            for turn in range(depth):
                values = [_nth_value(column, turn) for column in table.columns]
                session.changes += self._insert(session.connection, table, 1, values=values)
            truth.checkpoints.append(self.look())
            for turn, column in enumerate(table.columns):
                if column.name not in table.key:
                    value = _nth_value(column, turn + 1)
                    session.changes += self._update(session, table, [column.name], [value], depth)
            self._do_delete(session)
            self._finish(session, truth)
        truth.checkpoints.append(self.look())

    def _connect(self, lock_timeout: str = "0") -> psycopg.Connection[tuple[Any, ...]]:
        options = [f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items()]
        return psycopg.connect(
            self._dsn, autocommit=True, options=" ".join([*options, f"-c lock_timeout={lock_timeout}"])
        )

    def _try_to_look(self, truth: Truth) -> None:
        """Read the tables, unless a session is truncating one."""
        self._observer.execute(f"set lock_timeout = '{LOCK_TIMEOUT}'".encode())
        try:
            truth.checkpoints.append(self.look())
        except psycopg.errors.LockNotAvailable:
            pass
        finally:
            self._observer.execute("reset lock_timeout")

    def act(self, truth: Truth) -> None:
        """Run one random statement in one session."""
        session = self._random.choice(self._sessions)
        if not session.open:
            session.connection.execute("begin")
            session.open = True
            return
        actions = {
            self._do_insert: 20,
            self._do_big_insert: 3,
            self._do_update: 22,
            self._do_change_keys: 10,
            self._do_move_keys: 5,
            self._do_delete: 9,
            self._do_truncate: 2 if self.truncates else 0,
            self._do_savepoint: 9,
            self._do_message: 2,
            self._do_noise: 3,
        }
        if self._ddl is not Ddl.NONE:
            actions |= {self._do_add_column: 3, self._do_fill_column: 8}
        if self._ddl is Ddl.ANY or self._ddl.has_rewrites:
            actions |= {self._do_rename_column: 1, self._do_drop_column: 1}
        if self.restructuring is not None:
            actions[self._do_restructure] = 6
        if self._ddl.has_rewrites:
            actions |= {self._do_retype_column: 1, self._do_compute_column: 1, self._do_add_computed_column: 1}
        if session.savepoints:
            actions |= {self._do_roll_back_to: 6, self._do_release: 3}
        ends = {self._end: 12}
        chosen = self._random.choices([*actions, *ends], [*actions.values(), *ends.values()])[0]
        if chosen == self._end:
            self._end(session, truth)
            return
        try:
            chosen(session)  # pyright: ignore[reportCallIssue]
        except self._conflicts:
            self._recover(session)

    def _recover(self, session: _Session) -> None:
        if session.savepoints:
            self._do_roll_back_to(session)
        else:
            session.connection.execute("rollback")
            self._reset(session)

    # Rows

    def _do_insert(self, session: _Session) -> None:
        table = self._random.choice(self._tables)
        session.changes += self._insert(session.connection, table, self._random.choice([1, 1, 1, 2, 5]))

    def _do_big_insert(self, session: _Session) -> None:
        """Write more than 64 kB, so that the server streams the open transaction."""
        table = self._random.choice(self._tables)
        session.changes += self._insert(session.connection, table, self._random.choice([40, 120, 250]))

    def _do_update(self, session: _Session) -> None:
        """Change some non-key columns, so that the server omits large values of the others."""
        table = self._changeable()
        columns = [column for column in table.columns if column.name not in table.key]
        if not columns:
            return
        chosen = self._random.sample(columns, self._random.randint(1, min(3, len(columns))))
        values = [self._value(column) for column in chosen]
        session.changes += self._update(session, table, [column.name for column in chosen], values, self._some())

    def _do_change_keys(self, session: _Session) -> None:
        """Change the key of a row, or part of it."""
        table = self._changeable()
        if not table.key:
            return
        names = self._random.choice([table.key, self._random.sample(table.key, 1)])
        key = dict(zip(table.key, self._new_key(table), strict=True))
        columns = {column.name: column for column in table.columns}
        extra = [name for name in columns if name not in table.key]
        chosen = [*names, *self._random.sample(extra, min(len(extra), self._random.choice([0, 0, 1])))]
        values = [key[name] if name in key else self._value(columns[name]) for name in chosen]
        session.changes += self._update(session, table, chosen, values, 1)

    def _do_move_keys(self, session: _Session) -> None:
        """Change the key of one row several times in one transaction; sometimes reuse the first key."""
        table = self._changeable()
        if not table.key:
            return
        old = self._pick(session, table, 1, returning=table.key)
        if not old:
            return
        place, first = old[0][0], old[0][1:]
        keys = [self._new_key(table) for _ in range(self._random.randint(1, 3))]
        if self._random.random() < 0.3:
            keys.append(first)
        for key in keys:
            statement = sql.SQL("update {} set {} where ctid = %s returning ctid::text").format(
                table.identifier, self._assignments(table, table.key)
            )
            place = session.connection.execute(statement, [*key, place]).fetchone()
            assert place is not None
            place = place[0]
            session.changes += 1
        if first not in keys and self._random.random() < 0.5:
            session.changes += self._insert(session.connection, table, 1, key=first)

    def _do_delete(self, session: _Session) -> None:
        table = self._changeable()
        statement = sql.SQL("delete from {} where ctid = any(%s::tid[])").format(table.identifier)
        rows = self._pick(session, table, self._some())
        if rows:
            session.changes += session.connection.execute(statement, [[row[0] for row in rows]]).rowcount

    def _do_truncate(self, session: _Session) -> None:
        chosen = self._random.sample(
            self._tables, self._random.choice([1, 1, 2, min(3, len(self._tables))][: len(self._tables)])
        )
        names = sql.SQL(", ").join(table.identifier for table in chosen)
        restart = sql.SQL(self._random.choice([" restart identity", ""]))
        session.connection.execute(sql.SQL("truncate {}{} cascade").format(names, restart))
        session.changes += 1

    # Columns

    def _do_add_column(self, session: _Session) -> None:
        table, sample = self._random.choice(self._tables), self._random.choice([*_ADDED_SAMPLES.values()])
        default = sql.SQL(" default {}").format(sql.Literal(sample.value(self._random)))
        self._alter(
            session,
            table,
            "add column {} {}{}",
            *(self._new_column(), sql.SQL(sample.type), self._random.choice([sql.SQL(""), default])),
        )

    def _do_fill_column(self, session: _Session) -> None:
        """Fill an added column in some rows."""
        table = self._changeable()
        for name, type_ in self._one_added(session, table):
            sample = _ADDED_SAMPLES[type_]
            rows = self._pick(session, table, self._some())
            statement = sql.SQL("update {} set {} = %s::{} where ctid = any(%s::tid[])").format(
                table.identifier, sql.Identifier(name), sql.SQL(sample.type)
            )
            values = [sample.value(self._random), [row[0] for row in rows]]
            session.changes += session.connection.execute(statement, values).rowcount

    def _do_rename_column(self, session: _Session) -> None:
        table = self._random.choice(self._tables)
        for name, _ in self._one_added(session, table):
            self._alter(session, table, "rename column {} to {}", sql.Identifier(name), self._new_column())

    def _do_drop_column(self, session: _Session) -> None:
        table = self._random.choice(self._tables)
        for name, _ in self._one_added(session, table):
            self._alter(session, table, "drop column {}", sql.Identifier(name))

    def _do_retype_column(self, session: _Session) -> None:
        """Give an added column another type."""
        table, sample = self._random.choice(self._tables), self._random.choice([*_ADDED_SAMPLES.values()])
        for name, _ in self._one_added(session, table):
            self._compute(session, table, name, sample)

    def _do_compute_column(self, session: _Session) -> None:
        """Compute an added column again, with the type that it has."""
        table = self._random.choice(self._tables)
        for name, type_ in self._one_added(session, table):
            self._compute(session, table, name, _ADDED_SAMPLES[type_])

    def _do_add_computed_column(self, session: _Session) -> None:
        """Add a column with a default that differs from row to row, and sometimes drop the default."""
        table, name = self._random.choice(self._tables), self._new_column()
        self._alter(session, table, "add column {} text default pg_catalog.md5(pg_catalog.random()::text)", name)
        if self._random.random() < 0.5:
            self._alter(session, table, "alter column {} drop default", name)

    def _compute(self, session: _Session, table: PlannedTable, name: str, sample: Sample) -> None:
        """Give all rows one value of a sample, and the column its type."""
        column, type_ = sql.Identifier(name), sql.SQL(sample.type)
        value = sql.SQL("{}::{}").format(sql.Literal(sample.value(self._random)), type_)
        self._alter(session, table, "alter column {} drop default", column)
        self._alter(session, table, "alter column {} type {} using {}", column, type_, value)

    def _alter(self, session: _Session, table: PlannedTable, what: LiteralString, *parts: sql.Composable) -> None:
        statement = sql.SQL("alter table {} ").format(table.identifier) + sql.SQL(what).format(*parts)
        session.connection.execute(statement)

    def _new_column(self) -> sql.Identifier:
        self._number += 1
        return sql.Identifier(f"{_ADDED}{self._number}")

    def _one_added(self, session: _Session, table: PlannedTable) -> list[tuple[str, str]]:
        """Return an added column and its type, or None."""
        found = session.connection.execute(_ADDED_COLUMNS, [table.name, f"{_ADDED}%"]).fetchall()
        return self._random.sample(found, min(1, len(found)))

    # Whole tables

    def _create_structure(self, restructuring: Restructuring) -> None:
        """Create the tables that are restructured; random names and bounds may be taken."""
        while True:
            with suppress(psycopg.ProgrammingError), self._observer.transaction():
                restructuring.create(self._observer)
                return

    def _do_restructure(self, session: _Session) -> None:
        assert self.restructuring is not None
        try:
            self.restructuring.act(session.connection)
        except _CONFLICTS_OF_STRUCTURE:
            self._recover(session)

    # Everything else

    def _do_savepoint(self, session: _Session) -> None:
        session.connection.execute(f"savepoint s{len(session.savepoints)}".encode())
        session.savepoints.append((session.changes, session.messages))

    def _do_roll_back_to(self, session: _Session) -> None:
        """Roll back to any savepoint, not only the last; sometimes release it too."""
        depth = self._random.randrange(len(session.savepoints))
        session.connection.execute(f"rollback to savepoint s{depth}".encode())
        session.changes, session.messages = session.savepoints[depth]
        del session.savepoints[depth + 1 :]
        if self._random.random() < 0.5:
            session.connection.execute(f"release savepoint s{depth}".encode())
            del session.savepoints[depth]

    def _do_release(self, session: _Session) -> None:
        depth = self._random.randrange(len(session.savepoints))
        session.connection.execute(f"release savepoint s{depth}".encode())
        del session.savepoints[depth:]

    def _do_message(self, session: _Session) -> None:
        """Emit a logical message, which does not count as a change."""
        session.connection.execute("select pg_logical_emit_message(true, %s, 'content')", [MESSAGE_PREFIX])
        session.messages += 1

    def _do_noise(self, session: _Session) -> None:
        """Make the server describe tables again although nothing has changed."""
        table = self._random.choice(self._tables).identifier
        self._observer.execute(f"set lock_timeout = '{LOCK_TIMEOUT}'".encode())
        noise = self._random.choice(
            ["analyze {}", "vacuum (truncate false) {}", "alter table {} set (fillfactor = 90)"]
        )
        try:
            self._observer.execute(sql.SQL(noise).format(table))  # pyright: ignore[reportArgumentType]
        except psycopg.errors.LockNotAvailable:
            pass
        finally:
            self._observer.execute("reset lock_timeout")

    def _finish(self, session: _Session, truth: Truth) -> None:
        self._ask_xid(session)
        session.connection.execute("commit")
        self._note(session, truth)
        self._reset(session)

    def _ask_xid(self, session: _Session) -> None:
        found = session.connection.execute("select pg_current_xact_id_if_assigned()::text").fetchone()
        session.xid = int(found[0]) & 0xFFFFFFFF if found and found[0] else None

    def _end(self, session: _Session, truth: Truth) -> None:
        self._ask_xid(session)
        kind = self._random.choices(["commit", "rollback", "prepare"], [75, 15, 10])[0]
        if kind == "prepare" and session.changes:
            name = f"{session.connection.info.dbname}-{session.xid}"
            session.connection.execute(sql.SQL("prepare transaction {}").format(sql.Literal(name)))
            ended = _Session(session.connection, xid=session.xid, changes=session.changes, messages=session.messages)
            if self._random.random() < 0.5:
                self._commit_prepared(name, ended, truth)
            else:
                self._prepared.append((name, ended))
        elif kind == "rollback":
            session.connection.execute("rollback")
        else:
            session.connection.execute("commit")
            self._note(session, truth)
        self._reset(session)
        if self._prepared and self._random.random() < 0.3:
            self._commit_prepared(*self._prepared.pop(0), truth)

    def _commit_prepared(self, name: str, session: _Session, truth: Truth) -> None:
        self._observer.execute(sql.SQL("commit prepared {}").format(sql.Literal(name)))
        self._note(session, truth)

    def _note(self, session: _Session, truth: Truth) -> None:
        truth.messages += session.messages
        if session.changes:
            assert session.xid is not None
            truth.transactions.append(Committed(session.xid, session.changes))

    def _reset(self, session: _Session) -> None:
        session.open, session.xid, session.changes, session.messages = False, None, 0, 0
        session.savepoints.clear()

    # Statements

    def _insert(
        self,
        connection: psycopg.Connection,
        table: PlannedTable,
        count: int,
        key: tuple[str, ...] | None = None,
        values: Sequence[str | None] | None = None,
    ) -> int:
        rows: list[str | None] = []
        for _ in range(count):
            keyed = dict(zip(table.key, key or self._new_key(table, reuse=values is None), strict=True))
            for at, column in enumerate(table.columns):
                if column.name in keyed:
                    rows.append(keyed[column.name])
                else:
                    rows.append(self._value(column) if values is None else values[at])
        row = sql.SQL("({})").format(sql.SQL(", ").join(self._placeholder(column) for column in table.columns))
        statement = sql.SQL("insert into {} ({}) values {}").format(
            table.identifier,
            sql.SQL(", ").join(sql.Identifier(column.name) for column in table.columns),
            sql.SQL(", ").join([row] * count),
        )
        return connection.execute(statement, rows).rowcount

    def _insert_new(self, table: PlannedTable) -> None:
        """Insert a row with an unused key and commit it immediately."""
        self._insert(self._observer, table, 1, key=self._new_key(table, reuse=False))

    def _update(
        self, session: _Session, table: PlannedTable, names: Sequence[str], values: Sequence[str | None], count: int
    ) -> int:
        rows = self._pick(session, table, count)
        if not rows:
            return 0
        statement = sql.SQL("update {} set {} where ctid = any(%s::tid[])").format(
            table.identifier, self._assignments(table, names)
        )
        return session.connection.execute(statement, [*values, [row[0] for row in rows]]).rowcount

    def _pick(
        self, session: _Session, table: PlannedTable, count: int, returning: Sequence[str] = ()
    ) -> list[tuple[str, ...]]:
        """Lock some unlocked rows; return their ctids and the texts of some columns."""
        statement = sql.SQL(
            "select {} from {} order by hashtext(ctid::text || %s) limit %s for update skip locked"
        ).format(
            sql.SQL(", ").join(
                [sql.SQL("ctid::text"), *(sql.Identifier(name) + sql.SQL("::text") for name in returning)]
            ),
            table.identifier,
        )
        return session.connection.execute(statement, [str(self._random.random()), count]).fetchall()

    def _assignments(self, table: PlannedTable, names: Sequence[str]) -> sql.Composed:
        columns = {column.name: column for column in table.columns}
        return sql.SQL(", ").join(
            sql.Identifier(name) + sql.SQL(" = ") + self._placeholder(columns[name]) for name in names
        )

    @staticmethod
    def _placeholder(column: PlannedColumn) -> sql.Composed:
        return sql.SQL("%s::") + sql.SQL(column.sample.type)

    def _changeable(self) -> PlannedTable:
        return self._random.choice([table for table in self._tables if not table.insert_only] or self._tables[:1])

    def _some(self) -> int:
        return self._random.choice([1, 1, 1, 2, 4, 30])

    def _value(self, column: PlannedColumn) -> str | None:
        if self._random.random() < 0.12:
            return None
        if column.sample.large is not None and self._random.random() < 0.35:
            return column.sample.large(self._random)
        return column.sample.value(self._random)

    def _new_key(self, table: PlannedTable, *, reuse: bool = True) -> tuple[str, ...]:
        """Return an unused key, rarely a used one."""
        used = self._used[table.name]
        if reuse and used and self._random.random() < 0.05:
            return self._random.choice(used)
        columns = {column.name: column for column in table.columns}
        key: list[str] = []
        for name in table.key:
            sample = columns[name].sample
            key.append(sample.unique(self._number) if sample.unique else self._random.choice(sample.values))
        self._number += 1
        used.append(tuple(key))
        return tuple(key)


def _all_values(column: PlannedColumn) -> list[str | None]:
    large = [column.sample.large(Random(number)) for number in range(2)] if column.sample.large else []
    return [None, *column.sample.values, *large]


def _nth_value(column: PlannedColumn, number: int) -> str | None:
    values = _all_values(column)
    return values[number % len(values)]


def read_rows(connection: psycopg.Connection, table: sql.Identifier, columns: Sequence[str]) -> Rows:
    """Return a table's rows as type output (a cast to text can differ: `bool`, `inet`)."""
    statement = sql.SQL("select {} from {}").format(sql.SQL(", ").join(sql.Identifier(name) for name in columns), table)
    result: Any = connection.pgconn.exec_(statement.as_bytes(connection))
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise psycopg.errors.error_from_result(result)
    return [
        tuple(_decoded(result.get_value(row, column)) for column in range(result.nfields))
        for row in range(result.ntuples)
    ]


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
