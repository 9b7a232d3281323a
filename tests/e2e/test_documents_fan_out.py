"""A row that very many documents show: memory stays bounded, and other changes do not wait for all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import wait_for
from tests.support.document_sink import FileSink
from tests.support.drive_pipeline import DriveSettings
from tests.support.pipeline_process import PipelineProcess, Seen
from tests.support.processes import resident_bytes

DOCUMENTS = int(os.environ.get("PENSTOCK_SOAK_FAN_OUT", "1000000"))
PEOPLE = """
version: 1
schema: w
table: people
fields:
  - {text: name}
  - {belongs_to: team, column: team_id, table: teams, primary_key: id, fields: [{text: label}]}
"""
NOTES = "version: 1\nschema: w\ntable: notes\nfields: [{text: body}]"

pytestmark = pytest.mark.timeout(900)


@pytest.mark.trap(48)
@pytest.mark.parametrize(
    "documents", [20_000, pytest.param(DOCUMENTS, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_a_row_in_very_many_documents_holds_nobody_back(database: Any, tmp_path: Path, documents: int) -> None:
    database.execute(
        f"""
        create schema w;
        create table w.teams (id int primary key, label text);
        create table w.people (id int primary key, name text, team_id int);
        create table w.notes (id int primary key, body text);
        insert into w.teams values (1, 'before');
        insert into w.people select n, repeat('x', 200), 1 from generate_series(1, {documents}) n;
        insert into w.notes values (1, 'first');
        create index on w.people (team_id);
        """
    )
    database.execute("analyze w.people")
    settings = DriveSettings(
        dsn=database.dsn,
        folder=str(tmp_path),
        slot=f"fan_out_{database.name[-12:]}",
        tables=("w.*",),
        indexes={"people": PEOPLE, "notes": NOTES},
        documents={"fan_out_documents": 2_000, "wave_chunks": 4},
    )
    sink = FileSink(settings.sink_file)
    process = PipelineProcess(settings)
    process.start()
    try:
        process.wait_phases("seeded", 2)
        before = resident_bytes(process.pid)
        database.execute("update w.teams set label = 'after'")
        process.wait_for("the many documents to be begun", lambda seen: "busy" in seen.phases.values())
        database.execute("update w.notes set body = 'second'")
        wait_for(lambda: sink.documents("notes")["1"]["body"] == "second", "another index to follow")
        assert "busy" in process.seen.phases.values(), "the many are not done, and nobody waited for them"
        sizes = [before]

        def done(seen: Seen) -> bool:
            sizes.append(resident_bytes(process.pid))
            return "busy" not in seen.phases.values()

        process.wait_for("all of them", done, timeout=3000)
        assert max(sizes) - before < 200 << 20
        process.wait_phases("seeded", 2)
        labels = {each["team"]["label"] for each in sink.documents("people").values()}
        assert labels == {"after"}
        assert sink.count("people") == documents
        assert process.stop() == 0
    finally:
        process.close()
