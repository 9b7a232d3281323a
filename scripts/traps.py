"""List the traps of docs/reference/traps.md with the tests that cover them."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "traps.md"
_ENTRY = re.compile(r"^(\d+)\. \*\*(.+?)\*\*", re.MULTILINE)


class Collector:
    """A pytest plugin that collects the tests of each trap."""

    def __init__(self) -> None:
        self.tests: dict[int, list[str]] = defaultdict(list)
        self.errors: list[str] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        name = item.nodeid.split("[")[0]
        for mark in item.iter_markers("trap"):
            for number in mark.args:
                if name not in self.tests[number]:
                    self.tests[number].append(name)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report.nodeid)


def main() -> int:
    """Print the list. A trap without a test is not a failure."""
    traps = {int(number): title.rstrip(".,:") for number, title in _ENTRY.findall(PAGE.read_text())}
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", str(ROOT / "tests")], [collector])
    for number, title in sorted(traps.items()):
        tests = sorted(collector.tests.get(number, ()))
        print(f"{number:3} {'+' if tests else '-'} {title}")
        for test in tests:
            print(f"        {test}")
    uncovered = [number for number in sorted(traps) if number not in collector.tests]
    print(f"\n{len(traps) - len(uncovered)} of {len(traps)} traps have a test", end="")
    print(f"; without a test: {', '.join(map(str, uncovered))}" if uncovered else "")
    for number in sorted(set(collector.tests) - set(traps)):
        print(f"unknown trap {number}: {', '.join(collector.tests[number])}", file=sys.stderr)
    for name in collector.errors:
        print(f"could not be collected: {name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
