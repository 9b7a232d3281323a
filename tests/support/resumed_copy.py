"""A copy that is killed and resumed: tables, writers that make it hard, and the pipeline."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.destinations.delta.resume import COPIES_FOLDER
from penstock.state import open_store
from tests.support.drive_pipeline import DriveSettings
from tests.support.pipeline_process import PipelineProcess

RANGE_BYTES = 128 << 10
TABLES = {
    "whole": "create table {} (id int primary key, version int, note text, large text)",
    "texts": 'create table {} (id text collate "C", part uuid, version int, note text, large text, '
    "primary key (id, part))",
    "times": "create table {} (id timestamptz primary key, version int, note text, large bytea)",
}
"""Tables with keys of several types; `large` is stored out of line."""
_KEYS = {
    "whole": ("id", "{}"),
    "texts": ("id, part", "'k''\\' || {0}, lpad(({0} % 7)::text, 32, '0')::uuid"),
    "times": ("id", "timestamptz '2020-01-01 00:00:00.000001+02' + {} * interval '1 s 1 us'"),
}
_LARGE = {"whole": "{}", "texts": "{}", "times": "convert_to({}, 'utf8')"}


def create(connection: Any, kind: str, rows: int) -> None:
    """Create the table `busy` and fill it."""
    connection.execute(TABLES[kind].format("busy"))
    connection.execute("alter table busy alter column large set storage external")
    _insert(connection, kind, f"generate_series(1, {rows}) i", "i")


def _insert(connection: Any, kind: str, source: str, number: str, version: int = 0) -> None:
    columns, key = _KEYS[kind]
    large = _LARGE[kind].format(f"repeat(md5({number}::text), case when {number} % 5 = 0 then 90 else 0 end)")
    connection.execute(
        f"insert into busy ({columns}, version, note, large) "
        f"select {key.format(number)}, {version}, repeat('n', {number} % 400), {large} from {source} "
        "on conflict do nothing"
    )


def writes(kind: str, rows: int, seed: int) -> Callable[[Any], None]:
    """Return a step for a writer: one transaction with a few random changes all over the table."""
    choose = random.Random(seed)

    def key(number: int) -> str:
        return f"({_KEYS[kind][0]}) = ({_KEYS[kind][1].format(number)})"

    def step(connection: Any) -> None:
        with connection.transaction():
            for _ in range(choose.randrange(1, 6)):
                number, other = (choose.randrange(1, rows + rows // 10) for _ in range(2))
                match choose.randrange(6):
                    case 0:
                        # The large value is omitted from the stream.
                        connection.execute(f"update busy set version = version + 1 where {key(number)}")
                    case 1:
                        large = _LARGE[kind].format(f"repeat(md5('{number}-{other}'), 100)")
                        connection.execute(f"update busy set large = {large} where {key(number)}")
                    case 2:
                        connection.execute(f"delete from busy where {key(number)}")
                    case 3:
                        _insert(connection, kind, f"generate_series({number}, {number + 3}) i", "i", version=other)
                    case 4:
                        columns, value = _KEYS[kind]
                        connection.execute(
                            f"update busy set ({columns}) = row({value.format(other)}) where {key(number)} "
                            f"and not exists (select from busy where {key(other)})"
                        )
                    case _:
                        # Many rows move to other blocks, and leave room for others.
                        connection.execute(
                            "update busy set note = repeat('m', %s) where ctid in "
                            "(select ctid from busy order by md5(version::text || note) limit 20)",
                            [choose.randrange(600)],
                        )

    return step


def drive(dsn: str, folder: Path, slot: str, **changes: Any) -> PipelineProcess:
    """Return a pipeline into Delta that copies in many small ranges."""
    settings: dict[str, Any] = {"destination": "delta", "range_bytes": RANGE_BYTES, **changes}
    return PipelineProcess(DriveSettings(dsn=dsn, folder=str(folder), slot=slot, **settings))


def recorded(pipeline: PipelineProcess, blocks: int) -> dict[str, int]:
    """Return for each record of the unfinished copy how many of the first blocks of the table it has."""
    found: dict[str, int] = {}
    for path in pipeline.settings.lake.glob(f"*/*/{COPIES_FOLDER}/*/*.json"):
        ranges = json.loads(path.read_text())["blocks"]
        found[path.name] = sum(min(end or blocks, blocks) - min(first, blocks) for _, first, end, _ in ranges)
    return found


def resumption(pipeline: PipelineProcess) -> Any:
    """Return what the stored phase of the table says about resuming."""
    store = open_store(pipeline.settings.state_url, pipeline.settings.id)
    try:
        (phase,) = store.get_table_replication_states().values()
        return getattr(phase, "resumption", None)
    finally:
        store.close()
