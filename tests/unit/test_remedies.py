"""Remedies, wherever they are written: the commands that they name exist, none contradicts itself, and tests run them.

A test that follows a remedy as printed is marked `@pytest.mark.remedy(...)` with the names of the errors, or of the
findings of `penstock check`, and ends with a healthy pipeline.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import penstock
from penstock import errors
from penstock.cli.main import app
from penstock.errors import PenstockError

SOURCE = Path(penstock.__file__).parent
TESTS = Path(__file__).parents[1]
ERRORS = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, PenstockError)
}

BASES = "a base class; its subclasses have the remedies"
ELSEWHERE = "raised with remedies of its own, one for each fault"
HEALS_BY_ITSELF = {
    "TakesLong": "test_nobody_waits_for_a_table_that_takes_long",
    "TasksFailed": "test_while_no_task_runs_no_table_stops",
    "SpoolDiskFull": "test_full_disk_is_waited_for",
    "CaptureStopped": "test_five_kills_under_load_lose_and_double_nothing",
    "SparkGone": "test_whoever_is_killed_nothing_is_lost_or_doubled_for_many_seeds",
}
"""Errors that need no more than time, room or a new start, and a test of that."""
UNRUN: dict[str, str] = {
    **dict.fromkeys(("PenstockError", "SourceError", "SpoolError", "StateError", "DestinationError"), BASES),
    **dict.fromkeys(("QueryFailed", "TableRejected", "NotComparable"), ELSEWHERE),
    "UnsupportedServer": "another server is needed; `check_version` and `check_standby` name it",
    "DecodeError": "a defect, to be reported",
    "IllegalTransition": "a defect of Penstock, or the remedy is `penstock resync`, which other tests run",
    "PositionGone": "for callers of the Python API: the order of two calls",
    "FailpointReached": "raised by tests only",
}
"""Errors whose remedy no test runs, and why."""
UNRUN_FINDINGS: dict[str, str] = {
    **dict.fromkeys(("server_version", "server_role"), "another server is needed"),
    "other_slots": "another program's slot, which a person drops",
    **dict.fromkeys(("encoding", "slot_retention", "slot_failover"), "data or machines outside of Penstock"),
    **dict.fromkeys(("connection", "replication_connection", "state", "spool", "slot"), "the errors of the same name"),
    **dict.fromkeys(
        ("table_patterns", "type_overrides", "column_rules", "schema_changes", "exact_keys"), "a key of the config file"
    ),
    **dict.fromkeys(("tables_without_columns", "types_as_text"), "nothing to do"),
    "open_transactions": "as for `SnapshotBlocked`",
    "names_alike": "a person chooses which table to rename",
    "generated_identity": "as for `replica_identity`",
    "trigger_privileges": "the first start runs as a superuser",
}
"""Findings whose remedy no test runs, and why."""
_NAMES = {"hint", "default_hint", "remedy"}


def texts(node: ast.expr) -> str:
    """The text of an expression; what is filled in stays as its source, like `{RESYNC}`."""
    return re.sub(r"\s+", " ", ast.unparse(node))


@cache
def remedies() -> list[tuple[str, str]]:
    return list(_find_remedies())


def _find_remedies() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE)
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(keywords=keywords):
                    for keyword in keywords:
                        if keyword.arg in _NAMES:
                            yield f"{where}:{keyword.value.lineno}", texts(keyword.value)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in _NAMES:
                    yield f"{where}:{value.lineno}", texts(value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name in _NAMES:
                    yield f"{where}:{value.lineno}", texts(value)
                case _:
                    pass


def known_commands() -> set[str]:
    found: set[str] = set()

    def walk(command: object, name: str) -> None:
        for each, inner in getattr(command, "commands", {}).items():
            found.add(f"{name} {each}".strip())
            walk(inner, f"{name} {each}".strip())

    walk(get_command(app), "")
    return found


def test_there_are_remedies() -> None:
    assert len(remedies()) > 100


def test_every_command_that_a_remedy_names_exists() -> None:
    commands = known_commands()
    for where, text in remedies():
        # In prose, a command follows "run:", a backquote or "then"; elsewhere the word is the name of the program.
        for named in re.findall(r"(?:[Rr]un:? |`|then |: )penstock ([a-z]+(?: [a-z]+)?)", text):
            first, _, rest = named.partition(" ")
            assert first in commands, (where, named)
            if first == "index" and rest:
                assert named in commands, (where, named)


@pytest.mark.parametrize("phrase", [r"\bcopy (the|this) table again", r"needs? a new copy"])
def test_a_remedy_that_says_to_copy_a_table_names_the_command(phrase: str) -> None:
    """Otherwise status would add `penstock rollback`, which contradicts it."""
    for where, text in remedies():
        if re.search(phrase, text, re.IGNORECASE):
            assert "RESYNC" in text or "penstock resync" in text, (where, text)


@cache
def run_by_tests() -> dict[str, list[str]]:
    """By the name of an error or a finding: the tests that run its remedy."""
    found: dict[str, list[str]] = {name: [test] for name, test in HEALS_BY_ITSELF.items()}
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        if "mark.remedy(" not in text:
            continue
        for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
            marks = [each for each in function.decorator_list if ast.unparse(each).startswith("pytest.mark.remedy(")]
            for constant in (node for mark in marks for node in ast.walk(mark) if isinstance(node, ast.Constant)):
                found.setdefault(str(constant.value), []).append(function.name)
    return found


def findings() -> set[str]:
    """The findings of `penstock check` that something is wrong."""
    return {
        node.args[0].value
        for path in (*(SOURCE / "source/preflight").glob("*.py"), SOURCE / "operations/readiness.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "failed"
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def test_a_test_runs_the_remedy_of_every_error_or_a_reason_says_why_none_can() -> None:
    assert ERRORS.keys() == {*UNRUN, *(run_by_tests().keys() & ERRORS.keys())}
    assert not UNRUN.keys() & run_by_tests().keys(), "a reason is out of date"


def test_a_test_runs_the_remedy_of_every_finding_or_a_reason_says_why_none_can() -> None:
    assert findings() == {*UNRUN_FINDINGS, *(run_by_tests().keys() & findings())}
    assert not UNRUN_FINDINGS.keys() & run_by_tests().keys(), "a reason is out of date"


def test_errors_findings_and_tests_exist() -> None:
    assert run_by_tests().keys() <= ERRORS.keys() | findings()
    texts = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    for test in HEALS_BY_ITSELF.values():
        assert f"\ndef {test}(" in texts, test


@pytest.mark.parametrize("text", ["alter table …", "alter publication …", "grant select on …", "schema … to"])
def test_no_statement_of_a_remedy_has_gaps(text: str) -> None:
    assert [where for where, remedy in remedies() if text in remedy] == []
