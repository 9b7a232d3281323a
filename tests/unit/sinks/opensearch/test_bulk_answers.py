"""What a server says about documents: sorted, and without the values that it quotes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.sinks.opensearch.bulk import BulkResult, read_answer
from penstock.sinks.opensearch.client import Answer, Transient

FIELDS = frozenset({"age", "address", "address.since", "labels", "code"})


def outcome(status: int, type_: str | None = None, reason: str = "", *causes: tuple[str, str]) -> dict[str, Any]:
    error: dict[str, Any] | None = None
    for kind, said in reversed([(type_, reason), *causes] if type_ else []):
        error = {"type": kind, "reason": said, **({"caused_by": error} if error else {})}
    return {"status": status, **({"error": error} if error else {})}


def judged(*outcomes: dict[str, Any], action: str = "index") -> BulkResult:
    said = {"took": 3, "errors": any("error" in each for each in outcomes), "items": [{action: o} for o in outcomes]}
    return read_answer(answer_of(said), len(outcomes), FIELDS)


def answer_of(said: Any) -> Answer:
    return Answer(200, json.dumps(said, separators=(",", ":")).encode())


def reason(*arguments: Any) -> str:
    [(_, told)] = judged(outcome(400, *arguments)).refused
    return told


def test_an_answer_without_errors_has_a_status_for_each_document() -> None:
    said = {"took": 12, "errors": False, "items": [{"index": {"status": 201}}, {"delete": {"status": 404}}]}
    assert read_answer(answer_of(said), 2, FIELDS) == BulkResult()


CREATED = {"index": {"status": 201}}


@pytest.mark.trap(46)
@pytest.mark.parametrize(
    "said",
    [
        *(None, [], {}, {"errors": False}, {"errors": True}, {"items": None}),
        {"error": {"type": "strange"}, "status": 200},
        {"errors": False, "items": [CREATED]},
        {"errors": False, "items": [CREATED, CREATED, CREATED]},
        {"errors": False, "items": [CREATED, {}]},
        {"errors": True, "items": [CREATED, "created"]},
        {"errors": True, "items": [CREATED, {"index": {"status": "201"}}]},
    ],
)
def test_an_answer_that_does_not_name_every_document_says_nothing(said: Any) -> None:
    with pytest.raises(Transient, match="bulk request"):
        read_answer(answer_of(said), 2, FIELDS)


def test_a_page_of_a_proxy_says_nothing() -> None:
    for status in (200, 404):
        with pytest.raises(Transient, match=f"answered {status} with something other than JSON"):
            Answer(status, b"<html>a proxy's page</html>").require_said()
    with pytest.raises(Transient):
        read_answer(Answer(200, b"<html>a proxy's page</html>"), 2, FIELDS)


def test_a_status_without_an_error_is_not_a_success() -> None:
    said = {"errors": True, "items": [CREATED, {"index": {"status": 503}}, {"index": {"status": 404}}]}
    verdict = read_answer(answer_of(said), 3, FIELDS)
    assert (verdict.again, verdict.unknown) == ((1,), "404")


def test_what_is_stale_or_not_there_is_done() -> None:
    stale = outcome(409, "version_conflict_engine_exception", "[1]: version conflict")
    assert judged(stale, outcome(404), outcome(200), action="delete") == BulkResult()


@pytest.mark.trap(46)
@pytest.mark.parametrize(
    ("status", "type_"),
    [
        (429, "rejected_execution_exception"),
        (429, "circuit_breaking_exception"),
        (503, "unavailable_shards_exception"),
        (500, "node_closed_exception"),
        (403, "cluster_block_exception"),
    ],
)
def test_only_what_passes_goes_again(status: int, type_: str) -> None:
    refused = outcome(400, "mapper_parsing_exception", "failed to parse")
    verdict = judged(outcome(200), outcome(status, type_), refused, outcome(status, type_))
    assert (verdict.again, verdict.busy) == ((1, 3), f"{status} {type_}")
    assert [place for place, _ in verdict.refused] == [2]


def test_a_removal_from_an_index_that_is_gone_is_not_a_removal_of_nothing() -> None:
    gone = outcome(404, "index_not_found_exception", "no such index [x]")
    assert judged(gone, action="delete").gone == "index_not_found_exception"
    assert judged(outcome(400, "invalid_index_name_exception"), action="delete").gone
    assert judged(outcome(400, "index_closed_exception")).gone == "index_closed_exception"


def test_what_nobody_knows_is_neither_tried_again_nor_set_aside() -> None:
    verdict = judged(outcome(400, "strange_exception", "secret"))
    assert (verdict.unknown, verdict.again, verdict.refused) == ("400 strange_exception", (), ())


def test_refusals_name_the_field_and_never_a_value() -> None:
    quoted = "in document with id 'secret'. Preview of field's value: 'secret failed to parse field [code]'"
    assert reason(
        "mapper_parsing_exception",
        f"failed to parse field [age] of type [integer] {quoted}",
        ("number_format_exception", 'For input string: "secret"'),
    ) == ("mapper_parsing_exception [age]: the value is not a number")
    assert reason(
        "mapper_parsing_exception",
        f"failed to parse field [address.since] of type [date] {quoted}",
        ("illegal_argument_exception", "failed to parse date field [secret]"),
        ("date_time_parse_exception", "secret"),
    ) == ("mapper_parsing_exception [address.since]: the value is not a date in the mapping's format")
    assert reason(
        "illegal_argument_exception",
        'Document contains at least one immense term in field="code" (whose UTF8 encoding is longer): secret',
        ("max_bytes_length_exceeded_exception", "got 40000"),
    ) == ("illegal_argument_exception [code]: the value is too long for a keyword")
    assert reason("mapper_parsing_exception", "failed to parse", ("json_parse_exception", "secret")) == (
        "mapper_parsing_exception: the body is not JSON"
    )


def test_keys_that_come_from_data_are_not_named() -> None:
    said = "failed to parse field [labels.john@secret.example] of type [integer] in document"
    assert reason("mapper_parsing_exception", said) == (
        "mapper_parsing_exception [labels]: the value does not fit the mapping"
    )
    strict = "mapping set to strict, dynamic introduction of [{}] within [{}] is not allowed"
    sentence = "the mapping does not have this field"
    kind = "strict_dynamic_mapping_exception"
    assert reason(kind, strict.format("extra", "address")) == f"{kind} [address.extra]: {sentence}"
    assert reason(kind, strict.format("extra", "_doc")) == f"{kind} [extra]: {sentence}"
    assert reason(kind, strict.format("0123 secret", "address")) == f"{kind} [address]: {sentence}"
    assert reason(kind, strict.format("0123 secret", "_doc")) == f"{kind}: {sentence}"
