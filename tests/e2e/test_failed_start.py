"""A start that fails leaves nothing on the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.base import DestinationContext
from penstock.destinations.memory import MemoryDestination
from penstock.errors import ConfigError
from penstock.state.memory import MemoryStore
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import tables_alone, tables_settings, wait_for

CREATED = """
    select 'slot' from pg_replication_slots where database = current_database()
    union all select 'publication' from pg_publication
    union all select 'trigger' from pg_event_trigger
"""


class Unusable(MemoryDestination):
    """Starts only if it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_usable = False

    def startup(self, context: DestinationContext) -> None:
        if not self.is_usable:
            raise ConfigError("the destination cannot be used")
        super().startup(context)


def test_what_a_failed_start_created_is_removed_and_what_was_there_before_stays(database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)")
    settings = tables_settings(database, tmp_path, ddl_trigger=True)
    store, destination = MemoryStore("e2e"), Unusable()

    def start() -> Any:
        return tables_alone(settings, store, destination, ProcessTasks())

    with pytest.raises(ConfigError, match="cannot be used"):
        start().start()
    assert database.execute(CREATED) == []
    destination.is_usable = True
    with start() as pipeline:
        wait_for(lambda: pipeline.phases["public.t"].name == "ready", "the copy")
    there = database.execute(CREATED)
    assert {what for (what,) in there} == {"slot", "publication", "trigger"}
    destination.is_usable = False
    with pytest.raises(ConfigError, match="cannot be used"):
        start().start()
    assert database.execute(CREATED) == there
