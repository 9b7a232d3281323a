"""The contract of stores that several processes share, and that survive their death."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

from penstock.errors import LeaseHeld, LeaseLost
from penstock.lsn import Lsn
from penstock.source.lineage import Ancestry
from penstock.state import DataSync, Init, Store, open_store
from penstock.testing.stores.contract import StoreContract
from penstock.testing.stores.samples import LINEAGE, PATIENCE, TABLES

_PLAY = "import sys; from penstock.testing.stores.durable import play; play(*sys.argv[1:])"


class DurableStoreContract(StoreContract):
    """`StoreContract`, and what happens when processes race, stop or are killed."""

    url: str

    def open(self, pipeline_id: str = "contract") -> Store:
        return open_store(self.url, pipeline_id)

    def test_a_killed_process_leaves_whole_changes_and_a_lease_that_is_free(self) -> None:
        with self._process("update") as process:
            lines = _lines(process)
            rounds = [int(next(lines)) for _ in range(25)]
            process.kill()
            rounds += [int(line) for line in lines if line.endswith("\n")]
        store = self.driver()  # immediately, not after the lease has expired
        positions = store.get_table_positions()
        assert set(positions) == set(TABLES)
        assert len(set(positions.values())) == 1
        assert store.get_replication_progress() == positions[1]
        assert positions[1] in (rounds[-1], rounds[-1] + 1)
        assert len(set(store.get_table_replication_states().values())) == 1
        store.update_table_replication_states({table_id: Init() for table_id in TABLES})

    def test_of_processes_that_race_for_the_lease_one_gets_it(self) -> None:
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(self._process("race")) for _ in range(3)]
            for process in processes:
                assert next(_lines(process)) == "waiting\n"
            for process in processes:
                _tell(process)
            answers = [next(_lines(process)).split() for process in processes]
            winners = [each for each, answer in zip(processes, answers, strict=True) if answer[0] == "held"]
            assert len(winners) == 1, answers
            named = {answer[1] for answer in answers if answer[0] == "refused"}
            assert named == {str(winners[0].pid)}

    def test_a_stopped_process_is_fenced_off_when_it_wakes_up(self) -> None:
        with self._process("sleep") as process:
            assert next(_lines(process)) == "held\n"
            process.send_signal(signal.SIGSTOP)
            store = self.reader()
            store.acquire_lease(wait=PATIENCE)
            store.update_table_replication_state(1, Init())
            process.send_signal(signal.SIGCONT)
            _tell(process)
            assert next(_lines(process)) == "lost\n"
            assert store.get_table_replication_states() == {1: Init()}

    @contextlib.contextmanager
    def _process(self, role: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-c", _PLAY, role, self.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout.readline, "")


def play(role: str, url: str) -> None:
    """Play a role in a process of its own; a line on standard input tells it to continue."""
    output = sys.stdout
    with open_store(url, "contract") as store:
        store.use_lineage(Ancestry(LINEAGE))
        match role:
            case "update":
                store.acquire_lease()
                _update(store, output)
            case "race":
                _say(output, "waiting")
                sys.stdin.readline()
                try:
                    lease = store.acquire_lease()
                    _say(output, f"held {lease.holder.pid}")
                except LeaseHeld as error:
                    _say(output, f"refused {error.pid}")
                sys.stdin.readline()
            case "sleep":
                store.acquire_lease(ttl=0.6)
                _say(output, "held")
                sys.stdin.readline()
                try:
                    store.update_table_replication_state(2, Init())
                    _say(output, "written")
                except LeaseLost:
                    _say(output, "lost")
            case _:
                raise SystemExit(f"unknown role {role}")


def _update(store: Store, output: IO[str]) -> None:
    store.update_table_replication_states({table_id: Init() for table_id in TABLES})
    for number in range(1, 1_000_000):
        phase = DataSync() if number % 2 else Init()
        store.update_table_replication_states(dict.fromkeys(TABLES, phase))
        positions = {table_id: Lsn(number) for table_id in TABLES}
        store.upsert_replication_progress(Lsn(number), table_positions=positions)
        _say(output, str(number))


def _say(output: IO[str], line: str) -> None:
    output.write(line + "\n")
    output.flush()
