"""Documents that an index refused, kept for people to look at and to try again."""

from penstock.documents.quarantine.contract import Quarantined, QuarantineStore
from penstock.documents.quarantine.opening import open_quarantine
from penstock.documents.quarantine.postgres import PostgresQuarantine
from penstock.documents.quarantine.sqlite import SqliteQuarantine

__all__ = ["PostgresQuarantine", "QuarantineStore", "Quarantined", "SqliteQuarantine", "open_quarantine"]
