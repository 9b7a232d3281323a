"""Documents of any size and of tables without a key, built on a real server."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from penstock.documents.build import PIECE_BYTES, build_pieces, build_range, compile_build
from penstock.documents.builder import PostgresDocuments
from penstock.errors import QueryFailed
from penstock.source.connections import SourceSettings
from penstock.specification import parse_specification
from tests.integration.documents.conftest import Build, catalog_of

HEAD = "version: 1\nschema: lib\ntable: books\nprimary_key: id\n"


def test_documents_of_any_size_come_in_pieces_that_fit_into_memory(library: psycopg.Connection[Any]) -> None:
    library.execute("insert into lib.books (id, title) select n, repeat('x', 200) from generate_series(1, 1400) n")
    library.execute("update lib.books set title = repeat('x', 50000) where id > 400")
    specification = parse_specification(HEAD + "fields: [{text: title}]", "books")
    query = compile_build(specification, catalog_of(library, specification))
    keys = [[str(number) for number in range(1, 1402)]]
    by_key = [(each.num_rows, each.nbytes) for each in build_pieces(library, query, keys, chunk=1000)]
    with library.transaction():
        of_range = [(r.num_rows, r.nbytes) for r in build_range(library, query, "lib.books", "", chunk=1000)]
    assert max(size for _, size in by_key + of_range) < PIECE_BYTES + 10 * 51_000, "also where large ones begin"
    assert sum(count for count, _ in by_key) == 1401, "one answer for each key"
    assert sum(count for count, _ in of_range) == 1400
    for pieces in (by_key, of_range):
        assert pieces[0][0] >= 200, "small ones come together"
        large = [size for count, size in pieces if size > 45_000 * count]
        assert len(large) >= 3
    doubled = parse_specification(HEAD + "doc_id: title\nfields: [{text: title}]", "books")
    again = compile_build(doubled, catalog_of(library, doubled))
    with pytest.raises(QueryFailed, match="not unique"):
        list(build_pieces(library, again, [["x" * 200, *map(str, range(50))]], chunk=1000))


def test_the_ranges_of_a_small_table_are_many_and_even_so_that_tasks_end_together(
    library: psycopg.Connection[Any],
) -> None:
    library.execute("insert into lib.books (id, title) select n, repeat('x', 900) from generate_series(1, 15000) n")
    library.execute("analyze lib.books")
    specification = parse_specification(HEAD + "fields: [{text: title}]", "books")
    source = SourceSettings(library.info.dsn + f" password={library.info.password}")
    documents = PostgresDocuments(library, library, [specification], source=source)
    ranges = documents.ranges("books") or []
    counts = [
        library.execute(f"select count(*) from lib.books where {condition or 'true'}".encode()).fetchone()
        for _, _, condition in ranges
    ]
    rows = sorted(int(count[0]) for count in counts if count)
    assert sum(rows) == 15000
    assert len(rows) in (8, 9), "not the two that 13 MB would be with ranges of full size"
    assert rows[-8:][0] * 2 > rows[-1]


def test_arrays_of_bytes_and_money_arrive_as_single_values_do(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("alter table lib.books add prints bytea[], add costs money[]")
    library.execute(
        r"insert into lib.books (id, title, prints, costs) values (1, 'a', array['\xff'::bytea, null], '{1.5,2}'),"
        " (2, 'b', '{}', null)"
    )
    fields = "fields: [{binary: prints}, {decimal: costs}]"
    assert build(HEAD + fields, [1, 2]) == {
        "1": {"prints": ["/w==", None], "costs": [1.5, 2]},
        "2": {"prints": [], "costs": None},
    }


def test_rows_of_a_junction_without_a_key_have_one_order(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("create table lib.parts (id int primary key); create table lib.uses (book int, part int, n int)")
    library.execute("insert into lib.books (id, title) values (1, 'a'); insert into lib.parts values (1)")
    library.execute("insert into lib.uses select 1, 1, n from generate_series(9, 1, -1) n")
    fields = """fields:
  - many_to_many: parts
    table: parts
    primary_key: id
    limit: 3
    through: {table: uses, left_key: book, right_key: part}
    fields: [{integer: n, from: junction}]
"""
    first = build(HEAD + fields, [1])
    library.execute("update lib.uses set n = n")
    library.execute("update lib.uses set n = n where n < 5")
    assert first == build(HEAD + fields, [1])
    assert [each["n"] for each in first["1"]["parts"]] == [1, 2, 3]
