"""The pages: links lead somewhere, quoted messages exist, and samples of config files can be read."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from penstock.capture.engine import CaptureSettings
from penstock.config import load_config
from penstock.config.models import CopySection, PipelineSection, SpoolSection
from penstock.documents import load_specification

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
TROUBLESHOOTING = (ROOT / "docs/guides/troubleshooting.md").read_text()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        assert not anchor or linked.suffix != ".md" or anchor in _anchors(linked), target


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_samples_of_config_files_can_be_read(path: Path) -> None:
    for sample in re.findall(r"^```toml\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
        tomllib.loads(sample)


# The samples of the API's own page run as tests.
@pytest.mark.parametrize("path", [each for each in PAGES if each.name != "api.md"], ids=_name)
def test_samples_import_what_exists(path: Path) -> None:
    for sample in re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(sample)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "penstock":
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@cache
def _templates() -> list[re.Pattern[str]]:
    """Texts in the source that say something by themselves, as patterns for what is filled in."""
    templates = {text for text in _messages().splitlines() if len(re.findall(r"\w", text)) >= 12}
    return [re.compile(".*".join(map(re.escape, text.split("…")))) for text in templates]


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_errors_and_hints_in_samples_are_those_of_the_program(path: Path) -> None:
    samples = re.findall(r"^```(?:console|text)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^(?:error|hint): (.*)$", "\n".join(samples), re.MULTILINE):
        assert any(template.search(line) for template in _templates()), line


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/reference/benchmarks.md"))
    shown = re.findall(r"^\| (\w+): .* \| [\d,]+ \| ([\d.]+) \| [\d.]+ \| (\d+ MiB) \|$", readme, re.MULTILINE)
    measured = re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+), (\d+ MiB) \|$", page, re.MULTILINE)
    assert len(shown) == 6
    assert shown == measured


def test_sizing_has_the_defaults() -> None:
    page = (ROOT / "docs/guides/sizing.md").read_text()
    spool, settings = SpoolSection(), PipelineSection(id="x")
    for name, unit, shift in (("max_bytes", "GB", 30), ("copy_max_bytes", "GB", 30), ("min_free_bytes", "MB", 20)):
        assert f"`spool.{name}`, {getattr(spool, name) >> shift} {unit}" in page
    assert f"`batch.max_bytes` defaults to {settings.batch.max_bytes >> 20} MB" in page
    assert f"`copy.max_table_sync_workers` ({CopySection().max_table_sync_workers})" in page
    assert f"a queue of {CaptureSettings.__dataclass_fields__['queue_bytes'].default >> 20} MiB" in page


@cache
def _messages() -> str:
    """Every text in the source, one per line, with `…` for what is filled in."""
    return "\n".join(
        " ".join(text.split())
        for path in sorted((ROOT / "src/penstock").rglob("*.py"))
        for text in _texts(ast.parse(path.read_text()))
    )


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _quoted() -> list[str]:
    """The messages in the first column of the page's tables."""
    cells = re.findall(r"^\| (.*?) \| .* \| .* \|$", TROUBLESHOOTING, re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    return [text for text in quoted if not text.startswith("penstock ") and text != "deltalake"]


FROM_THE_SERVER = {"password authentication failed", "Connection refused"}


@pytest.mark.parametrize("message", sorted(set(_quoted()) - FROM_THE_SERVER))
def test_messages_that_troubleshooting_quotes_exist(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("…")]
    assert re.search("[^\n]*".join(parts), _messages()), "changed in the source, not on the page"


def test_troubleshooting_quotes_messages() -> None:
    assert len(_quoted()) > 30


def test_the_specification_for_people_who_know_pgsync_is_understood(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/migrating-from-pgsync.md").read_text()
    for language, name in (("yaml", "books.schema.yml"), ("toml", "penstock.toml")):
        sample = re.search(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        assert sample is not None
        (tmp_path / name).write_text(sample[1])
    config = load_config(
        tmp_path / "penstock.toml", {"LIBRARY_URL": "postgresql://reader@db/library", "SEARCH_URL": "http://search"}
    )
    assert config.pipeline.id == "library"
    assert load_specification(tmp_path / "books.schema.yml").table.name == "book"


def test_the_config_for_people_who_know_debezium_is_understood(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/migrating-from-debezium.md").read_text()
    sample = re.search(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert sample is not None
    (tmp_path / "penstock.toml").write_text(sample[1])
    assert load_config(tmp_path / "penstock.toml", {"SHOP_URL": "postgresql://reader@db/shop"}).pipeline.id == "shop"
