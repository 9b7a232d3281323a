"""Penstock: Postgres into lakehouse tables and search documents, on Spark.

    import penstock

    with penstock.open("penstock.toml") as pipeline:
        pipeline.wait_until_ready()
        print(pipeline.status())

Names are imported when they are first used, so that `import penstock` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api import (
        CheckReport,
        Pipeline,
        PipelineStatus,
        Plan,
        VerifyReport,
        check,
        open,  # noqa: A004 (penstock.open, like gzip.open)
        plan,
        read_table,
        status,
        verify,
    )
    from penstock.datasource import KeptSnapshot, register, snapshot
    from penstock.errors import ConfigError, DestinationError, LeaseHeld, PenstockError, SourceError, StateError

    __version__: str

__all__ = [
    "CheckReport",
    "ConfigError",
    "DestinationError",
    "KeptSnapshot",
    "LeaseHeld",
    "PenstockError",
    "Pipeline",
    "PipelineStatus",
    "Plan",
    "SourceError",
    "StateError",
    "VerifyReport",
    "__version__",
    "check",
    "open",
    "plan",
    "read_table",
    "register",
    "snapshot",
    "status",
    "verify",
]

_MODULES = {
    **dict.fromkeys(("KeptSnapshot", "register", "snapshot"), "penstock.datasource"),
    **dict.fromkeys(
        ("ConfigError", "DestinationError", "LeaseHeld", "PenstockError", "SourceError", "StateError"),
        "penstock.errors",
    ),
}
"""Where names come from that are not in `penstock.api`."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("penstock")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "penstock.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
