"""The API on a real pipeline: what it says, what it does with the token, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import socket
from dataclasses import replace
from typing import Any

import pytest

from penstock.operations.verify import VerifyRequest, remember_failure, verifications
from penstock.server import app, guarding, serving
from tests.integration.server.conftest import HOSTILE, SECRETS, TOKEN, Site

READS = (
    "/healthz",
    "/readyz",
    "/metrics",
    "/",
    "/page.css",
    "/elements.js",
    "/page.js",
    "/api/v1/openapi.json",
    "/api/v1/now",
    "/api/v1/pipeline",
    "/api/v1/status",
    "/api/v1/outputs",
    "/api/v1/tables",
    "/api/v1/tables/public.errored",
    "/api/v1/indexes",
    "/api/v1/errors",
    "/api/v1/history",
    "/api/v1/batches",
    "/api/v1/events",
    "/api/v1/verifications",
    "/api/v1/commands",
)


def test_the_api_says_what_status_says(site: Site) -> None:
    status = site.ask("/api/v1/status").json
    assert status["pipeline"] == "shop"
    assert [output["output"] for output in status["outputs"]] == ["lake", "documents"]
    assert status["capture"]["state"] == "streaming"
    assert all(output["acknowledged_lag_bytes"] is not None for output in status["outputs"])
    tables = site.ask("/api/v1/tables").json
    known = {"public.followed", "public.errored", "public.many", HOSTILE}
    assert {each["table"] for each in tables["tables"]} == known
    assert tables["phases"]["errored"] == 1
    outputs = site.ask("/api/v1/outputs").json["outputs"]
    assert [(each["output"], each["tables"], each["indexes"]) for each in outputs] == [
        ("lake", 4, 0),
        ("documents", 0, 1),
    ]
    assert site.ask("/api/v1/now").json["capture"]["state"] == "streaming"
    assert site.ask("/healthz").json == {"status": "ok"}


def test_tables_are_searched_sorted_and_paged(site: Site) -> None:
    def names(query: str) -> list[str]:
        return [each["table"] for each in site.ask(f"/api/v1/tables?{query}").json["tables"]]

    assert names("search=MANY") == ["public.many"]
    assert names("phase=errored") == ["public.errored"]
    assert names("phase=errored,init") == ["public.errored"]
    assert names("sort=phase")[0] == "public.errored"
    assert names("sort=table&descending=1&limit=1") == ["public.many"]
    assert names("limit=1&offset=2") == ["public.followed"]
    for wrong in ("sort=reason", "limit=-1", "limit=1e9", "offset=x", "unknown=1"):
        assert site.ask(f"/api/v1/tables?{wrong}").status == 400


def test_a_table_has_its_history_and_its_columns(site: Site) -> None:
    found = site.ask("/api/v1/tables/public.followed").json
    assert [each["phase"] for each in found["history"]][-1] == "init"
    assert [column["name"] for column in found["schemas"][0]["columns"]] == ["id", "note"]
    assert site.ask("/api/v1/tables/public.nothing").status == 404


def test_a_batch_is_listed_with_its_operations_and_its_stages(site: Site) -> None:
    site.database.execute(
        """
        insert into many select n, 'batch' from generate_series(30001, 30007) n;
        update many set note = 'batched' where id between 30001 and 30003;
        delete from many where id = 30001;
        """
    )
    wanted = {"insert": 7, "update": 3, "delete": 1}

    def find() -> dict[str, Any] | None:
        batches = site.ask("/api/v1/tables/public.many").json["batches"]
        return next((each for each in batches if each["operations"] == wanted), None)

    batch = site.wait(find, "the batch")
    assert {"build", "write", "record", "job", "commit"} <= set(batch["stages"])
    assert batch["stages"]["job"] + batch["stages"]["commit"] <= batch["stages"]["write"] <= batch["seconds"]
    assert (batch["worker"], batch["output"], batch["error"]) == ("apply", "lake", None)
    assert batch["rows"] >= 11
    assert batch["bytes"] > 0
    listed = site.ask("/api/v1/batches?output=lake").json["batches"]
    assert batch["position"] in [each["position"] for each in listed]
    assert site.ask("/api/v1/batches?limit=1").json["batches"][0]["at"] >= batch["at"]
    assert site.ask("/api/v1/batches?table=x").status == 400


def test_an_error_has_its_remedy_and_the_command_that_does_it(site: Site) -> None:
    errors = {each["what"]: each for each in site.ask("/api/v1/errors").json["errors"]}
    assert errors["table"]["table"] == "public.errored"
    assert errors["table"]["solution"]
    assert errors["table"]["command"] in ("resync", "rollback")
    assert errors["quarantine"]["index"] == "followed"


def test_every_route_is_in_the_document_and_every_path_of_the_document_answers(site: Site) -> None:
    document = site.ask("/api/v1/openapi.json").json
    listed = set(document["paths"])
    assert {path for path in READS if path.startswith("/api/")} - {"/api/v1/tables/public.errored"} <= listed
    remember_failure(VerifyRequest(site.pipeline._config), "for this test")
    run = verifications(site.pipeline._config.pipeline.spool.path)[-1]["id"]
    for path, methods in document["paths"].items():
        if "get" in methods and not path.endswith("/stream"):
            known = path.replace("{table}", "public.many").replace("{index}", "followed").replace("{id}", run)
            assert site.ask(known, token=TOKEN).status == 200, path
    references = set(json.dumps(document).split('"#/components/schemas/')[1:])
    assert {each.partition('"')[0] for each in references} <= set(document["components"]["schemas"])


def test_actions_are_commands_in_the_state_and_are_audited(site: Site) -> None:
    answer = site.act("/api/v1/commands", {"kind": "pause", "output": "lake"})
    assert answer.status in (200, 202), answer.body
    try:
        site.wait(lambda: site.ask("/readyz").status == 503, "the pause")
        assert site.ask("/readyz").json["reasons"] == ["lake: paused"]
    finally:
        assert site.act("/api/v1/commands", {"kind": "resume", "output": "lake"}).status in (200, 202)
    site.wait(lambda: site.ask("/readyz").status == 200, "the end of the pause")
    log = [each for each in site.ask("/api/v1/commands").json["commands"] if each["output"] == "lake"]
    assert [each["kind"] for each in log][:2] == ["resume", "pause"]
    assert log[0]["requested_by"] == "HTTP client 127.0.0.1"


def test_a_capture_that_stands_still_makes_the_pipeline_unready_until_it_goes_on(site: Site) -> None:
    capture = site.pipeline._running._coordinator._stream._capture.pid

    def writes_and_asks() -> list[str]:
        site.database.execute("insert into many values (20000, 'x') on conflict (id) do update set note = 'y'")
        return site.ask("/readyz").json["reasons"]

    os.kill(capture, signal.SIGSTOP)
    try:
        reasons = site.wait(writes_and_asks, "the stall")
        assert any(each.startswith(("capture has received nothing", "lake: ", "documents: ")) for each in reasons)
        # As the pipeline measured it, when it first said so.
        assert all(float(seconds) <= 10 for each in reasons for seconds in re.findall(r"for ([\d.]+) s\b", each))
    finally:
        os.kill(capture, signal.SIGCONT)
    site.wait(lambda: site.ask("/readyz").status == 200, "the recovery")


def test_the_pipeline_survives_the_end_of_its_server(site: Site) -> None:
    serving = site.pipeline._server
    address = site.address
    # On the same port, so that the other tests find it again.
    serving._choice = replace(serving._choice, port=site.port)
    serving._server.should_exit = True
    site.wait(lambda: site.pipeline.address is None, "its end")
    lake = site.pipeline._running.outputs[0]
    before = lake.status.changes
    site.database.execute("update many set note = note || '.' where id = 1")
    site.wait(lambda: lake.status.changes > before, "a change")
    site.wait(lambda: site.pipeline.address == address, "its start")
    site.wait(lambda: site.ask("/healthz").status == 200, "its answer")


def test_a_table_is_copied_again_with_the_token(site: Site) -> None:
    answer = site.act("/api/v1/commands", {"kind": "resync", "tables": ["public.many"]})
    assert answer.status in (200, 202), answer.body
    assert answer.json["commands"][0]["tables"] == ["public.many"]
    copied = "/api/v1/tables/public.many"
    site.wait(
        lambda: (
            [each["phase"] for each in site.ask(copied).json["history"]].count("data_sync") >= 2
            and site.ask(copied).json["history"][0]["phase"] == "ready"
        ),
        "the copy",
    )


def test_quarantined_documents_are_listed_and_retried_only_with_the_token(site: Site) -> None:
    path = "/api/v1/indexes/followed/quarantine"
    assert site.ask(path).status == 401
    before = site.ask(path, token=TOKEN).json["documents"]
    assert [each["id"] for each in before] == ["1000"]
    assert site.act(f"{path}/retry", {"ids": ["1000"]}).json == {"index": "followed", "documents": 1}
    site.wait(lambda: site.ask(path, token=TOKEN).json["documents"][0]["attempts"] > before[0]["attempts"], "the retry")


def test_an_index_is_rebuilt_with_the_token(site: Site) -> None:
    answer = site.act("/api/v1/commands", {"kind": "rebuild_index", "indexes": ["followed"]})
    assert answer.status in (200, 202), answer.body
    assert site.act("/api/v1/commands", {"kind": "rebuild_index", "indexes": ["nothing"]}).status == 422


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "resync"},
        {"kind": "pause", "tables": ["public.many"]},
        {"kind": "drop"},
        {"kind": "resync", "tables": [""]},
        {"kind": "resync", "tables": ["public.many"], "more": 1},
        {"kind": "rebuild_index"},
        [],
        b"{",
        b"\xff",
        b"",
    ],
    ids=str,
)
def test_a_body_that_makes_no_sense_is_refused(site: Site, body: object) -> None:
    assert site.act("/api/v1/commands", body, Content_Type="application/json").status == 422


def test_a_refusal_speaks_of_the_request_and_not_of_a_config_file(site: Site) -> None:
    def refusal(body: object) -> str:
        return site.act("/api/v1/commands", body, Content_Type="application/json").json["error"]

    for key in ("more", "url"):
        known = "there is no such key; known here: kind, output, tables, indexes"
        assert refusal({"kind": "pause", key: 1}) == f"{key}: {known}"
    for body in ([1], b"{", b"7"):
        assert refusal(body) == "the body is not a JSON object"


def test_without_the_token_nothing_is_done(site: Site) -> None:
    body = {"kind": "pause"}
    before = len(site.ask("/api/v1/commands").json["commands"])
    for headers in (
        {},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
    ):
        assert site.ask("/api/v1/commands", "POST", body, client="127.0.0.2", **headers).status == 401
    other = "127.0.0.3"
    assert site.ask(f"/api/v1/commands?token={TOKEN}", "POST", body, client=other).status == 401
    assert site.ask("/api/v1/commands", "POST", body, client=other, Cookie=f"token={TOKEN}").status == 401
    assert len(site.ask("/api/v1/commands").json["commands"]) == before


def test_who_guesses_tokens_has_to_wait(site: Site) -> None:
    for number in range(6):
        wrong = f"wrong-{number}-0123456789"
        last = site.ask("/api/v1/commands", "POST", {"kind": "pause"}, token=wrong, client="127.0.0.4")
    assert last.status == 429
    # Also with the right one, and nobody else.
    assert site.ask("/api/v1/commands", "POST", b"{}", token=TOKEN, client="127.0.0.4").status == 429
    assert site.act("/api/v1/commands", {"kind": "refresh"}).status in (200, 202)
    assert int(last.headers["retry-after"]) >= 1


def test_no_path_tells_right_tokens_from_wrong_ones_without_a_limit(site: Site) -> None:
    for path in ("/api/v1/indexes/followed/quarantine", "/api/v1/indexes/nothing/quarantine"):
        client = f"127.0.1.{len(path)}"
        assert {site.ask(path, client=client).status for _ in range(10)} == {401}, "who sends none does not guess"
        answers = [site.ask(path, token=f"wrong-{number}-0123456789", client=client).status for number in range(6)]
        assert answers == [401] * 5 + [429]
        assert site.ask("/api/v1/commands", "POST", b"{}", token=TOKEN, client=client).status == 429


def test_what_clients_add_to_a_path_does_not_make_the_pipeline_work_more(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("command_log", "table_page"):
        found = getattr(app, name)
        counted = lambda *given, found=found, name=name: asked.append(name) or found(*given)  # noqa: E731
        monkeypatch.setattr(app, name, counted)
    monkeypatch.setattr(app, "KEPT_SECONDS", 3600.0)
    site.act("/api/v1/commands", {"kind": "refresh"})  # forgets all answers
    first = site.ask("/api/v1/commands").json["commands"][0]
    assert first["kind"] == "refresh"
    for number in range(20):
        assert site.ask(f"/api/v1/commands?x={number}").json["commands"][0] == first
        assert site.ask("/api/v1/tables/public.many", x=str(number)).status == 200
        assert site.ask(f"/api/v1/tables/public.many?x={number}").status == 400
    assert sorted(asked) == ["command_log", "table_page"]
    site.act("/api/v1/commands", {"kind": "refresh"})
    assert site.ask("/api/v1/commands").json["commands"][0]["command"] > first["command"], "an action is seen at once"
    monkeypatch.undo()
    site.act("/api/v1/commands", {"kind": "refresh"})


def test_another_site_cannot_act(site: Site) -> None:
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ):
        assert site.ask("/api/v1/commands", "POST", {"kind": "pause"}, token=TOKEN, **headers).status == 403
    plain = site.act("/api/v1/commands", b'{"kind": "pause"}', Content_Type="text/plain")
    assert plain.status == 415


def test_another_name_for_the_address_is_refused(site: Site) -> None:
    assert site.ask("/api/v1/status", Host="evil.example").status == 421
    assert site.ask("/api/v1/status", Host="127.0.0.1.evil.example").status == 421
    for known in (f"localhost:{site.port}", f"127.0.0.1:{site.port}", "[::1]:80", "pipeline.example:443"):
        assert site.ask("/healthz", Host=known).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/page.js/../../app.py",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/api/v1/tables/../../../etc/passwd",
        "/api/v1/tables/%00",
        "/api/v1/indexes/..%2f..%2f/quarantine",
        "/static/x",
        "/index.html",
    ],
)
def test_paths_lead_nowhere_else(site: Site, path: str) -> None:
    answer = site.ask(path)
    assert answer.status in (400, 401, 404, 421), answer.body
    assert b"root:" not in answer.body


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(site: Site, method: str) -> None:
    assert site.ask("/api/v1/status", method).status == 405


def test_a_huge_body_is_refused(site: Site) -> None:
    huge = b'{"kind": "' + b"x" * 100_000 + b'"}'
    assert site.act("/api/v1/commands", huge, Content_Type="application/json").status == 413
    with socket.create_connection(("127.0.0.1", site.port), 10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000)
        assert raw.recv(1000).startswith(b"HTTP/1.1 400")


def test_fuzzed_requests_are_refused_and_logged_and_leak_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Requests that never end are given up early.
    monkeypatch.setattr(serving, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(guarding, "BODY_SECONDS", 0.2)
    caplog.set_level(logging.INFO, logger="penstock.server")
    nonsense = (b"\x00" * 100, b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"X" * 70_000)
    dice = random.Random(18)
    seen: set[int] = set()
    for number in range(300):
        request = nonsense[number] if number < len(nonsense) else _fuzzed(dice)
        # Addresses of their own: other tests are not locked out because of wrong tokens.
        client = f"127.2.{number // 200}.{number % 200 + 1}"
        answer = bytearray()
        raw = socket.create_connection(("127.0.0.1", site.port), 30, (client, 0))
        with raw, contextlib.suppress(ConnectionError):
            raw.sendall(request)
            while part := raw.recv(1 << 16):
                answer += part
        assert [secret for secret in SECRETS if secret.encode() in answer] == [], request
        if answer:
            seen.add(int(answer[9:12]))
    assert seen <= {200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 503}
    assert {200, 400, 401, 404, 405, 421} <= seen
    assert "request refused status=401" in caplog.text
    assert "Invalid HTTP request" in caplog.text
    # Nothing above that can be repeated without limit.
    louder = {each.getMessage().partition(" client=")[0] for each in caplog.records if each.levelno > logging.INFO}
    assert louder == {"a wrong token was refused"}
    assert [secret for secret in SECRETS if secret in caplog.text] == []
    assert site.ask("/healthz").status == 200


def _fuzzed(dice: random.Random) -> bytes:
    """Return a request that is wrong in several ways, or by chance in none; its token is never the right one."""

    def often(right: bytes, *others: bytes) -> bytes:
        return right if dice.random() < 0.6 else dice.choice(others)

    path = dice.choice([*READS, "/api/v1/commands", "/api/v1/indexes/followed/quarantine"]).encode()
    if dice.random() < 0.4:
        cut = dice.randrange(len(path) + 1)
        path = (
            path[:cut]
            + dice.choice([b"%00", b"%ff", b"/..", b"//", b"?limit=-1", b"\xff", b" ", b"%", b"#x"])
            + path[cut:]
        )
    body = often(b"", b'{"kind": "pause"}', dice.randbytes(200), b"[" * 5000, b"x" * 70_000)
    lines = [
        often(b"Host: localhost", b"Host: evil.example", b"Host:", b"Host: [::1", b"X: y", b"Host: a\r\nHost: b"),
        often(b"Content-Length: %d" % len(body), b"Content-Length: -1", b"Content-Length: 9999999999999", b"Y: z"),
        often(b"Accept: */*", b"Transfer-Encoding: chunked", b"no colon", b"X: \x00", b"Expect: 100-continue"),
        often(b"Authorization: Bearer wrong-0123456789", b"Authorization: \xff", b"Authorization: Basic x", b"Z: z"),
        often(b"Content-Type: application/json", b"Content-Type: \xff", b"Origin: http://evil.example"),
        f"Cookie: token={TOKEN}".encode(),
    ]
    method = often(b"GET", b"POST", b"POST", b"HEAD", b"PUT", b"get", b"\xff", b"")
    dice.shuffle(lines)
    return b"%b %b HTTP/1.1\r\n%b\r\nConnection: close\r\n\r\n%b" % (method, path, b"\r\n".join(lines), body)


def test_clients_that_send_slowly_are_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", site.port), 30) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost:")
        # The end of the connection, without an answer.
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(1000) == b""
    assert site.ask("/healthz").status == 200


def test_many_idle_connections_keep_nobody_out_for_long(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_SECONDS", 0.2)
    idle = [socket.create_connection(("127.0.0.1", site.port), 30) for _ in range(serving.CONNECTIONS + 10)]
    try:
        site.wait(lambda: site.ask("/healthz").status == 200, "a place")
    finally:
        for each in idle:
            each.close()


def test_a_page_follows_the_pipeline(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port), 30) as raw, raw.makefile("rb") as lines:
        raw.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        moments = (json.loads(line[6:]) for line in iter(lines.readline, b"") if line.startswith(b"data: "))
        first, second = next(moments), next(moments)
        assert first["pipeline"] == "shop"
        assert second["at"] >= first["at"]


def test_no_more_pages_than_said_follow_the_pipeline_also_if_they_come_at_once(site: Site) -> None:
    pages = [socket.create_connection(("127.0.0.1", site.port), 30) for _ in range(app.STREAMS + 30)]
    try:
        for page in pages:
            page.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = [page.recv(12) for page in pages]
        assert answers.count(b"HTTP/1.1 200") <= app.STREAMS
        assert answers.count(b"HTTP/1.1 503") >= 30
    finally:
        for page in pages:
            page.close()

    def one_more() -> bool:
        with socket.create_connection(("127.0.0.1", site.port), 30) as page:
            page.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return page.recv(12) == b"HTTP/1.1 200"

    site.wait(one_more, "a place of one that has left")


def test_answers_carry_headers_that_confine_the_page(site: Site) -> None:
    headers = site.ask("/").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in headers
    assert site.ask("/api/v1/status").headers["cache-control"] == "no-store"


def test_no_answer_has_a_secret_or_a_cell(site: Site) -> None:
    for path in READS:
        answer = site.ask(path)
        text = answer.body.decode() + str(answer.headers)
        assert answer.status in (200, 503), path
        assert [secret for secret in SECRETS if secret in text] == [], path
    with_token = site.ask("/api/v1/indexes/followed/quarantine", token=TOKEN).body.decode()
    assert [secret for secret in SECRETS if secret in with_token] == []
    refused = site.act("/api/v1/commands", {"kind": "resync", "tables": ["public.nothing"]})
    assert refused.status == 422
    assert [secret for secret in SECRETS if secret in refused.body.decode()] == []
