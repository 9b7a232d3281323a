"""Classes by the name that a config gives them; nothing is imported before it is asked for.

    SINKS = Registry("sink", {"memory": Registered("my_package.sinks:MemorySink")}, ("write", "flush"))
    SINKS.create("memory", {})
    SINKS.create("their_package.their_module:TheirSink", {"anything": 1})

Options become arguments of the class. What it does not know is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Registered:
    """Where a class is, and what has to be installed for it."""

    target: str
    """`module:Class`."""
    extra: str | None = None
    """Of the `penstock` package; None when nothing more is needed."""


@dataclass(frozen=True, slots=True)
class Registry:
    """All classes of one sort."""

    what: str
    """What people call one of them."""
    known: Mapping[str, Registered]
    methods: tuple[str, ...]
    """What a class must have to be one."""
    contract: str = ""
    """Where somebody who writes one of their own should look."""

    def create(self, type_: str, options: Mapping[str, Any] | None = None, other_keys: Iterable[str] = ()) -> Any:
        """Make one from its type and its options; `other_keys` stand beside them in a config, for suggestions."""
        kind = self.load(type_)
        options = dict(options or {})
        self._check_options(type_, kind, options, other_keys)
        return kind(**options)

    def load(self, type_: str) -> type[Any]:
        """The class behind a name, or behind `module:Class`."""
        registered = self.known.get(type_)
        if registered is None:
            if ":" not in type_:
                raise ConfigError(
                    f"there is no {self.what} {type_!r}{_nearest(type_, self.known)}",
                    hint=f"Known are {', '.join(self.known)}, and your own as module:Class.",
                )
            registered = Registered(type_)
        return self._import(type_, registered)

    def _import(self, type_: str, registered: Registered) -> type[Any]:
        module_name, _, class_name = registered.target.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if registered.extra is not None and not missing.startswith("penstock"):
                raise ConfigError(
                    f"{self.what} {type_!r} needs {missing}, which is not installed",
                    hint=f"Run: pip install 'penstock[{registered.extra}]'",
                ) from error
            if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
                raise ConfigError(
                    f"there is no module {missing!r} for {self.what} {type_!r}",
                    hint="It must be installed, or stand in a folder that PYTHONPATH names.",
                ) from error
            raise
        kind = getattr(module, class_name, None)
        if not isinstance(kind, type):
            raise ConfigError(f"{module_name} has no class {class_name!r}{_nearest(class_name, vars(module))}")
        absent = [method for method in self.methods if not callable(getattr(kind, method, None))]
        if absent:
            raise ConfigError(f"{type_} is not a {self.what}: it lacks {', '.join(absent)}", hint=self.contract)
        return kind

    def _check_options(
        self, type_: str, kind: type[Any], options: Mapping[str, Any], other_keys: Iterable[str]
    ) -> None:
        # A class that only passes options on says to whom.
        parameters = inspect.signature(getattr(kind, "OPTIONS", kind)).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return
        for name in options:
            if name not in parameters:
                raise ConfigError(
                    f"{self.what} {type_!r} has no option {name!r}{_nearest(name, [*parameters, *other_keys])}",
                    hint=f"It has: {', '.join(parameters) or 'none'}.",
                )
        required = [name for name, each in parameters.items() if each.default is each.empty and name not in options]
        required = [name for name in required if parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL]
        if required:
            raise ConfigError(
                f"{self.what} {type_!r} needs the option{'s' * (len(required) > 1)} {', '.join(required)}"
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
