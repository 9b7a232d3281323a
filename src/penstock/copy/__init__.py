"""The consistent copy of a table: ranges of its heap, read in one snapshot, as Arrow."""

from penstock.copy.plan import CopyRange, CopySettings, Leaf, plan_ranges
from penstock.copy.progress import CopyProgress
from penstock.copy.reader import RangeReader
from penstock.copy.rows import CopyRows, prepare_copy

__all__ = [
    "CopyProgress",
    "CopyRange",
    "CopyRows",
    "CopySettings",
    "Leaf",
    "RangeReader",
    "plan_ranges",
    "prepare_copy",
]
