"""Documents built by one statement: every kind of field, on a real server."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.documents import catalog
from penstock.documents.build import BUILT, build_documents, compile_build
from penstock.documents.checks import check_index
from penstock.errors import ConfigError, QueryFailed
from penstock.source.catalog import load_tables
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.patterns import TableName
from penstock.specification import parse_specification
from tests.conftest import Database
from tests.integration.documents.conftest import Build, catalog_of

HEAD = "version: 1\nschema: lib\ntable: books\nprimary_key: id\n"


def test_vectors_arrive_as_arrays_of_numbers(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("create extension vector schema public")
    library.execute(
        "alter table lib.books add v public.vector(3), add h public.halfvec(2), add r real[], add n public.vector"
    )
    library.execute("insert into lib.books (id, v, h, r) values (1, '[1,2.5,-3]', '[0.5,1]', '{1.5,2}')")
    kinds = {"v": 3, "h": 2, "r": 2, "n": 9}
    fields = "fields:" + "".join(f"\n- {{vector: {name}, dimensions: {length}}}" for name, length in kinds.items())
    assert build(HEAD + fields, [1])["1"] == {"v": [1, 2.5, -3], "h": [0.5, 1], "r": [1.5, 2], "n": None}
    specification = parse_specification(HEAD + fields.replace("dimensions: 3", "dimensions: 4"), "books")
    [found] = check_index(library, specification, catalog_of(library, specification)).critical
    assert found.what == "v: lib.books.v has 3 dimensions, not 4"


def test_expressions_are_computed_from_the_row_alone(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("insert into lib.books (id, title, pages, price, labels) values (1, 'A', 10, 2.5, '{x}')")
    library.execute("insert into lib.chapters (book_id, number, title) values (1, 2, 'first')")
    document = build(
        HEAD
        + r"""
fields:
  - {keyword: name, expression: "title || '%' || pages -- a comment", transforms: [lowercase]}
  - {double: perPage, expression: "price / nullif(pages, 0)"}
  - {keyword: tags, expression: "labels || array['y']"}
  - {boolean: long, expression: pages > 300}
  - {binary: bytes, expression: "pg_catalog.convert_to(title, 'UTF8')"}
  - {json: pair, expression: "pg_catalog.json_build_object('id', id, 'title', title)"}
  - {keyword: nothing, expression: "nullif(title, title)", default: none}
  - has_many: chapters
    table: chapters
    foreign_key: book_id
    primary_key: [book_id, number]
    fields: [{keyword: label, expression: "number || ' ' || title"}]
""",
        [1],
    )["1"]
    assert document == {
        "name": "a%10",
        "perPage": 0.25,
        "tags": ["x", "y"],
        "long": False,
        "bytes": "QQ==",
        "pair": {"id": 1, "title": "A"},
        "nothing": "none",
        "chapters": [{"label": "2 first"}],
    }


def test_scalars_arrive_as_an_index_reads_them(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute(
        "insert into lib.books (id, title, genre, pages, price, rating, published, printed, day, cover, meta, labels,"
        " cost, code, latitude, longitude) values (1, '  Uber  ', 'essay', 7, 1.50, 0.1, '2026-01-02 03:04:05+02',"
        " '2026-01-02 03:04:05.6', '2026-01-02', decode(repeat('ff', 60), 'hex'), '{\"a\": [1]}', '{x,y}', 12.5,"
        " '6fa459ea-ee8a-3ca4-894e-db77e160355e', 1.5, 2.5)"
    )
    document = build(
        HEAD
        + """
fields:
  - long: id
  - {text: title, transforms: [trim, lowercase]}
  - enum: genre
  - integer: pages
  - {decimal: price}
  - {keyword: priceText, column: price}
  - double: rating
  - timestamp: published
  - timestamp: printed
  - date: day
  - binary: cover
  - json: meta
  - {keyword: labels}
  - {decimal: cost}
  - uuid: code
  - {geo: place, lat: latitude, lon: longitude}
  - {constant: source, value: "it's"}
  - constant: nothing
  - {keyword: missing, column: removed_at, default: "100%"}
  - object: inner
    fields: [{boolean: hidden}]
""",
        [1],
    )["1"]
    assert document == {
        "id": 1,
        "title": "uber",
        "genre": "essay",
        "pages": 7,
        "price": 1.5,
        "priceText": "1.50",
        "rating": 0.1,
        "published": "2026-01-02T01:04:05+00:00",
        "printed": "2026-01-02T03:04:05.6",
        "day": "2026-01-02",
        "cover": "/" * 80,
        "meta": {"a": [1]},
        "labels": ["x", "y"],
        "cost": 12.5,
        "code": "6fa459ea-ee8a-3ca4-894e-db77e160355e",
        "place": {"lat": 1.5, "lon": 2.5},
        "source": "it's",
        "nothing": None,
        "missing": "100%",
        "inner": {"hidden": False},
    }


def test_a_point_without_one_of_its_coordinates_is_null(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("insert into lib.books (id, latitude) values (1, 1.5)")
    assert build(HEAD + "fields: [{geo: place, lat: latitude, lon: longitude}]", [1]) == {"1": {"place": None}}


def test_relations_of_every_sort_and_depth(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("insert into lib.authors values (1, 'Ada', null), (2, 'Bob', 1)")
    library.execute("insert into lib.books (id, title, author_id) values (10, 'A', 2), (11, 'B', null), (12, 'C', 99)")
    library.execute("insert into lib.chapters values (10, 1, 'one', 5), (10, 2, 'two', 7), (11, 1, 'eins', null)")
    library.execute("insert into lib.notes values (1, 10, 2, 'late', 5), (2, 10, 1, 'early', 3), (3, 10, 1, 'x', null)")
    library.execute("""insert into "Other"."Tags" values ('a', 'Alpha'), ('b', 'Beta')""")
    library.execute("insert into lib.book_tags values (10, 'a', 1), (10, 'b', 9), (11, 'b', 1)")
    library.execute("insert into lib.blurbs values (1, 10, 'old', '2020-01-01'), (2, 10, 'new', '2021-01-01')")
    text = (
        HEAD
        + """
fields:
  - belongs_to: author
    column: author_id
    table: authors
    primary_key: id
    fields:
      - text: name
      - belongs_to: mentor
        column: mentor_id
        table: authors
        primary_key: id
        fields: [text: name]
  - has_one: blurb
    table: blurbs
    foreign_key: book_id
    primary_key: id
    order_by: [{column: at, direction: desc}]
    fields: [text: said]
  - has_many: chapters
    table: chapters
    foreign_key: book_id
    primary_key: [book_id, number]
    order_by: [{column: words, direction: desc}]
    fields:
      - integer: number
      - has_many: notes
        table: notes
        foreign_key: [book_id, chapter]
        primary_key: id
        filters: [{column: stars, op: is_not_null}]
        fields: [text: body]
  - many_to_many: tags
    schema: '"Other"'
    table: '"Tags"'
    primary_key: '"Code"'
    through: {schema: lib, table: book_tags, left_key: book_id, right_key: tag}
    order_by: [{column: weight, from: junction, direction: desc}]
    fields:
      - {keyword: label, column: '"Label"'}
      - {integer: weight, from: junction}
"""
    )
    assert build(text, [10, 11, 12]) == {
        "10": {
            "author": {"name": "Bob", "mentor": {"name": "Ada"}},
            "blurb": {"said": "new"},
            "chapters": [
                {"number": 2, "notes": [{"body": "late"}]},
                {"number": 1, "notes": [{"body": "early"}]},
            ],
            "tags": [{"label": "Beta", "weight": 9}, {"label": "Alpha", "weight": 1}],
        },
        "11": {
            "author": None,
            "blurb": None,
            "chapters": [{"number": 1, "notes": []}],
            "tags": [{"label": "Beta", "weight": 1}],
        },
        "12": {"author": None, "blurb": None, "chapters": [], "tags": []},
    }


def test_a_limit_takes_the_first_of_the_order(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("insert into lib.books (id) values (1)")
    library.execute("insert into lib.chapters select 1, n, 'x', n % 3 from generate_series(1, 9) n")
    many = "- {has_many: c, table: chapters, foreign_key: book_id, primary_key: [book_id, number], limit: 4,"
    text = HEAD + f"fields:\n  {many} order_by: [{{column: words, direction: desc}}], fields: [integer: number]}}"
    assert [each["number"] for each in build(text, [1])["1"]["c"]] == [2, 5, 8, 1]


def test_aggregates(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("insert into lib.books (id, title) values (1, 'A'), (2, 'B')")
    library.execute("insert into lib.chapters values (1, 1, 'a', 5), (1, 2, 'b', 8), (1, 3, 'c', null)")
    library.execute("""insert into "Other"."Tags" values ('a', 'Alpha'), ('b', 'Beta')""")
    library.execute("insert into lib.book_tags values (1, 'b', 1), (1, 'a', 9)")
    chapters = "table: chapters, foreign_key: book_id"
    tags = """schema: '"Other"', table: '"Tags"', through: {schema: lib, table: book_tags, left_key: book_id,"""
    tags += " right_key: tag}"
    text = (
        HEAD
        + f"""
fields:
  - {{count: count, {chapters}}}
  - {{count: long, {chapters}, filters: [{{column: words, op: gte, value: 6}}]}}
  - {{sum: sum, {chapters}, column: words, value_type: long}}
  - {{avg: avg, {chapters}, column: words}}
  - {{min: min, {chapters}, column: title, value_type: keyword}}
  - {{max: max, {chapters}, column: words, value_type: integer}}
  - {{ids: tags, {tags}, element_type: keyword}}
  - {{ids: heavy, {tags}, element_type: keyword, filters: [{{column: weight, op: gt, value: 5, from: junction}}]}}
  - {{count: tagCount, {tags}}}
"""
    )
    none = {"count": 0, "long": 0, "sum": None, "avg": None, "min": None, "max": None, "tags": [], "heavy": []}
    some = {"count": 3, "long": 1, "sum": 13, "avg": 6.5, "min": "a", "max": 8, "tags": ["a", "b"], "heavy": ["a"]}
    assert build(text, [1, 2]) == {"1": some | {"tagCount": 2}, "2": none | {"tagCount": 0}}


CONDITIONS: list[tuple[str, list[int]]] = [
    ("{column: words, op: eq, value: 5}", [2]),
    ("{column: words, op: neq, value: 5}", [3, 4]),
    ("{column: words, op: lt, value: 6}", [2]),
    ("{column: words, op: lte, value: 6}", [2, 3]),
    ("{column: words, op: gt, value: 6}", [4]),
    ("{column: words, op: gte, value: 6}", [3, 4]),
    ("{column: words, op: in, value: [5, 7]}", [2, 4]),
    ("{column: words, op: in, value: []}", []),
    ("{column: words, op: not_in, value: [5, 7]}", [3]),
    ("{column: words, op: not_in, value: []}", [1, 2, 3, 4]),
    ("{column: words, op: between, value: [5, 6]}", [2, 3]),
    ("{column: words, op: is_null}", [1]),
    ("{column: words, op: is_not_null}", [2, 3, 4]),
    ("{column: title, op: like, value: '%o%'}", [2, 3]),
    ("{column: title, op: ilike, value: '%O%'}", [2, 3]),
    ("{raw: \"words % 2 = 1 and title like '%e%' -- odd ones\"}", [4]),
    ('{raw: "chapters.words = 6 or number = 1"}', [1, 3]),
]


def test_conditions(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("insert into lib.books (id) values (1)")
    rows = "(1, 1, null, null), (1, 2, 'o', 5), (1, 3, 'foo', 6), (1, 4, 'e', 7)"
    library.execute(f"insert into lib.chapters values {rows}")
    many = "has_many: c, table: chapters, foreign_key: book_id, primary_key: [book_id, number]"
    for condition, expected in CONDITIONS:
        text = HEAD + f"fields:\n  - {{{many}, filters: [{condition}], fields: [integer: number]}}"
        assert [each["number"] for each in build(text, [1])["1"]["c"]] == expected, condition


def test_values_of_conditions_are_read_as_the_column_is(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("insert into lib.books (id, genre, published, hidden) values (1, 'poem', '2026-01-01', true)")
    conditions = (
        "{column: genre, op: eq, value: poem}",
        "{column: published, op: lt, value: 2026-06-01}",
        "{column: hidden, op: eq, value: true}",
        "{column: genre, op: gte, value: essay}",
    )
    for condition in conditions:
        assert build(HEAD + f"filters: [{condition}]\nfields: [long: id]", [1])["1"] == {"id": 1}
    with pytest.raises(QueryFailed, match="a value does not fit") as raised:
        build(HEAD + "filters: [{column: pages, op: eq, value: secret}]\nfields: [long: id]", [1])
    assert "secret" not in str(raised.value)


@pytest.mark.trap(43)
def test_every_requested_key_has_an_answer_and_only_that_says_deleted(
    library: psycopg.Connection[Any], build: Build
) -> None:
    library.execute("insert into lib.books (id, hidden, removed_at) values (1, false, null), (2, true, null),"
                    " (3, null, null), (4, false, now())")  # fmt: skip
    by_flag = HEAD + "soft_delete: {column: hidden}\nfields: [long: id]"
    assert build(by_flag, [4, 3, 2, 1, 9]) == {"4": {"id": 4}, "3": {"id": 3}, "2": None, "1": {"id": 1}, "9": None}
    by_time = HEAD + "soft_delete: {column: removed_at}\nfields: [long: id]"
    assert build(by_time, [1, 4]) == {"1": {"id": 1}, "4": None}
    narrowed = HEAD + "soft_delete: {column: hidden, when: [{column: id, op: gt, value: 2}]}\nfields: [long: id]"
    assert build(narrowed, [2]) == {"2": {"id": 2}}
    raw = HEAD + "soft_delete: {column: hidden, when: [{raw: id = 2}]}\nfilters: [{raw: id < 4}]\nfields: [long: id]"
    assert build(raw, [1, 2, 4]) == {"1": {"id": 1}, "2": None, "4": None}


@pytest.mark.trap(43)
def test_texts_of_equal_keys_name_the_same_document(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("create table lib.prices (price numeric primary key, code char(4))")
    library.execute("insert into lib.prices values (1.50, 'ab')")
    text = "version: 1\nschema: lib\ntable: prices\nprimary_key: price\nfields: [{keyword: code}]"
    assert build(text, ["1.5"]) == build(text, ["1.500"]) == build(text, ["01.50"]) == {"1.5": {"code": "ab"}}
    assert build(text.replace("primary_key: price", "primary_key: code"), ["ab  "]) == {"ab": {"code": "ab"}}


def test_composite_keys_have_ids_that_cannot_be_mistaken(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("create table lib.pairs (a text, b text, primary key (a, b))")
    library.execute("insert into lib.pairs values ('x:y', 'z'), ('x', 'y:z'), ('100%', ':')")
    text = "version: 1\nschema: lib\ntable: pairs\nfields: [keyword: a, keyword: b]".replace(
        "keyword: a, keyword: b", "{keyword: a}, {keyword: b}"
    )
    assert build(text, ["x:y", "x", "100%"], ["z", "y:z", ":"]) == {
        "x%3Ay:z": {"a": "x:y", "b": "z"},
        "x:y%3Az": {"a": "x", "b": "y:z"},
        "100%25:%3A": {"a": "100%", "b": ":"},
    }


def test_doc_id_names_documents_by_other_columns(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("create unique index on lib.books (code)")
    library.execute("insert into lib.books (id, code) values (1, '6fa459ea-ee8a-3ca4-894e-db77e160355e')")
    code = "6fa459ea-ee8a-3ca4-894e-db77e160355e"
    assert build(HEAD + "doc_id: code\nfields: [long: id]", [code.upper()]) == {code: {"id": 1}}


def test_a_key_that_is_not_unique_is_told(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("insert into lib.books (id, title) values (1, 'same'), (2, 'same')")
    with pytest.raises(QueryFailed, match="the key is not unique"):
        build(HEAD + "doc_id: title\nfields: [long: id]", ["same"])


def test_an_object_may_have_hundreds_of_fields(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("insert into lib.books (id) values (1)")
    fields = ", ".join(f"{{constant: c{number}, value: {number}}}" for number in range(300))
    assert len(build(HEAD + f"fields: [{fields}]", [1])["1"]) == 300


def test_types_of_extensions_are_compared_by_their_own_equality(library: psycopg.Connection[Any], build: Build) -> None:
    library.execute("create extension citext schema public")
    library.execute("create table lib.nicks (nick public.citext primary key, n int)")
    library.execute("create table lib.posts (id int primary key, nick public.citext)")
    library.execute("insert into lib.nicks values ('Ada', 1)")
    library.execute("insert into lib.posts values (1, 'ADA'), (2, 'ada')")
    text = """
version: 1
schema: lib
table: nicks
fields:
  - {count: posts, table: posts, foreign_key: nick}
"""
    assert build(text, ["aDa"]) == {"ada": {"posts": 2}}


@pytest.mark.trap(44)
def test_the_version_grows_with_every_transaction_that_ends(library: psycopg.Connection[Any]) -> None:
    specification = parse_specification(HEAD + "fields: [{keyword: title}]", "books")
    query = compile_build(specification, catalog_of(library, specification))

    def version() -> int:
        return build_documents(library, query, [["1"]]).column("version")[0].as_py()

    def body() -> Any:
        return build_documents(library, query, [["1"]]).column("body")[0].as_py()

    with psycopg.connect(library.info.dsn, password=library.info.password) as other:
        first = version()
        other.execute("insert into lib.books (id, title) values (1, 'a')")
        assert (version(), body()) == (first, None), "a transaction that runs changes nothing"
        other.commit()
        assert version() > first
        assert json.loads(body()) == {"title": "a"}
        # Two transactions that overlap: the later one ends first, and so does not hide behind the other.
        second = version()
        other.execute("update lib.books set title = 'b'")
        library.execute("insert into lib.books (id) values (2)")
        third = version()
        other.commit()
        assert second < third < version()


def test_all_keys_of_a_batch_are_one_statement_in_one_snapshot(library: psycopg.Connection[Any]) -> None:
    specification = parse_specification(HEAD + "fields: [{keyword: title}]", "books")
    query = compile_build(specification, catalog_of(library, specification))
    library.execute("insert into lib.books (id, title) select n, n::text from generate_series(1, 3000) n")
    for keys in (["1"], [str(number) for number in range(1, 5001)]):
        with library.transaction():
            library.execute("set transaction isolation level repeatable read")
            built = build_documents(library, query, [keys])
            assert built.schema == BUILT
            assert built.num_rows == len(keys)
            assert pc.count_distinct(built.column("version")).as_py() == 1
    assert built.column("body").null_count == 2000
    assert build_documents(library, query, [[]]).num_rows == 0


def test_a_function_of_ones_own_sees_the_documents(library: psycopg.Connection[Any], build: Build) -> None:
    module = ModuleType("own_documents")
    module.shout = lambda built: built.set_column(2, "body", pc.utf8_upper(built.column("body")))
    module.drop = lambda built: built.set_column(2, "body", pa.nulls(built.num_rows, pa.string()))
    module.short = lambda built: built.slice(1)
    sys.modules["own_documents"] = module
    library.execute("insert into lib.books (id, title) values (1, 'a')")
    text = HEAD + "transform: own_documents:{}\nfields: [{{keyword: title}}]"
    try:
        assert build(text.format("shout"), [1, 2]) == {"1": {"TITLE": "A"}, "2": None}
        assert build(text.format("drop"), [1]) == {"1": None}
        with pytest.raises(ConfigError, match="as many rows"):
            build(text.format("short"), [1])
        with pytest.raises(ConfigError, match="cannot be imported"):
            build(text.format("nope"), [1])
    finally:
        del sys.modules["own_documents"]


def test_columns_and_tables_that_are_not_there_are_named(library: psycopg.Connection[Any], build: Build) -> None:
    with pytest.raises(ConfigError, match=r"lib\.books has no column 'nope'"):
        build(HEAD + "fields: [keyword: nope]", [1])
    with pytest.raises(ConfigError, match=r"there is no table lib\.nope"):
        build(HEAD + "fields: [{count: c, table: nope, foreign_key: x}]", [1])
    library.execute("create table lib.keyless (x int)")
    with pytest.raises(ConfigError, match=r"lib\.keyless has no primary key"):
        build("version: 1\nschema: lib\ntable: keyless\nfields: [integer: x]", [1])
    with pytest.raises(ConfigError, match=r"'ids' of 'c' needs one primary key column, unlike lib\.keyless has"):
        build(HEAD + "fields: [{ids: c, table: keyless, foreign_key: x, element_type: long}]", [1])


def test_a_table_that_is_dropped_while_the_catalog_is_read_is_missing(
    library: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library.execute("create table lib.short_lived (id int primary key)")

    def drop_and_load(connection: psycopg.Connection[Any], oids: Any) -> Any:
        connection.execute("drop table lib.short_lived")
        return load_tables(connection, oids)

    monkeypatch.setattr(catalog, "load_tables", drop_and_load)
    names = [TableName("lib", "books"), TableName("lib", "short_lived")]
    assert list(catalog.load_catalog(library, names).tables) == names[:1]


def test_keys_that_are_equal_under_their_collation_only_name_different_documents(any_database: Database) -> None:
    collation = "create collation public.any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
    with connect(SourceSettings(any_database.dsn), Role.CATALOG) as connection:
        try:
            connection.execute(collation)
        except psycopg.errors.FeatureNotSupported:
            pytest.skip("the server was built without ICU")
        connection.execute("create table public.codes (code text collate public.any_case primary key)")
        connection.execute("insert into public.codes values ('ADA')")
        text = "version: 1\nschema: public\ntable: codes\nfields: [{keyword: code}]\n"
        specification = parse_specification(text, "codes")
        query = compile_build(specification, catalog_of(connection, specification))
        built = build_documents(connection, query, [["Ada", "ADA"]])
    assert built.column("id").to_pylist() == ["Ada", "ADA"]
    assert built.column("body").to_pylist() == [None, '{"code":"ADA"}']
