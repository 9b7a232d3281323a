"""The supervisor, with children that are not capture."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.capture import process
from penstock.capture.engine import CaptureSettings
from penstock.errors import CaptureStopped
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolSettings


class _DeadChild(subprocess.Popen):
    """Ends before it has read anything."""

    def __init__(self, command, **options):
        super().__init__(["/bin/sh", "-c", "exit 7"], **options)
        self.wait()


def test_a_child_that_dies_at_once_is_an_error_and_not_the_supervisors_end(monkeypatch):
    monkeypatch.setattr(process.subprocess, "Popen", _DeadChild)
    monkeypatch.setattr(process, "FRUITLESS_RESTARTS", 2)
    source = SourceSettings("postgresql://nobody@localhost/nothing")
    capture = process.CaptureProcess(CaptureSettings(source, "slot", "publication", SpoolSettings(Path("unused"))))
    with capture, pytest.raises(CaptureStopped, match="exit code 7"):
        capture.wait_until_streaming(20.0)
