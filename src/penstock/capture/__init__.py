"""Capture: reads the replication slot and writes the spool, in a child process."""

from penstock.capture.assembler import Assembler, AssemblerSettings
from penstock.capture.engine import Capture, CaptureSettings, CaptureStatus, Reading
from penstock.capture.process import CaptureProcess

__all__ = [
    "Assembler",
    "AssemblerSettings",
    "Capture",
    "CaptureProcess",
    "CaptureSettings",
    "CaptureStatus",
    "Reading",
]
