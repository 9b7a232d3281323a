"""The OpenAPI document of the API, and the bodies of its actions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from penstock.operations.status_model import IndexState, OutputStatus, SourceStatus, TableStatus

_Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=300)]], Field(max_length=1000)]


class CommandRequest(BaseModel):
    """A command to the pipeline; the same as those of the CLI."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    kind: Literal["pause", "resume", "resync", "rollback", "refresh", "rebuild_index"]
    output: str | None = None
    """One output; all by default."""
    tables: _Names = []
    """Names or patterns, for `resync` and `rollback`; `*.*` for all."""
    indexes: _Names = []
    """Names, for `rebuild_index`."""

    @model_validator(mode="after")
    def _need_targets(self) -> CommandRequest:
        if (self.kind in ("resync", "rollback")) != bool(self.tables):
            raise ValueError("resync and rollback need tables, and other commands have none")
        if (self.kind == "rebuild_index") != bool(self.indexes):
            raise ValueError("rebuild_index needs indexes, and other commands have none")
        return self


class RetryRequest(BaseModel):
    """Which quarantined documents to retry."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    ids: _Names | None = None
    """Ids of documents; all of the index by default."""


class VerifyBody(BaseModel):
    """What to compare with the source."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    output: str | None = None
    """One output; all by default."""
    tables: _Names = []
    """Names or patterns; all by default."""
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the rows to compare."""


TABLE_QUERY = {
    "search": "part of the name",
    "phase": "one phase, or several: `init,data_sync`",
    "output": "one output",
    "sort": "table, phase, rows, bytes, lag_bytes or output",
    "descending": "1 for the other order",
    "limit": "at most 1000 rows; 200 by default",
    "offset": "rows to skip",
}
_READS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("/now", "The last second: state, lag at each stage, and why the pipeline is not ready.", "", {}),
    ("/pipeline", "The status without single tables: source, slot, spool, outputs, problems.", "", {}),
    ("/status", "What `penstock status --json` prints.", "", {}),
    ("/outputs", "Every output, with the number of its tables and indexes.", "OutputStatus", {}),
    ("/tables", "Tables: phase, rows, lag, and the last error with its remedy.", "TableStatus", TABLE_QUERY),
    (
        "/tables/{table}",
        "A table: status, last batches, history of phases, schemas.",
        "TableStatus",
        {"output": ""},
    ),
    ("/indexes", "Search indexes and their builds.", "IndexState", {}),
    ("/indexes/{index}/quarantine", "Rejected documents. Needs the token: ids are values of keys.", "", {}),
    ("/errors", "Everything that needs attention, with what helps.", "", {}),
    ("/history", "Throughput and lag of the last hour, every five seconds.", "", {}),
    ("/batches", "The last 200 batches of each output, newest first.", "", {"output": "", "limit": "at most 1000"}),
    ("/events", "The last 500 events, newest first.", "", {}),
    ("/verifications", "What the last 20 comparisons on this machine found, newest first.", "", {}),
    ("/verifications/{id}", "One of them, with the keys of some rows. Needs the token.", "", {}),
    ("/commands", "Commands and their answers, newest first.", "", {}),
    ("/stream", "Server-sent events: `now` every second.", "", {}),
    ("/openapi.json", "This document.", "", {}),
)
_WRITES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("/commands", "Send a command. 200: done; 202: accepted; 409: refused, with the reason.", CommandRequest),
    ("/indexes/{index}/quarantine/retry", "Build quarantined documents again and write them.", RetryRequest),
    ("/verifications", "Compare tables with the source, as `penstock verify` does. 409 while it does.", VerifyBody),
)


def make_document() -> dict[str, Any]:
    """Return the document, OpenAPI 3.1."""
    schemas: dict[str, Any] = {}
    for kind in (OutputStatus, TableStatus, IndexState, SourceStatus):
        _add(schemas, kind.__name__, TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}"))
    for _, _, model in _WRITES:
        _add(schemas, model.__name__, model.model_json_schema(ref_template="#/components/schemas/{model}"))
    paths: dict[str, Any] = {}
    for path, summary, schema, query in _READS:
        paths.setdefault(f"/api/v1{path}", {})["get"] = {
            "summary": summary,
            "parameters": [*_path_parameters(path), *(_parameter(name, "query", text) for name, text in query.items())],
            "responses": {"200": _response(summary, schema), "default": {"description": "an error: `error`, `hint`"}},
            **({"security": [{"token": []}]} if path.endswith(("quarantine", "{id}")) else {}),
        }
    for path, summary, model in _WRITES:
        body = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
        paths.setdefault(f"/api/v1{path}", {})["post"] = {
            "summary": summary,
            "security": [{"token": []}],
            "parameters": _path_parameters(path),
            "requestBody": {"required": True, "content": {"application/json": body}},
            "responses": {"202": {"description": "accepted"}, "default": {"description": "an error: `error`, `hint`"}},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": package_version(), "description": "The API of a running pipeline."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _add(schemas: dict[str, Any], name: str, schema: dict[str, Any]) -> None:
    schemas |= schema.pop("$defs", {})
    schemas[name] = schema


def _response(summary: str, schema: str) -> dict[str, Any]:
    content = {"$ref": f"#/components/schemas/{schema}"} if schema else {"type": "object"}
    return {"description": summary, "content": {"application/json": {"schema": content}}}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [_parameter(name, "path", "") for name in ("table", "index", "id") if f"{{{name}}}" in path]


def _parameter(name: str, place: str, text: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": schema}


def package_version() -> str:
    """Return the version of Penstock."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"
