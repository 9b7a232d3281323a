"""Messages recorded from a real server, for tests that need no server.

`python -m tests.unit.capture.corpus` records them again: the replication messages of a small workload (many types,
all replica identities, key changes, TOAST, truncates, savepoints), once as ordinary and once as streamed
transactions, and the schemas that the catalog gave for each RELATION message.
"""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.capture.messages import Relation
from penstock.capture.parcels import HEADER, Parcel
from penstock.changes.wire import PADDING
from penstock.lsn import OrderKey
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.schema.table import schema_from_json, schema_to_json

PATH = Path(__file__).with_name("corpus.json.gz")


@dataclass(frozen=True)
class Corpus:
    """Recorded messages, with their replication headers."""

    ordinary: list[bytes]
    streamed: list[bytes]
    schemas: dict[int, TableSchema]


def load() -> Corpus:
    record = json.loads(gzip.decompress(PATH.read_bytes()))
    return Corpus(
        *([base64.b64decode(message) for message in record[name]] for name in ("ordinary", "streamed")),
        {int(key): schema_from_json(value) for key, value in record["schemas"].items()},
    )


def parcel(messages: list[bytes]) -> Parcel:
    return Parcel(b"".join((*messages, PADDING)), np.array([len(message) for message in messages], np.int64))


class RecordedResolver:
    """Stands in for the catalog: recorded schemas where the columns agree, text columns otherwise."""

    def __init__(self, schemas: dict[int, TableSchema]) -> None:
        self._schemas = schemas

    def learn(self, content: bytes, at: OrderKey) -> None:
        raise AssertionError("nothing was recorded")

    def resolve(self, relation: Relation, at: OrderKey | None = None) -> TableSchema:
        known = self._schemas.get(relation.table_id)
        if known and [column.name for column in known.columns] == [column.name for column in relation.columns]:
            return known
        return TableSchema(
            relation.table_id,
            relation.namespace,
            relation.name,
            tuple(
                Column(column.name, number, PostgresType(25, "text"), identity=column.is_key)
                for number, column in enumerate(relation.columns, start=1)
            ),
            ReplicaIdentity(relation.replica_identity),
        )


TABLES = """
create type mood as enum ('sad', 'ok', 'happy');
create domain positive as int check (value > 0);
create table plain (
  id bigint primary key, i2 int2, i4 int4, f4 float4, f8 float8, b bool, n numeric(12,2), wide numeric, t text,
  v varchar(20), ts timestamptz, tsn timestamp, d date, tm time, u uuid, j jsonb, by bytea, ia int[], ta text[],
  m mood, p positive, iv interval, r int4range, ip inet);
create table whole (a int, b text, c date);
alter table whole replica identity full;
create table toasted (id int primary key, small int, big text);
alter table toasted alter big set storage external;
create table silent (a int, b text);
alter table silent replica identity nothing;
create publication corpus for table plain, whole, toasted, silent;
"""

TYPES = """
insert into plain select
  {base} + i, i, i * 7, i * 0.5, i / 3.0, i % 2 = 0, i * 1.25, i * 1e30, 'text ' || i, 'v' || i,
  '2026-01-01 10:00:00.123456+00'::timestamptz + i * interval '1 day', '2026-01-01 10:00', '2026-02-28', '10:11:12.5',
  '11111111-2222-3333-4444-555555555555', '{{"a": [1, 2, null]}}', '\\x00ff10', array[1, null, i],
  array['a b', null, '"q"', 'x,y'], 'ok', 5, '1 day 02:03:04', '[1,5)', '10.0.0.1/8' from generate_series(1, 8) i;
insert into plain (id) values ({base} + 100);
"""

IDENTITIES = """
update plain set d = 'infinity', ts = '-infinity', tm = '24:00', n = 'NaN', ia = '{{{{1,2}},{{3,4}}}}'
  where id = {base} + 1;
update plain set d = '0044-03-15 BC', tsn = '12026-01-01 00:00:00' where id = {base} + 2;
update plain set id = {base} + 200 where id = {base} + 3;
update plain set id = {base} + 300 where id = {base} + 200;
delete from plain where id = {base} + 4;
insert into whole values (1, 'one', '2026-01-01'), (1, 'one', '2026-01-01'), (null, null, null);
update whole set b = 'two' where a = 1;
delete from whole where a is null;
insert into silent values (1, 'x');
"""

SAVEPOINTS = """
insert into toasted values ({base} + 1, 1, repeat('x', 3000)), ({base} + 2, 2, repeat('y', 3000));
update toasted set small = 10;
update toasted set id = {base} + 3 where id = {base} + 1;
insert into toasted select {base} + i, i, repeat('z', 1000) from generate_series(500, 500 + {filler}) i;
savepoint s;
insert into toasted select {base} + i, i, repeat('z', 1000) from generate_series(600, 600 + {filler}) i;
update toasted set small = 99;
rollback to s;
update toasted set small = 11;
truncate whole, silent;
insert into whole values (7, 'seven', '2026-07-07');
"""


def record() -> None:
    """Run the workload on a server of our own and write down what it sends."""
    from penstock.capture.messages import parse_relation
    from penstock.capture.relations import CatalogResolver
    from penstock.capture.session import ReplicationSession, StartOptions
    from penstock.source.connections import Role, SourceSettings, connect
    from penstock.testing.postgres import PostgresServer

    class NoVersions:
        def latest(self, table_id: int) -> None:
            return None

    with PostgresServer(settings={"logical_decoding_work_mem": "64kB"}) as server:
        server.execute(TABLES)
        for slot in ("ordinary", "streamed"):
            server.execute(f"select pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        small = [part.format(base=0, filler=1) for part in (TYPES, IDENTITIES, SAVEPOINTS)]
        # Too large for the server's memory: this one is streamed.
        large = "".join(part.format(base=1000, filler=70) for part in (TYPES, IDENTITIES, SAVEPOINTS))
        for statements in (*small, large):
            server.execute(f"begin; {statements} commit;")
        end = server.execute("select pg_current_wal_flush_lsn()")[0][0]
        schemas: dict[int, TableSchema] = {}
        found: dict[str, list[bytes]] = {}
        settings = SourceSettings(server.dsn())
        with connect(settings, Role.CATALOG) as catalog:
            resolver = CatalogResolver(catalog, NoVersions())  # pyright: ignore
            for slot in ("ordinary", "streamed"):
                session = ReplicationSession(settings, StartOptions(slot, ("corpus",), streaming=slot == "streamed"))
                found[slot] = _read_until(session, end)
                for message in found[slot]:
                    if message[HEADER : HEADER + 1] == b"R":
                        body = message[HEADER:]
                        try:
                            relation = parse_relation(body)
                        except Exception:  # streamed
                            relation = parse_relation(body, streamed=True)
                        schemas[relation.table_id] = resolver.resolve(relation)
    PATH.write_bytes(
        gzip.compress(
            json.dumps(
                {name: [base64.b64encode(message).decode() for message in messages] for name, messages in found.items()}
                | {"schemas": {key: schema_to_json(value) for key, value in schemas.items()}}
            ).encode(),
            mtime=0,
        )
    )


def _read_until(session, end: str) -> list[bytes]:
    from penstock.lsn import Lsn

    session.start(Lsn(0))
    messages: list[bytes] = []
    while True:
        length, message = session.connection.get_copy_data(0)
        assert length > 0
        if message[0] == ord("w"):
            messages.append(bytes(message))
        elif int.from_bytes(message[1:9], "big") >= Lsn.parse(end):
            session.close()
            return messages


if __name__ == "__main__":
    record()
