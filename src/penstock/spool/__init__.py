"""The spool: segments and a log between the capture process and any number of readers."""

from penstock.changes.steps import Entry
from penstock.spool.folder import Stopping
from penstock.spool.reader import SpoolReader
from penstock.spool.registry import Hold, Holds, Readers
from penstock.spool.writer import SpoolSettings, SpoolWriter

__all__ = ["Entry", "Hold", "Holds", "Readers", "SpoolReader", "SpoolSettings", "SpoolWriter", "Stopping"]
