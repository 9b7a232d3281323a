"""Run the tests marked `soak` and write what happened to docs/soak, one page per run.

Arguments go to pytest. Numbers that a test notes with `record_property` are in the report.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.testing.postgres_binaries import installed_binaries

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "soak"
TEST_SECONDS = 4 * 3600


@dataclass(slots=True, eq=False)
class Recorder:
    """A pytest plugin that keeps the outcome of each test."""

    reports: list[pytest.TestReport] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.reports.append(report)


def main(arguments: list[str]) -> int:
    """Run, write the page, and answer as pytest does."""
    recorder = Recorder()
    begun = time.monotonic()
    when = datetime.now(UTC)
    status = pytest.main(["-m", "soak", "--timeout", str(TEST_SECONDS), str(ROOT / "tests"), *arguments], [recorder])
    if not recorder.reports:
        print("soak: no test was run, no report is written", file=sys.stderr)
        return int(status)
    FOLDER.mkdir(parents=True, exist_ok=True)
    page = FOLDER / f"{when:%Y-%m-%d-%H%M}.md"
    page.write_text(_report(recorder.reports, when, time.monotonic() - begun))
    print(f"soak: report in {page.relative_to(ROOT)}")
    return int(status)


def _report(reports: list[pytest.TestReport], when: datetime, seconds: float) -> str:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    servers = ", ".join(each.version for each in installed_binaries().values())
    lines = [
        f"# Soak of {when:%Y-%m-%d %H:%M} UTC",
        "",
        f"- commit {commit.strip() or 'unknown'}, Python {platform.python_version()}, PostgreSQL {servers}",
        f"- {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        f"- kills asked for: {os.environ.get('PENSTOCK_SOAK_KILLS', 'the default of each test')}",
        f"- {seconds:.0f} s in all",
        "",
        "| Test | Outcome | Seconds | Noted |",
        "|---|---|---|---|",
    ]
    for report in sorted(reports, key=lambda each: each.nodeid):
        noted = ", ".join(f"{name} = {value}" for name, value in report.user_properties)
        lines.append(f"| {report.nodeid.rpartition('::')[2]} | {report.outcome} | {report.duration:.0f} | {noted} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
