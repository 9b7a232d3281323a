"""Check the committed files: nothing forbidden in them, no overlong module, no code in `src/` that stands twice.

scripts/audit.py             the problems, then the size of `src/`
scripts/audit.py FOLDER      the same for another checkout
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LINE_LIMIT = 600
BLOCK_LIMIT = 10
"""The most lines in a row that two places of `src/` may share; blank lines and imports do not count."""
REPEATED: dict[frozenset[str], str] = {}
"""Files below `src/` that may share a longer block, each pair with the reason."""

# Some are split, so that this file does not match itself.
_PATTERNS = {
    "address of a package registry": re.compile(
        r"(?:index[-_]url|find[-_]links|registry|trusted[-_]host)\b[^\n]{0,20}http" + r"s?://", re.IGNORECASE
    ),
    "registry host": re.compile(
        r"https?://(?:[\w.-]*\.)?(?:pypi|pythonhosted|npmjs|maven)\.[\w.-]+/(?:simple|packages|maven2)"
    ),
    "absolute home path": re.compile(r"(?<![\w.$}])/(?:home|Users)/\w+|(?<![\w.$}])/" + r"root/\w*"),
    "unfinished work": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
    "secret": re.compile(r"-----BEGIN (?:RSA |EC |OPENSSH )?PRIVATE" + r" KEY-----"),
}


def find_problems(root: Path) -> Iterator[str]:
    """Yield each problem as `path:line: problem`."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in sorted(filter(None, listing.split("\0"))):
        path = root / name
        if path.is_file():
            yield from check_file(name, path)


def check_file(name: str, path: Path) -> Iterator[str]:
    """Yield the problems of one file; binary files have none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        for what, pattern in _PATTERNS.items():
            if pattern.search(line):
                yield f"{name}:{number}: {what}"
    if name.startswith("src/") and name.endswith(".py") and len(lines) > LINE_LIMIT:
        yield f"{name}:{LINE_LIMIT}: {len(lines)} lines; split it by concept"


class Block(NamedTuple):
    """Lines that stand at two places, each given as `path:line`."""

    first: str
    second: str
    line_count: int

    @property
    def files(self) -> frozenset[str]:
        return frozenset(place.rpartition(":")[0] for place in (self.first, self.second))


def find_repeated_blocks(root: Path, limit: int = BLOCK_LIMIT) -> list[Block]:
    """Return the blocks of more than `limit` identical lines that stand twice in `src/`."""
    lines = {str(path.relative_to(root)): list(_code_lines(path)) for path in _modules(root)}
    # Where each run of limit + 1 lines begins: file and index.
    begins: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, numbered in lines.items():
        for index in range(len(numbered) - limit):
            window = numbered[index : index + limit + 1]
            # A gap between numbers is an import or a blank line; only imports, which have no text, end a run.
            if all(text for _, text in window):
                begins[tuple(text for _, text in window)].append((name, index))
    shared: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for places in begins.values():
        for (one, first), (other, second) in combinations(places, 2):
            shared[one, other, second - first].append(first)
    found: list[Block] = []
    for (one, other, distance), indexes in shared.items():
        for start, end in _runs(sorted(indexes)):
            first, second = lines[one][start][0], lines[other][start + distance][0]
            found.append(Block(f"{one}:{first}", f"{other}:{second}", end - start + limit + 1))
    return sorted(found)


class Size(NamedTuple):
    """How much there is to know in `src/`."""

    modules: int
    lines: int
    mean_imports: float
    """The modules of Penstock that a module imports, on average."""


def measure(root: Path) -> Size:
    """Count the modules, lines and imports below `src/`."""
    paths = {_module_name(root, path): path for path in _modules(root)}
    imports = [_imported(path, set(paths)) for path in paths.values()]
    lines = sum(len(path.read_text().splitlines()) for path in paths.values())
    return Size(len(paths), lines, sum(map(len, imports)) / max(1, len(paths)))


def _modules(root: Path) -> list[Path]:
    return sorted((root / "src").rglob("*.py"))


def _module_name(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root / "src").with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, modules: set[str]) -> set[str]:
    """The modules of ours that a file names in its imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            # A name that is no module comes from the module itself.
            found |= (inner & modules) | ({node.module} if inner - modules else set())
    return found & modules


def _code_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers; imports as empty texts."""
    text = path.read_text()
    imports = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, "" if number in imports else line.strip()


def _runs(indexes: list[int]) -> Iterator[tuple[int, int]]:
    """The first and last number of every run without a gap."""
    start = indexes[0]
    for before, after in pairwise([*indexes, indexes[-1] + 2]):
        if after != before + 1:
            yield start, before
            start = after


def main(arguments: list[str]) -> int:
    """Print the problems and the size of `src/`; any problem is a failure."""
    root = Path(arguments[0]).resolve() if arguments else ROOT
    problems = list(find_problems(root))
    problems += [
        f"{block.first}: the {block.line_count} lines of {block.second} again"
        for block in find_repeated_blocks(root)
        if block.files not in REPEATED
    ]
    for problem in problems:
        print(problem)
    size = measure(root)
    print(f"src: {size.modules} modules, {size.lines} lines, {size.mean_imports:.1f} imports per module")
    print(f"audit: {len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
