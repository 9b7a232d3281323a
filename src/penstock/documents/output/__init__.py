"""Search documents as an output of a stream: capture, spool and leases are those of everybody else.

Read in this order: `output` (how it starts and ends), `live` (changes become documents), `writer` and `tasks` (where
they are built and written), `judge` (what was refused), `builds` and `backfill` (indexes from nothing), `fan_out`
(changes with many documents).
"""

from penstock.documents.output.output import DocumentsOutput
from penstock.documents.output.writer import DocumentsSettings

__all__ = ["DocumentsOutput", "DocumentsSettings"]
