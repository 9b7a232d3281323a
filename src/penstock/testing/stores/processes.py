"""What the processes of `DurableStoreContract` do: `python -m penstock.testing.stores.processes <role> <url>`."""

from __future__ import annotations

import sys
from typing import IO

from penstock.errors import LeaseHeld, LeaseLost
from penstock.lsn import Lsn
from penstock.state import DataSync, Init, PipelineStore, open_store
from penstock.testing.stores.samples import APPLY, LINEAGE, TABLES


def main(role: str, url: str) -> None:
    """One role, told by its parent through standard input when to go on."""
    output = sys.stdout
    with open_store(url, "contract") as store:
        store.use_lineage(LINEAGE)
        match role:
            case "update":
                store.acquire_lease()
                _update(store, output)
            case "race":
                _say(output, "waiting")
                sys.stdin.readline()
                try:
                    lease = store.acquire_lease()
                    _say(output, f"held {lease.holder.pid}")
                except LeaseHeld as error:
                    _say(output, f"refused {error.pid}")
                sys.stdin.readline()
            case "sleep":
                store.acquire_lease(ttl=0.6)
                _say(output, "held")
                sys.stdin.readline()
                try:
                    store.update_table_replication_state(2, Init())
                    _say(output, "written")
                except LeaseLost:
                    _say(output, "lost")
            case _:
                raise SystemExit(f"unknown role {role}")


def _update(store: PipelineStore, output: IO[str]) -> None:
    store.update_table_replication_states({table_id: Init() for table_id in TABLES})
    for number in range(1, 1_000_000):
        phase = DataSync() if number % 2 else Init()
        store.update_table_replication_states(dict.fromkeys(TABLES, phase))
        positions = {table_id: Lsn(number) for table_id in TABLES}
        store.upsert_replication_progress(APPLY, Lsn(number), table_positions=positions)
        _say(output, str(number))


def _say(output: IO[str], line: str) -> None:
    output.write(line + "\n")
    output.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
