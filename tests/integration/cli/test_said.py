"""What `penstock run` says when something keeps it from its work: once, and to the point."""

from __future__ import annotations

import json

from tests.integration.cli.support import Site


def test_a_pause_that_was_noted_before_does_not_make_once_wait_for_ever(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    assert site.run("pause").returncode == 0
    paused = site.run("run", "--once", "-q")
    assert paused.returncode == 1
    assert "the pipeline is paused" in paused.stderr
    assert "Run: penstock resume." in paused.stderr
    assert site.run("resume").returncode == 0
    site.database.execute("insert into orders values (9000, 'late')")
    assert site.run("run", "--once", "-q").returncode == 0
    assert site.rows("orders") == site.source_rows("orders")


def test_a_table_that_stops_is_told_once(site: Site):
    site.database.execute("create table strange (id int primary key, note text, at date)")
    site.database.execute("insert into strange values (1, 'x', 'infinity')")
    site.configure(more='[types]\nout_of_range = "error"')
    reason = "public.strange.at has 1 value(s)"
    result = site.run("run", "--once")
    assert result.returncode == 1
    assert result.stderr.count(reason) == 1, result.stderr
    # Also where nothing else is said, and where all of it is the log.
    assert site.run("rollback", "strange").returncode == 0
    quiet = site.run("run", "--once", "-q")
    assert quiet.stderr.count(reason) == 1, quiet.stderr
    assert site.run("rollback", "strange").returncode == 0
    logged = site.run("--log-format", "json", "run", "--once")
    records = [json.loads(line) for line in logged.stderr.splitlines() if line.startswith("{")]
    # By what tells it, and not by the worker that knows it first.
    assert {record["logger"] for record in records if reason in record["message"]} == {"penstock.run"}


def test_whom_a_copy_waits_for_is_said_while_it_waits(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    with site.database.connect(autocommit=False) as blocker:
        blocker.execute("insert into items values (9000, 'late')")
        assert site.run("resync", "orders").returncode == 0
        process = site.start("run", "--once")
        site.wait_output(process, "waiting to copy public.orders until these transactions end")
        assert f"pid {blocker.info.backend_pid} (" in site.output(process)
        blocker.commit()
    assert process.wait(120) == 0, site.output(process)
    assert site.output(process).count("until these transactions end") == 1
    assert "waits for open transactions" not in site.output(process)
    assert site.rows("items") == site.source_rows("items")
