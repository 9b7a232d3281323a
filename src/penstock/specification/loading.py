"""Loads a `*.schema.yml` as an `IndexSpecification`, and reports all its problems at once.

A problem names the file, line and column, the path of keys, and for an unknown key the nearest known one. Nothing here
needs a database; `penstock.documents.checks` compares the result with one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from penstock.errors import SpecificationInvalid
from penstock.specification.build_tree import build_tree
from penstock.specification.models import (
    FIELD_MODELS,
    FilterModel,
    Model,
    OrderModel,
    SoftDeleteModel,
    SpecificationModel,
    ThroughModel,
    keys_of,
)
from penstock.specification.tree import IndexSpecification
from penstock.specification.yaml_positions import Located, Misplaced, Path, Position, parse_yaml

_SUFFIXES = (".schema.yml", ".schema.yaml", ".yml", ".yaml")
_SECTIONS: dict[str, type[Model]] = {
    "filters": FilterModel,
    "when": FilterModel,
    "order_by": OrderModel,
    "through": ThroughModel,
    "soft_delete": SoftDeleteModel,
}


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One problem in a file."""

    position: Position
    key: str
    """The path of keys, such as `fields[2].orders.limit`."""
    message: str

    def __str__(self) -> str:
        where = f"{self.position.line}:{self.position.column}"
        return f"{where}: {self.key}: {self.message}" if self.key else f"{where}: {self.message}"


def load_specification(path: str | FilePath, name: str | None = None) -> IndexSpecification:
    """Read a file; the index is called `name`, or like the file without its suffix."""
    path = FilePath(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecificationInvalid(f"index specification {str(path)!r} does not exist", problems=[]) from None
    except OSError as error:
        raise SpecificationInvalid(f"cannot read {str(path)!r}: {error.strerror}", problems=[]) from None
    except UnicodeDecodeError as error:
        raise SpecificationInvalid(f"{path} is not UTF-8, at byte {error.start}", problems=[]) from None
    return parse_specification(text, name or _stem(path), str(path))


def parse_specification(text: str, name: str, file: str = "specification") -> IndexSpecification:
    """Parse the text of a specification; `file` is for messages."""
    try:
        located = parse_yaml(text)
    except Misplaced as error:
        raise _invalid(file, [Problem(error.position, _key(error.path), error.message)]) from None
    except RecursionError:
        raise _invalid(file, [Problem(Position(1, 1), "", "is nested too deeply")]) from None
    if not isinstance(located.value, dict):
        raise _invalid(file, [Problem(Position(1, 1), "", "must be a mapping with version, table and fields")])
    normal = _Normalizer(located)
    values = normal.mapping(located.value, ())
    problems = list(normal.problems)
    try:
        model = SpecificationModel.model_validate(values)
    except ValidationError as error:
        problems += _explain(error, located)
        raise _invalid(file, problems) from None
    if problems:
        raise _invalid(file, problems)

    def place(path: Path) -> str:
        position = located.value_position(path)
        return f"{FilePath(file).name}:{position.line}:{position.column}"

    tree, mistakes = build_tree(model, name, place)
    if mistakes:
        raise _invalid(file, [Problem(located.key_position(at), _key(at), what) for at, what in mistakes])
    return tree


class _Normalizer:
    """Rewrites `{keyword: email, …}` to `{kind: keyword, name: email, …}`, everywhere below `fields`."""

    def __init__(self, located: Located) -> None:
        self._located = located
        self.problems: list[Problem] = []

    def mapping(self, value: dict[str, Any], path: Path) -> dict[str, Any]:
        inner = value.get("fields")
        if not isinstance(inner, list):
            return value
        fields = [self._field(each, (*path, "fields", index)) for index, each in enumerate(inner)]
        self._refuse_repeated(fields, (*path, "fields"))
        # Positions are looked up by index, so a placeholder replaces a field that failed.
        return value | {"fields": [each or {"kind": "constant", "name": "failed"} for each in fields]}

    def _field(self, value: Any, path: Path) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            self._refuse(path, "a field starts with its type, for example: - keyword: email")
            return None
        kinds = [key for key in value if key in FIELD_MODELS]
        if len(kinds) != 1:
            self._refuse((*path, *kinds[1:2]), self._wrong_kinds(list(value), kinds))
            return None
        kind = kinds[0]
        # Pydantic's errors about the name belong to the key with the kind.
        self._located.values[(*path, "name")] = self._located.value_position((*path, kind))
        rest = {key: each for key, each in value.items() if key != kind}
        for reserved in {"kind", "name"} & rest.keys():
            self._refuse((*path, reserved), f"there is no such key in {kind}; {_known(keys_of(FIELD_MODELS[kind]))}")
            del rest[reserved]
        return {"kind": kind, "name": value[kind]} | self.mapping(rest, path)

    def _wrong_kinds(self, keys: list[str], kinds: list[str]) -> str:
        if kinds:
            return f"a field has one type; this one has {' and '.join(kinds)}"
        near = [found for key in keys[:1] for found in difflib.get_close_matches(key, list(FIELD_MODELS), n=1)]
        hint = f'did you mean "{near[0]}"?' if near else f"one of: {', '.join(FIELD_MODELS)}"
        return f"the field has no known type; {hint}"

    def _refuse_repeated(self, fields: Sequence[dict[str, Any] | None], path: Path) -> None:
        seen: set[str] = set()
        for index, each in enumerate(fields):
            name = each["name"] if each is not None else None
            if isinstance(name, str) and name.strip() in seen:
                self._refuse((*path, index), f"field {name.strip()!r} already exists")
            elif isinstance(name, str):
                seen.add(name.strip())

    def _refuse(self, path: Path, message: str) -> None:
        self.problems.append(Problem(self._located.key_position(path), _key(path), message))


def _explain(error: ValidationError, located: Located) -> Iterator[Problem]:
    for problem in error.errors(include_input=False, include_url=False):
        path = _written_path(problem["loc"])
        match problem["type"]:
            case "extra_forbidden":
                model, place = _model_at(path[:-1], located.value)
                yield Problem(
                    located.key_position(path), _key(path), f"there is no such key{place}{_nearest(path[-1], model)}"
                )
            case "missing":
                yield Problem(located.key_position(path[:-1]), _key(path), "is missing")
            case "key":
                context = problem.get("ctx", {})
                path = (*path, str(context["key"]))
                yield Problem(located.key_position(path), _key(path), str(context["message"]))
            case _:
                message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
                yield Problem(located.value_position(path), _key(path), message[:1].lower() + message[1:])


def _written_path(location: Sequence[str | int]) -> Path:
    """Remove the tags that pydantic adds after each index of `fields`."""
    path: list[str | int] = []
    skip = False
    for part in location:
        if skip:
            skip = False
            continue
        skip = isinstance(part, int) and bool(path) and path[-1] == "fields"
        path.append(part)
    return tuple(path)


def _model_at(path: Path, value: Any) -> tuple[type[Model], str]:
    """Return the model that describes a place, and the place's name for a message."""
    model: type[Model] = SpecificationModel
    place = ""
    for index, part in enumerate(path):
        value = value[part]
        if isinstance(part, int) and path[index - 1] == "fields":
            kind = next(key for key in value if key in FIELD_MODELS)
            model, place = FIELD_MODELS[kind], f" in {kind}"
        elif part in _SECTIONS:
            model, place = _SECTIONS[str(part)], f" in {part}"
    return model, place


def _nearest(key: str | int, model: type[Model]) -> str:
    near = difflib.get_close_matches(str(key), keys_of(model), n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; {_known(keys_of(model))}"


def _known(keys: Iterable[str]) -> str:
    return f"known here: {', '.join(keys)}"


def _key(path: Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _stem(path: FilePath) -> str:
    for suffix in _SUFFIXES:
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return path.name


def _invalid(file: str, problems: list[Problem]) -> SpecificationInvalid:
    listed = [f"{file}:{problem}" for problem in sorted(set(problems))]
    if len(listed) == 1:
        return SpecificationInvalid(listed[0], problems=listed)
    return SpecificationInvalid(
        "\n  ".join([f"{file} has {len(listed)} errors:", *listed]),
        problems=listed,
    )
