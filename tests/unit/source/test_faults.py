"""Replies of the server, in any language, to named errors."""

from __future__ import annotations

import pickle

import pytest

from penstock.errors import (
    AuthenticationFailed,
    DatabaseMissing,
    PermissionDenied,
    PublicationMissing,
    QueryFailed,
    Retry,
    ServerUnavailable,
    SlotInUse,
    SlotLost,
    SlotMissing,
    SlotUndecodable,
    SlotUnusable,
    SourceError,
    StatementInterrupted,
    TlsFailed,
    UnsupportedServer,
    WalLevelTooLow,
)
from penstock.source.faults import Place, Reply, classify, format_location, parse_pid

PLACE = Place("db.example:5432/shop", frozenset({"hunter2hunter2"}))

BY_STATE = [
    ("28P01", 'password authentication failed for user "x"', AuthenticationFailed),
    ("28000", "Rolle »x« existiert nicht", AuthenticationFailed),
    ("3D000", "Datenbank »x« existiert nicht", DatabaseMissing),
    ("42501", "permission denied for table t", PermissionDenied),
    ("42704", 'publication "pub" does not exist', PublicationMissing),
    ("42704", "Publikation »pub« existiert nicht", PublicationMissing),
    ("42704", 'replication slot "s1" does not exist', SlotMissing),
    ("42704", "Replikations-Slot »s1« existiert nicht", SlotMissing),
    ("42704", 'type "nope" does not exist', QueryFailed),
    ("55006", 'replication slot "s1" is active for PID 4711', SlotInUse),
    ("55006", "Replikations-Slot »s1« ist aktiv für PID 4711", SlotInUse),
    ("55000", 'can no longer get changes from replication slot "s1"', SlotLost),
    ("55000", 'can no longer access replication slot "s1"', SlotLost),
    ("55000", 'logical decoding requires "wal_level" >= "logical"', WalLevelTooLow),
    ("55000", "logische Dekodierung erfordert wal_level >= logical", WalLevelTooLow),
    ("55000", "logical decoding cannot be used while in recovery", UnsupportedServer),
    ("55000", 'replication slot "s1" was not created in this database', SlotUnusable),
    ("55000", 'cannot use "s1". This slot is being synchronized from the primary server.', ServerUnavailable),
    ("58P01", "requested WAL segment 000000010000000000000001 has already been removed", SlotLost),
    ("XX000", "requested WAL segment 0000000100000002000000E5 has already been removed", SlotLost),
    ("XX000", 'could not map filenumber "base/16384/16736" to relation OID', SlotUndecodable),
    ("XX000", "pg_attribute catalog is missing 3 attribute(s) for relation OID 16734", SlotUndecodable),
    ("XX000", "unexpected duplicate for tablespace 0, relfilenumber 16702", SlotUndecodable),
    ("57014", "canceling statement due to user request", StatementInterrupted),
    ("40P01", "deadlock detected", StatementInterrupted),
    ("25P03", "terminating connection due to idle-in-transaction timeout", StatementInterrupted),
    ("58030", "could not read block 3 in file", StatementInterrupted),
    ("XX000", "cache lookup failed for relation 16736", QueryFailed),
    ("58P01", 'could not access file "pgoutput": No such file or directory', QueryFailed),
    ("53400", "all replication slots are in use", SlotUnusable),
    ("53300", "sorry, too many clients already", ServerUnavailable),
    ("57P01", "terminating connection due to administrator command", ServerUnavailable),
    ("57P03", "the database system is starting up", ServerUnavailable),
    ("08006", "connection failure", ServerUnavailable),
    ("08P01", "invalid message", QueryFailed),
    ("42601", "syntax error", QueryFailed),
]


@pytest.mark.parametrize(("state", "message", "kind"), BY_STATE)
def test_the_sqlstate_decides(state: str, message: str, kind: type[SourceError]) -> None:
    error = classify(Reply(message, state), PLACE, "do it", slot="s1", publication="pub")
    assert type(error) is kind
    assert error.sqlstate == state
    assert "db.example:5432/shop" in str(error)
    assert "cannot do it" in str(error)
    assert pickle.loads(pickle.dumps(error)).facts == error.facts


CONNECTING = [
    ('connection to server at "h", port 1 failed: Connection refused', False, ServerUnavailable),
    ('could not translate host name "h" to address: Name or service not known', False, ServerUnavailable),
    ("connection timeout expired", False, ServerUnavailable),
    (
        'connection to server at "h", port 1 failed: FATAL:  the database system is starting up',
        False,
        ServerUnavailable,
    ),
    ('connection to server at "h", port 1 failed: FATAL:  sorry, too many clients already', True, ServerUnavailable),
    ('connection to server at "h", port 1 failed: FATAL:  role "x" does not exist', False, AuthenticationFailed),
    ('connection to server at "h", port 1 failed: FATAL:  database "x" does not exist', True, DatabaseMissing),
    ('connection failed: FATAL:  no pg_hba.conf entry for host "h", user "x", SSL off', False, AuthenticationFailed),
    ('connection to server at "h", port 1 failed: FATAL:  kein pg_hba.conf-Eintrag', False, AuthenticationFailed),
    (
        'connection to server at "h" failed: FATAL:  Passwort-Authentifizierung für Benutzer »x« fehlgeschlagen',
        True,
        AuthenticationFailed,
    ),
    ('connection to server at "h", port 1 failed: FATAL:  das Datenbanksystem startet', False, ServerUnavailable),
    ("connection failed: server does not support SSL, but SSL was required", False, TlsFailed),
    ("connection failed: SSL error: certificate verify failed", False, TlsFailed),
    ('root certificate file "/nope" does not exist', False, TlsFailed),
    ("SSL SYSCALL error: EOF detected", False, ServerUnavailable),
    (
        "connection failed: FATAL:  permission denied to start WAL sender\nDETAIL:  Only roles with REPLICATION may.",
        True,
        PermissionDenied,
    ),
    ("connection failed: FATAL:  must be superuser or replication role to start walsender", True, PermissionDenied),
]


@pytest.mark.parametrize(("message", "used_password", "kind"), CONNECTING)
def test_a_connection_that_failed_to_open(message: str, used_password: bool, kind: type[SourceError]) -> None:
    error = classify(Reply(message), PLACE, "connect", connecting=True, used_password=used_password)
    assert type(error) is kind
    assert "FATAL" not in str(error)
    assert error.hint


def test_a_cut_of_an_open_connection_is_tried_again() -> None:
    error = classify(Reply("SSL connection has been closed unexpectedly"), PLACE, "read")
    assert type(error) is ServerUnavailable
    assert error.retry is Retry.TIMED


def test_the_pid_of_the_other_reader_is_a_fact() -> None:
    error = classify(Reply('replication slot "s1" is active for PID 4711', "55006"), PLACE, "start", slot="s1")
    assert (error.slot, error.pid) == ("s1", 4711)
    assert parse_pid('스토리지 슬롯 "s7" PID 4711') == 4711
    assert parse_pid("le slot « s1 » est actif pour le 4711") == 4711
    assert parse_pid("nothing here") is None


def test_details_are_kept_and_secrets_are_not() -> None:
    reply = Reply("failed with hunter2hunter2", "42601", detail="password=abc at postgresql://u:pw@h/d", hint="try")
    error = classify(reply, PLACE, "connect")
    for text in (str(error), repr(error), error.hint, str(error.facts), repr(PLACE)):
        assert "hunter2" not in text
        assert "abc" not in text
        assert "pw@" not in text
    assert error.hint == "try"


def test_locations_read_like_addresses() -> None:
    assert format_location("::1", "5433", "d") == "[::1]:5433/d"
    assert format_location("", "", "d") == "localhost:5432/d"
