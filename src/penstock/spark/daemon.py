"""The process from which Spark forks its Python workers, with everything imported so that tasks start at once.

One of Spark's own workers spends most of a second importing what its first task needs. Idle workers end after a minute,
so occasional changes would pay for that every time. Before each task, such a worker also rereads the directory of every
archive on its path, and after each task it collects garbage over all imported modules: 0.2 s of processor time for a
task that does nothing. This daemon imports the modules once, reads archives once, and exempts modules from collection.
"""

import gc
import importlib
import zipimport

import pyspark.daemon

NEEDED = (
    "penstock.copy.reader",
    "penstock.destinations.delta.destination",
    "penstock.destinations.parquet.destination",
    "penstock.destinations.spark.frames",
    "penstock.documents.build",
)
"""Modules that tasks use. Named, not imported: they belong to higher layers."""


def main() -> None:
    for each in NEEDED:
        try:
            importlib.import_module(each)
        except ModuleNotFoundError as error:
            # No task needs a destination whose extra is not installed.
            if error.name is None or error.name.startswith("penstock"):
                raise
    # Archives that Spark distributes do not change while a worker runs.
    zipimport.zipimporter.invalidate_caches = lambda self: None
    gc.collect()
    gc.freeze()
    pyspark.daemon.manager()


if __name__ == "__main__":
    main()
