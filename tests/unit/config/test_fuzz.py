"""Whatever stands in a config or a specification: it is accepted, or an error of its own says what is wrong."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from penstock.changes.conditions import parse_filter
from penstock.config import load_config, loading
from penstock.config.loading import make_config
from penstock.config.models import ConfigFile
from penstock.config.units import parse_duration, parse_size
from penstock.errors import ConfigError
from penstock.operations.report import redact_config
from penstock.source.patterns import TablePattern
from penstock.specification import parse_specification

VALID: dict[str, Any] = {
    "pipeline": {"id": "shop"},
    "source": {"url": "postgresql://me@127.0.0.1/shop"},
    "spark": {"master": "none"},
    "destination": {"type": "memory"},
}
SECRET = "hunter2secret"
WORDS = st.sampled_from(
    [
        "${PENSTOCK_FUZZED_SECRET}",
        f"postgresql://me:{SECRET}@127.0.0.1/shop",
        f"postgresql://me:{SECRET}@[::1",
        "",
        "none",
        "sqlite:///x",
        "5s",
        "1GB",
        "-1",
        "a.b",
        '"',
        "${HOME}",
        "postgresql://a:b@[::1",
        "\x1b[2J",
        "1e999s",
    ]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def keys_of(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    """A valid config in which some keys have any value."""
    config: dict[str, Any] = {name: dict(section) for name, section in VALID.items()}
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(keys_of(ConfigFile)) | st.text(max_size=5))
        annotation = getattr(ConfigFile.model_fields.get(name), "annotation", None)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and draw(st.booleans()):
            section = config.setdefault(name, {})
            if isinstance(section, dict):
                section[draw(st.sampled_from(keys_of(annotation)))] = draw(ANYTHING)
        else:
            config[name] = draw(ANYTHING)
    return config


@given(sections())
@example(VALID | {"source": {"url": f"postgresql://me:{SECRET}@[::1"}})
@example(VALID | {"pipeline": {"id": "${PENSTOCK_FUZZED_SECRET}\x00"}})
@example(VALID | {"batch": {"interval": "${PENSTOCK_FUZZED_SECRET}"}})
@example(
    VALID | {"destination": {"type": "delta", "path": "s3://b", "options": {"x": {"${PENSTOCK_FUZZED_SECRET}": 1}}}}
)
def test_any_config_is_accepted_or_refused(values: dict[str, Any]) -> None:
    said: list[str] = []
    for make in (make_config, from_file):
        try:
            make(values)
        except ConfigError as error:
            said.append(f"{error} {error.hint} {error.facts}")
    # Secret is what the config takes from the environment, and the password of a URL.
    assert SECRET not in "".join(said)
    redact_config(values)


def from_file(values: dict[str, Any]) -> None:
    """As if a file had these values: its variables are replaced."""
    with mock.patch.object(loading, "_parse", return_value=values):
        load_config("penstock.toml", {"PENSTOCK_FUZZED_SECRET": SECRET, "HOME": "/"})


@given(st.binary(max_size=60))
@example(b"a = " + b"[" * 5000)
@example(b"a = " + b"9" * 5000)
def test_any_file_is_accepted_or_refused(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "penstock.toml"
    path.write_bytes(content)
    with suppress(ConfigError):
        load_config(path)


LINES = st.lists(
    st.sampled_from(
        [
            *(
                "version: 1",
                "table: orders",
                "fields:",
                "  - text: note",
                "  - {long: id}",
                "  - has_many: x",
                "    table: y",
            ),
            *(
                "    foreign_key: z",
                "filters:",
                "  - {column: a, is: null}",
                "&a [*a]",
                "? {}",
                "!!python/object:os.system x",
            ),
            *(
                "version: 99999999999999999999999",
                "<<: {}",
                "- - - -",
                "[[[[",
                "{a: {a: {a",
                "'",
                '"\\',
                "\t",
                "%YAML 9",
                "---",
            ),
        ]
    )
    | st.text(max_size=10),
    max_size=12,
)


LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))


@given(LINES.map("\n".join))
@example("[" * 3000)
@example("a: &a [*a]\nb: *a")
@example(
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in pairwise("abcdefghij"))
)
def test_any_specification_is_accepted_or_refused(text: str) -> None:
    with suppress(ConfigError):
        parse_specification(text, "orders")


TOKENS = st.sampled_from(
    [
        "a",
        '"b"',
        "=",
        "<>",
        "and",
        "or",
        "not",
        "(",
        ")",
        "in",
        "is",
        "null",
        "'x'",
        "1",
        "-1.5",
        ",",
        "true",
        "'",
        '"',
        "between",
    ]
)


@given(st.lists(TOKENS | st.text(max_size=3), max_size=10).map(" ".join))
@example("(" * 5000)
@example("not " * 5000 + "a")
def test_any_filter_is_accepted_or_refused(text: str) -> None:
    with suppress(ConfigError):
        parse_filter(text)


@given(st.text(max_size=20))
@example('"')
@example("[")
def test_any_pattern_is_accepted_or_refused(text: str) -> None:
    with suppress(ConfigError):
        TablePattern(text)


@given(ANYTHING)
@example(86400000000000.0)
@example("9" * 400 + "GB")
@example("9" * 400 + "d")
@example(float("inf"))
def test_any_size_and_duration_is_accepted_or_refused(value: Any) -> None:
    for parse in (parse_size, parse_duration):
        with suppress(ValueError):
            parse(value)
