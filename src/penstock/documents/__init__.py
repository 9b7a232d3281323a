"""Search documents: rows of several tables joined into one JSON document per root row, kept up to date.

Read in this order: `penstock.specification` (what users write), `catalog` and `checks` (does it match the database),
`mapping` (the index), `build` and `builder` (documents from keys), `paths`, `resolve` and `relation_map` (keys from
changes), `base` (the interfaces), `engine` (what drives it) with `writer`, `backfill` and `fan_out`, `wal` and
`polling` (where changes come from), `output` (the engine as an output of a stream), `penstock.sinks`.
"""

from penstock.documents.base import (
    BatchPolicy,
    ChangeCapture,
    DocumentBuilder,
    FailurePolicies,
    FailurePolicy,
    Observer,
    Sink,
)
from penstock.documents.builder import PostgresDocuments
from penstock.documents.engine import Engine
from penstock.specification import IndexSpecification, load_specification

__all__ = [
    "BatchPolicy",
    "ChangeCapture",
    "DocumentBuilder",
    "Engine",
    "FailurePolicies",
    "FailurePolicy",
    "IndexSpecification",
    "Observer",
    "PostgresDocuments",
    "Sink",
    "load_specification",
]
