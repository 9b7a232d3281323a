"""Commands and config take the names that Postgres allows, as they are printed or in quotes."""

from __future__ import annotations

import json
import signal
from typing import Any

from tests.integration.cli.support import PATIENCE, Site

ODD = {
    "Odd.Schema.a*b": '"Odd.Schema"."a*b"',
    "Odd.Schema.aXb": '"Odd.Schema"."aXb"',
    "public.select": 'public."select"',
    "public.with space": 'public."with space"',
    "qu\"ote.it's\\": '"qu""ote"."it\'s\\"',
}
"""Names as they are printed, and in quotes."""


def reported(site: Site, *arguments: str) -> Any:
    result = site.run(*arguments, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_commands_take_any_name_as_it_is_printed_or_quoted(site: Site) -> None:
    site.database.execute('create schema "Odd.Schema"; create schema "qu""ote"')
    for quoted in ODD.values():
        site.database.execute(f"create table {quoted} (id int primary key, day date)")
        site.database.execute(f"insert into {quoted} values (1, 'infinity')")
    site.configure(
        tables='\\"Odd.Schema\\".a*", "\\"qu\\"\\"ote\\".*", "public.[sw]*',
        destination='[destination]\ntype = "delta"\npath = "lake"',
        more="""
            [tables."Odd.Schema.a*b"]
            types.out_of_range = "text"
            schema_changes.rename_table = "keep"
        """,
    )
    assert site.run("check").returncode == 0
    assert set(ODD) <= set(reported(site, "run", "--plan")["tables"])
    process = site.start("run")
    site.wait_ready(len(ODD))
    found = {each["table"]: each for each in reported(site, "tables")["tables"]}
    assert found.keys() == ODD.keys()
    assert len({each["location"] for each in found.values()}) == len(ODD)
    for names in (ODD, ODD.values()):
        [output] = reported(site, "verify", *names)["outputs"]
        assert {each["table"]: each["result"] for each in output["tables"]} == dict.fromkeys(ODD, "equal")
    assert reported(site, "resync", *ODD.values())["tables"] == list(ODD)
    # A table that is being copied refuses another resync.
    site.wait_ready(len(ODD))
    assert reported(site, "resync", '"Odd.Schema".*')["tables"] == ["Odd.Schema.a*b", "Odd.Schema.aXb"]
    site.wait_ready(len(ODD))
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0, site.output(process)
