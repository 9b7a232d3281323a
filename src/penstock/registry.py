"""Optional parts: classes that a config names, and the extras that bring the packages they need.

    SINKS = Registry("sink", {"memory": Registered("my_package.sinks:MemorySink")}, ("write", "flush"))
    SINKS.create("memory", {})
    SINKS.create("their_package.their_module:TheirSink", {"anything": 1})

A class is imported when it is first created or loaded. Options become its arguments; an unknown option is an error that
suggests the nearest known one. A missing package is an error with the command that installs it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f"pip install 'penstock[{extra}]'"


@contextmanager
def requires_extra(extra: str, what: str) -> Iterator[None]:
    """Turn a failed import inside the block into a `ConfigError` that says how to install the extra.

        with requires_extra("spark", "[spark] master"):
            from penstock.spark.session import build_session

    `what` is the feature that needs the extra, as the user knows it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "penstock"):
            raise
        raise ConfigError(
            f"{what} needs the package {package}, which is not installed", hint=f"Run: {install_command(extra)}"
        ) from error


@dataclass(frozen=True, slots=True)
class Registered:
    """Where a class is, and which extra it needs."""

    target: str
    """`module:Class`."""
    extra: str | None = None
    """None if the core packages are enough."""


@dataclass(frozen=True, slots=True)
class Registry:
    """All classes of one kind."""

    what: str
    """The kind, as messages name it: `destination`, `sink`."""
    known: Mapping[str, Registered]
    methods: tuple[str, ...]
    """The methods that every class of this kind has."""
    contract: str = ""
    """Where to read what a class of this kind must do."""

    def create(self, type_: str, options: Mapping[str, Any] | None = None, other_keys: Iterable[str] = ()) -> Any:
        """Create an object from its type and options; `other_keys` are further config keys to suggest for a typo."""
        kind = self.load(type_)
        options = dict(options or {})
        self._check_options(type_, kind, options, other_keys)
        return kind(**options)

    def load(self, type_: str) -> type[Any]:
        """Return the class with this name, or the class at `module:Class`."""
        registered = self.known.get(type_)
        if registered is None:
            if ":" not in type_:
                raise ConfigError(
                    f"there is no {self.what} {type_!r}{_nearest(type_, self.known)}",
                    hint=f"Choose one of {', '.join(self.known)}, or name your own class as module:Class.",
                )
            registered = Registered(type_)
        return self._import(type_, registered)

    def _import(self, type_: str, registered: Registered) -> type[Any]:
        module_name, _, class_name = registered.target.partition(":")
        try:
            with requires_extra(registered.extra, f"{self.what} {type_!r}") if registered.extra else nullcontext():
                module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
                raise ConfigError(
                    f"there is no module {missing!r} for {self.what} {type_!r}",
                    hint="Install it, or add its folder to PYTHONPATH.",
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
        # A class that passes its options on names the class that takes them.
        parameters = inspect.signature(getattr(kind, "OPTIONS", kind)).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return
        for name in options:
            if name not in parameters:
                raise ConfigError(
                    f"{self.what} {type_!r} has no option {name!r}{_nearest(name, [*parameters, *other_keys])}",
                    hint=f"Its options: {', '.join(parameters) or 'none'}.",
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
