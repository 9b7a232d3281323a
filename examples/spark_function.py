"""A function for `type = "spark"`, to copy and adapt: it appends changes to Delta tables, each exactly once.

    [destination]
    type = "spark"
    function = "spark_function:write"

After a crash Penstock repeats a batch with the same number. Delta records the number with the rows (`txnAppId`,
`txnVersion`) and skips a batch that it has. The folder comes from the environment variable LAKE.
"""

from __future__ import annotations

import os
from typing import Any

from penstock.destinations.spark import Batch


def write(frame: Any, number: int, batch: Batch) -> None:
    """Append the rows of a batch, with the number of the batch."""
    rows = frame.selectExpr("*", f"{number}L as batch")
    writer = rows.write.format("delta").mode("append").option("mergeSchema", "true")
    writer = writer.option("txnAppId", "spark_function").option("txnVersion", str(number))
    writer.save(f"{os.environ['LAKE']}/{batch.table}")
