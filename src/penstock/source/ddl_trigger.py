"""An optional event trigger that records DDL in the stream: which columns a table has, from exactly this point on.

RELATION messages name columns and types. Attribute numbers and the primary key come from the catalog of *now*: while
capture is behind, a column that was dropped and added again looks like the old one. With the trigger, the source
records the attributes at the right place: after each DDL on a published table it emits a transactional logical message
with them. At each start, every table is announced once. A second event trigger records where ALTER TABLE computes
values of existing rows again, which the stream does not mention otherwise.

The triggers consist of functions and a table in the schema `penstock_ddl` and two event triggers, named after the slot,
so that two streams on one database do not interfere. They never make DDL fail: an error becomes a warning, and then the
catalog decides, as without a trigger. They send names, numbers and types; no defaults, no statements, no values. The
table is the ledger, which tells their messages from those of others (`penstock.source.ddl_messages`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from penstock.errors import PermissionDenied, UnsupportedServer
from penstock.source.columns import BACKFILLED
from penstock.source.faults import translated
from penstock.source.publications import DDL_SCHEMA as SCHEMA

PREFIX = "penstock_ddl"
REWRITE_PREFIX = f"{PREFIX}_rewrite:"
"""Begins the prefix of the messages about rewritten tables."""
_PADDING_PREFIX = f"{PREFIX}_end"
"""Of messages that nothing reads."""
MESSAGES_SINCE = 140000
"""Older servers do not send logical messages through pgoutput."""
_LONGEST_NAME = 63
_OWN_PUBLICATION = "ALTER PUBLICATION"
_TAGS = ("ALTER TABLE", "CREATE TABLE", "CREATE TABLE AS", "SELECT INTO", _OWN_PUBLICATION)

logger = logging.getLogger(__name__)

_EMIT = """
declare
    content text;
begin
    select pg_catalog.json_build_object(
        'table', c.oid::int8, 'namespace', n.nspname, 'name', c.relname, 'kind', c.relkind,
        'persistence', c.relpersistence, 'identity', c.relreplident, 'partition', c.relispartition,
        'primary_key', (
            select (x.indkey::int2[])[0:x.indnkeyatts - 1]
            from pg_catalog.pg_index x where x.indrelid = c.oid and x.indisprimary
        ),
        'deferrable', (
            select not x.indimmediate from pg_catalog.pg_index x where x.indrelid = c.oid and x.indisprimary
        ),
        'identity_key', (
            select (x.indkey::int2[])[0:x.indnkeyatts - 1]
            from pg_catalog.pg_index x
            where x.indrelid = c.oid and case c.relreplident
                when 'i' then x.indisreplident when 'd' then x.indisprimary and x.indimmediate else false
            end
        ),
        'attributes', (
            select pg_catalog.json_agg(
                pg_catalog.json_build_array(
                    a.attnum, a.attname, a.atttypid::int8, a.atttypmod, a.attisdropped, a.attgenerated, a.attnotnull,
                    {backfilled}
                ) order by a.attnum
            )
            from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0
        )
    )::text into content
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.oid = changed and c.relkind in ('r', 'p') and c.relpersistence = 'p';
    if content is not null then
        perform {send}({prefix}, content);
    end if;
end
"""

# Two equal messages of one transaction are one row.
_SEND = """
declare
    bytes bytea := pg_catalog.convert_to(content, 'UTF8');
begin
    insert into {ledger} (xid, digest, at) values (
        pg_catalog.pg_current_xact_id(),
        pg_catalog.sha256(pg_catalog.convert_to(prefix, 'UTF8') || bytes),
        pg_catalog.pg_logical_emit_message(true, prefix, bytes)
    ) on conflict do nothing;
end
"""

# A table's description arrives when the caller's transaction commits, and may be outdated by then. So only roles may
# call this that can read the slot, and thus do whatever they like to the stream. Rows that the slot is past are no
# longer needed. Rows from the future come from the dump of another server.
_ANNOUNCE = """
begin
    if not pg_catalog.pg_has_role(session_user, current_user, 'member')
        and not exists (
            select from pg_catalog.pg_roles r
            where r.rolname = session_user and r.rolreplication
                or r.rolname = 'rds_replication' and pg_catalog.pg_has_role(session_user, r.oid, 'member')
        )
    then
        raise insufficient_privilege using message = 'announcing tables needs the replication privilege';
    end if;
    delete from {ledger} l where l.at > pg_catalog.pg_current_wal_insert_lsn()
        or l.xid >= pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())
        or l.at < (select s.restart_lsn from pg_catalog.pg_replication_slots s where s.slot_name = {slot});
    perform {emit}(t.relid) from pg_catalog.pg_get_publication_tables({publication}) t;
end
"""

# Whatever happens to a partitioned table happens to its partitions, and the stream may speak of either. A statement on
# the publication itself can add any table.
_TRIGGER = """
declare
    changed oid;
begin
    if pg_catalog.current_setting('wal_level') <> 'logical'
        or not exists (select from pg_catalog.pg_publication p where p.pubname = {publication})
    then
        return;
    end if;
    for changed in
        with recursive altered (id) as (
            select d.objid from pg_catalog.pg_event_trigger_ddl_commands() d
            where d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
            union
            select i.inhrelid from altered a join pg_catalog.pg_inherits i on i.inhparent = a.id
        ), published as (
            select t.relid from pg_catalog.pg_get_publication_tables({publication}) t
        )
        select distinct a.id from altered a
        where exists (
            select from published p
            where p.relid = a.id or p.relid in (select r.relid from pg_catalog.pg_partition_ancestors(a.id) r)
        )
        union
        select p.relid from published p where tg_tag = {own}
        order by 1
    loop
        perform {emit}(changed);
    end loop;
    if found then
        -- This function has a handler of exceptions, so it is a subtransaction. The server sorts its messages between
        -- the rows of the transaction by where they end: without another record, that is where the next row begins,
        -- and the row may be sent first.
        perform pg_catalog.pg_logical_emit_message(true, {padding}, '');
    end if;
exception when others then
    raise warning 'penstock could not record a change of a table: %', sqlerrm;
end
"""


# The reasons are those of ALTER TABLE: 2 is a default that is computed for each row, 4 a column that gets another type.
_REWRITE = """
begin
    if pg_catalog.current_setting('wal_level') <> 'logical'
        or (pg_catalog.pg_event_trigger_table_rewrite_reason() & 6) = 0
        or not exists (select from pg_catalog.pg_publication p where p.pubname = {publication})
    then
        return;
    end if;
    perform {send}({rewrite_prefix}, pg_catalog.json_build_object(
        'table', t.relid::int8, 'name', n.nspname || '.' || c.relname
    )::text)
    from pg_catalog.pg_get_publication_tables({publication}) t
    join pg_catalog.pg_class c on c.oid = t.relid
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where t.relid = pg_catalog.pg_event_trigger_table_rewrite_oid() or t.relid in (
        select r.relid from pg_catalog.pg_partition_ancestors(pg_catalog.pg_event_trigger_table_rewrite_oid()) r
    );
exception when others then
    raise warning 'penstock could not record a change of a table: %', sqlerrm;
end
"""

_FUNCTIONS = """
    select p.proname, p.prosrc
    from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
    where n.nspname = %s and p.proname = any(%s)
"""
_ANY_FUNCTION = """
    select from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
    where n.nspname = %s limit 1
"""

# Only a superuser, or a role that the provider lets do so, can create an event trigger.
_STRANGERS = """
    select distinct o.owner::pg_catalog.regrole::text
    from (
        select n.nspowner from pg_catalog.pg_namespace n where n.nspname = %(schema)s
        union all
        select p.proowner from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
        where n.nspname = %(schema)s and p.proname = any(%(names)s)
        union all
        select c.relowner from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
        where n.nspname = %(schema)s and c.relname = any(%(names)s)
    ) o (owner)
    join pg_catalog.pg_roles r on r.oid = o.owner
    where not r.rolsuper and o.owner not in (
        select e.evtowner from pg_catalog.pg_event_trigger e where e.evtname = any(%(names)s)
    )
"""


@dataclass(frozen=True, slots=True)
class DdlTrigger:
    """The objects of one stream on its source."""

    slot: str
    publication: str

    @property
    def name(self) -> str:
        """Of the event trigger and its function."""
        return _fit(f"{PREFIX}_{self.slot}")

    @property
    def emit_name(self) -> str:
        return _fit(f"{PREFIX}_emit_{self.slot}")

    @property
    def rewrite_name(self) -> str:
        """Of the event trigger for rewritten tables, and of its function."""
        return _fit(f"{PREFIX}_rewrite_{self.slot}")

    @property
    def send_name(self) -> str:
        return _fit(f"{PREFIX}_send_{self.slot}")

    @property
    def announce_name(self) -> str:
        return _fit(f"{PREFIX}_announce_{self.slot}")

    @property
    def ledger(self) -> tuple[str, str]:
        """The table with the digests of all messages: its schema and name."""
        return SCHEMA, _fit(f"{PREFIX}_ledger_{self.slot}")

    @property
    def rewrite_prefix(self) -> str:
        """Of the messages about rewritten tables."""
        return f"{REWRITE_PREFIX}{self.slot}"

    @property
    def prefix(self) -> str:
        """Of the messages."""
        return message_prefix(self.slot)

    def create(self, connection: psycopg.Connection[Any]) -> None:
        """Create or update the objects; needs no privilege if they are up to date."""
        if connection.info.server_version < MESSAGES_SINCE:
            raise UnsupportedServer("the DDL trigger needs PostgreSQL 14 or newer", hint="Set ddl_trigger = false.")
        with translated(connection, "check the DDL trigger"):
            standby = connection.execute("select pg_catalog.pg_is_in_recovery()").fetchone() == (True,)
        if standby:
            raise UnsupportedServer(
                "the DDL trigger cannot be created on a standby",
                hint="Read from the primary, or set ddl_trigger = false.",
            )
        bodies = self._bodies(connection)
        with translated(connection, "check the DDL trigger"):
            found = dict(connection.execute(_FUNCTIONS, [SCHEMA, list(bodies)]).fetchall())
        if found == bodies and self.fires(connection):
            self._refuse_strangers(connection)
            return
        with connection.transaction():
            with _privileged(connection, "create the DDL trigger"):
                for statement in self._statements(bodies, has_ledger=self._has_ledger(connection)):
                    connection.execute(statement)
            self._refuse_strangers(connection)
        logger.info("ddl trigger created name=%s publication=%s", self.name, self.publication)

    def exists(self, connection: psycopg.Connection[Any]) -> bool:
        """True if any of its objects exists."""
        with translated(connection, "check the DDL trigger"):
            functions = connection.execute(_FUNCTIONS, [SCHEMA, self._functions]).fetchone()
            trigger = connection.execute(
                "select from pg_catalog.pg_event_trigger where evtname = any(%s)", [[self.name, self.rewrite_name]]
            ).fetchone()
        return functions is not None or trigger is not None

    def fires(self, connection: psycopg.Connection[Any]) -> bool:
        """True if the event triggers exist and fire in every session."""
        names = [self.name, self.rewrite_name]
        with translated(connection, "check the DDL trigger"):
            found = connection.execute(
                "select from pg_catalog.pg_event_trigger where evtname = any(%s) and evtenabled = 'A'", [names]
            )
            return len(found.fetchall()) == len(names)

    def announce(self, connection: psycopg.Connection[Any]) -> None:
        """Emit the attributes of every published table, for the time before the first DDL."""
        statement = sql.SQL("select {}()").format(sql.Identifier(SCHEMA, self.announce_name))
        with _privileged(connection, "announce the tables"):
            connection.execute(statement)

    def drop(self, connection: psycopg.Connection[Any]) -> bool:
        """Drop the objects; return False if there were none. The schema is dropped with the last of them."""
        with _privileged(connection, "drop the DDL trigger"), connection.transaction():
            found = connection.execute(_FUNCTIONS, [SCHEMA, self._functions]).fetchall()
            for trigger in (self.name, self.rewrite_name):
                connection.execute(sql.SQL("drop event trigger if exists {}").format(sql.Identifier(trigger)))
            for name, _ in found:
                function = sql.Identifier(SCHEMA, name)
                connection.execute(sql.SQL("drop function {}").format(function))
            connection.execute(sql.SQL("drop table if exists {}").format(sql.Identifier(*self.ledger)))
            others = connection.execute(_ANY_FUNCTION, [SCHEMA]).fetchone()
            if others is None:
                connection.execute(sql.SQL("drop schema if exists {}").format(sql.Identifier(SCHEMA)))
        return bool(found)

    @property
    def _functions(self) -> list[str]:
        return [self.name, self.emit_name, self.rewrite_name, self.send_name, self.announce_name]

    def _has_ledger(self, connection: psycopg.Connection[Any]) -> bool:
        found = connection.execute(
            "select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = %s and c.relname = %s",
            self.ledger,
        )
        return found.fetchone() is not None

    def _refuse_strangers(self, connection: psycopg.Connection[Any]) -> None:
        """Raise if a role owns one of the objects that may not create event triggers: it could forge messages."""
        names = [*self._functions, self.ledger[1]]
        with translated(connection, "check the DDL trigger"):
            owners = connection.execute(_STRANGERS, {"schema": SCHEMA, "names": names}).fetchall()
        if owners:
            raise PermissionDenied(
                f"objects of the DDL trigger in schema {SCHEMA} belong to {', '.join(owner for (owner,) in owners)}, "
                "who could forge what it records",
                hint=f"As a superuser, run: drop schema {SCHEMA} cascade; then start again.",
            )

    def _bodies(self, connection: psycopg.Connection[Any]) -> dict[str, str]:
        """The functions' texts by their names."""
        values = {
            "prefix": sql.Literal(self.prefix),
            "rewrite_prefix": sql.Literal(self.rewrite_prefix),
            "backfilled": sql.SQL(BACKFILLED),
            "publication": sql.Literal(self.publication),
            "own": sql.Literal(_OWN_PUBLICATION),
            "slot": sql.Literal(self.slot),
            "emit": sql.Identifier(SCHEMA, self.emit_name),
            "padding": sql.Literal(_PADDING_PREFIX),
            "send": sql.Identifier(SCHEMA, self.send_name),
            "ledger": sql.Identifier(*self.ledger),
        }
        texts = {
            self.emit_name: sql.SQL(_EMIT),
            self.name: sql.SQL(_TRIGGER),
            self.rewrite_name: sql.SQL(_REWRITE),
            self.send_name: sql.SQL(_SEND),
            self.announce_name: sql.SQL(_ANNOUNCE),
        }
        return {name: text.format(**values).as_string(connection) for name, text in texts.items()}

    def _statements(self, bodies: Mapping[str, str], *, has_ledger: bool) -> Iterator[sql.Composed]:
        schema, ledger = sql.Identifier(SCHEMA), sql.Identifier(*self.ledger)
        event_triggers = (
            (self.name, sql.SQL("ddl_command_end"), _TAGS),
            (self.rewrite_name, sql.SQL("table_rewrite"), ("ALTER TABLE", "ALTER TYPE")),
        )
        yield sql.SQL("create schema if not exists {}").format(schema)
        yield sql.SQL("grant usage on schema {} to public").format(schema)
        if not has_ledger:
            yield sql.SQL(
                "create table {} (xid pg_catalog.xid8, digest bytea, at pg_catalog.pg_lsn not null, "
                "primary key (xid, digest))"
            ).format(ledger)
            # Messages of an earlier version of the trigger, which had no ledger, count up to here.
            yield sql.SQL(
                "insert into {} values (pg_catalog.pg_current_xact_id(), '', pg_catalog.pg_current_wal_insert_lsn())"
            ).format(ledger)
        yield sql.SQL("grant select on {} to public").format(ledger)
        for trigger, _, _ in event_triggers:
            yield sql.SQL("drop event trigger if exists {}").format(sql.Identifier(trigger))
        nothing, void, fired = sql.SQL(""), sql.SQL("void"), sql.SQL("event_trigger")
        signatures = {
            self.send_name: (sql.SQL("prefix text, content text"), void),
            self.emit_name: (sql.SQL("changed oid"), void),
            self.name: (nothing, fired),
            self.rewrite_name: (nothing, fired),
            self.announce_name: (nothing, void),
        }
        for function, (arguments, result) in signatures.items():
            name = sql.Identifier(SCHEMA, function)
            # Dropped first, so that it belongs to this role, not to the one that created it earlier.
            yield sql.SQL("drop function if exists {}").format(name)
            yield sql.SQL(
                "create function {name}({arguments}) returns {result} language plpgsql "
                "security definer set search_path = pg_catalog, pg_temp as {body}"
            ).format(name=name, arguments=arguments, result=result, body=sql.Literal(bodies[function]))
            # Roles that read the slot can announce tables even if another role has created the functions.
            if function != self.announce_name:
                yield sql.SQL("revoke all on function {} from public").format(name)
        for trigger, event, tags in event_triggers:
            name = sql.Identifier(trigger)
            yield sql.SQL(
                "create event trigger {name} on {event} when tag in ({tags}) execute function {schema}.{name}()"
            ).format(name=name, event=event, schema=schema, tags=sql.SQL(", ").join(map(sql.Literal, tags)))
            # Also with session_replication_role = replica, as subscriptions and some migration tools have it.
            yield sql.SQL("alter event trigger {} enable always").format(name)


def message_prefix(slot: str) -> str:
    """Of the messages that a stream's trigger sends."""
    return f"{PREFIX}:{slot}"


@contextmanager
def _privileged(connection: psycopg.Connection[Any], doing: str) -> Iterator[None]:
    """Add to `PermissionDenied` what the role needs."""
    try:
        with translated(connection, doing):
            yield
    except PermissionDenied as denied:
        raise PermissionDenied(
            denied.message,
            hint="Creating event triggers needs a superuser (or your provider's role for them). Start once with such a "
            "role, or set ddl_trigger = false.",
            **denied.facts,
        ) from None


def _fit(name: str) -> str:
    """A name that is short enough for the server."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
