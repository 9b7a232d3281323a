"""Search servers of tests: they end with whoever started them, and several processes can share one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.testing import opensearch
from penstock.testing.opensearch import ExistingOpenSearch, OpenSearchServer, find_java, find_opensearch, why_not
from penstock.testing.server import wait_until_gone
from tests.support.shared_server import shared_opensearch

needs_opensearch = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

_LAUNCH = """
from penstock.testing.opensearch import OpenSearchServer
server = OpenSearchServer()
server.launch()
print(server.pid, server.folder, flush=True)
input()
"""


def test_what_is_missing_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(opensearch.HOME_VARIABLE, str(tmp_path))
    assert find_opensearch() is None
    assert "make opensearch" in (why_not() or "")
    with pytest.raises(ConfigError, match="not installed"):
        OpenSearchServer()


@needs_opensearch
def test_a_server_does_not_outlive_a_process_that_is_killed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    pid, folder = process.stdout.readline().split()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdin.close()
    process.stdout.close()
    assert wait_until_gone([int(pid)], timeout=60)
    deadline = time.monotonic() + 60
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()


@needs_opensearch
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as somebody else")
def test_programs_in_a_folder_that_is_closed_to_others_are_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, java = find_opensearch(), find_java()
    assert home is not None
    assert java is not None
    closed = tmp_path / "closed"
    (closed / "bin").mkdir(parents=True)
    (closed / "bin" / "opensearch").write_text("")
    (closed / "config").mkdir()
    (closed / "config" / "log4j2.properties").write_text("")
    closed.chmod(0o700)
    monkeypatch.setenv(opensearch.HOME_VARIABLE, str(closed))
    server = OpenSearchServer()
    try:
        assert (server.folder / "home" / "bin" / "opensearch").exists()
    finally:
        server.close()
    assert not server.folder.exists()


@pytest.mark.soak
@needs_opensearch
def test_a_port_that_somebody_takes_meanwhile_is_left_to_them() -> None:
    server = OpenSearchServer()
    taken = server.port
    with socket.create_server(("127.0.0.1", taken)):
        try:
            server.start()
            assert server.port != taken
            assert server.request("GET", "/")["version"]["distribution"] == "opensearch"
        finally:
            server.close()


@pytest.mark.soak
@needs_opensearch
def test_one_server_for_all_who_ask_until_the_last_has_left(tmp_path: Path) -> None:
    leave = threading.Event()
    first_has_it = threading.Event()
    urls: list[str] = []

    def first() -> None:
        with shared_opensearch(tmp_path) as server:
            urls.append(server.url)
            first_has_it.set()
            assert leave.wait(240)

    starter = threading.Thread(target=first)
    starter.start()
    assert first_has_it.wait(240)
    with shared_opensearch(tmp_path) as server:
        assert [server.url] == urls
        leave.set()
        # It wants to end the server, and has to wait for us.
        starter.join(0.5)
        assert starter.is_alive()
        assert server.request("GET", "/")["version"]["distribution"] == "opensearch"
    starter.join(60)
    assert not starter.is_alive()
    with pytest.raises(OSError, match="refused"):
        ExistingOpenSearch(urls[0]).request("GET", "/")
