"""What the API says about outputs, tables, errors and commands: parts of the status, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from penstock.config.units import count_of
from penstock.observe.batches import BatchRecord
from penstock.operations.progress import format_time
from penstock.operations.status_model import OutputStatus, TableStatus, status_facts
from penstock.server.guarding import Refused
from penstock.server.monitor import Monitor
from penstock.server.openapi import package_version
from penstock.state import CommandStatus, Errored, Init
from penstock.state.quarantine import Quarantined

MOST_ROWS = 1000
"""Tables in one answer."""
_SORTS = ("table", "phase", "rows", "bytes", "lag_bytes", "output")
_PHASE_ORDER = ("errored", "init", "data_sync", "finished_copy", "sync_wait", "catchup", "sync_done", "ready")


def output_list(monitor: Monitor) -> dict[str, Any]:
    """Every output, without its tables and indexes."""
    return {"outputs": [_output(each) for each in monitor.status().outputs]}


def pipeline_summary(monitor: Monitor) -> dict[str, Any]:
    """The status without single tables and indexes, and whether actions are possible."""
    status = monitor.status()
    facts = status_facts(replace(status, outputs=()))
    server, documents = monitor.config.server, monitor.config.documents
    destinations = {each.name: each.destination_type for each in monitor.config.outputs}
    return {
        **facts,
        "outputs": [_output(each) for each in status.outputs],
        "destinations": destinations | ({} if documents is None else {documents.name: documents.sink_type}),
        "version": package_version(),
        "actions": server is not None and server.token is not None,
    }


def table_rows(monitor: Monitor, query: Mapping[str, str]) -> dict[str, Any]:
    """The tables that a query selects: `search`, `phase`, `output`, `sort`, `descending`, `limit`, `offset`."""
    limit, offset = _number(query, "limit", 200), _number(query, "offset", 0)
    sort = query.get("sort", "table")
    if sort not in _SORTS:
        raise Refused(400, f"sort is one of {', '.join(_SORTS)}")
    search = query.get("search", "").casefold()
    every = [table for output in monitor.status().outputs for table in output.tables]
    found = [
        table
        for table in every
        if search in table.table.casefold()
        and table.phase in query.get("phase", table.phase).split(",")
        and query.get("output", table.output) == table.output
    ]
    found.sort(key=lambda table: (table.table, table.output))
    found.sort(key=lambda table: _sort_key(table, sort), reverse=query.get("descending") in ("1", "true"))
    phases: dict[str, int] = {}
    for table in every:
        phases[table.phase] = phases.get(table.phase, 0) + 1
    return {
        "tables": [asdict(table) for table in found[offset : offset + min(limit, MOST_ROWS)]],
        "found": len(found),
        "total": len(every),
        "phases": phases,
    }


def batch_list(monitor: Monitor, query: Mapping[str, str]) -> dict[str, Any]:
    """The last batches, newest first; of one output or all."""
    found = [
        (record, output.output)
        for output in monitor.running.outputs
        if query.get("output", output.output) == output.output
        for record in output.tally.batches.all()
    ]
    found.sort(key=lambda each: each[0].begun, reverse=True)
    limit = min(_number(query, "limit", 200), MOST_ROWS)
    return {"batches": [_batch(record, output, record.operations) for record, output in found[:limit]]}


def _batch(record: BatchRecord, output: str, operations: Mapping[str, int]) -> dict[str, Any]:
    ended = record.begun + record.seconds
    return {
        "at": format_time(record.begun),
        "output": output,
        "worker": record.worker,
        "position": record.position,
        "transactions": record.transactions,
        "rows": record.rows,
        "bytes": record.bytes,
        "tables": record.table_count,
        "operations": {name: count for name, count in operations.items() if count},
        "seconds": round(record.seconds, 4),
        "stages": {name: round(seconds, 4) for name, seconds in record.stages.items()},
        "after_commit": round(max(0.0, ended - record.last_commit), 3) if record.last_commit else None,
        "error": record.error,
        "trace_id": record.trace_id,
    }


def table_page(monitor: Monitor, name: str, output: str | None) -> dict[str, Any]:
    """One table: its status, its last batches, the history of its phases, and the versions of its schema."""
    found = [
        table
        for each in monitor.status().outputs
        for table in each.tables
        if table.table == name and output in (None, each.output)
    ]
    if not found:
        raise Refused(404, "there is no such table")
    table = found[0]
    store = monitor.running.stores[table.output]
    history = [
        {
            "at": record.at.isoformat(timespec="seconds"),
            "phase": record.phase.name,
            "reason": record.phase.reason if isinstance(record.phase, Errored | Init) else None,
        }
        for record in store.get_table_replication_history(table.id)
    ]
    schemas = [
        {
            "since": str(version.snapshot_id),
            "columns": [
                {"name": column.name, "type": str(column.type), "key": column.primary_key_position is not None}
                for column in version.schema.columns
            ],
        }
        for version in store.get_table_schemas()
        if version.table_id == table.id
    ]
    return {
        "table": asdict(table),
        "outputs": [each.output for each in found],
        "batches": [
            _batch(record, each.output, operations)
            for each in monitor.running.outputs
            if each.output == table.output
            for record, operations in each.tally.batches.of(name)
        ],
        "history": history[::-1],
        "schemas": schemas[::-1],
    }


def error_list(monitor: Monitor) -> list[dict[str, Any]]:
    """Everything that needs attention, each with what helps."""
    status = monitor.status()
    found: list[dict[str, Any]] = []
    if status.source.error is not None:
        found.append({"what": "source", "reason": status.source.error, "solution": status.source.hint})
    for output in status.outputs:
        reason = output.error or output.failing
        if reason is not None:
            found.append(
                {"what": "output", "output": output.output, "reason": reason, "solution": output.hint}
                | ({"since": output.failing_since} if output.failing_since else {})
            )
        found += [
            {"what": "table", "output": table.output, "table": table.table, **asdict(table.error)}
            for table in output.tables
            if table.error is not None
        ]
        found += [
            {
                "what": "quarantine",
                "output": output.output,
                "index": index.index,
                "reason": f"{count_of(index.quarantined, 'document')} in quarantine",
                "solution": "Correct their rows or the mapping, then retry them.",
                "command": "quarantine_retry",
            }
            for index in output.indexes
            if index.quarantined
        ]
    named = {(each["what"], each.get("table")) for each in found}
    found += [
        {"what": "pipeline", "reason": problem, "solution": None}
        for problem in status.problems
        if not _is_listed(problem, named)
    ]
    return found


def command_log(monitor: Monitor) -> list[dict[str, Any]]:
    """The commands that each output remembers, newest first."""
    found = [
        (command.requested_at, output, command)
        for output, store in monitor.running.stores.items()
        for command in store.get_commands()
    ]
    found.sort(key=lambda each: each[0], reverse=True)
    return [
        {
            "output": output,
            "command": command.number,
            "kind": command.kind.value,
            "tables": list(command.tables),
            "status": command.status.value,
            # An answer to `verify` is for the process that compares.
            "reason": command.reason if command.status is CommandStatus.REFUSED else None,
            "requested_by": command.requested_by,
            "requested_at": at.isoformat(timespec="seconds"),
            "answered_at": None if command.answered_at is None else command.answered_at.isoformat(timespec="seconds"),
        }
        for at, output, command in found
    ]


def quarantined(entries: Sequence[Quarantined]) -> dict[str, Any]:
    """Quarantined documents, the last rejected first."""
    return {
        "documents": [
            {
                "id": each.id,
                "reason": each.reason,
                "attempts": each.attempts,
                "first_at": each.first_at.isoformat(timespec="seconds"),
                "last_at": each.last_at.isoformat(timespec="seconds"),
                "wanted": each.wanted,
            }
            for each in entries[:MOST_ROWS]
        ],
        "total": len(entries),
    }


def verification_list(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Comparisons without the keys of rows, which are values of cells."""
    return {
        "verifications": [
            {
                **run,
                "outputs": {
                    name: {
                        **output,
                        "found": [
                            {key: value for key, value in table.items() if key != "differences"}
                            for table in output.get("found", ())
                        ],
                    }
                    for name, output in run["outputs"].items()
                },
            }
            for run in runs
        ]
    }


def _output(output: OutputStatus) -> dict[str, Any]:
    facts = asdict(output)
    tables, indexes = facts.pop("tables"), facts.pop("indexes")
    return {**facts, "tables": len(tables), "indexes": len(indexes)}


def _is_listed(problem: str, named: set[tuple[Any, Any]]) -> bool:
    """Return True for a problem that is in the list with more details."""
    if problem.endswith(" has stopped"):
        return True
    return problem.startswith("output ") or (problem == "the source is unreachable" and ("source", None) in named)


def _sort_key(table: TableStatus, sort: str) -> Any:
    if sort == "phase":
        return _PHASE_ORDER.index(table.phase) if table.phase in _PHASE_ORDER else len(_PHASE_ORDER)
    value = getattr(table, sort)
    return value if sort in ("table", "output") else -1 if value is None else value


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise Refused(400, f"{name} is a whole number")
    return int(text)
