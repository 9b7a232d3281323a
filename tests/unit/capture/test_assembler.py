"""Transactions from recorded messages: the same whatever way they arrive."""

from __future__ import annotations

import random
import struct
import threading

import pytest

from penstock.capture.assembler import Assembler, AssemblerSettings
from penstock.capture.messages import Relation
from penstock.capture.parcels import HEADER
from penstock.capture.relations import RelationMap
from penstock.capture.streams import OpenStreams
from penstock.errors import DecodeError
from penstock.lsn import Lsn, OrderKey
from penstock.schema import Column, PostgresType, TableSchema
from penstock.source.columns import RelationColumn
from penstock.spool.folder import DiskGuard
from penstock.values import TypeSettings
from tests.unit.capture import corpus as recorded
from tests.unit.capture.gathering import MemorySink, assemble, make_assembler


@pytest.fixture(scope="module")
def corpus() -> recorded.Corpus:
    return recorded.load()


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory) -> MemorySink:
    return assemble(corpus, corpus.ordinary, tmp_path_factory.mktemp("streams"))


def kind(message: bytes) -> str:
    return chr(message[HEADER])


def test_recorded_messages_give_all_changes(corpus, expected):
    rows = sum(kind(message) in "IUD" for message in corpus.ordinary)
    truncated = 2 * sum(kind(message) == "T" for message in corpus.ordinary)
    assert len(expected.changes()) == rows + truncated
    assert expected.transactions == sum(kind(message) == "C" for message in corpus.ordinary)


@pytest.mark.trap(1)
def test_streamed_transactions_have_the_same_keys_and_rows(corpus, expected, tmp_path):
    assert {"S", "A", "c"} <= {kind(message) for message in corpus.streamed}
    streamed = assemble(corpus, corpus.streamed, tmp_path)
    assert streamed.changes() == expected.changes()


@pytest.mark.trap(1)
def test_relations_are_not_counted(corpus, expected, tmp_path):
    relations = [message for message in corpus.ordinary if kind(message) == "R"]
    first = {}
    for message in relations:
        first.setdefault(message[HEADER + 1 : HEADER + 5], message)
    again = []
    for message in corpus.ordinary:
        again += [message, *(first.values() if kind(message) in "IU" and len(again) > 60 else ())]
    assert assemble(corpus, again, tmp_path).changes() == expected.changes()


@pytest.mark.parametrize("which", ["ordinary", "streamed"])
def test_parcels_may_end_anywhere(corpus, expected, tmp_path, which):
    messages = getattr(corpus, which)
    assert assemble(corpus, messages, tmp_path, cuts=list(range(1, len(messages)))).changes() == expected.changes()
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(1, len(messages)), 9))
        assert assemble(corpus, messages, tmp_path, cuts=cuts, cut_each=True).changes() == expected.changes()


@pytest.mark.parametrize("which", ["ordinary", "streamed"])
@pytest.mark.parametrize("block_bytes", [1, 2_000, 40_000])
def test_blocks_may_be_of_any_size(corpus, expected, tmp_path, which, block_bytes):
    messages = getattr(corpus, which)
    sink = assemble(
        corpus,
        messages,
        tmp_path,
        cuts=list(range(0, len(messages), 7)),
        settings=AssemblerSettings(block_bytes=block_bytes),
    )
    assert sink.changes() == expected.changes()


@pytest.mark.trap(3)
def test_an_entry_never_ends_inside_a_transaction(corpus, tmp_path):
    messages = corpus.ordinary
    commits = [index for index, message in enumerate(messages) if kind(message) == "C"]
    around = {index + shift for index in commits for shift in (0, 1)}
    for length in sorted(around | set(range(0, len(messages), 3))):
        sink = assemble(corpus, messages[:length], tmp_path, settings=AssemblerSettings(block_bytes=500))
        assert sink.transactions == sum(index < length for index in commits)
        ends = [
            int.from_bytes(messages[index][HEADER + 10 : HEADER + 18], "big") for index in commits if index < length
        ]
        assert (sink.ends[-1] if sink.ends else None) == (ends[-1] if ends else None)


@pytest.mark.trap(32)
def test_a_truncate_stands_between_the_rows_around_it(corpus, expected):
    (entry,) = expected.entries
    steps = [
        ("rows", part[1].num_rows) if isinstance(part, tuple) else ("truncate", 0)
        for part in entry
        if (str(part[0]) if isinstance(part, tuple) else part.table) == "public.whole"
    ]
    # Inserted, updated and deleted; truncated; inserted again: twice.
    assert [name for name, _ in steps] == ["rows", "truncate", "rows", "truncate", "rows"]
    assert steps[0] == ("rows", 6)
    assert steps[-1] == ("rows", 1)


@pytest.mark.trap(13)
def test_a_repeated_relation_changes_nothing(corpus, tmp_path):
    sink = MemorySink()
    assembler = make_assembler(corpus, sink, tmp_path)
    assembler.feed(recorded.parcel(corpus.ordinary))
    lanes = len(assembler._relations.lanes)
    assembler.feed(recorded.parcel([message for message in corpus.ordinary if kind(message) == "R"]))
    assert len(assembler._relations.lanes) == lanes == len(corpus.schemas)


@pytest.mark.trap(12)
def test_a_relation_inside_a_streamed_transaction_counts_for_it_alone(corpus, tmp_path):
    messages = corpus.streamed
    start = next(index for index, message in enumerate(messages) if kind(message) == "S")
    first_relation = next(index for index in range(start, len(messages)) if kind(messages[index]) == "R")
    stop = next(index for index in range(first_relation, len(messages)) if kind(messages[index]) == "E")
    # The run alone, and then an ordinary transaction that relies on it: nothing was described to that one.
    rows = next(index for index, message in enumerate(corpus.ordinary) if kind(message) == "I")
    ordinary = [message for message in corpus.ordinary[: rows + 1] if kind(message) != "R"]
    with pytest.raises(DecodeError, match="never described"):
        assemble(corpus, [*messages[start : stop + 1], *ordinary], tmp_path)


def test_a_keepalive_moves_the_position_only_outside_of_transactions(corpus, tmp_path):
    sink = MemorySink()
    assembler = make_assembler(corpus, sink, tmp_path)
    assembler.keepalive(Lsn(5))
    assert sink.ends == [Lsn(5)]
    begin = next(index for index, message in enumerate(corpus.ordinary) if kind(message) == "B")
    assembler.feed(recorded.parcel(corpus.ordinary[: begin + 3]))
    assembler.keepalive(Lsn(1 << 40))
    assert sink.ends == [Lsn(5)]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda messages: messages[1:], "alternate|outside of a transaction|never described"),
        (lambda messages: [messages[0], *messages], "alternate"),
        (lambda messages: [message for message in messages if kind(message) != "R"], "never described"),
        (lambda messages: [messages[0][:HEADER]], "is empty"),
        (lambda messages: [messages[0][:-3]], "ends at offset 18"),
        (lambda messages: [messages[0][:HEADER] + b"?"], "unknown kind"),
    ],
)
def test_malformed_streams_are_refused(corpus, tmp_path, change, what):
    begin = next(index for index, message in enumerate(corpus.ordinary) if kind(message) == "B")
    with pytest.raises(DecodeError, match=what):
        assemble(corpus, change(corpus.ordinary[begin:]), tmp_path)


@pytest.mark.trap(26)
def test_the_padding_of_a_key_tuple_is_not_sent(expected):
    deleted = [
        row
        for entry in expected.entries
        for part in entry
        if isinstance(part, tuple) and str(part[0]) == "public.plain"
        for row in part[1].to_pylist()
        if row["_op"] == 3
    ]
    assert deleted
    for row in deleted:
        # 24 columns: all but the key are marked.
        assert row["_unchanged"] == bytes([0xFE, 0xFF, 0xFF])
        assert row["id"] is not None


@pytest.mark.trap(25)
def test_unchanged_toast_is_marked_and_not_null(expected):
    updates = [
        row
        for entry in expected.entries
        for part in entry
        if isinstance(part, tuple) and str(part[0]) == "public.toasted"
        for row in part[1].to_pylist()
        if row["_op"] == 2 and row["big"] is None
    ]
    assert updates
    assert {row["_unchanged"] for row in updates} == {b"\x04"}
    assert any(row["_old"] is not None for row in updates)


@pytest.mark.trap(12)
@pytest.mark.parametrize("again", [False, True])
def test_the_last_description_of_a_table_counts_after_a_streamed_commit(corpus, again):
    """The server says it once: inside the streamed transaction, or after that on its own; the later one holds."""
    relations = RelationMap(recorded.RecordedResolver({}), TypeSettings())
    old = Relation(7, "public", "t", "d", (RelationColumn("a", 25),))
    new = Relation(7, "public", "t", "d", (RelationColumn("a", 25), RelationColumn("b", 25)))
    relations.describe(old)
    relations.announce(7, transaction=500)
    if again:
        relations.describe(new)
    relations.describe(old if again else new, transaction=500)
    relations.commit(500)
    assert [column.name for column in relations.lane(7).schema.columns] == ["a", "b"]


class _LateCatalog:
    """A catalog in which the table has a primary key from the second look on."""

    def __init__(self) -> None:
        self._looks = 0

    def learn(self, content: bytes, at: OrderKey) -> None:
        raise AssertionError("nothing was recorded")

    def resolve(self, relation: Relation, at: OrderKey | None = None) -> TableSchema:
        self._looks += 1
        key = 1 if self._looks == 2 else None
        column = Column("id", 1, PostgresType(23, "int4"), identity=True, primary_key_position=key)
        return TableSchema(relation.table_id, relation.namespace, relation.name, (column,))


def test_steps_of_a_table_are_in_order_though_its_shape_goes_to_and_fro(tmp_path):
    """A streamed transaction is described when it commits, by a catalog that may have changed since."""
    number = struct.Struct(">I").pack
    columns = struct.pack(">HB3sIi", 1, 1, b"id\0", 23, -1)

    def relation(xid: bytes = b"") -> bytes:
        return b"R" + xid + number(7) + b"public\0t\0d" + columns

    def insert(value: bytes, xid: bytes = b"") -> bytes:
        return b"I" + xid + number(7) + b"N" + struct.pack(">HcI", 1, b"t", len(value)) + value

    def ordinary(commit: int, *inner: bytes) -> list[bytes]:
        begin = struct.pack(">cQqI", b"B", commit, 0, commit)
        return [begin, *inner, struct.pack(">cBQQq", b"C", 0, commit, commit + 8, 0)]

    xid = number(50)
    messages = [
        *(b"S" + xid + b"\1", relation(xid), insert(b"2", xid), b"E"),
        *ordinary(100, relation(), insert(b"1")),
        struct.pack(">cIBQQq", b"c", 50, 0, 200, 208, 0),
        *ordinary(300, insert(b"3")),
    ]
    sink = MemorySink()
    streams = OpenStreams(tmp_path / "open", DiskGuard(tmp_path, min_free_bytes=0, stop=threading.Event()))
    assembler = Assembler(sink, _LateCatalog(), streams, AssemblerSettings())
    assembler.feed(recorded.parcel([bytes([ord("w"), *bytes(HEADER - 1)]) + message for message in messages]))
    assembler.publish()
    (entry,) = sink.entries
    assert [rows["_commit_lsn"].to_pylist() for _, rows in entry] == [[100], [200], [300]]
