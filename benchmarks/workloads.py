"""Define the workloads: tables, initial rows, and a procedure that makes the changes.

Each workload has a procedure `load(wanted, changes, transactions)` that runs on the server at full speed and commits
inside. It counts rows and returns the number of changes and transactions, so that a reader can be checked. The affected
rows are computed, not random: all runs of the same size are identical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

PUBLICATION = "bench"

TABLE_COUNT = 300
TABLES_PER_TRANSACTION = 10

_UPDATED_ROWS = 150_000
"""Rows that updates go to, over and over; a stride without a common factor spreads them."""
_STRIDE = 7919


@dataclass(frozen=True, slots=True)
class Workload:
    """Tables and changes."""

    name: str
    about: str
    changes: int
    """How many, unless somebody asks for fewer: some seconds' worth, or capture's last wait shows in the rate."""
    transaction_rows: int
    """The number of changes is rounded to whole transactions."""
    prepare: Callable[[psycopg.Connection[Any], int], None]
    """Makes the tables, their rows, and the procedure, for a number of changes."""


def _execute(connection: psycopg.Connection[Any], *statements: str) -> None:
    for statement in statements:
        connection.execute(statement.encode())


def _procedure(declare: str, body: str) -> str:
    return f"""
        create procedure load(wanted bigint, inout changes bigint, inout transactions bigint)
        language plpgsql as $$
        declare
            counted bigint;
            {declare}
        begin
            {body}
        end $$"""


_COUNT = "get diagnostics counted = row_count; changes := changes + counted;"
_COMMIT = "commit; transactions := transactions + 1;"


def _prepare_one_table(
    connection: psycopg.Connection[Any],
    changes: int,
    *,
    table: str,
    columns: str,
    row: str,
    update: str,
    updated_rows: int = _UPDATED_ROWS,
) -> None:
    """One table, transactions of 60 updates, 30 inserts and 10 deletes.

    Ids: first what will be deleted, then what is updated, then what is inserted.
    """
    _execute(
        connection,
        f"create table {table} ({columns})",
        f"insert into {table} select {row} from generate_series(1::bigint, {changes // 10 + updated_rows}) i",
        _procedure(
            f"before constant bigint := wanted / 10; last constant bigint := before + {updated_rows};",
            f"""
            for t in 0 .. wanted / 100 - 1 loop
                update {table} set {update} where id = any (array(
                    select before + 1 + j * {_STRIDE} % {updated_rows}
                    from generate_series(t::bigint * 60, t * 60 + 59) j));
                {_COUNT}
                insert into {table} select {row} from generate_series(last + t * 30 + 1, last + t * 30 + 30) i;
                {_COUNT}
                delete from {table} where id between t * 10 + 1 and t * 10 + 10;
                {_COUNT}
                {_COMMIT}
            end loop;""",
        ),
    )


_ORDER_COLUMNS = """
    id bigint primary key, customer_id int, status text, amount numeric(12,2), quantity int, note text,
    created_at timestamptz, updated_at timestamptz, paid boolean, score double precision"""
_ORDER_ROW = """
    i, (i % 1000)::int, 'new', (i % 100000) / 100.0, (i % 10)::int, md5(i::text) || '--------',
    clock_timestamp(), clock_timestamp(), i % 2 = 0, i * 0.37"""
_ORDER_UPDATE = "status = 's' || t, amount = amount + 1.5, updated_at = clock_timestamp()"


def create_orders(connection: psycopg.Connection[Any], table: str, rows: int) -> None:
    """A table of ten columns with rows 1 to `rows`."""
    _execute(
        connection,
        f"create table {table} ({_ORDER_COLUMNS})",
        f"insert into {table} select {_ORDER_ROW} from generate_series(1::bigint, {rows}) i",
    )


def _prepare_mixed(connection: psycopg.Connection[Any], changes: int) -> None:
    _prepare_one_table(
        connection, changes, table="orders", columns=_ORDER_COLUMNS, row=_ORDER_ROW, update=_ORDER_UPDATE
    )


def prepare_mixed_into(connection: psycopg.Connection[Any], changes: int, rows: int) -> None:
    """As `mixed`, into a table of so many rows, all over it."""
    _prepare_one_table(
        connection,
        changes,
        table="orders",
        columns=_ORDER_COLUMNS,
        row=_ORDER_ROW,
        update=_ORDER_UPDATE,
        updated_rows=rows - changes // 10,
    )


def prepare_wide_into(connection: psycopg.Connection[Any], changes: int, rows: int) -> None:
    """As `prepare_mixed_into`, with rows of about 400 bytes."""
    _prepare_one_table(
        connection,
        changes,
        table="wide",
        columns=f"{_ORDER_COLUMNS}, detail text",
        row=f"{_ORDER_ROW}, repeat(md5(i::text), 8)",
        update=_ORDER_UPDATE,
        updated_rows=rows - changes // 10,
    )


def _prepare_small(connection: psycopg.Connection[Any], changes: int) -> None:
    """The same kinds of changes, each in a transaction of its own."""
    _execute(
        connection,
        f"create table orders ({_ORDER_COLUMNS})",
        f"insert into orders select {_ORDER_ROW} from generate_series(1::bigint, {changes // 10 + _UPDATED_ROWS}) i",
        _procedure(
            f"before constant bigint := wanted / 10; last constant bigint := before + {_UPDATED_ROWS}; i bigint;",
            f"""
            for t in 0 .. wanted - 1 loop
                if t % 10 < 6 then
                    update orders set {_ORDER_UPDATE} where id = before + 1 + t::bigint * {_STRIDE} % {_UPDATED_ROWS};
                elsif t % 10 < 9 then
                    i := last + t + 1;
                    insert into orders select {_ORDER_ROW};
                else
                    delete from orders where id = t / 10 + 1;
                end if;
                {_COUNT}
                {_COMMIT}
            end loop;""",
        ),
    )


_WIDE_KINDS = (
    ("int", "(i % 100000)::int"),
    ("bigint", "i * 1000003"),
    ("smallint", "(i % 30000)::smallint"),
    ("text", "left(md5(i::text), 16)"),
    ("numeric(10,2)", "(i % 1000000) / 100.0"),
    ("timestamptz", "timestamptz '2024-01-01' + i * interval '1.5 seconds'"),
    ("timestamp", "timestamp '2024-01-01' + i * interval '1.25 seconds'"),
    ("boolean", "i % 2 = 0"),
    ("double precision", "i * 0.37"),
    ("date", "date '2020-01-01' + (i % 1000)::int"),
    ("uuid", "md5(i::text)::uuid"),
    ("text", "case when i % 4 <> 0 then 'label ' || i % 100 end"),
)


def _prepare_wide(connection: psycopg.Connection[Any], changes: int) -> None:
    kinds = [_WIDE_KINDS[number % len(_WIDE_KINDS)] for number in range(59)]
    columns = ", ".join(f"c{number} {type_}" for number, (type_, _) in enumerate(kinds))
    _prepare_one_table(
        connection,
        changes,
        table="wide",
        columns=f"id bigint primary key, {columns}",
        row=", ".join(("i", *(value for _, value in kinds))),
        update="c0 = c0 + 1, c3 = 's' || t, c4 = c4 + 1.5, c5 = clock_timestamp()",
    )


_TEXT_POOL = 4096


def _prepare_text(connection: psycopg.Connection[Any], changes: int) -> None:
    """Rows of 1.9 KB: just below what the server would compress or move out of line. No deletes: they carry none."""
    kept = 20_000
    _execute(
        connection,
        "create unlogged table pool (n bigint primary key, body text)",
        f"""insert into pool select n, string_agg(encode(sha256((n * 1000 + j)::text::bytea), 'base64'), '')
            from generate_series(0, {_TEXT_POOL - 1}) n, generate_series(1, 43) j group by n""",
        "create table texts (id bigint primary key, body text)",
        f"""insert into texts select i, lpad(i::text, 12, '0') || body
            from generate_series(1, {kept}) i join pool on n = i % {_TEXT_POOL}""",
        _procedure(
            "",
            f"""
            for t in 0 .. wanted / 100 - 1 loop
                update texts set body = lpad(t::text, 12, '0') || pool.body
                from generate_series(t::bigint * 60, t * 60 + 59) j join pool on n = j * 37 % {_TEXT_POOL}
                where id = 1 + j * {_STRIDE} % {kept};
                {_COUNT}
                insert into texts select i, lpad(i::text, 12, '0') || pool.body
                from generate_series({kept} + t * 40 + 1, {kept} + (t + 1) * 40) i
                join pool on n = i * 41 % {_TEXT_POOL};
                {_COUNT}
                {_COMMIT}
            end loop;""",
        ),
    )


def _prepare_many(connection: psycopg.Connection[Any], changes: int) -> None:
    prepare_many(connection, changes, TABLE_COUNT)


def prepare_many(connection: psycopg.Connection[Any], changes: int, tables: int) -> None:
    """Each transaction changes five rows in each of ten tables: six in ten visits update, three insert, one deletes.

    In as many transactions as there are tables (no multiple of 7 or 31) every table has ten visits; their numbers give
    each its own rows to insert or delete.
    """
    deleted = 50 * (changes // 50 // tables + 1)
    _execute(
        connection,
        f"""do $do$ begin
            for k in 0 .. {tables - 1} loop
                execute format($$create table t%s (id bigint primary key, account int, name text,
                                 amount numeric(12,2), changed timestamptz, active boolean)$$, k);
                execute format($$insert into t%s
                                 select i, mod(i, 1000), md5(i::text), i / 100.0, clock_timestamp(), true
                                 from generate_series(1, {deleted + 1000}) i$$, k);
            end loop; end $do$""",
        _procedure(
            "k bigint; visit bigint;",
            f"""
            for t in 0 .. wanted / 50 - 1 loop
                for j in 0 .. {TABLES_PER_TRANSACTION - 1} loop
                    k := (t * 7 + j * 31) % {tables};
                    visit := t / {tables} * {TABLES_PER_TRANSACTION} + j;
                    if (t + j) % 10 < 6 then
                        execute format('update t%s set amount = amount + 1.5, name = $2, changed = clock_timestamp()
                                        where id between $1 and $1 + 4', k)
                        using {deleted} + 1 + visit * 5 % 1000, 's' || t;
                    elsif (t + j) % 10 < 9 then
                        execute format('insert into t%s select i, 7, $2, 1.25, clock_timestamp(), false
                                        from generate_series($1, $1 + 4) i', k)
                        using {deleted} + 1001 + visit * 5, 'new ' || t;
                    else
                        execute format('delete from t%s where id between $1 and $1 + 4', k) using 1 + visit * 5;
                    end if;
                    {_COUNT}
                end loop;
                {_COMMIT}
            end loop;""",
        ),
    )


def _prepare_huge(connection: psycopg.Connection[Any], changes: int) -> None:
    """One transaction: 70% inserts, then updates and deletes of what it inserted."""
    _execute(
        connection,
        f"create table orders ({_ORDER_COLUMNS})",
        _procedure(
            "inserted constant bigint := wanted * 7 / 10; deleted constant bigint := wanted / 10;",
            f"""
            insert into orders select {_ORDER_ROW} from generate_series(1, inserted) i;
            {_COUNT}
            update orders set status = 'done', amount = amount + 1.5, updated_at = clock_timestamp()
            where id <= wanted - inserted - deleted;
            {_COUNT}
            delete from orders where id > inserted - deleted;
            {_COUNT}
            {_COMMIT}""",
        ),
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mixed", "10 columns, transactions of 100 rows", 1_000_000, 100, _prepare_mixed),
        Workload("wide", "60 columns, transactions of 100 rows", 400_000, 100, _prepare_wide),
        Workload("text", "rows of 1.9 KB, transactions of 100 rows", 400_000, 100, _prepare_text),
        Workload("small", "10 columns, transactions of 1 row", 300_000, 10, _prepare_small),
        Workload("many", "300 tables, transactions of 50 rows in 10 of them", 500_000, 50, _prepare_many),
        Workload("huge", "10 columns, one transaction", 2_000_000, 10, _prepare_huge),
    )
}
