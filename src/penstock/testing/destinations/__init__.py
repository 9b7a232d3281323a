"""For people who write destinations: the suite that each must pass, and batches without a database.

class TestMine(DestinationContract):
    @pytest.fixture
    def harness(self, tmp_path):
        return MyHarness(tmp_path)
"""

from penstock.testing.destinations.contract import DestinationContract, DestinationHarness
from penstock.testing.destinations.script import LocalTasks, ScriptedCopy, ScriptedSource, make_context

__all__ = [
    "DestinationContract",
    "DestinationHarness",
    "LocalTasks",
    "ScriptedCopy",
    "ScriptedSource",
    "make_context",
]
