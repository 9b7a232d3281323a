"""What errors say to do is done, to the letter, and works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

from tests.integration.cli.support import Site


def hint(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result.stderr
    return result.stderr.rpartition("hint: ")[2].strip()


def follow(site: Site, remedy: str) -> None:
    """Set the keys and run the commands that a remedy names; the last command has to succeed."""
    path = site.folder / "penstock.toml"
    for key, value in re.findall(r'(\w+) = ("\w+"|true|false)', remedy):
        section = "[source]" if key in ("on_lost_slot", "manage_publication") else "[pipeline]"
        kept = re.sub(rf"^\s*{key} = .*$", "", path.read_text(), flags=re.MULTILINE)
        path.write_text(kept.replace(section, f"{section}\n{key} = {value}"))
    commands = re.findall(r"penstock (run|resume|teardown|resync [\w.]+|rollback [\w.]+)", remedy)
    assert commands, remedy
    for command in commands:
        words = [*command.split(), *{"run": ["--once"], "teardown": ["--yes"]}.get(command, [])]
        result = site.run(*words)
        assert result.returncode == 0, (command, result.stderr)


def check_equal(site: Site) -> None:
    assert set(site.phases().values()) == {"ready"}
    assert site.rows("orders") == site.source_rows("orders")


def test_a_lost_slot(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("select pg_drop_replication_slot(%s)", [site.database.idle_slot(site.slot)])
    site.database.execute("update orders set note = 'while there was no slot'")
    check = site.run("check", "--json")
    (finding,) = [each for each in json.loads(check.stdout)["checks"] if each["id"] == "slot"]
    assert (check.returncode, finding["severity"]) == (1, "critical")
    refused = site.run("run", "--once")
    assert "is gone, and with it changes" in refused.stderr
    # A command that only a start could carry out is not queued for one that is refused.
    resync = site.run("resync", "*.*")
    assert hint(resync) == hint(refused) == finding["remedy"]
    assert 'on_lost_slot = "recreate"' in finding["remedy"]
    follow(site, finding["remedy"])
    check_equal(site)


def test_a_publication_that_does_not_exist(site: Site):
    site.configure()
    path = site.folder / "penstock.toml"
    path.write_text(path.read_text().replace("[source]", "[source]\nmanage_publication = false"))
    remedy = hint(site.run("run", "--once"))
    site.database.execute(remedy.partition("Create it: ")[2])
    assert site.run("run", "--once", "-q").returncode == 0
    check_equal(site)


def test_a_damaged_spool_and_a_pause(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("update orders set note = note || '!'")
    for log in (site.folder / "work/spool/log").iterdir():
        log.write_bytes(b"damaged\n" + log.read_bytes())
    remedy = hint(site.run("run", "--once"))
    assert "delete the spool folder" in remedy
    shutil.rmtree(site.folder / "work/spool")
    follow(site, remedy)
    check_equal(site)
    assert site.run("pause").returncode == 0
    follow(site, hint(site.run("run", "--once")))
    assert site.run("run", "--once", "-q").returncode == 0
    check_equal(site)
