"""The processes of a pipeline, told apart by how they were called."""

from __future__ import annotations

from enum import StrEnum

from penstock.spark import PYTHON_DAEMON
from penstock.testing.processes import command_of


class Part(StrEnum):
    """A process of a pipeline."""

    DRIVER = "driver"
    CAPTURE = "capture"
    JVM = "jvm"
    WORKER = "worker"
    """A Python process that runs Spark's tasks, or from which such ones are forked."""


def part_of(pid: int) -> Part | None:
    """What a process below a driver is; None for those that belong to no pipeline, or are gone."""
    command = " ".join(command_of(pid))
    if "penstock.capture" in command:
        return Part.CAPTURE
    if "org.apache.spark.deploy" in command:
        return Part.JVM
    return Part.WORKER if PYTHON_DAEMON in command else None
