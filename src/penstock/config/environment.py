"""`${NAME}` in a config: secrets come from the environment, and stay out of files and messages.

Replaced in values after the file was parsed, so whatever a variable holds, it cannot become another key. `$${` stands
for `${` itself.
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
    """Replaces references; afterwards `problems` and `secrets` tell what was met."""

    environment: Mapping[str, str]
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Where, and what."""
    secrets: set[str] = field(default_factory=set[str])
    """The values that were put in: not to be shown."""

    def apply(self, value: Any, path: str = "") -> Any:
        """The value with all references replaced, at any depth."""
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
            self.problems.append((path, "${…} holds the name of one environment variable"))
        elif name not in self.environment:
            self.problems.append((path, f"the environment variable {name} is not set"))
        else:
            self.secrets.add(self.environment[name])
            return self.environment[name]
        return ""


def join(*parts: str) -> str:
    """A path of keys as TOML writes it."""
    return ".".join(_quoted(parts))


def _quoted(parts: tuple[str, ...]) -> Iterator[str]:
    for number, part in enumerate(parts):
        if part:
            # The first is a path already.
            yield part if number == 0 or re.fullmatch(r"[\w-]+", part) else f'"{part}"'
