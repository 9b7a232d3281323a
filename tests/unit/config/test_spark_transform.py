"""`transform` in the config file: its form, and the destinations that it works with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading import load_config, make_config
from penstock.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples/transform/penstock.toml"


def sections(transform: str, **destination: Any) -> dict[str, Any]:
    return {
        "pipeline": {"id": "x"},
        "source": {"url": "postgresql://h/d"},
        "destination": {"type": "spark", "format": "delta", "path": "lake", **destination},
        "tables": {"public.orders": {"transform": transform}},
    }


def test_a_transform_is_a_rule_of_its_table() -> None:
    config = make_config(sections("select id from changes"))
    rules = config.pipeline.transforms.rules["public.orders"]
    assert rules.transform == "select id from changes"
    assert "select id from changes" in str(rules)
    other = make_config(sections("select id, note from changes")).pipeline.transforms.rules["public.orders"]
    assert rules.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    "transform",
    [
        "",
        "delete from changes",
        "select id from orders",
        "select id from changes where id > 1",
        "select id from changes x",
    ],
)
def test_a_transform_is_one_select_from_changes(transform: str) -> None:
    with pytest.raises(ConfigError, match="select … from changes"):
        make_config(sections(transform))


def test_other_destinations_have_rules_for_columns_instead() -> None:
    wrong = sections("select id from changes") | {"destination": {"type": "parquet", "path": "lake"}}
    with pytest.raises(ConfigError, match='needs a \\[destination\\] of type "spark"'):
        make_config(wrong)


def test_the_checkpoint_is_beside_the_spool_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    default = make_config(sections("select id from changes"), tmp_path).outputs[0].destination_options["checkpoint"]
    assert default == str(tmp_path / ".penstock/x/spark-tables")
    named = make_config(sections("select id from changes", checkpoint="here"), tmp_path)
    assert named.outputs[0].destination_options["checkpoint"] == str(tmp_path / "here")


def test_the_example_is_valid() -> None:
    config = load_config(EXAMPLE, {"SOURCE_URL": "postgresql://h/d", "LAKE": "/lake"})
    assert config.create_destination().name == "spark"
