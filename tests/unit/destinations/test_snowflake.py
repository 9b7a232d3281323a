"""The snowflake destination without a server: its options, its secrets, its columns and its errors."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from snowflake.connector import errors

from penstock.destinations.snowflake import SnowflakeDestination
from penstock.destinations.snowflake import connection as snowflake_connection
from penstock.destinations.snowflake.connection import failure
from penstock.destinations.snowflake.layout import Layout, Mode, Stored, follow, layout_from_json, plain, shown_name
from penstock.errors import (
    ConfigError,
    DestinationUnavailable,
    SchemaNotFollowed,
    TableBusy,
    TableRejected,
)
from penstock.schema import Column, PostgresType
from penstock.testing.destinations.contract import LINES, ORDERS

LOGIN = {"account": "org-account", "user": "me"}
TYPES = pa.schema([("id", pa.int64()), ("note", pa.string()), ("due", pa.date32())])


def opened(**options: object) -> SnowflakeDestination:
    return SnowflakeDestination("shop", "Mirror", **{**LOGIN, **options})


def pem(path: Path, passphrase: bytes | None = None) -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    lock = serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
    form = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    return key.private_bytes(serialization.Encoding.DER, form, serialization.NoEncryption())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "append"}, "unknown mode 'append'"),
        ({"timeout": 0}, "timeout must be a number of seconds above zero"),
        ({"commit_interval": True}, "commit_interval must be a number"),
        ({"account": None}, "needs account"),
        ({"endpoint": "localhost:1"}, "must start with http"),
        ({"private_key_file": "/nowhere/key.p8"}, "(private_key_file) cannot be read"),
        ({"connection_name": "nobody"}, "connections.toml"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_written(
    options: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snowflake_connection, "CONFIG_MANAGER", {"connections": {}})
    with pytest.raises(ConfigError) as error:
        opened(**options)
    assert says in str(error.value)


def test_unquoted_names_are_those_of_snowflake() -> None:
    connection = opened()._connection
    assert (connection.database, connection.schema) == ("SHOP", "Mirror")
    assert connection.name('a"b') == '"SHOP"."Mirror"."a""b"'
    assert [shown_name(name, 3, ["ID"]) for name in ("note", "id", "ID", "Two words")] == [
        *("NOTE", "ID_3", "ID_3", "Two words")
    ]


def test_secrets_go_to_tasks_and_are_never_printed(tmp_path: Path) -> None:
    der = pem(tmp_path / "key.p8", b"open sesame")
    connection = opened(
        password="hidden one", private_key_file=str(tmp_path / "key.p8"), private_key_passphrase="open sesame"
    )._connection
    found = dict(pickle.loads(pickle.dumps(connection)).parameters)
    assert found["private_key"] == der
    assert found["password"] == "hidden one"
    assert "hidden" not in repr(connection)
    assert "sesame" not in repr(connection)
    with pytest.raises(ConfigError) as error:
        opened(private_key_file=str(tmp_path / "key.p8"), private_key_passphrase="wrong word")
    assert "wrong word" not in f"{error.value} {error.value.hint}"


def test_a_connection_of_the_connector_is_read_on_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    der = pem(tmp_path / "key.p8")
    known = {"connections": {"work": {"account": "a", "user": "b", "private_key_file": str(tmp_path / "key.p8")}}}
    monkeypatch.setattr(snowflake_connection, "CONFIG_MANAGER", known)
    destination = SnowflakeDestination("shop", "mirror", connection_name="work", user="c")
    assert dict(destination._connection.parameters) == {"account": "a", "user": "c", "private_key": der}


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (errors.OperationalError(msg="x", errno=250001), DestinationUnavailable),
        (errors.InternalServerError(msg="x", errno=290500), DestinationUnavailable),
        (ConnectionResetError(), DestinationUnavailable),
        (errors.ProgrammingError(msg="cancelled", errno=604), DestinationUnavailable),
        (errors.DatabaseError(msg="Incorrect username", errno=390100), ConfigError),
        (errors.ProgrammingError(msg="Insufficient privileges", errno=3001), ConfigError),
        (errors.ProgrammingError(msg="No active warehouse", errno=606), ConfigError),
        (errors.ProgrammingError(msg="locked", errno=625), TableBusy),
        (errors.ProgrammingError(msg="no such object", errno=2003), TableRejected),
        (errors.ProgrammingError(msg="'a secret' is too long", errno=100078, sqlstate="22000"), TableRejected),
    ],
)
def test_errors_say_what_helps_and_never_a_value(error: Exception, meaning: type[Exception]) -> None:
    found = failure("public.orders", error)
    assert isinstance(found, meaning)
    assert "secret" not in str(found)


def test_an_error_that_is_not_of_the_connector_stays_as_it_is() -> None:
    error = ValueError("x")
    assert failure("public.orders", error) is error


def test_a_column_that_comes_back_with_another_type_never_meets_earlier_values() -> None:
    key, note, due = ORDERS.columns
    number, text = Stored(4, "amount", "NUMBER(38,0)"), Stored(4, "amount", "VARCHAR")
    assert number.column != text.column
    layout = Layout(Mode.MIRROR, ORDERS, TYPES)
    assert layout_from_json(layout.to_json()) == layout
    dropped = replace(ORDERS, columns=(key, due))
    types = pa.schema([TYPES.field("id"), TYPES.field("due")])
    assert "C2_VARCHAR" not in follow("t", layout, dropped, types, keep_dropped=False).columns
    kept = follow("t", layout, dropped, types, keep_dropped=True)
    assert kept.kept == (Stored(2, "note", "VARCHAR"),)
    assert '"C2_VARCHAR" as "NOTE"' in kept.view("x")
    again = follow("t", kept, ORDERS, TYPES, keep_dropped=True)
    assert again.kept == ()
    assert note in again.schema.columns


@pytest.mark.parametrize(
    "columns",
    [
        lambda key, note, due: (key, note, replace(due, type=PostgresType(25, "text"))),
        lambda key, note, due: (replace(key, identity=False, primary_key_position=None), note, due),
        lambda key, note, due: (key, note, due, Column("more", 4, PostgresType(25, "text"), missing="x")),
    ],
)
def test_what_only_a_new_copy_can_follow_is_refused(columns: object) -> None:
    changed = replace(ORDERS, columns=columns(*ORDERS.columns))  # type: ignore[operator]
    types = pa.schema([(column.name, pa.string()) for column in changed.columns])
    types = types.set(0, TYPES.field(0)) if changed.columns[2].type.name == "text" else types.set(2, TYPES.field(2))
    with pytest.raises(SchemaNotFollowed):
        follow("t", Layout(Mode.MIRROR, ORDERS, TYPES), changed, types, keep_dropped=False)


def test_a_table_without_a_key_is_copied_again_when_its_columns_change() -> None:
    types = pa.schema([("level", pa.int32()), ("line", pa.string())])
    names = {column.name for column in LINES.columns}
    types = plain(pa.schema([types.field(name) for name in names]), LINES)
    more = replace(LINES, columns=(*LINES.columns, Column("more", 9, PostgresType(25, "text"))))
    wider = types.append(pa.field("more", pa.string()))
    with pytest.raises(SchemaNotFollowed):
        follow("t", Layout(Mode.MIRROR, LINES, types), more, wider, keep_dropped=False)
