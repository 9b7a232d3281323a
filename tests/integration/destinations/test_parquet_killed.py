"""A writer of the parquet destination that is killed again and again: every change is there exactly once."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.testing.destinations import ScriptedSource, make_context
from penstock.testing.destinations.contract import LINES, ORDERS

WRITER = Path(__file__).with_name("parquet_writer.py")
BATCHES, KILLS = 60, 5


@pytest.mark.trap(28, 40)
def test_every_change_is_there_exactly_once_whenever_the_writer_dies(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("randomly_seed", default=1)
    chance = random.Random(seed)
    lake, source = tmp_path / "lake", ScriptedSource(tmp_path / "segments")
    destination = ParquetDestination(lake)
    destination.startup(make_context())
    for schema in (LINES, ORDERS):
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, []))
    batches = []
    for number in range(BATCHES):
        for half in range(2):
            with source.transaction() as transaction:
                transaction.insert(LINES, {"level": number, "line": "x"})
                transaction.insert(ORDERS, {"id": number * 2 + half, "note": None, "due": None})
        batches.append(source.batch())
    expected = [(int(batch.begin) + offset, ordinal) for batch in batches for offset in (0, 0x30) for ordinal in (0, 1)]
    (tmp_path / "batches").write_bytes(pickle.dumps(batches))

    durable = -1
    for attempt in range(KILLS + 1):
        # What is durable may come again, from any batch before on.
        first = max(0, durable + 1 - chance.randrange(4))
        arguments = [sys.executable, str(WRITER), str(lake), str(tmp_path / "batches"), str(first)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            left = chance.randint(1, 8) if attempt < KILLS else BATCHES
            for line in process.stdout:
                durable = max(durable, int(line))
                left -= 1
                if left == 0:
                    time.sleep(chance.uniform(0, 0.02))
                    process.kill()
            process.wait(60)
    assert durable == BATCHES - 1

    reader = ParquetReader(lake)
    found = []
    for table in ("audit.lines", "public.orders"):
        changes = reader.read_changes(table)
        found += zip(changes.column("_commit_lsn").to_pylist(), changes.column("_ordinal").to_pylist(), strict=True)
    assert sorted(found) == expected, f"seed {seed}"
    # The next process sweeps what nobody names.
    with source.transaction() as transaction:
        transaction.insert(LINES, {"level": -1, "line": "last"})
    successor = ParquetDestination(lake)
    successor.startup(make_context())
    assert successor.write_events(source.batch()).result().tables == {}
    data = next((lake / "audit/lines/generations").glob("*/data"))
    assert sorted(data.iterdir()) == sorted(reader.files("audit.lines"))
