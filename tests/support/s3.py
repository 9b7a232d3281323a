"""Object stores for tests, each a process on 127.0.0.1 that ends with its `with` block.

`S3Emulator` (moto) is always available. It tests the protocol and conditional puts, not behaviour under load.
`S3Gateway` (versitygw, over a folder) is a real server that handles requests concurrently; `make s3-server` builds it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import ServerUnavailable
from penstock.testing.server import free_port

PROGRAM_VARIABLE = "PENSTOCK_VERSITYGW"
"""The path of the server's program; by default `versitygw` beside the interpreter."""
_HOST = "127.0.0.1"
_START_SECONDS = 60.0
_KEY, _SECRET, _REGION = "testing", "only-for-tests", "us-east-1"


def find_gateway() -> Path | None:
    """Return the program of `S3Gateway`, or None if it is not built."""
    program = Path(os.environ.get(PROGRAM_VARIABLE) or Path(sys.prefix) / "bin" / "versitygw")
    return program if program.is_file() else None


class S3Server(ABC):
    """A server with its own buckets; use it in a `with` block."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """Storage options for Penstock's destinations and delta-rs."""
        return {
            "aws_endpoint": self.endpoint,
            "aws_allow_http": "true",
            "aws_access_key_id": _KEY,
            "aws_secret_access_key": _SECRET,
            "aws_region": _REGION,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same options as environment variables."""
        names = {"aws_endpoint": "AWS_ENDPOINT_URL"}
        return {names.get(name, name.upper()): value for name, value in self.options.items()}

    @abstractmethod
    def create_bucket(self, name: str) -> str:
        """Create a bucket and return its URL."""

    @abstractmethod
    def _command(self) -> Sequence[str]: ...

    def __enter__(self) -> Self:
        environment = {**os.environ, "ROOT_ACCESS_KEY": _KEY, "ROOT_SECRET_KEY": _SECRET}
        self._process = subprocess.Popen(
            self._command(), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._stop()
                raise ServerUnavailable(f"{type(self).__name__} did not start", hint="Is it installed?")
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
        except urllib.error.HTTPError:
            return True
        except (urllib.error.URLError, OSError):
            return False

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)


class S3Emulator(S3Server):
    """Buckets in the memory of a moto process."""

    def create_bucket(self, name: str) -> str:
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            return f"s3://{name}"

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-m", "tests.support.s3", str(self.port)]


class S3Gateway(S3Server):
    """Buckets in a temporary folder, served by versitygw."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-s3-"))
        self._buckets = self._folder / "buckets"
        self._buckets.mkdir()
        (self._folder / "metadata").mkdir()

    def create_bucket(self, name: str) -> str:
        (self._buckets / name).mkdir()
        return f"s3://{name}"

    def _command(self) -> Sequence[str]:
        program = find_gateway()
        if program is None:
            raise ServerUnavailable("versitygw is not installed", hint="make s3-server")
        # By default it keeps metadata in extended attributes, which not every file system has.
        backend = ["posix", "--sidecar", str(self._folder / "metadata"), str(self._buckets)]
        return [str(program), "--port", f"{_HOST}:{self.port}", "--region", _REGION, "--quiet", *backend]

    def _stop(self) -> None:
        super()._stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _emulate(port: int) -> None:
    """Run moto, one request at a time.

    moto checks whether an object exists and then writes it. If another request came in between, two conditional puts
    could both succeed, which no store allows.
    """
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    application: Any = DomainDispatcherApplication(create_backend_app)
    turn = threading.Lock()

    def serve(environment: dict[str, Any], start_response: Any) -> list[bytes]:
        with turn:
            return list(application(environment, start_response))

    run_simple(_HOST, port, serve, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    _emulate(int(sys.argv[1]))
