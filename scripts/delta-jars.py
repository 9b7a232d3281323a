"""Fetch the jars with which Spark reads Delta tables into a folder, unless they are there.

Only the demo and tests that read tables with Spark use them. Spark resolves them like `spark.jars.packages`, into a
temporary folder, so that incomplete caches of other tools cannot interfere. To use a mirror, set the environment
variable DEFAULT_ARTIFACT_REPOSITORY to its address.

Usage: delta-jars.py <folder>
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from penstock.spark.lake import COORDINATES

# Spark has its own versions of these.
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
            print(f"make: could not fetch Delta's jars ({type(error).__name__}: {reason})", file=sys.stderr)
            print("make: continuing without them; tests that need them are skipped and listed.", file=sys.stderr)
            return 0
        target.mkdir(parents=True, exist_ok=True)
        for jar in (Path(cache) / "jars").glob("io.delta_*.jar"):
            shutil.copy(jar, target / jar.name)
        stamp.touch()
    return 0


def resolve(cache: str) -> None:
    """Let Spark fetch the jars, and hide its output."""
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
