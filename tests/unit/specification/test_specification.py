"""Index specifications: what loads, what it means, and where an error is."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import SpecificationInvalid
from penstock.source.patterns import TableName
from penstock.specification import IndexSpecification, load_specification, parse_specification
from penstock.specification.tree import (
    Aggregate,
    Constant,
    Filter,
    Geo,
    Group,
    Join,
    Junction,
    Operation,
    OrderBy,
    Scalar,
    ScalarType,
    SoftDelete,
    Transform,
    Verb,
    relations_in,
)

FOLDER = Path(__file__).parent / "specifications"
HEAD = "version: 1\ntable: users\nprimary_key: id\n"


def load(name: str) -> IndexSpecification:
    return load_specification(FOLDER / f"{name}.schema.yml")


def field(specification: IndexSpecification, name: str):
    return next(each for each in specification.fields if each.name == name)


def problems(text: str) -> list[str]:
    with pytest.raises(SpecificationInvalid) as raised:
        parse_specification(text, "users", "users.schema.yml")
    assert "index-specification.md" in raised.value.hint
    return raised.value.problems


@pytest.mark.parametrize("name", ["customers", "articles"])
def test_files_in_the_public_format_load_unchanged(name: str) -> None:
    assert load(name).name == name


def test_fields_of_the_row_have_their_columns_and_what_is_done_to_them() -> None:
    customers = load("customers")
    assert customers.table == TableName("public", "customers")
    assert customers.primary_key == ("id",)
    assert field(customers, "email") == Scalar(
        "email", ScalarType.KEYWORD, "email", required=True, transforms=(Transform.LOWERCASE, Transform.TRIM)
    )
    assert field(customers, "displayName").column == "display_name"
    account = field(customers, "account")
    assert isinstance(account, Group)
    assert account.fields[0].variants == ("bronze", "silver", "gold")
    assert account.fields[1].default == "unknown"
    assert customers.soft_delete == SoftDelete("removed")


def test_relations_say_which_columns_must_be_equal() -> None:
    customers = load("customers")
    orders = field(customers, "orders")
    assert isinstance(orders, Join)
    assert orders.verb is Verb.HAS_MANY
    assert (orders.relation.parent_columns, orders.relation.columns) == (("id",), ("customer_id",))
    assert orders.relation.filters == (Filter("status", "neq", ("cancelled",)),)
    assert orders.relation.order_by == (OrderBy("placed_at", descending=True),)
    assert orders.relation.limit == 20
    product = orders.fields[2].fields[1]
    assert product.verb is Verb.BELONGS_TO
    assert (product.relation.parent_columns, product.relation.columns) == (("product_id",), ("id",))
    total = field(customers, "lifetimeValue")
    assert isinstance(total, Aggregate)
    assert (total.operation, total.column, total.value_type) == (Operation.SUM, "total", ScalarType.DECIMAL)
    assert [str(each) for each in sorted(customers.tables())] == [
        "public.addresses",
        "public.cards",
        "public.customers",
        "public.order_items",
        "public.orders",
        "public.products",
    ]
    assert len(list(relations_in(customers.fields))) == 9


def test_the_other_kinds_of_the_public_format() -> None:
    articles = load("articles")
    assert articles.table == TableName("press", "articles")
    assert articles.filters[2] == Filter(raw="word_count > 0 and language <> 'xx'")
    assert articles.soft_delete == SoftDelete("archived", (Filter("word_count", "between", ("1", "1000")),))
    assert field(articles, "title").values is ScalarType.TEXT
    assert field(articles, "price").opensearch == "scaled_float"
    assert field(articles, "place") == Geo("place", column="place_json")
    assert field(articles, "nothing") == Constant("nothing", None)
    assert field(articles, "author_id").relation.parent_columns == ("author_id",)
    tags = field(articles, "tags")
    assert tags.relation.table == TableName("press", "tags")
    assert tags.relation.junction == Junction(TableName("press", "article_tags"), ("article_id",), ("tag_id",))
    assert field(articles, "tagIds").value_type is ScalarType.LONG


def test_beyond_the_public_format() -> None:
    lines = load("lines")
    assert lines.table == TableName("sales", "OrderLines")
    assert lines.primary_key == ("order_id", "line")
    assert lines.doc_id == ("external_code",)
    assert lines.transform == "shop.documents:add_margin"
    warehouse = field(lines, "warehouse")
    assert warehouse.relation.table == TableName("logistics", "warehouses")
    assert warehouse.relation.parent_columns == ("region", "warehouse_no")
    assert warehouse.fields[0].column == "Display Name"
    offers = field(lines, "offers")
    assert offers.relation.order_by == (OrderBy("position", descending=True, junction=True),)
    assert offers.relation.filters == (Filter("active", "eq", ("true",), junction=True),)
    assert offers.fields[1].junction
    assert offers.relation.junction.table == TableName("sales", "line_offers")


def test_names_follow_postgres() -> None:
    text = HEAD.replace("users", "Users") + 'fields:\n- keyword: Email\n- keyword: other\n  column: \'"A ""b"""\'\n'
    specification = parse_specification(text, "users")
    assert specification.table.name == "users"
    assert field(specification, "Email").column == "email"
    assert field(specification, "other").column == 'A "b"'


def test_values_are_what_was_written() -> None:
    text = (
        HEAD
        + "fields:\n- keyword: a\nfilters:\n"
        + "".join(
            f"- {{column: c, op: eq, value: {value}}}\n"
            for value in ["2026-01-01", "12:30", "yes", "true", "1.5", "007"]
        )
    )
    values = [each.values for each in parse_specification(text, "users").filters]
    assert values == [("2026-01-01",), ("12:30",), ("yes",), ("true",), ("1.5",), ("7",)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("- keyword: a\n  colum: b", '6:3: fields[0].colum: there is no such key in keyword; did you mean "column"?'),
        ("- keywrd: a", '5:3: fields[0]: the field has no known type; did you mean "keyword"?'),
        ("- keyword: a\n  text: b", "6:3: fields[0].text: a field has one type; this one has keyword and text"),
        ("- a", "5:3: fields[0]: a field starts with its type, for example: - keyword: email"),
        ("- keyword: a\n- text: a", "6:3: fields[1]: field 'a' already exists"),
        ("- keyword: 1a", "5:12: fields[0].name: a field's name has at most 63 letters, digits and '_', and"),
        ("- keyword: a\n  required: maybe", "6:13: fields[0].required: should be a valid boolean"),
        ("- keyword: a\n  column: a-b", "6:11: fields[0].column: 'a-b' is not a plain name; write '\"a-b\"'"),
        ("- keyword: a\n  variants: [x]", "6:3: fields[0].variants: is allowed only for 'enum', not for 'keyword'"),
        ("- enum: a\n  variants: [x, x]", "6:3: fields[0].variants: has a duplicate value"),
        ("- geo: a\n  lat: x", "5:3: fields[0].lon: is missing; a point needs either 'lat' and 'lon', or 'column'"),
        (
            "- has_many: a\n  table: b\n  foreign_key: c\n  primary_key: d\n  limit: 0\n  fields: []",
            "9:10: fields[0].limit: should be greater than or equal to 1",
        ),
        (
            "- belongs_to: a\n  table: b\n  primary_key: d\n  limit: 1\n  fields: []",
            "8:3: fields[0].limit: there is no such key in belongs_to; known here: table",
        ),
        ("- has_many: a\n  table: b\n  primary_key: d\n  fields: []", "5:3: fields[0].foreign_key: is missing"),
        (
            "- count: a\n  table: b",
            "5:3: fields[0].foreign_key: count needs either 'foreign_key' or 'through', not both",
        ),
        (
            "- sum: a\n  table: b\n  column: x\n  foreign_key: c",
            "5:3: fields[0].value_type: is missing; 'sum' needs it",
        ),
        (
            "- count: a\n  table: b\n  column: x\n  foreign_key: c",
            "7:3: fields[0].column: is not allowed for 'count'",
        ),
        (
            "- count: a\n  table: b\n  foreign_key: c\n  required: true",
            "8:3: fields[0].required: there is no such key in count; known here",
        ),
        (
            "- has_many: a\n  table: b\n  foreign_key: [c, d]\n  primary_key: d\n  fields: []",
            "7:3: fields[0].foreign_key: has 2 columns, but the referenced key has 1",
        ),
        ("- keyword: a\n  from: junction", "6:3: fields[0].from: there is no junction here"),
        (
            (
                "- has_many: a\n  table: b\n  foreign_key: c\n  primary_key: d\n  fields:\n  - object: o\n    fields:\n"
                "    - keyword: x\n      defalt: 1"
            ),
            '13:7: fields[0].fields[0].fields[0].defalt: there is no such key in keyword; did you mean "default"?',
        ),
        (
            (
                "- has_many: a\n  table: b\n  foreign_key: c\n  primary_key: d\n  fields: []\n  order_by:\n"
                "  - {column: x, directon: asc}"
            ),
            '11:17: fields[0].order_by[0].directon: there is no such key in order_by; did you mean "direction"?',
        ),
        ("- {keyword: a, column: b, expression: c}", "5:27: fields[0].expression: cannot be combined with 'column'"),
        ("- {keyword: a, expression: ' '}", "5:16: fields[0].expression: is empty"),
    ],
)
def test_errors_of_fields_name_line_column_and_key(fields: str, expected: str) -> None:
    found = problems(HEAD + "fields:\n" + fields)
    assert found[0].startswith(f"users.schema.yml:{expected}"), found


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("version: 2\ntable: a", "1:10: version: should be 1"),
        ("table: a", "1:1: version: is missing"),
        ("version: 1\ntabel: a", '2:1: tabel: there is no such key; did you mean "table"?'),
        ("version: 1\ntable: a\ntable: b", "3:1: table: 'table' appears twice in the same mapping"),
        ("version: 1\ntable: a\nfilters:\n- {column: x, op: eq}", "4:3: filters[0].value: is missing; 'eq' needs it"),
        (
            "version: 1\ntable: a\nfilters:\n- {column: x, op: between, value: [1]}",
            "4:28: filters[0].value: must have exactly two values",
        ),
        ("version: 1\ntable: a\nfilters:\n- {column: x, op: in, value: 1}", "4:23: filters[0].value: must be a list"),
        ("version: 1\ntable: a\nfilters:\n- {op: is_null}", "4:3: filters[0].column: is missing; a condition needs"),
        ("version: 1\ntable: a\nfilters:\n- {raw: x, op: eq}", "4:12: filters[0].op: cannot be combined with 'raw'"),
        ("version: 1\ntable: a\nsoft_delete: {field: nope}", "3:15: soft_delete.field: must name a field"),
        (
            "version: 1\ntable: a\nsoft_delete: {}",
            "3:14: soft_delete.column: needs either 'column' or 'field', not both",
        ),
        ("version: 1\ntable: a\ntransform: f", "3:1: transform: must be module:function"),
        (
            "version: 1\ntable: a\nsettings:\n  index: {gc_deletes: 1s}",
            "4:11: settings.index.gc_deletes: Penstock sets it",
        ),
        ("version: 1\ntable: a\nsource_excludes: [b, ab]", "3:19: source_excludes[0]: there is no field 'b'"),
        ("version: 1\ntable: a\nsource_excludes: [b, ab]", "3:22: source_excludes[1]: there is no field 'ab'; did"),
        ("version: 1\ntable: a\nx: &a [*a]", "3:4: x[0]: contains itself through aliases"),
    ],
)
def test_errors_at_the_top(head: str, expected: str) -> None:
    found = problems(head + "\nfields:\n- keyword: a\n")
    assert any(each.startswith(f"users.schema.yml:{expected}") for each in found), found


def test_all_errors_are_told_at_once() -> None:
    found = problems(HEAD + "fields:\n- nope\n- keyword: a\n  colum: b\n- texd: c\n- keyword: d\n  requird: true\n")
    assert [each.split(": ")[1] for each in found] == ["fields[0]", "fields[1].colum", "fields[2]", "fields[3].requird"]


def test_what_is_not_yaml_is_told_with_its_place() -> None:
    assert problems("version: 1\nfields: [a\n")[0].startswith("users.schema.yml:3:1: is not YAML: ")
    (said,) = problems("version: 1\ntable: t\nfields:\n  - text: x\n    expression: a || ': ' || b\n")
    assert said.startswith("users.schema.yml:5:23: is not YAML: ")
    assert said.endswith("put a text that contains ': ' in quotes")
    assert problems("- a\n")[0].startswith("users.schema.yml:1:1: must be a mapping")
    assert problems("")[0].startswith("users.schema.yml:1:1: must be a mapping")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecificationInvalid, match=r"index specification .* does not exist"):
        load_specification(tmp_path / "nope.schema.yml")
    (tmp_path / "latin.yml").write_bytes(b"table: \xff")
    with pytest.raises(SpecificationInvalid, match="is not UTF-8, at byte 7"):
        load_specification(tmp_path / "latin.yml")
