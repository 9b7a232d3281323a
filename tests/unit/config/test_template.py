"""The config that `penstock init` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import load_config
from penstock.config.template import Choices, password_variable, public_url, render_config, with_password

SECRET = "a b'c@d/e\\${x}"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me@db.example:5433/shop?sslmode=require",
        "postgres://me@one,two/shop",
        "host=db.example dbname=shop user=me options='-c a=b'",
    ],
)
def test_a_password_is_taken_out_and_comes_back_from_the_environment(url: str, tmp_path: Path) -> None:
    public = public_url(with_password(url, SECRET), "SHOP_PASSWORD")
    assert public.password is not None
    assert SECRET not in public.text
    assert public.password not in public.text
    file = tmp_path / "penstock.toml"
    file.write_text(render_config(Choices("shop", public.text, "SHOP_PASSWORD", destination="memory", path=None)))
    parameters = load_config(file, {"SHOP_PASSWORD": public.password}).pipeline.source.parameters()
    assert parameters.pop("password") == SECRET
    assert parameters["user"] == "me"
    assert parameters["dbname"] == "shop"


def test_a_password_in_the_query_is_taken_out_too() -> None:
    public = public_url("postgresql://db.example/shop?user=me&password=hunter2", "P")
    assert public.text == "user=me dbname=shop host=db.example password='${P}'"
    assert public.password == "hunter2"


def test_a_url_without_a_password_stays_as_it_is(tmp_path: Path) -> None:
    url = "postgresql://me@db.example/shop?application_name=${x}"
    public = public_url(url, "P")
    assert public.password is None
    choices = Choices(
        "shop", public.text, None, ('"Odd.Schema"."a*b"', "sales.*"), ("x.y",), "parquet", 'la"ke', "none"
    )
    file = tmp_path / "penstock.toml"
    file.write_text(render_config(choices))
    config = load_config(file, {})
    assert config.pipeline.source.url == url
    assert config.pipeline.tables == ('"Odd.Schema"."a*b"', "sales.*")
    assert config.pipeline.exclude == ("x.y",)
    assert config.outputs[0].destination_options["path"] == str(tmp_path / 'la"ke')
    assert not config.spark.is_used


def test_variables_have_names_that_shells_take() -> None:
    assert [password_variable(name) for name in ("shop", "my-shop.2", "2nd")] == [
        "SHOP_PASSWORD", "MY_SHOP_2_PASSWORD", "_2ND_PASSWORD"
    ]  # fmt: skip
