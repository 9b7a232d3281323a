"""A machine of its own, as far as files go: a test's folders in the place of /etc, /opt and /var, a read-only root.

    machine = Machine(tmp_path)
    (machine.root / "etc/penstock").mkdir()
    process = machine.start(["/opt/penstock/bin/penstock", "run"], folder="/var/lib/penstock", user=10001)

It is a mount namespace (`unshare`), which needs root, or a kernel that lets every user have one. A process in it keeps
its pid, so signals reach it. It has no capability and cannot gain privileges, like a service that systemd confines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

_PLACES = ("etc", "opt", "var")
_KNOWN = ("passwd", "group", "hosts", "resolv.conf", "nsswitch.conf", "localtime", "ssl", "ld.so.cache", "alternatives")
"""What programs look for in /etc."""
_ENTER = """
set -e
mount --make-rprivate /
for place in etc opt var; do mount --bind "$1/$place" "/$place"; done
mount -t tmpfs -o mode=1777 tmpfs /tmp
if [ "$2" = "read-only" ]; then for place in / /etc /opt; do mount -o remount,bind,ro "$place"; done; fi
cd "$3"
user=$4
shift 4
if [ -n "$user" ]; then set -- --reuid="$user" --regid="$user" --clear-groups "$@"; fi
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


class Machine:
    """See the module. Skips the test where namespaces are not permitted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
        if shutil.which("unshare") is None or shutil.which("setpriv") is None:
            pytest.skip("needs unshare and setpriv (util-linux)")
        if any(Path(sys.prefix).is_relative_to(place) for place in ("/tmp", *(f"/{each}" for each in _PLACES))):
            pytest.skip("needs the project in another folder than /tmp, /etc, /opt and /var, which it replaces")
        for place in _PLACES:
            (root / place).mkdir(parents=True)
        for name in _KNOWN:
            found = Path("/etc", name)
            if found.is_dir():
                shutil.copytree(found, root / "etc" / name, symlinks=True)
            elif found.exists():
                shutil.copy(found, root / "etc" / name)
        if self.run(["true"], user=None).returncode:
            pytest.skip("needs root, or a kernel that permits mount namespaces")

    @property
    def can_be_another_user(self) -> bool:
        return os.geteuid() == 0

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str = "/",
        user: int | None = None,
        output: IO[bytes] | int | None = None,
        umask: int = -1,
    ) -> subprocess.Popen[bytes]:
        """Start a command; its pid is that of the process."""
        return subprocess.Popen(
            self._command(command, folder, user, "read-only"),
            env={"PATH": os.defpath, **(environment or {})},
            stdout=output,
            stderr=output,
            umask=umask,
        )

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str = "/",
        user: int | None = None,
        mode: str = "read-only",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `mode` is `writable` for what builds an image."""
        return subprocess.run(
            self._command(command, folder, user, mode),
            env={"PATH": os.defpath, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def _command(self, command: Sequence[str], folder: str, user: int | None, mode: str) -> list[str]:
        chosen = str(user) if user is not None and self.can_be_another_user else ""
        return [*self._unshare, "sh", "-c", _ENTER, "sh", str(self.root), mode, folder, chosen, *command]
