"""`source.ddl_trigger`: shown beforehand, made, used, and removed."""

from __future__ import annotations

from typing import Any

from psycopg.conninfo import make_conninfo

from tests.integration.cli.support import Site

TRIGGERS = "select evtname from pg_event_trigger order by length(evtname::text)"
SCHEMAS = "select count(*) from pg_namespace where nspname = 'penstock_ddl'"


def configure(site: Site, *, wanted: bool) -> None:
    site.configure()
    path = site.folder / "penstock.toml"
    path.write_text(path.read_text().replace("[source]", f"[source]\nddl_trigger = {str(wanted).lower()}"))


def left(site: Site) -> tuple[Any, Any]:
    return site.database.execute(TRIGGERS), site.database.execute(SCHEMAS)


def test_the_trigger_is_shown_made_and_removed(site: Site):
    name = f"penstock_ddl_{site.slot}"
    configure(site, wanted=True)
    plan = site.run("run", "--plan")
    assert f"ddl trigger  {name}: would be created" in plan.stdout
    assert left(site) == ([], [(0,)])
    assert site.run("run", "--once", "-q").returncode == 0
    assert left(site) == ([(name,), (f"penstock_ddl_rewrite_{site.slot}",)], [(1,)])
    assert f"ddl trigger  {name}: exists" in site.run("run", "--plan").stdout
    # Nothing runs while the table is altered; the rows around it are followed all the same.
    site.database.execute("insert into orders values (9001, 'before')")
    site.database.execute("alter table orders add column extra int")
    site.database.execute("insert into orders values (9002, 'after', 1)")
    again = site.run("run", "--once", "-q")
    assert again.returncode == 0, again.stderr
    assert [row for row in site.rows("orders") if row[0] > 9000] == [(9001, "before"), (9002, "after")]
    removed = site.run("teardown", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert f"removed DDL trigger {name} and its functions" in removed.stdout
    assert left(site) == ([], [(0,)])


def test_a_trigger_that_is_not_wanted_any_more_goes_at_the_next_start(site: Site):
    configure(site, wanted=True)
    assert site.run("run", "--once", "-q").returncode == 0
    configure(site, wanted=False)
    assert "exists, and would be removed" in site.run("run", "--plan").stdout
    assert site.run("run", "--once", "-q").returncode == 0
    assert left(site) == ([], [(0,)])
    assert "ddl trigger" not in site.run("run", "--plan").stdout


def test_a_role_without_the_privilege_is_told_what_to_do(site: Site):
    role = f"reader_{site.database.name[-12:]}"
    site.database.execute(f"create role {role} login replication password 'reader'")
    try:
        site.database.execute("create publication shop for all tables")
        site.database.execute(f"grant select on all tables in schema public to {role}")
        configure(site, wanted=True)
        path = site.folder / "penstock.toml"
        path.write_text(path.read_text().replace("[source]", "[source]\nmanage_publication = false"))
        url = make_conninfo(site.database.dsn, user=role, password="reader")
        result = site.run("run", "--once", environment={"SOURCE_URL": url})
        assert result.returncode == 1
        assert "Creating event triggers needs a superuser" in result.stderr
        assert left(site) == ([], [(0,)])
    finally:
        site.database.execute(f"drop owned by {role}; drop role {role}")
