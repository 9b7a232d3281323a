"""The supervisor, with children that are not capture."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.capture import process
from penstock.capture.engine import CaptureSettings
from penstock.errors import CaptureStopped
from penstock.retry import Backoff
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolSettings


class _DeadChild(subprocess.Popen):
    """Ends before it has read anything."""

    def __init__(self, command, **options):
        super().__init__(["/bin/sh", "-c", "exit 7"], **options)
        self.wait()


def make_capture():
    source = SourceSettings("postgresql://nobody@localhost/nothing")
    return process.CaptureProcess(CaptureSettings(source, "slot", "publication", SpoolSettings(Path("unused"))))


def test_log_lines_of_capture_are_logged_by_its_parent(caplog: pytest.LogCaptureFixture) -> None:
    line = b'{"log": "slot is slow slot=shop", "level": 30, "logger": "penstock.capture.session"}'
    assert process._read_report(line) is None
    assert [(each.name, each.levelname, each.message) for each in caplog.records] == [
        ("penstock.capture.session", "WARNING", "slot is slow slot=shop")
    ]


def test_capture_reports_its_log_lines_without_level_and_logger() -> None:
    # As `run_child` sets it up; in a process of its own, because `basicConfig` is for a whole process.
    code = """
import logging
from penstock.capture.process import _ToParent
logging.basicConfig(level=logging.WARNING, handlers=[_ToParent()])
logging.getLogger("penstock.capture.engine").warning("capture failed, retrying in=%.1fs", 3.5)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["log"] == "capture failed, retrying in=3.5s"


def test_a_child_that_dies_at_once_is_an_error_and_not_the_supervisors_end(monkeypatch):
    monkeypatch.setattr(process.subprocess, "Popen", _DeadChild)
    monkeypatch.setattr(process, "FRUITLESS_RESTARTS", 2)
    with make_capture() as capture, pytest.raises(CaptureStopped, match="exit code 7"):
        capture.wait_until_streaming(20.0)


def no_process(*command, **options):
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_child_that_cannot_be_started_is_tried_again_and_then_an_error(monkeypatch):
    monkeypatch.setattr(process.subprocess, "Popen", no_process)
    monkeypatch.setattr(process, "FRUITLESS_RESTARTS", 2)
    with make_capture() as capture, pytest.raises(CaptureStopped, match="could not be started"):
        capture.wait_until_streaming(20.0)
    assert capture.restarts == 1


def test_children_that_ran_for_long_are_started_again_however_many_there_were(monkeypatch):
    """On an idle server a healthy child captures nothing either."""
    monkeypatch.setattr(process.subprocess, "Popen", _DeadChild)
    monkeypatch.setattr(process, "FRUITLESS_RESTARTS", 2)
    monkeypatch.setattr(process, "HEALTHY_SECONDS", 0.0)
    monkeypatch.setattr(process, "Backoff", lambda **_: Backoff(first=0.001, longest=0.001))
    with make_capture() as capture:
        deadline = time.monotonic() + 20.0
        while capture.restarts < 5:
            capture.check()
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_supervisor_that_fails_says_so(monkeypatch):
    def fail(self):
        raise AssertionError("a bug")

    monkeypatch.setattr(process.CaptureProcess, "_run_child", fail)
    with make_capture() as capture, pytest.raises(CaptureStopped, match="AssertionError"):
        capture.wait_until_streaming(20.0)


@pytest.mark.parametrize("line", [b'{"error": "AAAA"}', b'{"reading": "dreaming"}', b'{"reading": "streaming"}'])
def test_a_report_that_cannot_be_read_is_an_error_and_not_the_supervisors_end(line):
    assert isinstance(process._read_report(line), CaptureStopped)
