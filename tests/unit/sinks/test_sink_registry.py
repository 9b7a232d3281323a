"""Sinks by name: loaded when asked for, with errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.documents.sinks import MemorySink
from penstock.errors import ConfigError
from penstock.registry import Registered
from penstock.sinks import registry
from penstock.sinks.registry import SINKS, create_sink, load_sink


@pytest.mark.parametrize("name", SINKS)
def test_every_name_leads_to_a_sink(name: str) -> None:
    assert load_sink(name).__name__.lower() == f"{name}sink"


def test_an_unknown_name_is_told_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="there is no sink 'opensarch'; did you mean 'opensearch'") as caught:
        create_sink("opensarch")
    assert "module:Class" in caught.value.hint


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_more.py").write_text("import a_library_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "SINKS", {"more": Registered("needs_more:Sink", extra="more")})
    with pytest.raises(ConfigError, match="sink 'more' needs the package a_library_that_nobody_has") as caught:
        create_sink("more")
    assert "pip install 'penstock[more]'" in caught.value.hint


def test_a_class_of_ones_own_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sink_of_my_own.py").write_text(
        "from penstock.documents import Sink\n"
        "class Half:\n    def write(self): ...\n"
        "class Whole(Sink):\n    def write(self, batch): ...\n    def flush(self, caught_up): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="is not a sink: it lacks flush, ensure_index") as caught:
        create_sink("sink_of_my_own:Half")
    assert "penstock.documents.Sink" in caught.value.hint
    assert type(create_sink("sink_of_my_own:Whole")).__name__ == "Whole"
    assert isinstance(create_sink("memory"), MemorySink)


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys; from penstock.sinks.registry import create_sink; create_sink('counting');"
        "print('penstock.sinks.opensearch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_options_of_opensearch_are_checked() -> None:
    with pytest.raises(ConfigError, match="sink 'opensearch' has no option 'usr'; did you mean 'user'"):
        create_sink("opensearch", {"url": "http://localhost:9200", "usr": "x"})
    with pytest.raises(ConfigError, match="sink 'opensearch' needs the option url"):
        create_sink("opensearch", {})
    assert load_sink("opensearch") is type(create_sink("opensearch", {"url": "http://localhost:9200"}))
