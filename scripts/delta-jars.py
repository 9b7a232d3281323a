"""Fetch Delta's jars for Spark into a folder, by their coordinates; does nothing when they are there.

Only tests that read tables with Spark need them. Spark resolves the coordinates itself, as `spark.jars.packages` does,
into a folder that is thrown away: half-filled caches of other tools do not matter. Behind a mirror, Spark takes its
address from the environment variable DEFAULT_ARTIFACT_REPOSITORY.

Usage: delta-jars.py <folder>
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from penstock.spark.lake import COORDINATES

# What Spark has itself, in versions that fit it.
EXCLUDED = (
    "com.fasterxml.jackson.core:jackson-databind",
    "com.fasterxml.jackson.datatype:jackson-datatype-jdk8",
    "com.github.luben:zstd-jni",
    "io.unitycatalog:unitycatalog-client",
    "io.unitycatalog:unitycatalog-hadoop",
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.apache.logging.log4j:log4j-core",
    "org.apache.logging.log4j:log4j-slf4j2-impl",
    "org.apache.parquet:parquet-hadoop",
    "org.locationtech.jts:jts-core",
    "org.roaringbitmap:RoaringBitmap",
)


def main() -> int:
    target = Path(sys.argv[1])
    stamp = target / COORDINATES.replace(":", "_")
    if stamp.exists():
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-jars-") as cache:
        try:
            resolve(cache)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            print(f"make: Delta's jars could not be fetched ({type(error).__name__}: {reason})", file=sys.stderr)
            print("make: going on without them; tests that need them are skipped by name.", file=sys.stderr)
            return 0
        target.mkdir(parents=True, exist_ok=True)
        for jar in (Path(cache) / "jars").glob("io.delta_*.jar"):
            shutil.copy(jar, target / jar.name)
        stamp.touch()
    return 0


def resolve(cache: str) -> None:
    """Let Spark fetch the jars; it says much about it, which helps nobody when it works."""
    os.environ["JDK_JAVA_OPTIONS"] = f"-Duser.home={cache} {os.environ.get('JDK_JAVA_OPTIONS', '')}"
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from penstock.spark.session import SparkSettings, build_session

    options = {
        "spark.jars.packages": COORDINATES,
        "spark.jars.excludes": ",".join(EXCLUDED),
        "spark.jars.ivy": cache,
    }
    noise = os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            build_session(SparkSettings(master="local[1]", app_name="delta-jars", options=options)).stop()
        finally:
            os.dup2(noise, 2)


if __name__ == "__main__":
    sys.exit(main())
