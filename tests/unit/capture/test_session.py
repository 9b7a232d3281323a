"""Reading from a replication connection, without a server: what counts as silence, and what waits in the queue."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from penstock.capture.parcels import ParcelQueue
from penstock.capture.session import ReplicationSession, StartOptions
from penstock.errors import ServerUnavailable
from penstock.lsn import Lsn


class SlowConnection:
    """A connection over which one long message arrives, byte by byte, and never ends."""

    host = port = db = user = password = b""
    server_version = 180000

    def __init__(self, ours: socket.socket) -> None:
        self._ours = ours
        self.socket = ours.fileno()

    def get_copy_data(self, _):
        return 0, None

    def consume_input(self):
        self._ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(100)

    def put_copy_data(self, answer):
        pass

    def flush(self):
        return 0


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def session(ends, monkeypatch):
    connection = SlowConnection(ends[0])
    monkeypatch.setattr("penstock.capture.session.connect_replication", lambda settings: connection)
    return ReplicationSession(None, StartOptions("slot", ("publication",)))


def _read(session, stop):
    session.read(ParcelQueue(1000), lambda: Lsn(0), stop, answer_seconds=0.2, silence_seconds=0.5)


def test_a_message_that_is_long_in_coming_is_not_silence(session, ends):
    stop = threading.Event()

    def send():
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            ends[1].send(b"x")
            time.sleep(0.02)
        stop.set()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        _read(session, stop)
    finally:
        sender.join()


def test_a_server_that_says_nothing_is_given_up(session):
    with pytest.raises(ServerUnavailable, match="silent"):
        _read(session, threading.Event())


def test_keepalives_do_not_pile_up_while_nobody_takes_them():
    queue = ParcelQueue(1000)
    for position in range(1, 1000):
        queue.put(Lsn(position))
    assert queue.get(0) == 999
    assert queue.is_empty
