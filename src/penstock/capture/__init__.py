"""From a replication slot to the spool: session, messages, waves, and the process they run in."""

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
