"""Checks of what the role may create: the publication, with its tables, and the DDL trigger."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.source.identity import quote_if_needed
from penstock.source.preflight.context import Context
from penstock.source.preflight.report import Check, Severity, counted, failed, listed, passed

_OTHERS = """
    select c.oid::int8, pg_catalog.pg_get_userbyid(c.relowner), r.rolsuper
    from pg_catalog.pg_class c join pg_catalog.pg_roles r on r.oid = c.relowner
    where c.oid = any(%s::pg_catalog.oid[]) and not pg_catalog.pg_has_role(c.relowner, 'usage')
"""
_OWNED = "select pg_catalog.pg_has_role(pubowner, 'usage') from pg_catalog.pg_publication where pubname = %s"
_SUPERUSER = "select rolsuper from pg_catalog.pg_roles where rolname = current_user"


def check_publication_privileges(context: Context) -> Iterator[Check]:
    """May the role create the publication, and add tables to it?"""
    name = context.request.publication
    if name is None or not context.request.manage_publication:
        return
    user, database = context.connection.info.user, context.connection.info.dbname
    publication = context.publication
    members = frozenset[int]()
    if publication is None:
        if not context.value("select pg_catalog.has_database_privilege(current_database(), 'create')"):
            yield failed(
                "publication_privileges",
                Severity.CRITICAL,
                f"role {user!r} may not create publications in database {database!r}",
                f"Run: grant create on database {quote_if_needed(database)} to {quote_if_needed(user)};",
            )
            return
    else:
        members = context.members
        if not context.value(_OWNED, name):
            missing = [str(each) for each in context.subjects if each.published.oid not in members]
            yield failed(
                "publication_privileges",
                Severity.CRITICAL if missing and not members else Severity.WARNING,
                f"publication {name!r} belongs to {publication.owner}, so role {user!r} may not add or remove tables"
                + (f": {listed(missing)}" if missing else ""),
                f"Run: alter publication {quote_if_needed(name)} owner to {quote_if_needed(user)};",
                missing,
            )
            return
    wanted = {each.published.oid: str(each) for each in context.subjects if each.published.oid not in members}
    others = context.rows(_OTHERS, list(wanted))
    if others:
        names = sorted(wanted[oid] for oid, _, _ in others)
        owners = sorted({owner for _, owner, is_superuser in others if not is_superuser})
        grants = " ".join(f"grant {quote_if_needed(owner)} to {quote_if_needed(user)};" for owner in owners)
        yield failed(
            "publication_privileges",
            Severity.WARNING if len(others) < len(wanted) or members else Severity.CRITICAL,
            f"role {user!r} does not own {counted(names)}, so it may not publish them: {listed(names)}",
            f"Run: {grants}"
            if grants
            else f"Create publication {name!r} as their owner, and set source.manage_publication = false.",
            names,
        )
    else:
        yield passed("publication_privileges", f"role {user!r} may publish every table")


def check_trigger_privileges(context: Context) -> Iterator[Check]:
    """May the role create the event trigger of `source.ddl_trigger`?"""
    trigger = context.request.ddl_trigger
    if trigger is None or trigger.exists(context.connection):
        return
    if context.value(_SUPERUSER):
        yield passed("trigger_privileges", "the role may create event triggers")
    else:
        user = context.connection.info.user
        yield failed(
            "trigger_privileges",
            Severity.WARNING,
            f"role {user!r} is not a superuser; most servers let only superusers create the event trigger of "
            "source.ddl_trigger",
            "Remove source.ddl_trigger from the config, or run the first start as a superuser.",
        )


CHECKS: dict[str, Callable[[Context], Iterator[Check]]] = {
    "publication_privileges": check_publication_privileges,
    "trigger_privileges": check_trigger_privileges,
}
