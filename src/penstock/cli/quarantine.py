"""`penstock index quarantine`: documents that the sink rejected, under the policy `skip`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.text import Text

from penstock.cli.display import echo, make_table, wide_console
from penstock.cli.index import IndexName, complete_index
from penstock.cli.options import DEFAULT_PATH, AsJson, ConfigPath, configured
from penstock.config import Config
from penstock.config.units import count_of
from penstock.errors import PenstockError
from penstock.operations.stores import existing_store, require_shared_state, running
from penstock.state.quarantine import Quarantine, Quarantined

quarantine = typer.Typer(
    name="quarantine",
    help="List, retry or drop quarantined documents: those that the sink rejected.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_SHOWN = 100
_ALL = typer.Option("--all", help="Select all quarantined documents of this index.")

Ids = Annotated[list[str] | None, typer.Argument(help="Document ids.", metavar="ID")]
All = Annotated[bool, _ALL]


@quarantine.command("list")
def list_quarantined(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of one index. Default: all indexes.", metavar="NAME", autocompletion=complete_index),
    ] = None,
    config_path: ConfigPath = DEFAULT_PATH,
    limit: Annotated[int, typer.Option(min=1, help="Print at most this many.", metavar="N")] = _SHOWN,
    as_json: AsJson = False,
) -> None:
    """List quarantined documents, with the time, number and reason of their rejections.

    The most recently rejected documents come first.

    Examples:

        penstock index quarantine list
        penstock index quarantine list customers --json | jq '.documents[].id'
    """
    with configured(config_path) as config, _opened(config, name) as store:
        counts = {} if store is None else dict(store.counts())
        found = [] if store is None else store.entries(name, limit=limit)
    if name is not None:
        counts = {index: count for index, count in counts.items() if index == name}
    if as_json:
        echo(json.dumps({"counts": counts, "documents": [_facts(each) for each in found]}, indent=2))
        return
    if not found:
        echo("no quarantined documents")
        return
    _print(found)
    total = sum(counts.values())
    if total > len(found):
        echo(f"… and {total - len(found):,} more; raise --limit to see them")


@quarantine.command("retry")
def retry(
    name: IndexName,
    ids: Ids = None,
    every: All = False,
    config_path: ConfigPath = DEFAULT_PATH,
    as_json: AsJson = False,
) -> None:
    """Build quarantined documents again and write them.

    The pipeline does this at once if it is running, otherwise at its next start. Documents that are rejected
    again stay quarantined.

    Examples:

        penstock index quarantine retry customers 42
        penstock index quarantine retry customers --all
    """
    _require_choice(ids, every)
    with configured(config_path) as config, _opened(config, name) as store:
        asked = [] if store is None else store.retry(name, None if every else ids)
        with existing_store(config, config.indexes) as state:
            is_running = state is not None and running(state) is not None
    _refuse_unknown(name, ids, asked)
    if as_json:
        echo(json.dumps({"index": name, "ids": asked, "running": is_running}))
    else:
        when = "now" if is_running else "at the next start of the pipeline"
        echo(f"{count_of(len(asked), 'document')} of index {name} will be retried {when}")


@quarantine.command("drop")
def drop(
    name: IndexName,
    ids: Ids = None,
    every: All = False,
    config_path: ConfigPath = DEFAULT_PATH,
    as_json: AsJson = False,
) -> None:
    """Remove documents from the quarantine without writing them.

    The index keeps the previous version of a document, if it has one, until one of the document's rows changes.

    Examples:

        penstock index quarantine drop customers 42
        penstock index quarantine drop customers --all
    """
    _require_choice(ids, every)
    with configured(config_path) as config, _opened(config, name) as store:
        count = 0 if store is None else store.drop(name, None if every else ids)
    if as_json:
        echo(json.dumps({"index": name, "dropped": count}))
    else:
        echo(f"dropped {count_of(count, 'document')} from the quarantine of index {name}")


@contextmanager
def _opened(config: Config, name: str | None) -> Iterator[Quarantine | None]:
    """Open the quarantine; None if the pipeline has never run, since listing must not create it."""
    require_shared_state(config)
    if name is not None:
        config.indexes.index(name)
    with existing_store(config, config.indexes) as store:
        yield None if store is None else Quarantine(store.database)


def _require_choice(ids: list[str] | None, every: bool) -> None:
    if bool(ids) == every:
        raise typer.BadParameter("give either document ids or --all", param_hint="ID")


def _refuse_unknown(name: str, ids: list[str] | None, found: list[str]) -> None:
    unknown = [each for each in ids or () if each not in found]
    if unknown:
        what = f"document{'s' * (len(unknown) > 1)} {', '.join(unknown)}"
        raise PenstockError(f"no quarantined {what} in index {name}", hint="Run: penstock index quarantine list")


def _facts(each: Quarantined) -> dict[str, Any]:
    return {
        "index": each.index,
        "id": each.id,
        "reason": each.reason,
        "position": None if each.position is None else str(each.position),
        "body_hash": each.body_hash,
        "first_at": each.first_at.isoformat(),
        "last_at": each.last_at.isoformat(),
        "attempts": each.attempts,
        "wanted": each.wanted,
    }


def _print(found: list[Quarantined]) -> None:
    table = make_table("index", "id", "rejected", "attempts", "reason", right=("attempts",))
    for each in found:
        ending = ", to be retried" if each.wanted else ""
        table.add_row(
            Text(each.index),
            Text(each.id),
            Text(f"{each.last_at:%Y-%m-%d %H:%M:%S}"),
            Text(str(each.attempts)),
            Text(f"{each.reason}{ending}"),
        )
    wide_console().print(table)
