"""`penstock index list`: how the indexes of a pipeline are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.configured import DEFAULT_PATH, ConfigPath, configured, existing_store, running
from penstock.cli.options import AsJson
from penstock.cli.tables import wide_console
from penstock.config import Config, IndexChoice
from penstock.documents.fingerprint import fingerprint
from penstock.documents.reading import IndexFacts, ReadableSink
from penstock.errors import PenstockError
from penstock.state import IndexBuild

_STYLES = {"seeded": "green", "filling": "yellow", "wanted": "yellow"}


@dataclass(frozen=True, slots=True)
class IndexState:
    """One index; as JSON it has the same names."""

    index: str
    table: str
    fingerprint: str
    """Of the specification as it is now."""
    status: str
    """not built, wanted, filling or seeded; outdated if the specification is another one than what was built."""
    seeded: bool
    reason: str
    """Why it is being built anew, or was."""
    generation: str | None = None
    filling: str | None = None
    documents: int | None = None
    quarantined: int | None = None
    failure_policy: str = "stop"


def list_indexes(config_path: ConfigPath = DEFAULT_PATH, as_json: AsJson = False) -> None:
    """List the indexes: what serves, whether it is complete, how many documents it has.

    Works whether the pipeline runs or not, and changes nothing. A sink that cannot be asked is told on standard error.

    Examples:

        penstock index list
        penstock index list --json | jq '.indexes[] | select(.seeded | not)'
    """
    with configured(config_path) as config:
        found, trouble = _states(config)
        with existing_store(config, config.indexes) as store:
            driver = None if store is None else running(store)
        if as_json:
            facts = {
                "pipeline": config.pipeline.id,
                "running": driver is not None,
                "sink": config.indexes.sink_type,
                "sink_error": None if trouble is None else trouble.message,
                "indexes": [asdict(each) for each in found],
            }
            typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
            return
        _print(found)
        if trouble is not None:
            typer.echo(f"the sink cannot be asked: {trouble.message}", err=True)


def _states(config: Config) -> tuple[list[IndexState], PenstockError | None]:
    with existing_store(config, config.indexes) as store:
        builds: Mapping[str, IndexBuild] = {} if store is None else store.get_index_builds()
    facts, trouble = _ask_sink(config)
    return [_state(each, builds.get(each.name), facts.get(each.name)) for each in config.indexes.indexes], trouble


def _ask_sink(config: Config) -> tuple[dict[str, IndexFacts], PenstockError | None]:
    try:
        sink = config.indexes.create_sink()
        # What is in memory is in that of another process.
        if config.indexes.sink_type == "memory" or not isinstance(sink, ReadableSink):
            return {}, None
        return {each.name: sink.facts(each.name) for each in config.indexes.indexes}, None
    except PenstockError as error:
        return {}, error


def _state(index: IndexChoice, build: IndexBuild | None, facts: IndexFacts | None) -> IndexState:
    wanted = fingerprint(index.specification)
    outdated = build is not None and build.fingerprint != wanted
    status = "not built" if build is None else "outdated" if outdated else build.status.value
    return IndexState(
        index=index.name,
        table=str(index.specification.table),
        fingerprint=wanted,
        status=status,
        seeded=status == "seeded",
        reason="" if build is None else build.reason,
        generation=None if facts is None else facts.generation,
        filling=None if facts is None else facts.filling,
        documents=None if facts is None else facts.documents,
        failure_policy=index.failure_policy.value,
    )


def _print(found: Sequence[IndexState]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("index", "table", "status", "generation", "documents", "quarantined"):
        table.add_column(title, overflow="fold", justify="right" if title in ("documents", "quarantined") else "left")
    for each in found:
        generation = each.generation or ""
        if each.filling is not None:
            generation = f"{generation} → {each.filling}" if generation else each.filling
        table.add_row(
            Text(each.index),
            Text(each.table),
            Text(each.status, style=_STYLES.get(each.status, "yellow")),
            Text(generation),
            Text("" if each.documents is None else f"{each.documents:,}"),
            Text("" if each.quarantined is None else f"{each.quarantined:,}"),
        )
    wide_console().print(table)
