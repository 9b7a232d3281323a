"""Documents in Spark tasks: the same as without, also where a task's worker or the whole process is killed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.documents.output import DocumentsSettings
from penstock.source.connections import Role, SourceSettings, connect
from penstock.spark.tasks import SparkTasks
from penstock.state import CommandKind
from tests.e2e.documents import ORDERS, PEOPLE, Site, run, specifications
from tests.e2e.support import wait_for
from tests.integration.documents import world
from tests.support.document_sink import FileSink

pytestmark = pytest.mark.timeout(900)


def test_documents_are_built_and_written_in_tasks(spark: Any, database: Any, tmp_path: Path) -> None:
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        world.create(connection, recorded=False)
        world.fill(Random(1), connection)
        connection.execute(
            "insert into w.people (id, name, email, team_code)"
            " select n, 'p', n::text, 'c1' from generate_series(100, 1000) n"
        )
        connection.execute("insert into w.orders select n, n from generate_series(100, 1000) n")
        sink = FileSink(tmp_path / "documents.db")
        # Everything in jobs, however small; the documents of a team are many.
        settings = DocumentsSettings(local_documents=0, chunk_documents=100, fan_out_documents=500, range_bytes=8192)
        indexes = specifications(people=PEOPLE, orders=ORDERS)
        site = Site(database, tmp_path, indexes, sink, sink.documents, settings)
        output = site.output(SparkTasks(spark))
        with run(output):
            site.wait_settled(output)
            site.check()
            connection.execute("update w.teams set label = 'renamed' where code = 'c1'")
            random = Random(3)
            for _ in range(10):
                world.random_transaction(random, connection, 20)
            output.store.add_command(CommandKind.REBUILD_INDEX, options={"indexes": ["people"]})
            for _ in range(10):
                world.random_transaction(random, connection, 20)
            site.wait_settled(output)
            wait_for(lambda: all(each.answered for each in output.store.get_commands()), "the rebuild to be answered")
            site.wait_settled(output)
            site.check()
