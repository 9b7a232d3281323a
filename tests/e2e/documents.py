"""What the tests of documents share: a world of tables, an output over it, and what the documents should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.documents.base import Sink
from penstock.documents.builder import PostgresDocuments
from penstock.documents.output import DocumentsOutput, DocumentsSettings
from penstock.documents.relation_map import RelationMap, open_relation_map
from penstock.lsn import Lsn, reaches
from penstock.source.connections import Role, SourceSettings, connect
from penstock.specification import IndexSpecification, parse_specification
from penstock.spool import SpoolSettings
from penstock.state import IndexStatus, MemoryStore, Store
from penstock.stream import StreamSettings
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import Alone, current_position, wait_for

PEOPLE = """
version: 1
schema: w
table: people
fields:
  - {text: name}
  - {belongs_to: team, column: team_code, table: teams, primary_key: code, fields: [{text: label}]}
  - {has_many: orders, table: orders, foreign_key: person_id, primary_key: id, fields: [{long: id}, {keyword: status}]}
  - {count: order_count, table: orders, foreign_key: person_id}
"""
ORDERS = """
version: 1
schema: w
table: orders
fields:
  - {keyword: status}
  - {has_many: lines, table: lines, foreign_key: order_id, primary_key: [order_id, no], fields: [{keyword: sku}]}
"""


def specifications(**texts: str) -> list[IndexSpecification]:
    return [parse_specification(text, name) for name, text in texts.items()]


def documents_of(dsn: str, specifications: list[IndexSpecification]) -> dict[str, dict[str, Any]]:
    """What every index should have, built from the database in one go."""
    settings = SourceSettings(dsn)
    with (
        connect(settings, Role.CATALOG) as resolving,
        connect(settings, Role.CATALOG) as building,
        closing(open_relation_map("memory:", "oracle")) as relations,
    ):
        documents = PostgresDocuments(resolving, building, specifications, relations)
        found: dict[str, dict[str, Any]] = {each.name: {} for each in specifications}
        for each in specifications:
            for keys in documents.every_key(each.name):
                for row in documents.build(keys).to_pylist():
                    if row["body"] is not None:
                        found[each.name][row["id"]] = json.loads(row["body"])
        return found


@dataclass
class Site:
    """A database with the world's tables, and documents that follow it; its state outlives the outputs."""

    database: Any
    folder: Path
    specifications: list[IndexSpecification]
    sink: Sink
    read: Callable[[str], dict[str, Any]]
    """What a search of an index would see."""
    settings: DocumentsSettings = field(default_factory=DocumentsSettings)
    store: Store = field(default_factory=lambda: MemoryStore("e2e:documents"))
    stream: dict[str, Any] = field(default_factory=dict)

    def relations(self) -> RelationMap:
        return open_relation_map(f"sqlite:///{self.folder}/state.db", "e2e:documents")

    def stream_settings(self) -> StreamSettings:
        values = {
            "id": "e2e",
            "source": SourceSettings(self.database.dsn),
            "publication": "e2e",
            "slot": f"documents_{self.database.name[-12:]}",
            "spool": SpoolSettings(self.folder / "spool", min_free_bytes=0),
            "tables": ("w.*",),
        }
        return StreamSettings(**values | self.stream)

    def output(self, tasks: Any = None, **options: Any) -> Alone:
        return Alone(self.definition(tasks, **options))

    def definition(self, tasks: Any = None, **options: Any) -> DocumentsOutput:
        return DocumentsOutput(
            self.stream_settings(),
            self.store,
            self.specifications,
            self.sink,
            tasks or ProcessTasks(),
            relations=self.relations,
            documents=self.settings,
            **options,
        )

    def wait_settled(self, output: Alone, position: Lsn | None = None) -> None:
        """Every index serves, and has all that is committed now."""
        end = position or current_position(self.database)

        def look() -> bool:
            output.wait(0)
            return reaches(output.status.acknowledged, end) and output.is_complete

        wait_for(look, f"documents to reach {end}")
        assert {each.status for each in output.indexes.values()} == {IndexStatus.SEEDED}

    def check(self) -> None:
        """Every document equals the one that is built from the database, none is missing, none is extra."""
        for name, wanted in documents_of(self.database.dsn, self.specifications).items():
            found = self.read(name)
            assert found.keys() == wanted.keys(), name
            assert found == wanted, name


def run(output: Alone) -> Alone:
    return output
