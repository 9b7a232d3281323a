"""`penstock run` in a terminal, as a person sees it; and the same lines as JSON."""

from __future__ import annotations

import json
import signal

import pytest

from tests.integration.cli.support import PATIENCE, Site, Terminal, check_discreet

CLEAR_LINE = "\x1b[2K"
SLOW = '[copy]\nmax_bytes_per_second = "4MB"'


def make_big(site: Site) -> None:
    site.database.execute(
        "create table big as select i as id, repeat('y', 500) as note from generate_series(1, 80000) i"
    )
    site.database.execute("alter table big add primary key (id); analyze big")


def test_bars_move_while_a_copy_runs_and_are_gone_at_the_end(site: Site):
    make_big(site)
    site.configure(more=SLOW)
    with Terminal("--log-level", "info", "run", cwd=site.folder, environment=site.environment) as terminal:
        terminal.wait_for("following publication shop")
        terminal.wait_for("public.big")
        terminal.wait_for("0/2 ranges")
        terminal.wait_for("1/2 ranges")
        terminal.wait_for("copied public.big: 80,000 rows")
        terminal.wait_for("4 of 4 tables ready")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait() == 0, terminal.text
    check_discreet(site, terminal.text)
    assert "━" in terminal.text
    assert "% " in terminal.text
    # Log lines stand above: the status is cleared before each, and comes back behind it.
    logged = terminal.text.index("table copied table=public.big")
    cleared = terminal.text.rindex(CLEAR_LINE, 0, logged)
    assert "streaming" not in terminal.text[cleared:logged]
    assert "streaming" in terminal.text[logged:]
    # The cursor is shown again.
    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")


@pytest.mark.parametrize("options", [(), ("--supervise",)], ids=["alone", "supervised"])
def test_a_run_survives_its_terminal_and_says_what_ended_it(site: Site, options: tuple[str, ...]):
    arguments = ("--log-level", "info", "run", *options)
    with Terminal(*arguments, cwd=site.folder, environment=site.environment) as terminal:
        terminal.wait_for("3 of 3 tables ready")
        terminal.hang_up()
        # Each copy is told in the log and by the display.
        assert site.run("resync", "orders").returncode == 0
        site.database.execute("insert into orders values (9000, 'unseen')")
        site.wait_rows("orders")
        assert terminal.process.poll() is None
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.process.wait(PATIENCE) == 0
    status = json.loads(site.run("status", "--json").stdout)
    assert status["last_run"].endswith(": a signal stopped it"), status


def test_json_tells_the_same_at_any_log_level(site: Site):
    make_big(site)
    site.configure(more=SLOW)
    result = site.run("--log-format", "json", "run", "--once", "--status-every", "0.2")
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stderr.splitlines()]
    copies = [each for each in records if each.get("event") == "copy" and each["table"] == "public.big"]
    assert {each["ranges_done"] for each in copies} >= {0, 1}
    assert all(each["ranges"] == 2 and 0 <= each["fraction"] <= 1 for each in copies)
    (done,) = [each for each in records if each.get("event") == "copied" and each["table"] == "public.big"]
    assert (done["rows_done"], done["ranges_done"], done["output"]) == (80_000, 2, "tables")
    status = [each for each in records if each.get("event") == "status"]
    assert status[-1]["ready"] == 4
    assert status[-1]["lag_bytes"] is not None


def test_quiet_says_nothing(site: Site):
    result = site.run("--log-format", "json", "run", "--once", "--quiet")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
