"""`${NAME}` in a config: a value from the environment, which stays out of files and messages.

References are replaced after the file is parsed, so that a value can never become a key. `$${` stands for `${` itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(slots=True)
class Substitution:
    """Replaces references; collects `problems` and `secrets` on the way."""

    environment: Mapping[str, str]
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Key and message."""
    secrets: set[str] = field(default_factory=set[str])
    """The inserted values, which must not be shown."""

    def apply(self, value: Any, path: str = "") -> Any:
        """Replace all references in a value, at any depth."""
        if isinstance(value, str):
            return _REFERENCE.sub(lambda found: self._replace(found, path), value)
        if isinstance(value, dict):
            return {key: self.apply(each, join(path, str(key))) for key, each in value.items()}
        if isinstance(value, list):
            return [self.apply(each, f"{path}[{index}]") for index, each in enumerate(value)]
        return value

    def _replace(self, found: re.Match[str], path: str) -> str:
        name = found[1]
        if name is None:
            return "${"
        if _NAME.fullmatch(name) is None:
            self.problems.append((path, "${…} must contain the name of an environment variable"))
        elif name not in self.environment:
            self.problems.append((path, f"the environment variable {name} is not set"))
        else:
            self.secrets.add(self.environment[name])
            return self.environment[name]
        return ""


def join(*parts: str) -> str:
    """A path of keys in TOML's notation."""
    return ".".join(_quoted(parts))


def _quoted(parts: tuple[str, ...]) -> Iterator[str]:
    for number, part in enumerate(parts):
        if part:
            # The first part is already a path.
            yield part if number == 0 or re.fullmatch(r"[\w-]+", part) else f'"{part}"'
