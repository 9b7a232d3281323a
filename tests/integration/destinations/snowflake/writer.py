"""Writes batches into an emulated Snowflake until it is done or killed: `writer.py <file with a pickled Job>`."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.changes.batch import EventBatch
from penstock.destinations.snowflake import SnowflakeDestination
from penstock.testing.destinations import make_context


@dataclass(frozen=True)
class Job:
    options: dict[str, Any]
    batches: tuple[EventBatch, ...]

    def write(self) -> None:
        destination = SnowflakeDestination(**self.options)
        destination.startup(make_context())
        for batch in self.batches:
            for table in destination.write_events(batch).result(60).tables.values():
                if table.error is not None:
                    raise table.error
        destination.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))
    from tests.integration.destinations.snowflake.writer import Job as Named

    found = pickle.loads(Path(sys.argv[1]).read_bytes())
    assert isinstance(found, Named)
    found.write()
