"""`penstock run` and its sister commands as people run them: processes, on a real server, into Parquet files."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import psycopg
import pytest

from tests.integration.cli.support import BOTH, ONE, PATIENCE, Site, check_discreet


@pytest.mark.parametrize("master", ["none", "local[2]"])
def test_once_copies_catches_up_and_ends(site: Site, master: str):
    site.configure(master=master)
    first = site.run("run", "--once")
    assert first.returncode == 0, first.stderr
    check_discreet(site, first.stdout + first.stderr)
    assert "copied public.items: " in first.stderr
    assert "caught up" in first.stderr
    assert first.stdout == ""
    for table in ("orders", "items", "nothing"):
        assert site.rows(table) == site.source_rows(table)
    site.database.execute("update orders set note = 'changed' where id % 7 = 0; delete from items where id % 3 = 0")
    site.database.execute("insert into nothing values (1, 'something')")
    second = site.run("run", "--once", "--quiet")
    # Java says this by itself.
    errors = [line for line in second.stderr.splitlines() if "incubator" not in line]
    assert (second.returncode, second.stdout, errors) == (0, "", [])
    for table in ("orders", "items", "nothing"):
        assert site.rows(table) == site.source_rows(table)


def test_the_plan_changes_nothing(site: Site):
    def look() -> tuple[Any, ...]:
        publications = site.database.execute("select pubname, xmin::text from pg_publication")
        slots = site.database.execute(
            "select confirmed_flush_lsn from pg_replication_slots where slot_name = %s", [site.slot]
        )
        files = sorted(str(path.relative_to(site.folder)) for path in site.folder.rglob("*"))
        return publications, slots, files

    before = look()
    result = site.run("run", "--plan")
    assert result.returncode == 0, result.stderr
    assert "publication  shop: would be created, for 3 tables" in result.stdout
    assert f"slot         {site.slot}: would be created" in result.stdout
    assert "  public.orders   would be copied" in result.stdout
    assert look() == before
    assert "has not run yet" in site.run("tables").stdout
    assert look() == before
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("create table late (id int primary key, note text)")
    before = look()
    result = site.run("run", "--plan")
    assert "exists; public.late would be added" in result.stdout
    assert "public.orders   is already copied" in result.stdout
    assert "public.late     would be copied" in result.stdout
    assert look() == before
    check_discreet(site, result.stdout + result.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_a_run_well(site: Site, number: signal.Signals):
    process = site.start("run", "--status-every", "0.5")
    site.wait_output(process, "3 of 3 tables ready; ")
    site.database.execute("insert into nothing select i, 'n' from generate_series(1, 100) i")
    site.wait_rows("nothing")
    process.send_signal(number)
    assert process.wait(PATIENCE) == 0, site.output(process)
    text = site.output(process)
    check_discreet(site, text)
    assert "changes/s; lag" in text
    assert "stopped at " in text
    assert "pipeline shop is not running; 3 of 3 tables ready" in site.run("tables").stdout
    assert site.database.execute(
        "select active from pg_replication_slots where slot_name = %s", [site.slot]
    ) == [(False,)]  # fmt: skip


def test_ctrl_c_while_spark_copies_ends_well_and_the_next_run_is_whole(site: Site):
    site.database.execute(
        "create table big as select i as id, repeat('y', 200) as note from generate_series(1, 40000) i"
    )
    site.database.execute("alter table big add primary key (id)")
    site.configure(master="local[2]", more='[copy]\nmax_bytes_per_second = "500kB"')
    process = site.start("run")
    site.wait_output(process, "copying public.big")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0, site.output(process)
    check_discreet(site, site.output(process))
    assert site.phases()["public.big"] != "errored"
    site.configure(more="")
    assert site.run("run", "--once", "-q").returncode == 0
    assert site.rows("big") == site.source_rows("big")


def test_a_server_that_is_not_there_is_told_at_once(site: Site):
    url = "postgresql://postgres:hunter2secret@127.0.0.1:1/shop"
    result = site.run("run", environment={"SOURCE_URL": url})
    assert result.returncode == 75
    assert "cannot connect (127.0.0.1:1/shop)" in result.stderr
    assert "keeps trying" not in result.stderr
    assert "hunter2" not in result.stderr


def test_commands_reach_a_pipeline_that_runs(site: Site):
    process = site.start("run")
    site.wait_output(process, "following publication shop")
    site.wait_ready(3)

    second = site.run("run")
    assert second.returncode == 75
    assert f"is already running: process {process.pid} on " in second.stderr
    assert "Stop the other process" in second.stderr
    check_discreet(site, second.stderr)
    assert site.run("teardown", "--yes").returncode == 1

    assert site.run("pause").stdout == "paused; run `penstock resume` to continue\n"
    site.database.execute("insert into nothing values (1, 'while paused')")
    time.sleep(1.0)
    assert site.rows("nothing") == []
    assert site.run("resume").stdout == "resumed\n"
    site.wait_rows("nothing")

    result = site.run("resync", "orders", "public.it*")
    assert result.stdout == "public.orders, public.items will be copied again\n", result.stderr
    site.wait_ready(3)
    site.wait_rows("orders")
    again = site.output(process).index("copied public.items") + 1
    site.wait_output(process, "copied public.items", after=again)

    refused = site.run("rollback", "orders")
    assert refused.returncode == 1
    assert "rollback was refused: " in refused.stderr
    assert "only an errored table can be rolled back" in refused.stderr
    unknown = site.run("resync", "public.order")
    assert unknown.returncode == 1
    assert "did you mean 'public.orders'?" in unknown.stderr

    listing = site.run("tables")
    assert f"is run by process {process.pid}" in listing.stdout
    check_discreet(site, listing.stdout + unknown.stderr + refused.stderr)


def test_a_command_for_a_pipeline_that_does_not_run_waits_for_it(site: Site):
    never = site.run("pause")
    assert never.returncode == 1
    assert "has not run yet" in never.stderr
    assert site.run("run", "--once", "-q").returncode == 0
    noted = site.run("resync", "orders")
    assert noted.returncode == 0
    assert "is not running: resync is queued (command 1) until its next start" in noted.stdout
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock resync public.o", "COMP_CWORD": "2"}
    assert site.run(environment=asked).stdout.split() == ["public.orders"]
    result = site.run("run", "--once")
    assert result.returncode == 0, result.stderr
    assert "copied public.orders" in result.stderr
    assert "copied public.items" not in result.stderr
    assert site.rows("orders") == site.source_rows("orders")


def test_a_table_that_stops_is_explained(site: Site):
    site.database.execute("create table strange (id int primary key, note text, at date)")
    site.database.execute("insert into strange values (1, 'x', 'infinity')")
    site.configure(more='[types]\nout_of_range = "error"')
    result = site.run("run", "--once")
    assert result.returncode == 1, result.stderr
    assert "1 table stopped: public.strange" in result.stderr
    check_discreet(site, result.stderr)
    assert site.rows("orders") == site.source_rows("orders")
    listing = site.run("tables").stdout
    assert "public.strange stopped at " in listing
    assert "then: penstock rollback public.strange" in listing
    (error,) = [each["error"] for each in json.loads(site.run("tables", "--json").stdout)["tables"] if each["error"]]
    assert error["command"] == "rollback"
    site.database.execute("update strange set at = '2026-01-01'")
    assert site.run("rollback", "strange").returncode == 0
    again = site.run("run", "--once")
    assert again.returncode == 0, again.stderr
    assert site.rows("strange") == [(1, "x")]


def test_a_table_that_only_a_copy_helps_is_told_so(site: Site):
    site.configure(destination='[destination]\ntype = "delta"\npath = "lake"', more='[schema_changes]\nrecopy = "stop"')
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("alter table orders add column extra uuid default gen_random_uuid()")
    site.database.execute("update orders set note = 'changed'")
    stopped = site.run("run", "--once")
    assert stopped.returncode == 1, stopped.stderr
    remedy = "Copy the table again, with its new columns: penstock resync public.orders."
    (line,) = [line for line in stopped.stderr.splitlines() if "stopped public.orders: " in line]
    assert line.endswith(remedy)
    listing = site.run("tables").stdout
    assert f"  {remedy}\n" in listing
    assert "then:" not in listing
    (error,) = [each["error"] for each in json.loads(site.run("tables", "--json").stdout)["tables"] if each["error"]]
    assert error["command"] == "resync"
    assert site.run("resync", "orders").returncode == 0
    again = site.run("run", "--once")
    assert again.returncode == 0, again.stderr


@pytest.mark.remedy("NotIdentified", "replica_identity")
def test_a_table_whose_updates_the_server_would_reject_is_left_out_until_its_remedy_is_run(site: Site):
    site.database.execute("create table keyless (id int, note text); insert into keyless values (1, 'a')")
    remedy = "Run: alter table public.keyless replica identity full;"
    plan = site.run("run", "--plan").stdout
    assert "  public.keyless  WOULD BE LEFT OUT: it has no replica identity, so publishing it" in plan
    assert "would be created, for 3 tables" in plan
    check = site.run("check", "--json")
    assert check.returncode == 0, check.stdout
    (finding,) = [each for each in json.loads(check.stdout)["checks"] if each["id"] == "replica_identity"]
    assert (finding["severity"], finding["subjects"]) == ("warning", ["public.keyless"])
    result = site.run("run", "--once")
    assert result.returncode == 0, result.stderr
    assert f"{remedy}\n" in result.stderr
    site.database.execute("update keyless set note = 'b'; delete from keyless where id = 2")
    status = json.loads(site.run("status", "--json").stdout)
    (left_out,) = status["source"]["left_out"]
    assert (left_out["table"], left_out["solution"].endswith(remedy)) == ("public.keyless", True)
    assert remedy in " ".join(site.run("status").stdout.split())
    # a person may name it
    site.configure(more='[tables."public.keyless"]\npublish_without_identity = true')
    assert "public.keyless  would be copied; NO REPLICA IDENTITY" in site.run("run", "--plan").stdout
    assert site.run("run", "--once", "-q").returncode == 0
    assert site.phases()["public.keyless"] == "ready"
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        site.database.execute("update keyless set note = 'c'")
    # who takes that back gets a table that can be written
    site.configure()
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("update keyless set note = 'd'")
    assert "public.keyless" not in site.phases()
    site.database.execute(left_out["solution"].partition("Run: ")[2])
    assert site.run("run", "--once", "-q").returncode == 0
    assert site.rows("keyless") == [(1, "d")]
    assert json.loads(site.run("status", "--json").stdout)["source"]["left_out"] == []


def created(site: Site) -> list[Any]:
    """What a pipeline has created on the server."""
    found = "select slot_name::text from pg_replication_slots where database = current_database()"
    return site.database.execute(f"{found} union all select pubname::text from pg_publication")


@pytest.mark.remedy("ConfigError", "destination")
def test_a_start_that_cannot_work_is_refused_and_leaves_nothing_behind(site: Site):
    """`check`, `run --plan` and `run` agree."""
    (site.folder / "lake").write_text("a file where the folder should be")
    before = sorted(path.name for path in site.folder.iterdir())
    check = site.run("check", "--json")
    assert check.returncode == 1
    (finding,) = [each for each in json.loads(check.stdout)["checks"] if each["id"] == "destination"]
    assert (finding["severity"], finding["status"]) == ("critical", "failed")
    plan = site.run("run", "--plan")
    assert plan.returncode == 1
    assert f"WOULD FAIL   {finding['what']}. {finding['remedy']}" in plan.stdout
    assert sorted(path.name for path in site.folder.iterdir()) == before
    result = site.run("run", "--once")
    assert result.returncode == 1
    assert f"the start is refused: {finding['what']}" in result.stderr
    check_discreet(site, result.stderr)
    assert created(site) == []
    (site.folder / "lake").unlink()
    assert site.run("check").returncode == 0
    assert not (site.folder / "lake").exists()
    assert site.run("run", "--once", "-q").returncode == 0
    assert len(created(site)) == 2


@pytest.mark.remedy("PermissionDenied", "publication_privileges")
def test_check_names_the_privileges_that_a_start_needs_and_its_remedies_work(site: Site):
    database, role = site.database, f"r_{site.database.name}"
    database.execute(f"create role {role} login replication password 'secret'; create role owner_{role}")
    database.execute(f"grant usage on schema public to {role}; grant select on all tables in schema public to {role}")
    database.execute(f"alter table orders owner to owner_{role}")
    url = database.server.dsn(database.name, user=role, password="secret")
    try:
        for what in ("may not create publications", "does not own 3 tables"):
            check = site.run("check", "--json", environment={"SOURCE_URL": url})
            assert check.returncode == 1, check.stdout
            (finding,) = [each for each in json.loads(check.stdout)["checks"] if each["severity"] == "critical"]
            assert (finding["id"], what in finding["what"]) == ("publication_privileges", True)
            assert "WOULD FAIL" in site.run("run", "--plan", environment={"SOURCE_URL": url}).stdout
            run = site.run("run", "--once", environment={"SOURCE_URL": url})
            assert (run.returncode, finding["remedy"] in run.stderr) == (1, True), run.stderr
            assert created(site) == []
            database.execute(finding["remedy"].removeprefix("Run: "))
        # the others belong to a superuser, which no remedy makes the role a member of
        result = site.run("run", "--once", environment={"SOURCE_URL": url})
        assert list(site.phases()) == ["public.orders"], result.stderr
        assert site.run("teardown", "--yes", environment={"SOURCE_URL": url}).returncode == 0
    finally:
        database.execute(f"drop owned by {role}, owner_{role}; drop role {role}, owner_{role}")


def test_a_table_whose_key_a_setting_would_change_is_named(site: Site):
    site.database.execute("create table days (id date primary key, note text)")
    site.configure(more='[types]\nout_of_range = "clamp"')
    plan = site.run("run", "--plan")
    wanted = "out_of_range = \"clamp\" cannot be used for column 'id'"
    assert f"public.days     WOULD STOP: {wanted}" in plan.stdout
    check = site.run("check", "--json")
    assert check.returncode == 1
    (finding,) = [each for each in json.loads(check.stdout)["checks"] if each["id"] == "exact_keys"]
    assert finding["subjects"] == ["public.days.id"]
    site.configure(more='[types]\nout_of_range = "clamp"\n[tables."public.days".types]\nout_of_range = "keep"')
    assert "WOULD STOP" not in site.run("run", "--plan").stdout
    assert site.run("run", "--once").returncode == 0


def test_policies_for_schema_changes_are_planned_and_checked(site: Site):
    own = '[tables."public.orders".schema_changes]\nrecopy = "stop"\npartitions = "keep"\n'
    more = f'[schema_changes]\nrecopy_max_bytes = "1kB"\n{own}[tables.gone.schema_changes]\nrecopy = "stop"'
    site.configure(more=more, destination='[destination]\ntype = "delta"\npath = "lake"')
    plan = site.run("run", "--plan").stdout
    assert "schema changes: tables are copied again up to 1,024 bytes where a change cannot be followed\n" in plan
    assert "is stopped until resync where a change cannot be followed, rows of former partitions kept" in plan
    found = json.loads(site.run("check", "--json").stdout)["checks"]
    texts = [each["what"] for each in found if each["id"] == "schema_changes"]
    assert texts[0] == "[tables] sets schema_changes for tables that are not published: gone"
    assert texts[1].startswith("tables are copied again up to 1,024 bytes")


def test_rules_for_columns_are_planned_and_refused(site: Site):
    site.database.execute("create table people (id int primary key, email text, city text)")
    site.database.execute("alter table people replica identity full")
    more = '[tables."public.people"]\nwhere = "city = \'Bonn\'"\n[tables."public.people".columns]\n'
    site.configure(more=f'{more}email = {{ mask = "hidden" }}')
    plan = site.run("run", "--plan").stdout
    assert "would be copied; email masked; only rows where city = 'Bonn'" in plan
    assert site.run("run", "--once").returncode == 0
    site.configure(more=f"{more}email = {{ exclude = true }}")
    # These files keep every change.
    plan = site.run("run", "--plan").stdout
    assert "its rules changed: existing rows would stay as they are; only later changes would follow" in plan
    assert "email excluded" in plan
    assert "tables are never copied again automatically: the destination keeps every change" in plan
    site.configure(more=f"{more}mail = {{ exclude = true }}")
    plan = site.run("run", "--plan").stdout
    assert 'public.people   WOULD STOP: [tables."public.people"] names a column' in plan
    assert "copy the table again: penstock resync public.people." in plan
    site.configure(more=f"{more}id = {{ exclude = true }}")
    assert "hides column 'id', which identifies rows" in site.run("check", "--json").stdout


def test_the_plan_says_what_the_next_start_does(site: Site):
    def plan(more: str) -> dict[str, str]:
        site.configure(more=more, destination='[destination]\ntype = "delta"\npath = "lake"')
        tables = json.loads(site.run("run", "--plan", "--json").stdout)["tables"]
        return {name: each["tables"] for name, each in tables.items()}

    def start() -> dict[str, str]:
        site.run("run", "--once", "-q")
        return {each["table"]: each["phase"] for each in json.loads(site.run("tables", "--json").stdout)["tables"]}

    site.database.execute("create table people (id int primary key, email text)")
    kept = "is already copied, and would be kept up to date"
    rules = '[tables."public.people".columns]\nemail = {{ {} = true }}\n'
    assert (
        plan(rules.format("hash") + '[hash]\nkey = "0123456789abcdef"')["public.people"]
        == "would be copied; email hashed"
    )
    more = rules.format("null")
    site.database.execute("create table sums (id int primary key, twice int generated always as (id * 2) stored)")
    site.database.execute("create table empty ()")
    assert plan(more)["public.people"] == "would be copied; email set to NULL"
    assert plan(more)["public.empty"].startswith("has no columns, and would be skipped until it has one")
    assert set(start().values()) == {"ready"}
    # A table that was renamed keeps its rules, and is not copied for them.
    site.database.execute("alter table people rename to clients")
    moved = "was public.people, and would be copied again, to the folder of its new name; email set to NULL"
    assert plan(more)["public.clients"] == moved
    more = f'{more}[schema_changes]\nrename_table = "keep"\n'
    assert plan(more)["public.clients"] == f"{kept}; email set to NULL"
    assert start()["public.clients"] == "ready"
    assert not (site.folder / "lake" / "public" / "clients").exists()
    assert plan(more)["public.clients"] == f"{kept}; email set to NULL"
    site.database.execute("alter table clients rename to people")
    assert site.run("resync", "orders").returncode == 0
    found = plan(more)
    assert (found["public.orders"], found["public.items"]) == ("would be copied again", kept)
    other = rules.format("exclude")
    assert plan(other)["public.people"] == "its rules changed: would be copied again; email excluded"
    path = site.folder / "penstock.toml"
    path.write_text(path.read_text().replace("[source]", "[source]\ngenerated_columns = true"))
    published = json.loads(site.run("run", "--plan", "--json").stdout)
    assert "stored generated columns would be published" in published["publication_plan"]
    sums = published["tables"]["public.sums"]["tables"]
    assert sums == "its generated columns would be published: would be copied again"
    checks = json.loads(site.run("check", "--json").stdout)["checks"]
    assert not [each for each in checks if each["id"] == "generated_columns" and each["subjects"]]
    found = plan(f'[schema_changes]\nrecopy = "stop"\n{other}')
    assert found["public.people"].startswith("its rules changed: WOULD STOP until penstock resync")
    phases = start()
    assert (phases["public.people"], phases["public.orders"]) == ("errored", "ready")


@pytest.mark.remedy("IdentitiesDiffer", "partition_identity")
def test_a_partitioned_table_whose_rows_cannot_be_identified_is_refused_until_its_remedy_is_followed(site: Site):
    site.database.execute("create table parts (id int, part int) partition by list (part)")
    site.database.execute("create table one partition of parts (primary key (id)) for values in (1)")
    refused = "changes of public.parts cannot be matched to its rows"
    assert f"would be copied; REFUSED: {refused}" in site.run("run", "--plan").stdout
    result = site.run("run", "--once")
    assert result.returncode == 1, result.stderr
    statement = "alter table public.one replica identity full;"
    assert f"the start is refused: {refused}" in result.stderr
    assert f"hint: Run: {statement}\n" in result.stderr
    site.database.execute(statement)
    site.database.execute("insert into parts values (1, 1)")
    result = site.run("run", "--once")
    assert result.returncode == 0, result.stderr
    assert "REFUSED" not in site.run("run", "--plan").stdout


def test_patterns_that_match_no_table_are_told(site: Site):
    site.configure(tables="shp.*")
    assert "tables       none: no table in the database matches" in site.run("run", "--plan").stdout
    result = site.run("run", "--once")
    assert result.returncode == 1
    assert "no table matches shp.*, so none was copied" in result.stderr


def test_teardown_shows_asks_and_removes(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    assert site.run("verify", "-q").returncode == 0
    no = site.run("teardown", answer="n\n")
    assert no.returncode == 1
    assert f"slot {site.slot} on " in no.stdout
    assert "publication shop on " in no.stdout
    slots = "select count(*) from pg_replication_slots where slot_name = %s"
    assert site.database.execute(slots, [site.slot]) == [(1,)]
    yes = site.run("teardown", "--yes")
    assert yes.returncode == 0, yes.stderr
    check_discreet(site, yes.stdout + no.stdout)
    assert site.database.execute(slots, [site.slot]) == [(0,)]
    assert site.database.execute("select count(*) from pg_publication") == [(0,)]
    assert not (site.folder / "work/spool").exists()
    assert site.phases() == {}
    assert "nothing to remove for pipeline" in site.run("teardown").stdout
    # What is at the destination stays, and the pipeline can begin anew.
    assert site.rows("orders") == site.source_rows("orders")
    again = site.run("run", "--once")
    assert again.returncode == 0, again.stderr
    assert site.rows("orders") == site.source_rows("orders")


def test_errors_of_the_config_end_with_1_and_without_values(site: Site):
    site.configure(more="compresion = 'hunter2'")
    result = site.run("run")
    assert result.returncode == 1
    assert "did you mean 'compression'?" in result.stderr
    assert "hunter2" not in result.stderr
    missing = site.run("tables", "-c", "none.toml")
    assert missing.returncode == 1
    assert "there is no config file 'none.toml'" in missing.stderr


def test_two_destinations_share_a_slot(site: Site):
    site.configure(destination=BOTH)
    plan = site.run("run", "--plan")
    assert "destination  second: parquet" in plan.stdout, plan.stderr
    process = site.start("run", "--status-every", "0.5")
    site.wait_output(process, "tables: streaming: 3 of 3 tables ready; ")
    site.wait_output(process, "second: streaming: 3 of 3 tables ready; ")
    paused = site.run("pause", "--output", "second")
    assert paused.stdout == "second: paused; run `penstock resume` to continue\n", paused.stderr
    site.database.execute("insert into nothing values (1, 'for one of them')")
    site.wait_rows("nothing")
    assert site.rows("nothing", "second") == []
    listing = json.loads(site.run("tables", "--json").stdout)["tables"]
    assert sorted(each["output"] for each in listing) == ["second"] * 3 + ["tables"] * 3
    assert "has no destination 'third'" in site.run("resume", "--output", "third").stderr
    # Whoever is killed with one of them behind goes on with both.
    process.kill()
    process.wait(PATIENCE)
    site.database.execute("delete from orders where id % 2 = 0; update items set note = note || '!' where id < 50")
    # The pause is still in force.
    refused = site.run("run", "--once")
    assert refused.returncode == 1
    assert "the pipeline is paused" in refused.stderr
    assert site.rows("nothing", "second") == []
    assert site.run("resume", "--wait", "0").returncode == 0
    again = site.run("run", "--once")
    assert again.returncode == 0, again.stderr
    check_discreet(site, again.stderr)
    for table in ("orders", "items", "nothing"):
        assert site.rows(table) == site.source_rows(table)
        assert site.rows(table, "second") == site.source_rows(table)
    # One of them goes for good; the other keeps all of its own.
    site.configure(destination=ONE)
    held = site.run("run", "--once")
    assert "holds back the slot output=second" in held.stderr
    gone = site.run("teardown", "--output", "second", "--yes")
    assert gone.returncode == 0, gone.stderr
    assert "state of pipeline shop:second" in gone.stdout
    assert "position of output second" in gone.stdout
    assert "there is no output 'second'" in site.run("teardown", "--output", "second").stderr
    free = site.run("run", "--once")
    assert "holds back the slot" not in free.stderr
    assert "copied" not in free.stderr
