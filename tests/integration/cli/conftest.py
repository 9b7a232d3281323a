"""A pipeline with three small tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.support import PATIENCE, Site


@pytest.fixture
def site(database: Any, tmp_path: Path) -> Iterator[Site]:
    for name, rows in (("orders", 500), ("items", 2000), ("nothing", 0)):
        database.execute(f"create table {name} (id int primary key, note text)")
        database.execute(f"insert into {name} select i, repeat('x', i % 50) from generate_series(1, {rows}) i")
    site = Site(database, tmp_path)
    site.configure()
    yield site
    for process in site.processes:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE)
