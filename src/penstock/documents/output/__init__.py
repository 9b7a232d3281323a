"""Search documents as an output of a stream: capture and spool are shared with the other outputs.

Read in this order: `output` (start and stop), `live` (changes become documents), `writer` (builds and writes them),
`indexes` (what is compiled, and the state of builds), `readiness` and `backfill` (filling indexes), `fan_out` (changes
that affect very many documents).
"""

from penstock.documents.output.output import DocumentsOutput, RunningDocuments
from penstock.documents.output.writer import DocumentsSettings

__all__ = ["DocumentsOutput", "DocumentsSettings", "RunningDocuments"]
