"""The processes of a pipeline, told apart by how they were called."""

from __future__ import annotations

from enum import StrEnum

from penstock.spark.session import PYTHON_DAEMON
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
    program, *arguments = command_of(pid) or [""]
    if "penstock.capture" in arguments:
        return Part.CAPTURE
    # Shells start it, with the same arguments.
    if program.endswith("java") and any(each.startswith("org.apache.spark.deploy") for each in arguments):
        return Part.JVM
    return Part.WORKER if PYTHON_DAEMON in arguments else None
