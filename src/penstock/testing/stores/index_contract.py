"""What every store remembers of search indexes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.state import IndexBuild, IndexStatus, Store, WorkKind


class IndexStoreContract:
    """Part of `StoreContract`, which says how stores are made."""

    def driver(self, pipeline_id: str = "contract") -> Store:
        raise NotImplementedError

    def now_and_restarted(self, store: Store) -> Iterator[Store]:
        raise NotImplementedError

    def test_builds_of_indexes_survive_a_restart_range_by_range(self) -> None:
        store = self.driver()
        build = IndexBuild("people", "one", "f00", IndexStatus.FILLING, "new", {"ranges": [[1, 2, None]]})
        store.store_index_build(build)
        store.finish_index_ranges("people", "one", {0: 10, 2: 0})
        store.finish_index_ranges("people", "another", {1: 5})
        store.add_index_work("people", WorkKind.REMOVAL, [{"keys": [["1", "ä"]]}], changed=7)
        store.add_index_work("people", WorkKind.FAN_OUT, [{"values": [["x"]]}, {"values": [["y"]]}])
        for each in self.now_and_restarted(store):
            assert each.get_index_builds() == {"people": replace(build, changed=7)}
            assert each.get_index_ranges("people", "one") == {0: 10, 2: 0}
            assert [work.details for work in each.get_index_work("people", WorkKind.REMOVAL)] == [
                {"keys": [["1", "ä"]]}
            ]
            assert [work.details["values"][0][0] for work in each.get_index_work("people", WorkKind.FAN_OUT)] == [
                "x",
                "y",
            ]

    def test_another_build_of_an_index_forgets_the_one_before(self) -> None:
        store = self.driver()
        store.store_index_build(IndexBuild("people", "one", "f00", IndexStatus.FILLING))
        store.finish_index_ranges("people", "one", {0: 10})
        store.add_index_work("people", WorkKind.REMOVAL, [{}])
        store.add_index_work("people", WorkKind.FAN_OUT, [{}, {}])
        store.store_index_build(IndexBuild("people", "one", "f00", IndexStatus.SEEDED))
        assert store.get_index_ranges("people", "one") == {0: 10}
        store.store_index_build(IndexBuild("people", "two", "f00", IndexStatus.WANTED))
        assert store.get_index_ranges("people", "one") == store.get_index_ranges("people", "two") == {}
        assert store.get_index_work("people", WorkKind.REMOVAL) == []
        first, second = store.get_index_work("people", WorkKind.FAN_OUT)
        store.delete_index_work("people", [first.number])
        assert store.get_index_work("people", WorkKind.FAN_OUT) == [second]
        store.delete_index("people")
        assert store.get_index_builds() == {}
        assert store.get_index_work("people", WorkKind.FAN_OUT) == []
