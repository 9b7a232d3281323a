"""Names from a config stay names in commands of the replication protocol."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.capture import engine
from penstock.capture.session import ReplicationSession, StartOptions
from penstock.lsn import Lsn

HOSTILE = """a" LOGICAL 0/0; drop'"""


def test_names_cannot_leave_their_place_in_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = SimpleNamespace(host=b"", port=b"", db=b"", user=b"", password=b"", server_version=180000)
    monkeypatch.setattr("penstock.capture.session.connect_replication", lambda settings: connection)
    source: Any = None
    session = ReplicationSession(source, StartOptions(HOSTILE, (HOSTILE,)))
    command = session._start_command(Lsn(1))  # pyright: ignore[reportPrivateUsage]
    assert command.startswith("""START_REPLICATION SLOT "a"" LOGICAL 0/0; drop'" LOGICAL 0/1 (""")
    assert """publication_names '"a"" LOGICAL 0/0; drop''"'""" in command
    sent: list[str] = []

    def run_command(connection: Any, command: str, *_: Any, **__: Any) -> list[tuple[str, str]]:
        sent.append(command)
        return [("", "0/1")]

    monkeypatch.setattr(engine, "run_command", run_command)
    engine._create_temporary_slot(session, HOSTILE)  # pyright: ignore[reportPrivateUsage]
    assert sent[0].startswith("""CREATE_REPLICATION_SLOT "a"" LOGICAL 0/0; drop'" TEMPORARY """)
