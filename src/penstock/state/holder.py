"""Which process holds a lease, and whether it is certainly gone.

A process that was killed cannot give its lease back. On the same machine one need not wait until it runs out: the
process table tells. Only where all is comparable, though: same boot, same process namespace (two containers may have
the same host name and the same pid), and the start time of the process, since pids are used again.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, as it is named in a lease."""

    host: str
    pid: int
    machine: str
    """The boot and the process namespace; empty where the system does not say."""
    started: str
    """When the process began, in the kernel's own measure; empty where the system does not say."""


def this_process() -> Holder:
    """The process that asks."""
    return Holder(socket.gethostname(), os.getpid(), _machine(), _started(os.getpid()) or "")


def is_gone(holder: Holder) -> bool:
    """Whether the process has certainly ended; false when one cannot know."""
    if not holder.machine or not holder.started or holder.machine != _machine():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it belongs to somebody else; what /proc says decides, if it says anything
    started = _started(holder.pid)
    return started is not None and started != holder.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """The start time of a process; `ended` for one that only waits to be collected, None where /proc is silent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "ended" if fields[0] in "ZX" else fields[19]
