"""Connections that tasks use one after the other: a few per process, opened when they are first needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import pq

from penstock.errors import ServerUnavailable
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect

SESSION: Mapping[str, str] = {**NO_TIMEOUTS, "lock_timeout": "200"}
"""Patient with rows, not with locks: in a deadlock with somebody who empties or alters several tables we give way, long
before the server looks for a victim, and try again."""

_KEPT = 4
"""Connections that wait for the next task; in a Python worker of Spark one is enough."""


class ConnectionPool:
    """Belongs to a process; what a fork has inherited is not used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, SourceSettings], list[psycopg.Connection[Any]]] = {}

    @contextmanager
    def borrow(self, source: SourceSettings) -> Iterator[psycopg.Connection[Any]]:
        """A connection in autocommit, for this thread alone; after an error it is not used again."""
        key = (os.getpid(), source)
        with self._lock:
            idle = self._idle.setdefault(key, [])
            connection = idle.pop() if idle else None
        connection = connection or connect(source, Role.DOCUMENTS, parameters=SESSION)
        try:
            yield connection
        except BaseException as error:
            connection.close()
            if isinstance(error, ServerUnavailable):
                self.clear()  # the others are cut off as well
            raise
        if connection.info.transaction_status != pq.TransactionStatus.IDLE:
            connection.close()
            return
        with self._lock:
            if len(idle) < _KEPT:
                idle.append(connection)
                return
        connection.close()

    def clear(self) -> None:
        """Close what waits."""
        with self._lock:
            waiting = [each for (process, _), idle in self._idle.items() if process == os.getpid() for each in idle]
            self._idle.clear()
        for each in waiting:
            each.close()


POOL = ConnectionPool()
"""The one of this process."""
