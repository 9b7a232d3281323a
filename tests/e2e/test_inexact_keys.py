"""Settings that could make two rows the same are refused for the columns that identify rows, table by table."""

from __future__ import annotations

import pytest

from penstock.destinations.delta.destination import DeltaDestination
from penstock.errors import RESYNC
from penstock.state import CommandKind, Errored, MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.values import NumericPolicy, OutOfRange, TypeOverride, TypeSettings
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Alone, tables_alone, tables_settings, wait_for
from tests.e2e.test_delta import wait_applied
from tests.support.readback import check_equal

CLAMP = TypeSettings(out_of_range=OutOfRange.CLAMP)


def wait_errored(pipeline: Alone, table: str) -> Errored:
    def look() -> Errored | None:
        phase = pipeline.phases.get(f"public.{table}")
        return phase if isinstance(phase, Errored) else None

    return wait_for(look, f"{table} to stop")


def wait_phases(pipeline: Alone, wanted: dict[str, str]) -> None:
    def look() -> bool:
        return {name.removeprefix("public."): phase.name for name, phase in pipeline.phases.items()} == wanted

    wait_for(look, f"phases {wanted}")


@pytest.mark.trap(31)
@pytest.mark.parametrize(
    ("types", "column", "says"),
    [
        (CLAMP, "date", 'out_of_range = "clamp"'),
        (TypeSettings(out_of_range=OutOfRange.NULL), "date", 'out_of_range = "null"'),
        (TypeSettings(numeric=NumericPolicy.DOUBLE), "numeric", 'numeric = "double"'),
    ],
)
def test_a_key_that_a_setting_would_change_stops_its_table_until_it_is_overridden(
    each_database, tmp_path, types, column, says
):
    database = each_database
    values = {"date": ("infinity", "10000-01-01"), "numeric": (str(2**60), str(2**60 + 1))}[column]
    database.execute(f"create table keyed (id {column} primary key, note text)")
    database.execute(f"create table whole (cell {column}); alter table whole replica identity full")
    database.execute(f"create table other (id int primary key, cell {column})")
    for value in values:
        database.execute("insert into keyed values (%s, 'n')", [value])
        database.execute("insert into whole values (%s)", [value])
    store = MemoryStore("e2e")

    def pipeline(settings: TypeSettings) -> Alone:
        described = tables_settings(database, tmp_path, manage_publication=True, types=settings)
        return tables_alone(described, store, DeltaDestination(tmp_path / "lake"), LocalTasks())

    with pipeline(types) as running:
        wait_phases(running, {"keyed": "errored", "whole": "errored", "other": "ready"})
        stopped = wait_errored(running, "keyed")
        assert says in stopped.reason
        assert "public.keyed" in stopped.reason
        assert "'id'" in stopped.reason
        assert stopped.solution is not None
        assert '[tables."public.keyed".types.columns."id"]' in stopped.solution
        assert RESYNC in stopped.solution
        assert "cell" in wait_errored(running, "whole").reason
    overrides = (
        TypeOverride("public.keyed", "id", TypeSettings()),
        TypeOverride("public.whole", None, TypeSettings()),
    )
    with pipeline(TypeSettings(types.out_of_range, types.numeric, overrides=overrides)) as running:
        store.add_command(CommandKind.RESYNC, ("public.keyed", "public.whole"))
        wait_phases(running, dict.fromkeys(["keyed", "whole", "other"], "ready"))
        for value in values:
            database.execute("update keyed set note = 'changed' where id = %s", [value])
            database.execute("insert into whole values (%s)", [value])
        database.execute("delete from keyed where id = %s", [values[0]])
        wait_applied(running, database)
    assert check_equal(database.dsn, LakeReadBack(tmp_path / "lake"), ["keyed", "whole", "other"]) == 5


@pytest.mark.trap(31)
def test_a_column_that_joins_the_key_of_a_running_table_stops_it(database, tmp_path):
    database.execute("create table whole (cell int); alter table whole replica identity full")
    settings = tables_settings(database, tmp_path, manage_publication=True, types=CLAMP)
    destination = DeltaDestination(tmp_path / "lake")
    with tables_alone(settings, MemoryStore("e2e"), destination, LocalTasks()) as pipeline:
        wait_phases(pipeline, {"whole": "ready"})
        database.execute("alter table whole add due date; insert into whole values (1, 'infinity')")
        assert "out_of_range = \"clamp\" cannot be used for column 'due'" in wait_errored(pipeline, "whole").reason
