"""`make audit`: code that stands twice is found, and there is none without a reason."""

from __future__ import annotations

from pathlib import Path

from scripts.audit import REPEATED, ROOT, Block, Size, find_repeated_blocks, measure


def _write(root: Path, name: str, *parts: str) -> None:
    path = root / "src" / "p" / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n")


def _lines(name: str, count: int) -> str:
    return "\n".join(f"{name}_{number} = {number}" for number in range(count))


def test_no_block_of_the_source_stands_twice_without_a_reason() -> None:
    found = find_repeated_blocks(ROOT)
    assert [block for block in found if block.files not in REPEATED] == []
    assert REPEATED.keys() <= {block.files for block in found}, "a pair that shares nothing any more is still listed"


def test_blocks_are_found_wherever_they_stand(tmp_path: Path) -> None:
    _write(tmp_path, "a", "first = 1", _lines("x", 12), "last = 1")
    _write(tmp_path, "b", "import os", "", "if True:", _lines("    x", 12).replace("x_5", "\n\n    x_5", 1))
    _write(tmp_path, "c", _lines("y", 10), "other = 1", _lines("y", 10))
    assert find_repeated_blocks(tmp_path) == [Block("src/p/a.py:2", "src/p/b.py:4", 12)]


def test_imports_are_no_block_and_end_one(tmp_path: Path) -> None:
    for name in "ab":
        _write(tmp_path, name, *["import os"] * 12, _lines("x", 8), "import re", _lines("y", 8))
    assert find_repeated_blocks(tmp_path) == []


def test_modules_lines_and_imports_are_counted(tmp_path: Path) -> None:
    _write(tmp_path, "__init__", "from p.a import x")
    _write(tmp_path, "a", "import os", "x = 1")
    _write(tmp_path, "b", "from p import a", "from p.a import x", "import p")
    assert measure(tmp_path) == Size(3, 6, 1.0)
