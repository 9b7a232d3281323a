"""The contract of stores, as tests that any implementation can be put through.

    class TestMyStore(StoreContract):
        def open(self, pipeline_id="contract"):
            return MyStore(self.place, pipeline_id)       # the same state each time within a test

`DurableStoreContract` adds what only a store outside the process can show: other processes, and their death. It needs
a `url` that `penstock.state.open_store` understands. Run with pytest, which finds the methods by their names; for
readable failures, `pytest.register_assert_rewrite("penstock.testing.stores")` in a conftest.
"""

from penstock.testing.stores.contract import StoreContract
from penstock.testing.stores.durable import DurableStoreContract
from penstock.testing.stores.samples import LINEAGE, failed, refused, table_version

__all__ = ["LINEAGE", "DurableStoreContract", "StoreContract", "failed", "refused", "table_version"]
