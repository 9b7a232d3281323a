"""Brings source and destination to one position, so that they can be compared while both are in use.

The pipeline applies changes up to the server's current position and no further. Then `verify` takes a snapshot, whose
position S is at or after that one. The pipeline continues up to exactly S and stays there until it is released, so the
destination has exactly the transactions that the snapshot shows. Apply is held for a few seconds; if the destination
keeps no versions, it is held until the comparison ends.

A snapshot waits for open transactions, and apply must not wait with it. After a moment `verify` releases apply, names
the sessions that block the snapshot, and starts again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from penstock.errors import PenstockError, SnapshotBlocked
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.source.connections import SourceSettings
from penstock.source.patterns import TableName
from penstock.source.slots import Blocker
from penstock.source.snapshots import Check, Snapshot, take_snapshot
from penstock.state import Command, CommandKind, CommandStatus, Ready, Store, SyncDone
from penstock.workers.apply_hold import PATIENCE_SECONDS, HoldStep

SNAPSHOT_SECONDS = 2.0
"""Longest time that apply waits for a snapshot."""
RETRY_SECONDS = 5.0
ANSWER_SECONDS = 600.0
"""How long a pipeline that lags may take to reach the position that the server had when `verify` asked."""
_POLL_SECONDS = 0.1
_NEWEST = Lsn(2**63 - 1)
"""After every version of a schema."""

logger = logging.getLogger(__name__)

OnBlocked = Callable[[SnapshotBlocked], None]


@dataclass(slots=True)
class HeldTables:
    """Tables at one position; see `hold_at_snapshot`."""

    snapshot: Snapshot
    tables: Mapping[int, TableSchema]
    """The tables that are at the snapshot's position, with the schemas that they have there."""
    left_out: Mapping[str, str]
    """The other tables by name, with the reason: being copied, errored."""
    _release: Callable[[], None] = field(repr=False)
    _released: bool = False

    @property
    def position(self) -> Lsn:
        return self.snapshot.position

    def release(self) -> None:
        """Let apply continue; the snapshot and the tables pinned at the destination stay."""
        if not self._released:
            self._released = True
            self._release()


@contextmanager
def hold_at_snapshot(
    source: SourceSettings,
    store: Store,
    *,
    wait: float = 60.0,
    on_blocked: OnBlocked | None = None,
    check: Check = lambda: None,
) -> Iterator[HeldTables]:
    """Bring the tables of a running output to the position of a snapshot, and hold them until `release` or the end.

    `store` is the output's state store. `hold_at_snapshot` waits up to `wait` seconds for transactions that block the
    snapshot, in turns with apply, and passes them to `on_blocked`; then it raises `SnapshotBlocked`. `check` raises
    what has ended the pipeline, if it runs in this process.
    """
    asking = _Asking(store, check)
    with _snapshot_ahead(source, asking, wait, on_blocked or _warn) as snapshot:
        left_out = asking.ask(HoldStep.ADVANCE, position=str(snapshot.position))
        with _renewing(asking) as stop:

            def release() -> None:
                stop.set()
                asking.ask(HoldStep.RELEASE)

            held = HeldTables(snapshot, _schemas_at(store, snapshot.position, left_out), left_out, release)
            try:
                yield held
            finally:
                held.release()


@dataclass(frozen=True, slots=True)
class Moment:
    """Tables at one position; see `hold_now`."""

    tables: Mapping[int, TableSchema]
    left_out: Mapping[str, str]
    """As in `HeldTables`."""


@contextmanager
def hold_now(store: Store, check: Check = lambda: None) -> Iterator[Moment]:
    """Bring the tables of a running output to the server's current position, and hold them there inside the block."""
    asking = _Asking(store, check)
    left_out = asking.ask(HoldStep.HOLD)
    try:
        with _renewing(asking):
            yield Moment(_schemas_at(store, _NEWEST, left_out), left_out)
    finally:
        asking.ask(HoldStep.RELEASE)


@contextmanager
def _snapshot_ahead(source: SourceSettings, asking: _Asking, wait: float, on_blocked: OnBlocked) -> Iterator[Snapshot]:
    """Yield a snapshot that was taken while apply was held before it; apply stays held."""
    deadline = time.monotonic() + wait
    while True:
        asking.ask(HoldStep.HOLD)
        try:
            snapshot = take_snapshot(source, timeout=SNAPSHOT_SECONDS, on_wait=_say_nothing)
        except SnapshotBlocked as blocked:
            asking.ask(HoldStep.RELEASE)
            if time.monotonic() >= deadline:
                raise
            on_blocked(blocked)
            time.sleep(min(RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
            continue
        except BaseException:
            asking.ask(HoldStep.RELEASE)
            raise
        with snapshot:
            yield snapshot
        return


@contextmanager
def _renewing(asking: _Asking) -> Iterator[threading.Event]:
    """Renew the hold from time to time until the event is set."""
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(PATIENCE_SECONDS / 4):
            try:
                asking.ask(HoldStep.RENEW)
            except PenstockError as error:
                logger.warning("apply is no longer held error=%s", error)
                return

    thread = threading.Thread(target=renew, name="renew-hold", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join()


class _Asking:
    """Sends commands to the running pipeline and waits for the answers."""

    def __init__(self, store: Store, check: Check) -> None:
        self._store = store
        self._check = check
        self._name = uuid.uuid4().hex

    def ask(self, step: HoldStep, **options: str) -> dict[str, str]:
        """Wait until a step is done; return the tables that it leaves out."""
        answer = self._await(self._send(step, **options))
        if answer.status is CommandStatus.REFUSED:
            raise PenstockError(f"the pipeline refused the comparison: {answer.reason}")
        return dict(json.loads(answer.reason)["left_out"]) if answer.reason else {}

    def _send(self, step: HoldStep, **options: str) -> Command:
        return self._store.add_command(CommandKind.VERIFY, options={"step": step.value, "asker": self._name, **options})

    def _await(self, command: Command) -> Command:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not command.answered:
            self._check()
            lease = self._store.get_lease()
            if lease is None or lease.gone:
                raise PenstockError("the pipeline is not running", hint="Start it with `penstock run`.")
            if time.monotonic() > deadline:
                # Otherwise the pipeline would hold apply later, for a comparison that has ended.
                self._send(HoldStep.RELEASE)
                raise PenstockError(
                    f"the pipeline did not answer within {ANSWER_SECONDS:g} s",
                    hint="`penstock status` shows how far it is behind.",
                )
            time.sleep(_POLL_SECONDS)
            command = self._store.get_command(command.number) or command
        return command


def _schemas_at(store: Store, position: Lsn, left_out: Mapping[str, str]) -> dict[int, TableSchema]:
    """Return the followed tables, except those left out, with their schemas at a position."""
    store.load_table_replication_states()
    store.load_table_schemas()
    names = store.get_table_names()
    found: dict[int, TableSchema] = {}
    for table_id, phase in store.get_table_replication_states().items():
        version = store.get_table_schema(table_id, OrderKey(position, 0))
        if isinstance(phase, SyncDone | Ready) and version is not None:
            # A schema has the name that the table had at its last change.
            name = names.get(table_id, TableName(version.schema.namespace, version.schema.name))
            if str(name) not in left_out:
                found[table_id] = replace(version.schema, namespace=name.namespace, name=name.name)
    return found


def _warn(blocked: SnapshotBlocked) -> None:
    logger.warning("%s; trying again", blocked)


def _say_nothing(_: list[Blocker]) -> None:
    """Do nothing: the attempt is short, and the error at its end names the blockers."""
