"""Fetch artifacts with Ivy, which comes with Spark, into a temporary folder.

To use a mirror, set the environment variable DEFAULT_ARTIFACT_REPOSITORY to its address.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pyspark

from penstock.testing.opensearch import find_java

MIRROR_VARIABLE = "DEFAULT_ARTIFACT_REPOSITORY"
MIRROR_SETTINGS = """
<ivysettings>
  <settings defaultResolver="mirror"/>
  <resolvers><ibiblio name="mirror" m2compatible="true" root="${mirror}"/></resolvers>
</ivysettings>
"""
ARCHIVE = """
<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="penstock" module="archive"/>
  <dependencies>
    <dependency org="{0}" name="{1}" rev="{2}" transitive="false">
      <artifact name="{1}" type="{4}" ext="{4}" m:classifier="{3}"/>
    </dependency>
  </dependencies>
</ivy-module>
"""
SECONDS = 900


def fetch(coordinates: tuple[str, str, str, str], folder: Path) -> Path:
    """Fetch the file of an artifact, without its dependencies."""
    group, artifact, version, kind = coordinates
    wanted = ["-types", kind, "-notransitive", "-retrieve", str(folder / "[artifact]-[revision].[ext]")]
    resolve(["-dependency", group, artifact, version, *wanted], folder)
    path = folder / f"{artifact}-{version}.{kind}"
    if not path.exists():
        raise FileNotFoundError(f"{group}:{artifact}:{version} has no {kind}")
    return path


def fetch_archive(coordinates: tuple[str, str, str], classifier: str, kind: str, folder: Path) -> Path:
    """Fetch a file that has a classifier, which needs a description of the module."""
    group, artifact, version = coordinates
    described = folder / "ivy.xml"
    described.write_text(ARCHIVE.format(group, artifact, version, classifier, kind))
    resolve(["-ivy", str(described), "-retrieve", str(folder / "[artifact]-[revision].[ext]")], folder)
    return folder / f"{artifact}-{version}.{kind}"


def fetch_jars(coordinates: tuple[str, str, str], folder: Path, target: Path) -> None:
    """Fetch a jar and all that it needs to run into a folder."""
    wanted = ["-types", "jar", "bundle", "-confs", "default", "-retrieve", str(target / "[artifact]-[revision].[ext]")]
    resolve(["-dependency", *coordinates, *wanted], folder)


def resolve(wanted: list[str], folder: Path) -> None:
    """Run Ivy."""
    arguments = [*wanted, "-m2compatible", "-cache", str(folder / "cache")]
    options: list[str] = []
    if mirror := os.environ.get(MIRROR_VARIABLE):
        settings = folder / "ivysettings.xml"
        settings.write_text(MIRROR_SETTINGS)
        options = [f"-Dmirror={mirror}"]
        arguments += ["-settings", str(settings)]
    ivy = next((Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar"))
    command = [java(), *options, "-jar", str(ivy), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)


def java() -> str:
    """Return the machine's own Java if there is one: it trusts the certificates of a mirror or proxy."""
    home = os.environ.get("JAVA_HOME")
    packaged = find_java()
    found = (home and shutil.which("java", path=f"{home}/bin")) or shutil.which("java")
    return found or (str(packaged / "bin" / "java") if packaged else "java")


def why_failed(what: str, error: OSError | subprocess.SubprocessError) -> str:
    """Return what to print if something could not be fetched."""
    output = getattr(error, "stdout", None) or str(error)
    return (
        f"make: could not fetch {what}; the end of Ivy's output:\n{output[-800:]}\n"
        "make: continuing without it; tests that need it are skipped and listed."
    )
