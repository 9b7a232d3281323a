"""Destinations by name: loaded when asked for, with errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.destinations import registry
from penstock.destinations.memory import MemoryDestination
from penstock.destinations.registry import DESTINATIONS, create_destination, load_destination
from penstock.errors import ConfigError
from penstock.registry import Registered


@pytest.mark.parametrize("name", DESTINATIONS)
def test_every_name_leads_to_a_destination(name: str) -> None:
    assert load_destination(name).name == name


def test_options_become_arguments(tmp_path: Path) -> None:
    assert isinstance(create_destination("memory"), MemoryDestination)
    assert create_destination("parquet", {"path": tmp_path}).name == "parquet"


def test_an_unknown_name_is_told_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'parquet'") as caught:
        create_destination("parkett")
    assert "module:Class" in caught.value.hint


def test_an_unknown_option_is_told_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="no option 'pth'; did you mean 'path'"):
        create_destination("parquet", {"pth": "x"})
    with pytest.raises(ConfigError, match="needs the option path"):
        create_destination("parquet")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_more.py").write_text("import a_library_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = {"more": Registered("needs_more:Destination", extra="more")}
    monkeypatch.setattr(registry, "DESTINATIONS", entry)
    with pytest.raises(ConfigError, match="a_library_that_nobody_has") as caught:
        create_destination("more")
    assert "pip install 'penstock[more]'" in caught.value.hint


def test_a_class_of_ones_own_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "of_my_own.py").write_text("class Half:\n    def startup(self): ...\n")
    (tmp_path / "broken.py").write_text("import a_library_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        create_destination("nowhere:Thing")
    with pytest.raises(ConfigError, match="no class 'Halve'; did you mean 'Half'"):
        create_destination("of_my_own:Halve")
    with pytest.raises(ConfigError, match="lacks drop_table_for_copy, write_table_rows"):
        create_destination("of_my_own:Half")
    with pytest.raises(ModuleNotFoundError):
        create_destination("broken:Thing")


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, penstock.destinations; print([m for m in sys.modules if 'parquet' in m or 'pyspark' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "penstock.destinations.parquet" not in found.stdout
    assert "pyspark" not in found.stdout
