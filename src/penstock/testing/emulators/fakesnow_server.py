"""A server that speaks Snowflake's protocol: `python fakesnow_server.py <port>`, in the environment of fakesnow.

PyPI `fakesnow` is the emulator. What it lacks, or does differently from what Snowflake's documentation says, stands
here: MERGE in a transaction (DuckDB's own), transactions with names and numbers, `system$abort_transaction`, errors for
locks, and no DDL in a transaction, which would commit it. `/penstock/…` breaks requests on demand.

Penstock never imports this file: it runs in another environment.
"""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shutil
import sys
import threading
from typing import Any

import duckdb
import fakesnow.server as server
import snowflake.connector.errors as errors
import uvicorn
from fakesnow.cursor import FakeSnowflakeCursor
from fakesnow.dialect import parse_one
from fakesnow.transforms import stage
from sqlglot import exp
from starlette.responses import JSONResponse

_NAMES = itertools.count(1001)
_DDL = re.compile(r"\s*(create|alter|drop|truncate)\b", re.IGNORECASE)
_BEGIN = re.compile(r"\s*begin transaction name (\w+)", re.IGNORECASE)
_REMOVE = re.compile(r"remove @([^/]+)/(.+)")
_ABORT = re.compile(r"system\$abort_transaction\((\d+)\)", re.IGNORECASE)
_transactions: dict[str, tuple[int, str]] = {}
"""Number and name, by session."""
_faults: list[dict[str, Any]] = []
_seen: list[str] = []
_lock = threading.Lock()
_execute = FakeSnowflakeCursor.execute


def execute(self: Any, command: str, params: Any = None, *args: Any, **options: Any) -> Any:
    """Run a statement; a MERGE by DuckDB's own, and with Snowflake's errors for conflicts."""
    try:
        expression = parse_one(command)
        if not isinstance(expression, exp.Merge):
            return _execute(self, command, params, *args, **options)
        if not self._conn._autocommit and not self._conn._in_transaction:
            self._duck_conn.begin()
            self._conn._in_transaction = True
        values = options.get("binding_params") or params
        sql = self._transform(expression, values).sql(dialect="duckdb")
        ((count,),) = self._duck_conn.execute(sql, values).fetchall()
        return _execute(self, f'select {count} as "number of rows updated"', server=True)
    except duckdb.TransactionException:
        raise errors.ProgrammingError(msg="locked", errno=625, sqlstate="57014") from None
    except duckdb.Error as error:
        raise errors.ProgrammingError(msg=str(error), errno=100000, sqlstate="22000") from None


FakeSnowflakeCursor.execute = execute  # type: ignore[method-assign]


class Front:
    """Stands before the emulator: rewrites statements, and breaks requests."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        path = scope["path"]
        if path.startswith("/penstock/"):
            await JSONResponse(_control(path.removeprefix("/penstock/"), body))(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        token = headers.get(b"authorization", b"").decode()[17:-1]
        sql, fault = "", None
        if path == "/queries/v1/query-request":
            content = gzip.decompress(body) if headers.get(b"content-encoding") == b"gzip" else body
            request = json.loads(content)
            sql = request["sqlText"]
            fault = _fault(sql)
            if fault is not None and fault["when"] == "before":
                await _broken(scope, receive, send)
                return
            refused = _refused(token, sql)
            if refused is not None:
                await JSONResponse(refused)(scope, receive, send)
                return
            request["sqlText"] = _rewritten(token, sql)
            body = json.dumps(request).encode()
            scope = {**scope, "headers": _plain(scope["headers"], len(body))}
        elif path.startswith("/fs_bucket"):
            fault = _fault("put")
            if fault is not None:
                await _broken(scope, receive, send)
                return
        chunks = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Any:
            found = next(chunks, None)
            return found if found is not None else await receive()

        if fault is None:
            await self._app(scope, replay, send)
        else:

            async def swallow(_: Any) -> None:
                return None

            await self._app(scope, replay, swallow)
            await _broken(scope, receive, send)
        if sql:
            with _lock:
                _seen.append(sql.split(" ", 1)[0].lower())


def _rewritten(token: str, sql: str) -> str:
    begin = _BEGIN.match(sql)
    if begin is not None:
        _transactions[token] = (next(_NAMES), begin[1])
        return "begin"
    if sql.strip().lower() in ("commit", "rollback"):
        _transactions.pop(token, None)
    if sql.strip().lower() == "show transactions":
        rows = [
            f"select {n} as id, 'u' as \"user\", 1 as \"session\", '{name}' as name"
            for n, name in _transactions.values()
        ]
        return " union all ".join(rows) or "select 1 as id, 'u' as u, 1 as s, 'x' as name where false"
    abort = _ABORT.search(sql)
    if abort is not None:
        for other, (number, _) in list(_transactions.items()):
            if number == int(abort[1]):
                _transactions.pop(other)
                connection = server.sessions.get(other)
                if connection is not None:
                    connection._duck_conn.rollback()
                    connection._in_transaction = False
        return "select 'Transaction aborted.' as status"
    remove = _REMOVE.match(sql)
    if remove is not None:
        place = os.path.join(stage.LOCAL_BUCKET_PATH, *remove[1].replace('"', "").split("."), remove[2])
        shutil.rmtree(place, ignore_errors=True)
        return "select 'removed' as result"
    # The emulator cannot copy files into a temporary table.
    sql = re.sub(r"^create temporary table", "create table", sql)
    number = _transactions.get(token, (None, ""))[0]
    return re.sub(r"current_transaction\(\)", "null" if number is None else f"'{number}'", sql, flags=re.IGNORECASE)


def _refused(token: str, sql: str) -> dict[str, Any] | None:
    return _error("001999", "DDL in a transaction") if token in _transactions and _DDL.match(sql) else None


def _error(code: str, message: str) -> dict[str, Any]:
    return {"data": {"errorCode": code, "sqlState": "0A000"}, "code": code, "message": message, "success": False}


def _fault(sql: str) -> dict[str, Any] | None:
    with _lock:
        for fault in _faults:
            if re.search(fault["match"], sql, re.IGNORECASE):
                if fault["skip"] > 0:
                    fault["skip"] -= 1
                    continue
                fault["hits"] += 1
                return fault
    return None


def _control(action: str, body: bytes) -> Any:
    with _lock:
        if action == "break":
            _faults.append({"skip": 0, "hits": 0, **json.loads(body)})
        elif action == "heal":
            _faults.clear()
        return {
            "seen": len(_seen),
            "hits": sum(fault["hits"] for fault in _faults),
            "open": len(_transactions),
            "files": _files(),
        }


def _files() -> int:
    return sum(len(names) for _, _, names in os.walk(stage.LOCAL_BUCKET_PATH))


async def _broken(scope: Any, receive: Any, send: Any) -> None:
    await JSONResponse({"success": False}, status_code=503)(scope, receive, send)


def _plain(headers: Any, size: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-encoding", b"content-length")]
    return [*kept, (b"content-length", str(size).encode())]


if __name__ == "__main__":
    uvicorn.run(Front(server.app), host="127.0.0.1", port=int(sys.argv[1]), log_level="info", access_log=False)
