"""Which destinations there are, by the name that a config gives them; nothing is imported before it is asked for.

    create_destination("parquet", {"path": "/lake"})
    create_destination("my_package.my_module:MyDestination", {"anything": 1})

Options become arguments of the class. What it does not know is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.destinations.base import Destination
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Registered:
    """Where a destination is, and what has to be installed for it."""

    target: str
    """`module:Class`."""
    extra: str | None = None
    """Of the `penstock` package; None when nothing more is needed."""


DESTINATIONS: Mapping[str, Registered] = {
    "delta": Registered("penstock.destinations.delta.destination:DeltaDestination"),
    "memory": Registered("penstock.destinations.memory:MemoryDestination"),
    "stdout": Registered("penstock.destinations.stdout:StdoutDestination"),
    "parquet": Registered("penstock.destinations.parquet:ParquetDestination"),
    "http": Registered("penstock.destinations.http:HttpDestination"),
}

_METHODS = ("startup", "drop_table_for_copy", "write_table_rows", "write_events", "position", "shutdown")


def create_destination(type_: str, options: Mapping[str, Any] | None = None) -> Destination:
    """Make a destination from its type and its options; it is not started yet."""
    kind = load_destination(type_)
    options = dict(options or {})
    _check_options(type_, kind, options)
    return kind(**options)


def load_destination(type_: str) -> type[Any]:
    """The class behind a name, or behind `module:Class`."""
    registered = DESTINATIONS.get(type_)
    if registered is None:
        if ":" not in type_:
            raise ConfigError(
                f"there is no destination {type_!r}{_nearest(type_, DESTINATIONS)}",
                hint=f"Known are {', '.join(DESTINATIONS)}, and your own as module:Class.",
            )
        registered = Registered(type_)
    return _import(type_, registered)


def _import(type_: str, registered: Registered) -> type[Any]:
    module_name, _, class_name = registered.target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if registered.extra is not None and not missing.startswith("penstock"):
            raise ConfigError(
                f"destination {type_!r} needs {missing}, which is not installed",
                hint=f"Run: pip install 'penstock[{registered.extra}]'",
            ) from error
        if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise ConfigError(
                f"there is no module {missing!r} for destination {type_!r}",
                hint="It must be installed, or stand in a folder that PYTHONPATH names.",
            ) from error
        raise
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        raise ConfigError(f"{module_name} has no class {class_name!r}{_nearest(class_name, vars(module))}")
    absent = [method for method in _METHODS if not callable(getattr(kind, method, None))]
    if absent:
        raise ConfigError(
            f"{type_} is not a destination: it lacks {', '.join(absent)}",
            hint="See penstock.destinations.base.Destination, or start from penstock.destinations.rows.RowDestination.",
        )
    return kind


def _check_options(type_: str, kind: type[Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for name in options:
        if name not in parameters:
            raise ConfigError(
                f"destination {type_!r} has no option {name!r}{_nearest(name, parameters)}",
                hint=f"It has: {', '.join(parameters) or 'none'}.",
            )
    required = [name for name, each in parameters.items() if each.default is each.empty and name not in options]
    required = [name for name in required if parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL]
    if required:
        raise ConfigError(f"destination {type_!r} needs the option{'s' * (len(required) > 1)} {', '.join(required)}")


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
