"""The programs of each version come from another package: tests run on each."""

from __future__ import annotations

from tests.conftest import every_server as any_server

__all__ = ["any_server"]
