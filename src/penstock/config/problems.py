"""What is wrong with a config, in words of config files: the key, what it should be, and the nearest known one.

Never a value, which may be secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from penstock.config.environment import join
from penstock.config.models import ConfigFile
from penstock.errors import ConfigError

REFERENCE = "docs/reference/config.md describes every key."
"""The hint of an error in a config."""


def problems_error(name: str, problems: list[str], hint: str = REFERENCE) -> ConfigError:
    """Return one error that lists all problems of a config."""
    if len(problems) == 1:
        return ConfigError(f"{name}: {problems[0]}", hint=hint)
    listed = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{name} has {len(problems)} errors:{listed}", hint=hint)


def explain(error: ValidationError, root: type[BaseModel] = ConfigFile) -> Iterator[str]:
    """Yield what the validator of `root` found, each with its key; some more than once."""
    for problem in error.errors(include_input=False, include_url=False, include_context=False):
        # The index of a destination; mostly there is one.
        parts = [str(part) for part in problem["loc"] if part != 0]
        where = join("", *parts)
        match problem["type"]:
            case "extra_forbidden":
                yield f"{where}: there is no such key{_nearest(parts, root)}"
            case "missing":
                yield f"{where}: is missing"
            case "value_error" if not parts:
                yield problem["msg"].removeprefix("Value error, ")
            case kind:
                message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
                yield f"{where}: {_plain(kind, message)}"


def _plain(kind: str, message: str) -> str:
    """What the validator says, in words of config files."""
    least = re.search(r"at least (\d+)", message)
    match kind:
        case "string_type":
            return "should be text, in quotes"
        case "int_type" | "int_parsing" | "int_from_float":
            return "should be a whole number"
        case "float_type" | "float_parsing":
            return "should be a number"
        case "bool_type" | "bool_parsing":
            return "should be true or false"
        case "list_type" | "tuple_type":
            return 'should be a list, like ["a", "b"]'
        case "model_type" | "model_attributes_type" | "dict_type":
            return "should be a section with keys of its own, like { key = value }"
        case "literal_error" if message == "should be True":
            return "can only be true; remove it otherwise"
        case "too_short" | "string_too_short" if least is not None:
            what = "character" if "string" in kind or "after validation" in message else "item"
            return f"should have at least {least[1]} {what}{'s' * (least[1] != '1')}"
        case _:
            return message


def _nearest(parts: list[str], root: type[BaseModel]) -> str:
    """A known key that resembles the last of these, in its own section or in another one."""
    model: type[BaseModel] | None = root
    is_named = False
    for part in parts[:-1]:
        if is_named or part.isdigit():  # the name of a table or column, or the index in a list
            is_named = False
            continue
        is_named = model is not None and part in model.model_fields and _is_by_name(model.model_fields[part].annotation)
        model = _keys(model).get(part) if model is not None else None
    if model is None:
        return ""
    known = list(_keys(model))
    found = difflib.get_close_matches(parts[-1], known, n=1)
    if found:
        return f'; did you mean "{found[0]}"?'
    elsewhere = [section for section, inner in _keys(root).items() if inner and parts[-1] in _keys(inner)]
    if elsewhere:
        return f"; it belongs to [{elsewhere[0]}]"
    return f"; known here: {', '.join(known)}"


def _keys(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """The keys of a model, with the models of its sections."""
    return {info.alias or name: _model_in(info.annotation) for name, info in model.model_fields.items()}


def _is_by_name(annotation: Any) -> bool:
    return get_origin(annotation) is dict


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None
