"""Sessions that write to the world's tables while another one alters them, and indexes over these tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import psycopg
import yaml

from tests.integration.documents import world
from tests.support.document_ddl import DocumentDdl
from tests.support.writers import HANG_SECONDS, when_recovered

SESSIONS = 3
LEFT_ALONE = range(11, 31)
"""The keys of rows that writers leave alone, so nothing hides what DDL did to them."""
POISONED = "c_poison"
"""A field that cannot be computed for people whose column `poison` is 0."""
_FORGIVEN = (
    psycopg.errors.IntegrityError,
    psycopg.errors.DataError,
    psycopg.errors.ProgrammingError,
    # A published table that has no key at the moment refuses updates.
    psycopg.errors.ObjectNotInPrerequisiteState,
)
"""What a session expects of its statements while others change the tables."""
_BLOCKED = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
"""What ends a transaction, so that those that wait for it continue."""


class DocumentWriters:
    """Sessions that change the world's tables, and one that alters them, until the end of the `with` block."""

    def __init__(self, dsn: str, seed: int, ddl: DocumentDdl, stop: threading.Event) -> None:
        self._dsn = dsn
        self._ddl = ddl
        self._stop = stop
        self._moved = threading.Condition()
        self._error: BaseException | None = None
        self.transactions = 0
        self._threads = [
            threading.Thread(target=self._guard, args=(self._write, Random(f"{seed}-{number}")), daemon=True)
            for number in range(SESSIONS)
        ]
        self._threads.append(
            threading.Thread(target=self._guard, args=(self._alter, Random(f"{seed}-pauses")), daemon=True)
        )
        self.backends: list[int] = []
        """The process ids of the sessions' backends, the latest last."""

    def __enter__(self) -> DocumentWriters:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join(HANG_SECONDS)
        if self._error is not None:
            raise self._error
        when_recovered(self._settle)

    def wait(self, more: int) -> None:
        """Wait for so many more transactions."""
        with self._moved:
            target = self.transactions + more
            reached = self._moved.wait_for(lambda: self.transactions >= target or self._error is not None, HANG_SECONDS)
        if self._error is not None:
            raise self._error
        if not reached:
            raise TimeoutError(f"fewer than {more} transactions in {HANG_SECONDS:g} s")

    def _guard(self, work: Callable[[Random], None], random: Random) -> None:
        try:
            work(random)
        except BaseException as error:
            with self._moved:
                self._error = error
                self._moved.notify_all()

    def _connect(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self._dsn, autocommit=True)
        # DDL waits for transactions that wait for each other; short waits keep all of them moving.
        connection.execute("set lock_timeout = '300ms'")
        self.backends.append(connection.info.backend_pid)
        return connection

    def _each(self, work: Callable[[psycopg.Connection[Any]], None], pause: Callable[[], float]) -> None:
        """Work again and again; open a lost connection again."""
        connection = when_recovered(self._connect)
        while not self._stop.wait(pause()):
            try:
                work(connection)
            except psycopg.Error as error:
                if not connection.broken and not connection.closed and not isinstance(error, psycopg.OperationalError):
                    raise
                connection.close()
                connection = when_recovered(self._connect)
        connection.close()

    def _write(self, random: Random) -> None:
        def transaction(connection: psycopg.Connection[Any]) -> None:
            statements = 200 if random.random() < 0.01 else random.randint(1, 5)
            with suppress(*_BLOCKED):
                world.random_transaction(random, connection, statements, truncates=0.0003, forgiven=_FORGIVEN)
                if random.random() < 0.02:
                    world.fill(random, connection, forgiven=_FORGIVEN)
            if random.random() < 0.2:
                with suppress(*_FORGIVEN, *_BLOCKED):
                    text, values = _extra(random, self._ddl.labels)
                    connection.execute(text.encode(), values)
            with self._moved:
                self.transactions += 1
                self._moved.notify_all()

        self._each(transaction, lambda: 0.02)

    def _alter(self, random: Random) -> None:
        self._each(self._ddl.act, lambda: random.choice([0.1, 0.4, 1.0]))

    def _settle(self) -> None:
        """Undo what must not stay, and let no table end without rows."""
        with self._connect() as connection:
            self._ddl.settle(connection)
            for numbers in (range(1, 6), LEFT_ALONE):
                world.fill(Random(0), connection, numbers=numbers, forgiven=_FORGIVEN)


def _extra(random: Random, labels: Sequence[str]) -> tuple[str, list[Any]]:
    """A statement on what the world does not know: the enum, and the tables that inherit."""
    key = random.randint(1, 6)
    if random.random() < 0.6:
        return "update w.people set mood = %s where id = %s", [random.choice([*labels, None]), key]
    return random.choice(
        [
            ("update w.people_heir set name = 'heir' where id = %s", [key]),
            ("delete from w.people_heir where id = %s", [key]),
            ("insert into w.profiles_heir (person_id, motto) values (%s, 'heir')", [key]),
            ("update w.order_tags_heir set tag_id = 3 where order_id = %s", [key]),
        ]
    )


def random_indexes(random: Random, prefix: str) -> dict[str, str]:
    """Return two or three random specifications, some of whose levels show the enum, or can be poisoned."""
    return {
        f"{prefix}{number}": _with_more(random, world.random_text(random)) for number in range(random.randint(2, 3))
    }


def _with_more(random: Random, text: str) -> str:
    def add(level: dict[str, Any]) -> None:
        fields: list[dict[str, Any]] = level.get("fields", [])
        for each in fields:
            add(each)
        if level.get("table") == "people" and fields and random.random() < 0.6:
            fields.append({"keyword": "c_mood", "column": "mood"})
        if level.get("table") == "people" and fields and random.random() < 0.4:
            fields.append({"integer": POISONED, "expression": "1 / coalesce(poison, 1)"})

    written = yaml.safe_load(text)
    add(written)
    return yaml.safe_dump(written, sort_keys=False)
