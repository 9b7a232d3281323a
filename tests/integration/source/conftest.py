"""What is asked of the catalog depends on the version of the server: tests run on each."""

from __future__ import annotations

from tests.conftest import every_server as any_server

__all__ = ["any_server"]
