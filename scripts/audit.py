"""Look through the committed files for what must not be in them, and for files that have grown too long."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE_LIMIT = 600

# Written in pieces, so that this file does not find itself.
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
    """Each as `path:line: what`."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in sorted(filter(None, listing.split("\0"))):
        path = root / name
        if path.is_file():
            yield from check_file(name, path)


def check_file(name: str, path: Path) -> Iterator[str]:
    """The problems of one file; binary files have none."""
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


def main() -> int:
    """Print the problems; any is a failure."""
    problems = list(find_problems(ROOT))
    for problem in problems:
        print(problem)
    print(f"audit: {len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
