"""A specification against the catalog: what is found, and what is proposed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from penstock.documents.checks import check_index
from penstock.source.preflight.report import Check, Report, Severity
from penstock.specification import parse_specification
from tests.integration.documents.conftest import catalog_of

HEAD = "version: 1\nschema: lib\ntable: books\nprimary_key: id\n"
Look = Callable[[str], Report]


@pytest.fixture
def look(library: psycopg.Connection[Any]) -> Look:
    def look_at(text: str) -> Report:
        specification = parse_specification(text, "books")
        return check_index(library, specification, catalog_of(library, specification))

    return look_at


def critical(report: Report) -> list[Check]:
    return [each for each in report.failed if each.severity is Severity.CRITICAL]


def test_a_specification_that_fits(look: Look) -> None:
    report = look(HEAD + "fields: [{long: id}, {text: title}, {enum: genre}, {integer: pages}, {keyword: labels}]")
    assert report.ready
    assert [each.id for each in report.checks] == ["index"]


def test_a_document_id_that_contains_a_unique_key_is_unique(look: Look) -> None:
    report = look(HEAD + "doc_id: [genre, id]\nrouting: genre\nfields: [{long: id}]")
    assert [each for each in critical(report) if each.id == "key"] == []
    report = look(HEAD + "doc_id: [genre, title]\nfields: [{long: id}]")
    assert "doc_id: (genre, title) is not unique in lib.books" in critical(report)[0].what


CRITICAL: list[tuple[str, str, str]] = [
    (HEAD + "fields: [{text: titel}]", "column", "titel: lib.books has no column 'titel'; did you mean 'title'?"),
    (HEAD.replace("books", "boks") + "fields: [{text: title}]", "table", "no table lib.boks; did you mean 'books'?"),
    (
        HEAD + "fields: [{integer: title}]",
        "type",
        "title: lib.books.title is text; a field of type 'integer' cannot hold it",
    ),
    (HEAD + "fields: [{text: meta}]", "type", "lib.books.meta is jsonb; a field of type 'text' cannot hold it"),
    (HEAD + "fields: [{integer: id}]", "type", "id: lib.books.id is int8; a field of type 'integer'"),
    (HEAD + "fields: [{keyword: labels, transforms: [trim]}]", "type", "transforms do not work on arrays"),
    (HEAD + "fields: [{vector: rating, dimensions: 3}]", "type", "a vector needs a column of pgvector, or an array"),
    (HEAD + "fields: [{vector: labels, dimensions: 3}]", "type", "a field of type 'vector' cannot hold it"),
    (HEAD + "routing: title\nfields: [{long: id}]", "key", "routing: title is not part of the document id (id)"),
    (HEAD + "fields: [{geo: p, lat: title, lon: longitude}]", "type", "a point needs two numbers"),
    (
        HEAD + "fields: [{custom: price, postgres: [text], opensearch: keyword}]",
        "type",
        "is numeric; a field of type 'custom'",
    ),
    (HEAD + "filters: [{column: nope, op: is_null}]\nfields: [{long: id}]", "column", "filters: lib.books has no"),
    (HEAD + "soft_delete: {column: nope}\nfields: [{long: id}]", "column", "soft_delete: lib.books has no column"),
    (HEAD + "doc_id: title\nfields: [{long: id}]", "key", "doc_id: (title) is not unique in lib.books"),
    (HEAD.replace("id\n", "rating\n") + "fields: [{long: id}]", "key", "primary_key: equal values of type float8"),
    (
        HEAD + "fields: [{sum: s, table: chapters, foreign_key: book_id, column: title, value_type: long}]",
        "type",
        "s: lib.chapters.title is text; sum needs numbers",
    ),
    (
        HEAD + "fields: [{ids: s, table: chapters, foreign_key: book_id, element_type: long}]",
        "type",
        "s: 'ids' needs a table whose primary key has one column",
    ),
    (
        HEAD + "fields: [{has_many: b, table: blurbs, primary_key: id, foreign_key: book, fields: []}]",
        "column",
        "b: lib.blurbs has no column 'book'; did you mean 'book_id'?",
    ),
    (
        HEAD + "fields: [{belongs_to: a, column: title, table: authors, primary_key: id, fields: [text: name]}]",
        "statement",
        "operator does not exist",
    ),
    (HEAD + "filters: [{raw: nope = 1}]\nfields: [{long: id}]", "statement", 'column "nope" does not exist'),
]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (
            "keyword: a, expression: titel || 'x'",
            'a (books.schema.yml:6:30): column "titel" does not exist, at character 1',
        ),
        (
            "keyword: a, expression: title + 1",
            "a (books.schema.yml:6:30): operator does not exist: text + integer, at character 7",
        ),
        (
            "keyword: a, expression: title || tableoid",
            'a (books.schema.yml:6:30): column "tableoid" does not exist, at character 10',
        ),
        ("keyword: a, expression: title || (", 'a (books.schema.yml:6:30): syntax error at or near ")"'),
        ("long: a, expression: title", "a (books.schema.yml:6:27): it is text; a field of type 'long' cannot hold it"),
        (
            "has_one: c, table: blurbs, foreign_key: book_id, primary_key: id, fields: [{long: a, expression: pages}]",
            'c.a (books.schema.yml:6:103): column "pages" does not exist, at character 1',
        ),
        (
            "long: a, expression: (select count(*) from lib.chapters where book_id = books.id)",
            "a (books.schema.yml:6:27): the expression reads lib.chapters, whose changes it would not follow",
        ),
    ],
)
def test_an_expression_that_cannot_work_is_shown_with_its_place(
    field: str, said: str, library: psycopg.Connection[Any]
) -> None:
    specification = parse_specification(HEAD + f"fields:\n  - {{{field}}}", "books", "folder/books.schema.yml")
    found = critical(check_index(library, specification, catalog_of(library, specification)))
    assert [each.what for each in found if each.id == "expression"] == [said], found


def test_what_cannot_work_is_critical(look: Look) -> None:
    for text, id_, said in CRITICAL:
        found = critical(look(text))
        assert any(each.id == id_ and said in each.what and each.remedy for each in found), (text, found)


def test_a_view_cannot_be_followed(library: psycopg.Connection[Any], look: Look) -> None:
    library.execute("create view lib.shelf as select * from lib.books")
    assert "cannot be followed" in critical(look(HEAD.replace("books", "shelf") + "fields: [{long: id}]"))[0].what


@pytest.mark.trap(42)
def test_a_relation_whose_deletes_cannot_be_seen_is_told_with_the_remedy(
    library: psycopg.Connection[Any], look: Look
) -> None:
    text = HEAD + "fields: [{count: blurbs, table: blurbs, foreign_key: book_id}]"
    (found,) = [each for each in look(text).checks if each.id == "identity"]
    assert found.severity is Severity.INFO
    assert "does not send book_id" in found.what
    assert "replica identity full" in found.remedy
    library.execute("alter table lib.blurbs replica identity full")
    assert look(text).find("identity") is None
    library.execute("alter table lib.blurbs replica identity nothing")
    assert critical(look(text))[0].id == "identity"


def test_remedies_for_a_partitioned_table_work_as_printed(library: psycopg.Connection[Any], look: Look) -> None:
    library.execute(
        """
        create table lib.visits (id bigint, "Book" bigint, at date, primary key (id, at)) partition by range (at);
        create table lib.visits_2025 partition of lib.visits for values from ('2025-01-01') to ('2026-01-01');
        create table lib."Visits 2026" partition of lib.visits for values from ('2026-01-01') to ('2027-01-01');
        """
    )
    text = HEAD + "fields: [{count: visits, table: visits, foreign_key: '\"Book\"'}]"
    remedies = {each.id: each.remedy for each in look(text).failed}
    assert remedies.keys() == {"identity", "index"}
    assert "concurrently on" not in remedies["index"], "Postgres refuses this for partitioned tables"
    for remedy in remedies.values():
        for statement in re.findall(r"(?:create|alter) [^;]+;", remedy):
            library.execute(statement)
    assert not look(text).failed


def test_a_generated_column_cannot_connect_tables(library: psycopg.Connection[Any], look: Look) -> None:
    library.execute("alter table lib.blurbs add twice bigint generated always as (book_id * 2) stored")
    found = critical(look(HEAD + "fields: [{count: blurbs, table: blurbs, foreign_key: twice}, {long: id}]"))
    assert [each.id for each in found] == ["generated"]
    assert look(HEAD + "fields: [{has_many: b, table: blurbs, foreign_key: book_id, primary_key: id,"
                " fields: [{long: twice}]}]").ready  # fmt: skip


def test_lookups_without_an_index_are_told_with_the_statement(library: psycopg.Connection[Any], look: Look) -> None:
    text = HEAD + (
        "fields:\n"
        "  - {count: blurbs, table: blurbs, foreign_key: book_id}\n"
        "  - {belongs_to: a, column: author_id, table: authors, primary_key: id, fields: [text: name]}\n"
    )
    found = [each for each in look(text).checks if each.id == "index"]
    assert [each.remedy for each in found] == [
        "Run: create index concurrently on lib.blurbs (book_id);",
        "Run: create index concurrently on lib.books (author_id);",
    ]
    assert all(each.severity is Severity.WARNING for each in found)
    library.execute("create index on lib.blurbs (book_id, at)")
    library.execute("create index on lib.books (author_id) where author_id > 0")
    assert [each.subjects for each in look(text).checks if each.id == "index"] == [("lib.books",)]


def test_keys_in_another_order_have_their_index_too(look: Look) -> None:
    text = HEAD + (
        "fields:\n  - has_many: c\n    table: chapters\n    foreign_key: book_id\n    primary_key: [number, book_id]\n"
        "    fields: [{has_many: n, table: notes, foreign_key: [chapter, book_id], primary_key: id, fields: []}]\n"
    )
    assert [each.subjects for each in look(text).checks if each.id == "index"] == [("lib.notes",)]


def test_required_fields_that_may_be_null_are_a_warning(look: Look) -> None:
    report = look(HEAD + "fields: [{text: title, required: true}, {long: id, required: true}]")
    assert report.ready
    assert [each.what for each in report.failed] == ["title is required, but lib.books.title may be null"]
