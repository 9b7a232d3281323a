"""`penstock index list`: how the indexes of a pipeline are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.configured import DEFAULT_PATH, ConfigPath, configured, existing_store, running
from penstock.cli.index_states import STYLES, IndexState, stored_indexes
from penstock.cli.options import AsJson
from penstock.cli.tables import wide_console
from penstock.config import Config
from penstock.documents.base import IndexFacts, ReadableSink
from penstock.errors import PenstockError


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
        stored = stored_indexes(config, store)
    facts, trouble = _ask_sink(config)
    return [_with_facts(each, facts.get(each.index)) for each in stored], trouble


def _ask_sink(config: Config) -> tuple[dict[str, IndexFacts], PenstockError | None]:
    try:
        sink = config.indexes.create_sink()
        # What is in memory is in that of another process.
        if config.indexes.sink_type == "memory" or not isinstance(sink, ReadableSink):
            return {}, None
        return {each.name: sink.facts(each.name) for each in config.indexes.indexes}, None
    except PenstockError as error:
        return {}, error


def _with_facts(state: IndexState, facts: IndexFacts | None) -> IndexState:
    if facts is None:
        return state
    return replace(state, generation=facts.generation, filling=facts.filling, documents=facts.documents)


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
            Text(each.status, style=STYLES.get(each.status, "yellow")),
            Text(generation),
            Text("" if each.documents is None else f"{each.documents:,}"),
            Text(f"{each.quarantined:,}"),
        )
    wide_console().print(table)
