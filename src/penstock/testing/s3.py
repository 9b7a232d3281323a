"""An S3 emulator (moto) as a process of its own, for tests of object stores. An emulator: it shows that we speak the
protocol and rely on conditional puts, not how a real store behaves under load or failure."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import TracebackType

_HOST = "127.0.0.1"
_START_SECONDS = 60.0


class S3Emulator:
    """A server with its own buckets; use it in a `with` block."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """Storage options, as Penstock's destinations and delta-rs take them."""
        return {
            "aws_endpoint": self.endpoint,
            "aws_allow_http": "true",
            "aws_access_key_id": "emulated",
            "aws_secret_access_key": "emulated",
            "aws_region": "us-east-1",
        }

    def create_bucket(self, name: str) -> str:
        """Make a bucket; gives its URL."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            return f"s3://{name}"

    def __enter__(self) -> S3Emulator:
        command = [sys.executable, "-m", "moto.server", "-H", _HOST, "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._stop()
                raise RuntimeError("the S3 emulator did not start: is moto installed?")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
