"""Fetch the jars with which Spark reads Delta tables and writes to PostgreSQL into a folder, unless they are there.

Only the demo and tests that use Spark's own formats need them. Spark resolves them like `spark.jars.packages`, into a
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

from penstock.spark.lake import COORDINATES, POSTGRES_DRIVER

# Spark has its own versions of these.
EXCLUDED = (
    "org.checkerframework:checker-qual",
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
    stamps = {each: target / each.replace(":", "_") for each in (COORDINATES, POSTGRES_DRIVER)}
    missing = [each for each, stamp in stamps.items() if not stamp.exists()]
    if not missing:
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-jars-") as cache:
        try:
            resolve(cache, missing)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            print(f"make: could not fetch jars for Spark ({type(error).__name__}: {reason})", file=sys.stderr)
            print("make: continuing without them; tests that need them are skipped and listed.", file=sys.stderr)
            return 0
        target.mkdir(parents=True, exist_ok=True)
        for group in {each.partition(":")[0] for each in missing}:
            for jar in (Path(cache) / "jars").glob(f"{group}_*.jar"):
                shutil.copy(jar, target / jar.name)
        for each in missing:
            stamps[each].touch()
    return 0


def resolve(cache: str, packages: list[str]) -> None:
    """Let Spark fetch the jars, and hide its output."""
    os.environ["JDK_JAVA_OPTIONS"] = f"-Duser.home={cache} {os.environ.get('JDK_JAVA_OPTIONS', '')}"
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from penstock.spark.session import SparkSettings, build_session

    options = {
        "spark.jars.packages": ",".join(packages),
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
