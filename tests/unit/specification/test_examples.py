"""The example specifications load as they are, and so do files in the public format; what nobody supports is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import load_config
from penstock.documents.mapping import index_mapping
from penstock.errors import SpecificationInvalid
from penstock.specification import load_specification, parse_specification
from penstock.specification.models import FIELD_MODELS
from penstock.testing import shop

EXAMPLES = Path(__file__).parents[3] / "examples/search"
PUBLIC = sorted((EXAMPLES / "public-format").glob("*.schema.yml"))


def test_the_example_config_is_understood() -> None:
    config = load_config(EXAMPLES / "penstock.toml", {"SHOP_URL": "host=db", "SEARCH_URL": "http://localhost:9200"})
    assert [each.name for each in config.indexes.indexes] == ["customers", "products"]
    assert config.pipeline.tables == (
        '"shop"."customers"',
        '"shop"."order_items"',
        '"shop"."orders"',
        '"shop"."products"',
    )


@pytest.mark.parametrize("name", ["customers", "products"])
def test_the_demo_uses_the_same_files(name: str) -> None:
    shipped = Path(shop.__file__).parent / "shop_indexes" / f"{name}.schema.yml"
    assert shipped.read_text() == (EXAMPLES / f"{name}.schema.yml").read_text()


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.name)
def test_a_file_of_the_public_format_loads_unchanged(path: Path) -> None:
    specification = load_specification(path)
    assert specification.name == path.name.removesuffix(".schema.yml")
    mapping = index_mapping(specification)
    assert set(mapping.mappings["properties"]) == {each.name for each in specification.fields}


def test_together_they_use_every_kind_of_field() -> None:
    text = "".join(path.read_text() for path in PUBLIC)
    unused = {kind for kind in FIELD_MODELS if f"- {kind}: " not in text}
    assert unused == {"float", "decimal", "vector"}, "two are written like double and long, one is not in the format"


@pytest.mark.parametrize(
    ("written", "refused", "says"),
    [
        ("- text: subject", "- text: subject\n    boost: 2", "fields[2].boost: there is no such key in text"),
        ("primary_key: id\n\n", "primary_key: id\nparent: id\n\n", "parent: there is no such key"),
        ("limit: 5", "offset: 5", "offset: there is no such key in has_many"),
        ("transforms: [lowercase, trim]", "transforms: [stem]", "transforms[0]: "),
        ("op: is_null}", "op: overlaps}", "op: "),
        ("version: 1", "version: 2", "version: "),
        ("- sum: attachedBytes", "- median: attachedBytes", "the field has no known type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_place(written: str, refused: str, says: str) -> None:
    text = (EXAMPLES / "public-format/tickets.schema.yml").read_text()
    assert written in text
    with pytest.raises(SpecificationInvalid) as raised:
        parse_specification(text.replace(written, refused, 1), "tickets", "tickets.schema.yml")
    assert says in raised.value.message
    assert raised.value.message.startswith("tickets.schema.yml")
