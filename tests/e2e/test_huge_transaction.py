"""One transaction of millions of rows into a Delta table: memory stays bounded, and the table equals the source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = int(os.environ.get("PENSTOCK_SOAK_HUGE_ROWS", "10000000"))
LIMIT = 600 << 20
"""docs/guides/sizing.md names it."""
CONFIG = """
[pipeline]
id = "huge"

[source]
url = "{dsn}"
tables = ["public.huge"]

[destination]
type = "delta"
path = "lake"
{options}

[spark]
master = "none"
"""


def run(folder: Path, *arguments: str) -> int:
    """Run a command; return the most memory that it or one of its children had."""
    process = subprocess.Popen([sys.executable, "-m", "penstock", *arguments], cwd=folder)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return usage.ru_maxrss << 10


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", ["mirror", "soft_delete"])
def test_memory_does_not_grow_with_a_transaction(mode, database, tmp_path, record_property):
    """Rows are inserted, updated, moved to other keys and deleted, all in one transaction."""
    database.execute("create table huge (id int8 primary key, n int, note text, at timestamptz)")
    (tmp_path / "penstock.toml").write_text(CONFIG.format(dsn=database.dsn, options=f'mode = "{mode}"'))
    run(tmp_path, "run", "--once")
    third = ROWS // 3
    database.execute(f"""
        begin;
        insert into huge select i, i % 100, 'note ' || i, now() from generate_series(1, {third}) i;
        update huge set n = n + 1, note = note || '!';
        update huge set id = id + {ROWS} where id > {third // 2};
        delete from huge where id < {third // 4};
        commit;
    """)
    peak = run(tmp_path, "run", "--once")
    record_property("peak", f"{peak >> 20} MiB")
    run(tmp_path, "verify")
    assert peak < LIMIT
