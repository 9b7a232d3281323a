"""Pipelines of tests as the role that docs/guides/postgres.md describes, instead of a superuser.

With `PENSTOCK_TEST_ROLE=documented` the address of a test's database is that of a role that may log in, read slots and
create publications, and that is a member of the role that owns the tables; no more. What tests do themselves (create
tables, end sessions, restart servers) they still do as a superuser, and a trigger gives what they create to the owner.
"""

from __future__ import annotations

import os

from penstock.testing.postgres import DatabaseServer, PostgresServer

VARIABLE = "PENSTOCK_TEST_ROLE"
DOCUMENTED = "documented"
ROLE, OWNER, PASSWORD = "penstock_documented", "owner_documented", "documented"

_ROLES = f"""
    do $$ begin
        create role {OWNER};
        create role {ROLE} login replication password '{PASSWORD}';
        grant {OWNER} to {ROLE};
    exception when duplicate_object or unique_violation then null;
    end $$
"""
_DATABASE = f"""
    grant connect, create on database "{{name}}" to {ROLE};
    grant create on database "{{name}}" to {OWNER};
    grant create on schema public to {OWNER};
    create schema testing;
    create function testing.give_away() returns event_trigger language plpgsql security definer as $$
    declare
        made record;
    begin
        -- What other roles create is theirs.
        if not (select rolsuper from pg_roles where rolname = session_user) then
            return;
        end if;
        for made in select distinct on (objid) * from pg_event_trigger_ddl_commands()
            where classid in ('pg_class'::regclass, 'pg_namespace'::regclass, 'pg_publication'::regclass)
                and command_tag ~ '^(CREATE TABLE|SELECT INTO|CREATE SCHEMA|CREATE PUBLICATION)' and not in_extension
        loop
            if made.object_type in ('table', 'schema', 'publication')
                and made.schema_name is distinct from 'pg_temp' then
                execute format('alter %s %s owner to {OWNER}', made.object_type, made.object_identity);
            end if;
        end loop;
    end $$;
    create event trigger give_away on ddl_command_end execute function testing.give_away();
"""


def is_wanted() -> bool:
    """Whether this run is one with the documented role."""
    return os.environ.get(VARIABLE) == DOCUMENTED


def documented_dsn(server: DatabaseServer, name: str) -> str:
    """Prepare a database, and return its address for the documented role."""
    assert isinstance(server, PostgresServer), "the documented role needs a server of the tests"
    server.execute(_ROLES)
    server.execute(_DATABASE.format(name=name), database=name)
    return server.dsn(name, user=ROLE, password=PASSWORD)
