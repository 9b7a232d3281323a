"""Opening the store that a URL names."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.private import private_file
from penstock.state.memory import MemoryStore
from penstock.state.postgres import PostgresStore
from penstock.state.sqlite import SqliteStore
from penstock.state.store import Store

_SQLITE = "sqlite:///"
_HINT = (
    "Write memory:, sqlite:///file.db (sqlite:////folder/file.db from the root), or postgresql://user@host/database."
)


def open_store(url: str, pipeline_id: str) -> Store:
    """Return the store of a pipeline: `memory:`, `sqlite:///path` (four slashes: absolute) or `postgresql://…`."""
    scheme, _, rest = url.partition(":")
    if scheme == "memory" and not rest:
        return MemoryStore(pipeline_id)
    if scheme == "sqlite":
        if not rest.startswith("///") or not rest[3:] or "?" in rest:
            raise ConfigError("the state URL does not name a file", hint=_HINT)
        return SqliteStore(_checked(Path(rest[3:])), pipeline_id)
    if scheme in ("postgresql", "postgres"):
        return PostgresStore(url, pipeline_id)
    raise ConfigError("the state URL has an unknown scheme", hint=_HINT)


def file_beside(url: str, suffix: str) -> Path | None:
    """Return the SQLite file for data kept beside the state, `:memory:` included; None if the state is in Postgres."""
    if url == "memory:":
        return Path(":memory:")
    if not url.startswith(_SQLITE):
        return None
    path = Path(url.removeprefix(_SQLITE))
    return private_file(path.with_name(path.name + suffix))


def _checked(path: Path) -> Path:
    absolute = Path("/") / path
    if not path.parent.is_dir() and absolute.parent.is_dir():
        raise ConfigError(
            f"the folder {str(path.parent)!r} does not exist",
            hint=f"For an absolute path, write four slashes: sqlite:///{absolute}",
        )
    return path
