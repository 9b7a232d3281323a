"""docs/reference/index-specification.md: every key that a file may have, and none besides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from penstock.specification import load_specification, parse_specification
from penstock.specification.models import (
    FIELD_MODELS,
    AggregateModel,
    FilterModel,
    OrderModel,
    ScalarModel,
    SoftDeleteModel,
    SpecificationModel,
    ThroughModel,
    keys_of,
)

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "index-specification.md").read_text()
SECTIONS: dict[str, type[BaseModel]] = {
    "The file": SpecificationModel,
    "soft_delete": SoftDeleteModel,
    "Scalars": ScalarModel,
    "Aggregates": AggregateModel,
    "through": ThroughModel,
    "order_by": OrderModel,
    "filters": FilterModel,
    **{kind: model for kind, model in FIELD_MODELS.items() if model not in (ScalarModel, AggregateModel)},
}


def section(name: str) -> str:
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no section {name}"
    return found[1]


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_is_described_in_its_section(name: str) -> None:
    table = section(name).split("| key | default | |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(keys_of(SECTIONS[name]))


def test_every_section_is_about_something_that_exists() -> None:
    assert set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE)) == set(SECTIONS)


def test_every_type_of_field_is_named() -> None:
    assert [kind for kind in FIELD_MODELS if f"`{kind}`" not in PAGE and f"## {kind}\n" not in PAGE] == []


def test_required_keys_are_those_that_the_models_require() -> None:
    for name, model in SECTIONS.items():
        for key, info in model.model_fields.items():
            written = info.alias or key
            if written in ("kind", "name"):
                continue
            default = re.search(rf"^\| `{written}` \| (.*?) \|", section(name), re.MULTILINE)
            assert default is not None
            assert (default[1] == "required") == info.is_required(), (name, written)


def test_the_example_of_the_page_loads() -> None:
    example = PAGE.split("```yaml\n")[1].split("```")[0]
    assert parse_specification(example, "customers").soft_delete is not None


def test_the_error_of_the_page_is_the_one_that_comes(tmp_path: Path) -> None:
    path = tmp_path / "customers.schema.yml"
    path.write_text("version: 1\ntable: customers\n\nfields:\n- keyword: email\n  colum: a\n")
    with pytest.raises(Exception, match="6:3") as raised:
        load_specification(path)
    said = str(raised.value).replace(str(tmp_path) + "/", "")
    assert said in PAGE.replace("\n  ", " ")
