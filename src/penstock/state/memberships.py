"""The part of a store that remembers what a publication looked like when it was last acted upon."""

from __future__ import annotations

from typing import Any

from penstock.source.publications import Heap, Membership, RowVersion
from penstock.state.core import StoreCore
from penstock.state.records import PublicationRecord, Transaction


class Memberships(StoreCore):
    """See `stores.MembershipStore`."""

    def get_publication_membership(self, publication: str) -> Membership | None:
        def work(transaction: Transaction) -> Membership | None:
            found = transaction.rows(PublicationRecord, name=publication)
            return _from_json(found[0].membership) if found else None

        return self.database.run(work, writing=False)

    def store_publication_membership(self, publication: str, membership: Membership) -> None:
        record = PublicationRecord(publication, _to_json(membership))
        self.write(lambda transaction: transaction.put([record]), lambda _: None)


def _to_json(membership: Membership) -> dict[str, Any]:
    def version(each: RowVersion) -> list[Any]:
        return [each.oid, each.xmin]

    return {
        "publication": version(membership.publication),
        "tables": {
            str(table_id): {"name": membership.names[table_id], "rows": sorted(version(each) for each in rows)}
            for table_id, rows in membership.tables.items()
        },
        "heaps": {
            name: sorted([each.oid, each.identity] for each in heaps) for name, heaps in membership.heaps.items()
        },
    }


def _from_json(stored: dict[str, Any]) -> Membership:
    tables = {int(table_id): table for table_id, table in stored["tables"].items()}
    return Membership(
        RowVersion(*stored["publication"]),
        {table_id: frozenset(RowVersion(*row) for row in table["rows"]) for table_id, table in tables.items()},
        {table_id: table["name"] for table_id, table in tables.items()},
        {name: frozenset(Heap(*heap) for heap in heaps) for name, heaps in stored.get("heaps", {}).items()},
    )
