"""A function as people write them: each batch goes to a folder of its own, which a repeat replaces."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from penstock.destinations.spark import Batch

FOLDER = Path()
"""Where batches go; tests set it."""


def write(frame: Any, number: int, batch: Batch) -> None:
    """Write a batch."""
    folder = FOLDER / str(batch.schema.table_id) / str(number)
    frame.write.mode("overwrite").parquet(str(folder))
    (folder / "_batch").write_bytes(pickle.dumps(batch))
