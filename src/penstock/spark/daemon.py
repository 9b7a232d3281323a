"""What Spark forks its Python workers from, so that tasks begin at once.

A worker of Spark's own imports what a task needs first, most of a second of processor time; idle ones are ended after a
minute, so that changes which come now and then wait for it each time. And before each task it reads the directory of
every archive on its path again, after each it looks through all that was imported for garbage: 0.2 s of processor time
for a task that does nothing. Here all is imported, archives are read once, and what was imported is left alone.
"""

import gc
import importlib
import zipimport

import pyspark.daemon

NEEDED = (
    "penstock.copy.reader",
    "penstock.destinations.delta.destination",
    "penstock.destinations.parquet.destination",
    "penstock.documents.build",
)
"""By name: they stand above this package, which only has them ready for whoever sends them as tasks."""


def main() -> None:
    for each in NEEDED:
        try:
            importlib.import_module(each)
        except ModuleNotFoundError as error:
            # Without the extra of a destination no task needs its module.
            if error.name is None or error.name.startswith("penstock"):
                raise
    # Archives that Spark distributes do not change under a worker.
    zipimport.zipimporter.invalidate_caches = lambda self: None
    gc.collect()
    gc.freeze()
    pyspark.daemon.manager()


if __name__ == "__main__":
    main()
