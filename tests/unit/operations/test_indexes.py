"""The state of search indexes, from what a pipeline stored and what their sink has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.status import index_status
from penstock.config import Config, load_config
from penstock.documents.mapping import fingerprint
from penstock.errors import DestinationUnavailable, PenstockError
from penstock.operations.indexes import index_states, open_reader, require_built
from penstock.state.indexes import IndexBuild, IndexStatus


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "books.schema.yml").write_text("version: 1\ntable: books\nfields: [{text: title}]\n")
    (tmp_path / "penstock.toml").write_text(
        """
        [pipeline]
        id = "library"
        [source]
        url = "postgresql://127.0.0.1/library"
        [[index]]
        specification = "books.schema.yml"
        [sink]
        type = "ndjson"
        path = "documents"
        """
    )
    return load_config(tmp_path / "penstock.toml")


def test_a_backfill_shows_how_far_it_is(config: Config) -> None:
    [[before], _] = index_states(config)
    assert (str(index_status(before)), before.backfill) == ("not built", None)
    built_from = fingerprint(config.indexes.indexes[0].specification)
    build = IndexBuild("books", "1", built_from, IndexStatus.FILLING, plan={"ranges": [[0], [1], [2], [3]]})
    with config.open_store(config.indexes) as store:
        store.acquire_lease()
        store.store_index_build(build)
        store.finish_index_ranges("books", "1", {0: 1000, 2: 500})
        store.release_lease()
    [[during], _] = index_states(config)
    assert during.backfill == {"fraction": 0.5, "documents_written": 1500}
    assert str(index_status(during)) == "filling 50%, 1,500 documents written"
    with config.open_store(config.indexes) as store:
        store.acquire_lease()
        store.store_index_build(replace(build, status=IndexStatus.SEEDED))
        store.release_lease()
    [[after], _] = index_states(config)
    assert (str(index_status(after)), after.backfill) == ("seeded", None)


def test_an_index_that_was_never_complete_is_not_compared(config: Config) -> None:
    with pytest.raises(PenstockError, match="'books' is not complete yet") as raised:
        require_built(config, config.indexes.indexes)
    assert "penstock run" in str(raised.value.hint)
    require_built(config, ())


def test_a_search_server_that_does_not_answer_is_named_at_once(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(
        path.read_text().replace('"ndjson"', '"opensearch"').replace("path =", "url = 'http://127.0.0.1:1' #")
    )
    away = load_config(path)
    [_, trouble] = index_states(away)
    assert trouble is not None
    for refused in (lambda: open_reader(away), lambda: require_built(away, away.indexes.indexes)):
        with pytest.raises(DestinationUnavailable, match="the search server does not answer"):
            refused()
