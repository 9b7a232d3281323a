"""`penstock report`: a bundle that helps, without secrets, whatever is broken."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

from tests.integration.cli.support import Site, check_discreet

SECRET = "hunter2-very-secret"


def unpack(site: Site, result: subprocess.CompletedProcess[str], name: str = "r.tar.gz") -> dict[str, str]:
    assert result.returncode == 0, result.stderr
    check_discreet(site, result.stdout + result.stderr)
    with tarfile.open(site.folder / name) as archive:
        found = {Path(member.name).name: archive.extractfile(member) for member in archive.getmembers()}
        files = {name: file.read().decode() for name, file in found.items() if file is not None}
    for text in files.values():
        assert site.database.dsn not in text
        assert SECRET not in text
    return files


def test_a_bundle_has_all_parts_and_no_secrets(site: Site):
    site.database.execute("create table strange (id int primary key, at date)")
    site.database.execute("insert into strange values (1, 'infinity')")
    site.configure(more='[types]\nout_of_range = "error"')
    assert site.run("run", "--once", "-q").returncode == 1
    url = f"postgresql://me:{SECRET}@db/x"
    (site.folder / "run.log").write_text(f"cannot connect {url}\nread {site.database.dsn}\nlast line\n")
    files = unpack(site, site.run("report", "--to", "r.tar.gz", "--log", "run.log", "--log", "none.log"))
    assert set(files) == {
        "README.txt", "check.json", "config.json", "log.txt", "server.json", "spool.json", "state.json", "status.json",
        "versions.json",
    }  # fmt: skip
    assert json.loads(files["config.json"])["source"]["url"] == "${SOURCE_URL}"
    assert "last line" in files["log.txt"]
    assert "none.log <==\ncannot read: No such file" in files["log.txt"]
    history = json.loads(files["state.json"])["tables"]["history"]["public.strange"]
    assert [each["phase"] for each in history][-1] == "errored"
    assert "public.strange" in history[-1]["reason"]
    assert json.loads(files["spool.json"])["readers"].keys() == {"tables"}
    server = json.loads(files["server.json"])
    assert server["settings"]["wal_level"] == "logical"
    assert site.slot in [slot["slot_name"] for slot in server["slots"]]
    assert json.loads(files["check.json"])["source"] in site.run("status").stdout
    assert json.loads(files["versions.json"])["packages"]["penstock"]
    again = site.run("report", "--to", "r.tar.gz")
    assert again.returncode == 1
    assert "'r.tar.gz' already exists" in again.stderr


def test_it_says_what_it_could_not_find_out(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    away = {"SOURCE_URL": f"postgresql://me:{SECRET}@127.0.0.1:1/shop"}
    result = site.run("report", "--json", environment=away)
    path = json.loads(result.stdout)["path"]
    files = unpack(site, result, path)
    assert path.startswith("penstock-report-shop-")
    assert "cannot connect (127.0.0.1:1/shop)" in files["server.error.txt"]
    assert json.loads(files["state.json"])["tables"]["history"].keys() == {
        "public.items", "public.nothing", "public.orders"
    }  # fmt: skip
    assert json.loads(files["status.json"])["source"]["error"]


def test_a_broken_config_can_be_reported(site: Site):
    site.configure(more=f'sercet_key = "{SECRET}"\n[sorce]\nx = 1')
    files = unpack(site, site.run("report", "--to", "r.tar.gz"))
    assert "sorce: there is no such key" in files["config.error.txt"]
    assert json.loads(files["config.json"])["destination"] == {"type": "parquet", "path": "lake", "sercet_key": "***"}
    assert "versions.json" in files
    missing = site.run("report", "-c", "none.toml")
    assert missing.returncode == 1
    assert "there is no config file 'none.toml'" in missing.stderr
