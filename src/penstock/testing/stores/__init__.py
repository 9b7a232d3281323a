"""The contract of stores, as tests for any implementation.

    class TestMyStore(StoreContract):
        def open(self, pipeline_id="contract"):
            return MyStore(self.place, pipeline_id)       # the same state each time within a test

`DurableStoreContract` adds tests with several processes, some of which are killed. It needs a `url` that
`penstock.state.open_store` understands. Run the tests with pytest; for readable failures, call
`pytest.register_assert_rewrite("penstock.testing.stores")` in a conftest.
"""

from penstock.testing.stores.contract import StoreContract
from penstock.testing.stores.durable import DurableStoreContract
from penstock.testing.stores.samples import LINEAGE, failed, refused, table_version

__all__ = ["LINEAGE", "DurableStoreContract", "StoreContract", "failed", "refused", "table_version"]
