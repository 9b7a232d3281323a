"""The Spark destination: its options, and the contract of destinations over one of the ways of writing."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.changes.batch import EventBatch, TableChanges
from penstock.destinations.base import (
    Capabilities,
    CopyRows,
    DestinationContext,
    TableResult,
    WriteHandle,
    WriteResult,
    completed,
)
from penstock.destinations.naming import FOLDERS, IDENTIFIERS
from penstock.destinations.refusals import unusable
from penstock.destinations.spark.append import AppendTarget, Batch, WriteFrame, call_function
from penstock.destinations.spark.checkpoint import Checkpoint
from penstock.destinations.spark.delta import DeltaTarget
from penstock.destinations.spark.frames import BATCH, emptied, failure, hidden_name, old_as_text, with_columns_of
from penstock.destinations.spark.postgres import PostgresTarget, require_postgres, write_jdbc
from penstock.destinations.spark.target import Tables, Target
from penstock.errors import PenstockError, SparkGone
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.spark.session import APPLY_POOL, COPY_POOL
from penstock.spark.tasks import described

_THREADS = 4
"""Tables that are written at the same time."""
_OWN_OPTIONS = ("path", "dbtable", "query", "txnAppId", "txnVersion")

logger = logging.getLogger(__name__)


class SparkDestination:
    """`type = "spark"`: data frames for a function of yours, or for any format that Spark writes.

    | option | |
    |---|---|
    | `function` | `module:function`, called with a data frame and the number of the batch, as `foreachBatch` does |
    | `format` | the format of `df.write`, instead of a function: `delta`, `jdbc`, … |
    | `mode` | `append` (default): each change is a row; `upsert`: the source's rows (`delta`, `jdbc` on PostgreSQL) |
    | `table` | the name at the destination; `{schema}`, `{table}` and `{name}` stand for parts of the source's |
    | `path` | instead of `table`: the folder or URL in which each table has a folder |
    | `options` | further options of the format |
    | `checkpoint` | a folder for the numbers of batches (`append` and `function`); by default next to the spool |
    """

    name = "spark"

    def __init__(
        self,
        *,
        function: str | None = None,
        format: str | None = None,
        mode: str = "append",
        table: str | None = None,
        path: str | None = None,
        options: Mapping[str, Any] | None = None,
        checkpoint: str | None = None,
    ) -> None:
        if (function is None) == (format is None):
            raise unusable("the spark destination needs either function or format", hint='Set format = "delta".')
        if mode not in ("append", "upsert"):
            raise unusable(f"unknown mode {mode!r}", hint="Use append or upsert.")
        self._target = _choose(function, format, mode, table, path, _checked(options), checkpoint)
        self._context: DestinationContext | None = None

    @property
    def capabilities(self) -> Capabilities:
        """See `Destination`; they depend on the options."""
        return self._target.capabilities

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        if context.session is None:
            raise unusable(
                'the spark destination needs Spark, but [spark] master is "none"',
                hint='Set master in [spark], such as "local[*]", or remove the section.',
            )
        self._context = context
        try:
            self._target.startup(Tables(context))
        except Exception as error:
            raise failure("the destination", error) from error

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        with self._running(str(schema), COPY_POOL, f"prepare the copy of {schema}"):
            self._target.drop_table_for_copy(schema, attempt)

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        with self._running(str(schema), COPY_POOL, f"copy {schema}"):
            self._target.write_table_rows(schema, rows)
        logger.info("table copied table=%s position=%s", schema, rows.position)

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""

        def write(changes: TableChanges) -> bool:
            with self._running(changes.table, APPLY_POOL, f"write {changes.table} up to {batch.end}"):
                return self._target.write_changes(batch, changes)

        def finish(work: Callable[[], None]) -> bool:
            with self._running("a table", APPLY_POOL, f"write accepted changes up to {batch.end}"):
                work()
            return True

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="spark-write") as pool:
            futures = {changes.table_id: pool.submit(write, changes) for changes in batch.tables}
            futures |= {table_id: pool.submit(finish, work) for table_id, work in self._target.finish(batch).items()}
        results: dict[int, TableResult] = {}
        errors: dict[int, PenstockError] = {}
        for table_id, future in futures.items():
            error = future.exception()
            if error is None:
                results[table_id] = TableResult(durable=future.result())
            elif isinstance(error, PenstockError) and not isinstance(error, SparkGone):
                errors[table_id] = error
            else:
                raise error
        return completed(WriteResult({**results, **WriteResult.failures(errors).tables}))

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        with self._running(str(table_id), APPLY_POOL, "read a position"):
            return self._target.position(table_id)

    def shutdown(self) -> None:
        """See `Destination`."""

    @contextmanager
    def _running(self, table: str, pool: str, description: str) -> Iterator[None]:
        """Describe this thread's jobs, and translate the errors of Spark."""
        if self._context is None:
            raise RuntimeError("startup was not called")
        try:
            with described(self._context.session.sparkContext, description, pool):
                yield
        except Exception as error:
            logger.debug("spark failed table=%s", table, exc_info=True)
            raise failure(table, error) from error


def _checked(options: Mapping[str, Any] | None) -> dict[str, str]:
    given = {} if options is None else dict(options)
    if found := sorted(name for name in given if name in _OWN_OPTIONS):
        listed = ", ".join(found)
        raise unusable(f"options must not contain {listed}", hint="Use table or path; Penstock sets the rest.")
    bad = sorted(name for name, value in given.items() if not isinstance(value, str | int | float))
    if bad:
        listed = ", ".join(bad)
        raise unusable(f"these options should be text, a number, true or false: {listed}", hint="Quote their values.")
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}


def _choose(
    function: str | None,
    format: str | None,
    mode: str,
    table: str | None,
    path: str | None,
    options: dict[str, str],
    checkpoint: str | None,
) -> Target:
    if function is not None:
        if mode != "append" or table is not None or path is not None or options:
            raise unusable("function does not go with mode, table, path and options", hint="The function decides them.")
        return AppendTarget(call_function(_load(function), function), _opened(checkpoint))
    assert format is not None
    if table is not None and path is not None:
        raise unusable("table and path are two names of the same thing", hint="Remove one of them.")
    if format == "jdbc" and (path is not None or "url" not in options):
        raise unusable("format jdbc needs options.url, and no path", hint='[destination.options] url = "jdbc:…"')
    name_of = _naming(format, table, path)
    if mode == "append":
        return AppendTarget(_writer(format, name_of, options, is_path=path is not None), _opened(checkpoint))
    if format == "delta":
        return DeltaTarget(name_of, options, _opened(checkpoint), is_path=path is not None)
    if format == "jdbc":
        require_postgres(options)
        namespace, _, name = (table or "{schema}.{table}").rpartition(".")
        parts = [_naming(format, each, None, alone=False) for each in (namespace or "public", name)]
        return PostgresTarget(lambda schema: (parts[0](schema), parts[1](schema)), options)
    raise unusable(
        f"the spark destination cannot upsert into format {format!r}",
        hint='Use mode = "append", or a function that merges; upsert works for delta, and for jdbc on PostgreSQL.',
    )


def _load(function: str) -> Callable[..., object]:
    module_name, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name or "", None)
    except ModuleNotFoundError as error:
        raise unusable(
            f"there is no module {error.name!r} for function = {function!r}",
            hint="Install it, or add its folder to PYTHONPATH.",
        ) from error
    if not callable(found):
        raise unusable(f"{module_name} has no function {name!r}", hint="Write module:function.")
    return found


def _opened(checkpoint: str | None) -> Checkpoint:
    if checkpoint is None:
        raise unusable("the spark destination needs a folder for its checkpoint", hint='Set checkpoint = "folder".')
    return Checkpoint(Path(checkpoint).absolute())


def _naming(format: str, table: str | None, path: str | None, *, alone: bool = True) -> Callable[[TableSchema], str]:
    """Return what names tables at the destination; unless it is `alone`, as a part of their names."""
    if path is not None:
        return lambda schema: f"{path.rstrip('/')}/{FOLDERS.table(schema)}"
    pattern = table or ("{schema}.{table}" if format == "jdbc" else "{name}")
    try:
        named = [pattern.format(schema="a", table=each, name=each) for each in "bc"]
    except (KeyError, IndexError, ValueError):
        raise unusable(
            f"table = {pattern!r} is not a pattern of names", hint="Use {schema}, {table} or {name}, and nothing else."
        ) from None
    if alone and named[0] == named[1]:
        raise unusable(f"table = {pattern!r} names all tables the same", hint="Use {table} or {name} in it.")
    return lambda schema: pattern.format(schema=schema.namespace, table=schema.name, name=IDENTIFIERS.table(schema))


def _writer(
    format: str, name_of: Callable[[TableSchema], str], options: dict[str, str], *, is_path: bool
) -> WriteFrame:
    def write(frame: Any, batch: Batch) -> None:
        name, given, session = name_of(batch.schema), dict(options), frame.sparkSession
        if batch.kind == "copy":
            # Earlier rows of the table no longer count, also if the copy has no row that would say so.
            frame = frame.unionByName(emptied(session, batch.until), allowMissingColumns=True)
        frame = old_as_text(frame).selectExpr("*", f"{batch.number}L as {hidden_name(batch.schema, BATCH)}")
        if format == "jdbc":
            write_jdbc(frame, given, name, "append")
            return
        if format == "delta":
            # The table records the number with the rows: a repeat changes nothing.
            given |= {"txnAppId": f"penstock/{batch.attempt}", "txnVersion": str(batch.number)}
            given.setdefault("mergeSchema", "true")
        elif not is_path and session.catalog.tableExists(name):
            frame = with_columns_of(session.table(name), frame)
        writer = frame.write.format(format).mode("append").options(**given)
        writer.save(name) if is_path else writer.saveAsTable(name)

    return write
