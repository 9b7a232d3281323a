"""Which server the positions of a spool belong to; written by capture before the first entry of each server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.lsn import Lsn
from penstock.source.lineage import Ancestry, Lineage, TimelineSwitch
from penstock.spool.folder import SpoolFolder, read_file


def load_ancestry(folder: SpoolFolder) -> Ancestry | None:
    """Return the server that capture reads, or has read last; None in a new spool."""
    stored = read_file(folder.lineage)
    if stored is None:
        return None
    switches = tuple(TimelineSwitch(timeline, Lsn.parse(end)) for timeline, end in stored.get("switches", ()))
    return Ancestry(Lineage(**stored["lineage"]), switches)


def to_record(ancestry: Ancestry) -> dict[str, Any]:
    """Return an ancestry as `load_ancestry` reads it."""
    switches = [[each.timeline, str(each.left_at)] for each in ancestry.switches]
    return {"lineage": asdict(ancestry.current), "switches": switches}
