"""A process that writes batches from a file and says which are durable; killed by the test at any moment."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from penstock.destinations.parquet import ParquetDestination
from penstock.testing.destinations import make_context


def main(lake: str, batches: str, first: str) -> None:
    destination = ParquetDestination(lake)
    destination.startup(make_context())
    for number, batch in list(enumerate(pickle.loads(Path(batches).read_bytes())))[int(first) :]:
        result = destination.write_events(batch).result()
        assert not result.tables, result
        print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
