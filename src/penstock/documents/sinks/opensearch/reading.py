"""Reads documents back: by id, all ids, and some by chance."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from penstock.documents.sinks.opensearch.client import NOT_FOUND, OpenSearchClient

_KEEP_ALIVE = "2m"
_SAMPLE_MOST = 10_000


class IndexReader:
    """What an alias leads to; where it leads nowhere, nothing."""

    def __init__(self, client: OpenSearchClient) -> None:
        self._client = client

    def count(self, index: str) -> int:
        """How many documents searches see."""
        found = self._client.expect("GET", f"/{quote(index, safe='')}/_count", allowed=(NOT_FOUND,))
        return int(found["count"]) if found else 0

    def fetch(self, index: str, ids: Sequence[str]) -> Mapping[str, Any]:
        """Documents by id, as they are now, also those that searches do not see yet."""
        if not ids:
            return {}
        found = self._client.expect("POST", f"/{quote(index, safe='')}/_mget", {"ids": list(ids)}, allowed=(NOT_FOUND,))
        docs = found["docs"] if found else []
        return {each["_id"]: each["_source"] for each in docs if each.get("found")}

    def scan(self, index: str, chunk: int) -> Iterator[list[str]]:
        """The ids of all documents, of one point in time."""
        path = f"/{quote(index, safe='')}"
        self._client.expect("POST", f"{path}/_refresh", allowed=(NOT_FOUND,))
        opened = self._client.expect(
            "POST", f"{path}/_search/point_in_time?keep_alive={_KEEP_ALIVE}", allowed=(NOT_FOUND,)
        )
        if opened is None:
            return
        point = opened["pit_id"]
        try:
            yield from self._pages(point, chunk)
        finally:
            self._client.expect("DELETE", "/_search/point_in_time", {"pit_id": [point]}, allowed=(NOT_FOUND,))

    def sample(self, index: str, count: int) -> list[str]:
        """Ids of some documents, by chance."""
        score = {"random_score": {"seed": random.getrandbits(31), "field": "_seq_no"}}
        query = {"function_score": {"query": {"match_all": {}}, **score}}
        body = {"size": min(count, _SAMPLE_MOST), "_source": False, "query": query}
        found = self._client.expect("POST", f"/{quote(index, safe='')}/_search", body, allowed=(NOT_FOUND,))
        return [each["_id"] for each in found["hits"]["hits"]] if found else []

    def _pages(self, point: str, chunk: int) -> Iterator[list[str]]:
        after: list[Any] | None = None
        while True:
            body: dict[str, Any] = {
                "size": chunk,
                "_source": False,
                "track_total_hits": False,
                "pit": {"id": point, "keep_alive": _KEEP_ALIVE},
                "sort": [{"_shard_doc": "asc"}],
            }
            if after is not None:
                body["search_after"] = after
            hits = self._client.expect("POST", "/_search", body)["hits"]["hits"]
            if hits:
                yield [each["_id"] for each in hits]
                after = hits[-1]["sort"]
            if len(hits) < chunk:
                return
