"""Writes batches into an emulated BigQuery until it is done or killed: `writer.py <file with a pickled Job>`."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.changes.batch import EventBatch
from penstock.destinations.bigquery import BigQueryDestination
from penstock.testing.destinations import make_context


@dataclass(frozen=True)
class Job:
    project: str
    dataset: str
    endpoint: str
    storage_endpoint: str
    mode: str
    batches: tuple[EventBatch, ...]

    def write(self) -> None:
        destination = BigQueryDestination(
            self.project,
            self.dataset,
            mode=self.mode,
            max_staleness="0s",
            endpoint=self.endpoint,
            storage_endpoint=self.storage_endpoint,
        )
        destination.startup(make_context())
        for batch in self.batches:
            result = destination.write_events(batch).result(60)
            for table in result.tables.values():
                if table.error is not None:
                    raise table.error


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))
    from tests.integration.destinations.bigquery.writer import Job as Named

    found = pickle.loads(Path(sys.argv[1]).read_bytes())
    assert isinstance(found, Named)
    found.write()
