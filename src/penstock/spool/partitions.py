"""The leaves of partitioned tables that the stream has mentioned.

The server sends rows of a leaf as rows of its table, but describes the leaf once on each connection before its first
row. So a leaf that was created, filled and dropped is known here even if the catalog never showed it to anybody.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.lsn import Lsn, reaches
from penstock.spool.folder import SpoolFolder, read_file, replace_file


class MentionedLeaves:
    """Kept by the writer of a spool; a leaf is durable before the rows that follow it."""

    def __init__(self, folder: SpoolFolder) -> None:
        self._folder = folder
        self._leaves = load_mentioned_leaves(folder)

    def add(self, table_id: int, leaf: int, at: Lsn) -> None:
        """Note that a transaction which commits at this position has rows of a leaf."""
        known = self._leaves.get(table_id, {})
        if leaf in known and reaches(known[leaf], at):
            return
        leaves = self._leaves | {table_id: known | {leaf: at}}
        record = {
            str(table): {str(each): str(position) for each, position in of_table.items()}
            for table, of_table in leaves.items()
        }
        replace_file(self._folder.leaves, record, durable=True)
        self._leaves = leaves


def load_mentioned_leaves(folder: SpoolFolder) -> dict[int, dict[int, Lsn]]:
    """The leaves of each table, and where each was last described: the commit position of that transaction."""
    record: Mapping[str, Mapping[str, str]] = read_file(folder.leaves) or {}
    return {
        int(table): {int(leaf): Lsn.parse(position) for leaf, position in of_table.items()}
        for table, of_table in record.items()
    }
