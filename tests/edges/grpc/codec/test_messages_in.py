"""Any message becomes a row, or is refused with a code; and what a row says is what the message said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeball.broker.accepting import admission
from timeball.broker.accepting.admission import batch_of
from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc.codec import messages_out
from timeball.edges.grpc.codec.messages_in import row_of, type_of
from timeball.edges.grpc.codec.messages_out import RESERVED
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits
from timeball.model.message import SEND_NAMES, decode_properties, with_seq
from timeball.schedule.delay_levels.levels import LevelTable

NOW_MS = 1_800_000_000_000
QUEUES = 3
INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NAMED = st.one_of(TEXT, st.sampled_from(sorted(RESERVED)))


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


# Every field of a message, with whatever its type can hold.
SYSTEM = st.fixed_dictionaries(
    {
        "tag": some(TEXT),
        "keys": st.lists(TEXT, max_size=4),
        "message_id": st.one_of(st.just("01AB"), TEXT),
        "digest": some(st.tuples(INT32, TEXT)),
        "body_encoding": st.one_of(st.sampled_from([0, 1, 2]), INT32),
        "message_type": st.one_of(st.sampled_from([0, 1, 2, 3, 4]), INT32),
        "born": some(st.tuples(INT64, INT32)),
        "born_host": TEXT,
        "delivery": some(
            st.one_of(st.tuples(INT64, INT32), st.tuples(st.integers(0, 2**34), st.integers(0, 10**9 - 1)))
        ),
        "queue_id": INT32,
        "delivery_attempt": some(INT32),
        "message_group": some(TEXT),
        "trace_context": some(TEXT),
        "recovery": some(st.tuples(INT64, INT32)),
        "lite_topic": some(st.just("")),
        "priority": st.sampled_from([None, None, None, 1]),
    }
)


def built(body: bytes, properties: dict[str, str], fields: dict[str, Any]) -> d.Message:
    fields = dict(fields)
    pairs = {name: fields.pop(name) for name in ("digest", "born", "delivery", "recovery")}
    system = d.SystemProperties(**{name: value for name, value in fields.items() if value is not None})
    if pairs["digest"] is not None:
        kind, checksum = pairs["digest"]
        system.body_digest.CopyFrom(d.Digest(type=kind, checksum=checksum))
    for name, field in (
        ("born", "born_timestamp"),
        ("delivery", "delivery_timestamp"),
        ("recovery", "orphaned_transaction_recovery_duration"),
    ):
        if pairs[name] is not None:
            found = getattr(system, field)
            found.seconds, found.nanos = pairs[name]
            found.SetInParent()
    return d.Message(body=body, user_properties=properties, system_properties=system)


WILD = st.builds(built, st.binary(max_size=4), st.dictionaries(NAMED, TEXT, max_size=3), SYSTEM)

# And what a client would send: type and fields agree, and most texts can be read.
WORD = st.one_of(
    st.text(st.characters(categories=["L", "N", "P"], exclude_characters="|"), min_size=1, max_size=6), TEXT
)
INSTANT = st.tuples(st.integers(0, NOW_MS // 1_000 + 2 * 10**8), st.integers(0, 10**9 - 1))
FIELDS_OF = {
    d.MessageType.NORMAL: {},
    d.MessageType.FIFO: {"message_group": WORD},
    d.MessageType.DELAY: {"delivery": INSTANT},
    d.MessageType.TRANSACTION: {"recovery": some(st.tuples(st.integers(0, 86_400), INT32))},
}
NOTHING = {name: st.none() for name in ("digest", "born", "delivery", "recovery")}


def likely(kind: int) -> st.SearchStrategy[d.Message]:
    fields: dict[str, st.SearchStrategy[Any]] = {
        **NOTHING,
        "tag": some(WORD),
        "keys": st.lists(WORD, max_size=3),
        "message_id": WORD,
        "body_encoding": st.sampled_from([0, 1, 2]),
        "message_type": st.sampled_from([kind, 0] if kind != d.MessageType.TRANSACTION else [kind]),
        "born": some(st.tuples(INT64, INT32)),
        "born_host": TEXT,
        "trace_context": some(WORD),
        **FIELDS_OF[kind],
    }
    words = st.dictionaries(WORD, WORD, max_size=3)
    return st.builds(built, st.binary(min_size=1, max_size=4), words, st.fixed_dictionaries(fields))


LIKELY = st.sampled_from(sorted(FIELDS_OF)).flatmap(likely)
MESSAGE = st.one_of(WILD, LIKELY)


def read(message: d.Message) -> dict[str, Any]:
    kind = type_of(message.system_properties)
    row = row_of(message, kind, "orders", QUEUES, NOW_MS, limits.DELAY_MS_MAX, "peer")
    return {"kind": kind, **dict(zip(SEND_NAMES, row, strict=True))}


def plain(**fields: Any) -> d.Message:
    system = d.SystemProperties(**{"message_id": "01AB", **fields})
    return d.Message(body=b"body", system_properties=system)


@given(message=MESSAGE)
def test_any_message_is_a_row_or_refused(message: d.Message) -> None:
    try:
        row = read(message)
    except Refused as refused:
        assert 40_000 <= refused.protocol_code < 60_000
        assert str(refused)
        return
    kind, system = row.pop("kind"), message.system_properties
    # The broker takes what the codec lets pass, so one message never refuses those that share its batch.
    rows, level = admission.admit(
        batch_of([tuple(row.values())]), now_ms=NOW_MS + 1, delay_ms_max=limits.DELAY_MS_MAX, host="h",
        table=LevelTable.parse("1s"),
    )  # fmt: skip
    assert level is None and rows.num_rows == 1
    properties = decode_properties(row["properties"])
    assert properties.pop("UNIQ_KEY") == row["unique_key"] == system.message_id
    assert properties.pop("TAGS", "") == (row["tag"] or "") == system.tag
    assert properties.pop("KEYS", "") == (row["keys"] or "") == " ".join(key for key in system.keys if key)
    if kind == d.MessageType.FIFO:
        assert properties.pop("__SHARDINGKEY") == system.message_group
    if kind == d.MessageType.TRANSACTION:
        assert properties.pop("__transactionId__") == system.message_id
    assert properties.pop("TRACE_CONTEXT", "") == system.trace_context
    assert (properties.pop("TRAN_MSG", "") == "true") == (kind == d.MessageType.TRANSACTION)
    assert ("TIMER_DELIVER_MS" in properties) == (kind == d.MessageType.DELAY)
    assert {name: value for name, value in properties.items() if name not in RESERVED} == dict(
        message.user_properties
    )
    assert row["due_ms"] is None or 0 < row["due_ms"] <= NOW_MS + limits.DELAY_MS_MAX
    assert (row["queue_id"] >= 0) == (kind == d.MessageType.FIFO) and row["queue_id"] < QUEUES


@given(message=LIKELY)
def test_what_comes_out_is_what_went_in(message: d.Message) -> None:
    try:
        row = read(message)
    except Refused:
        return
    kind, given = row.pop("kind"), message.system_properties
    rows, _ = admission.admit(
        batch_of([tuple(row.values())]), now_ms=NOW_MS, delay_ms_max=limits.DELAY_MS_MAX, host="h",
        table=LevelTable.parse("1s"),
    )  # fmt: skip
    asked = d.Resource(name="orders")
    [found] = messages_out.messages(with_seq(rows, 1), asked, "orders", "store")
    assert (found.topic, found.body) == (asked, message.body)
    marks = {
        d.MessageType.FIFO: {"__SHARDINGKEY": given.message_group},
        d.MessageType.TRANSACTION: {"__transactionId__": given.message_id},
    }
    assert found.user_properties == {**message.user_properties, **marks.get(kind, {})}
    system = found.system_properties
    for name in ("tag", "message_id", "message_group", "trace_context"):
        assert getattr(system, name) == getattr(given, name), name
    assert list(system.keys) == [key for key in " ".join(given.keys).split(" ") if key]
    assert system.body_encoding == (given.body_encoding or d.Encoding.IDENTITY)
    assert system.born_host == (given.born_host or "peer")
    if row["due_ms"] is not None:
        assert (system.message_type, kind) == (d.MessageType.DELAY, d.MessageType.DELAY)
        assert system.delivery_timestamp.ToMilliseconds() == row["due_ms"]
    elif kind in (d.MessageType.FIFO, d.MessageType.NORMAL):
        assert system.message_type == kind and not system.HasField("delivery_timestamp")


@given(message=MESSAGE)
def test_and_so_is_whatever_came_over_the_wire(message: d.Message) -> None:
    """The same from bytes: what a parser leaves is what handlers see."""
    again = d.Message.FromString(message.SerializeToString())
    outcomes = []
    for each in (message, again):
        try:
            row = read(each)
            outcomes.append({**row, "properties": decode_properties(row["properties"])})
        except Refused as refused:
            outcomes.append({"refused": refused.protocol_code})
    assert outcomes[0] == outcomes[1]


def test_messages_of_each_type_do_become_rows() -> None:
    """The control of the above: else a codec, or a strategy, that lets nothing pass would not be noticed."""
    found: set[int] = set()

    @settings(max_examples=200, database=None)
    @given(message=LIKELY)
    def look(message: d.Message) -> None:
        try:
            found.add(read(message)["kind"])
        except Refused:
            pass

    look()
    assert found == set(FIELDS_OF)


@pytest.mark.parametrize(
    ("seconds", "nanos", "due_ms"),
    [
        (1_800_000_001, 0, 1_800_000_001_000),
        (1_800_000_001, 1, 1_800_000_001_001),
        (1_800_000_001, 1_000_000, 1_800_000_001_001),
        (1_800_000_001, 999_999_999, 1_800_000_002_000),
        (1_800_000_000, 0, 1_800_000_000_000),
        (1, 0, 1_000),
        (-1, 999_999_999, None),
    ],
)
def test_an_instant_is_rounded_up(seconds: int, nanos: int, due_ms: int | None) -> None:
    message = plain(message_type=d.MessageType.DELAY)
    at = message.system_properties.delivery_timestamp
    at.seconds, at.nanos = seconds, nanos
    assert read(message)["due_ms"] == due_ms


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(2**62, 0), (-(2**62), 0), (0, -1), (0, 10**9), (0, 2**31 - 1)]
)
def test_what_is_no_instant(seconds: int, nanos: int) -> None:
    message = plain(message_type=d.MessageType.DELAY)
    at = message.system_properties.delivery_timestamp
    at.seconds, at.nanos = seconds, nanos
    with pytest.raises(Refused) as refused:
        read(message)
    assert refused.value.protocol_code == d.Code.ILLEGAL_DELIVERY_TIME
    assert f"{seconds} s and {nanos} ns" in str(refused.value)


@pytest.mark.parametrize("seconds", [253_402_300_799, 253_402_300_800, 2**63 - 1, -62_135_596_801])
def test_an_instant_out_of_range_is_repeated(seconds: int) -> None:
    message = plain(message_type=d.MessageType.DELAY)
    message.system_properties.delivery_timestamp.seconds = seconds
    with pytest.raises(Refused) as refused:
        read(message)
    assert refused.value.protocol_code == d.Code.ILLEGAL_DELIVERY_TIME
    assert str(seconds) in str(refused.value)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, None), (1, "1"), (86_400, "86400"), (86_401, "refused"), (-1, "refused")]
)
def test_when_a_producer_is_asked_first(seconds: int, text: str | None) -> None:
    message = plain(message_type=d.MessageType.TRANSACTION)
    message.system_properties.orphaned_transaction_recovery_duration.seconds = seconds
    if text == "refused":
        with pytest.raises(Refused, match="a day at most"):
            read(message)
        return
    properties = decode_properties(read(message)["properties"])
    assert properties.get("CHECK_IMMUNITY_TIME_IN_SECONDS") == text
    assert properties["PGROUP"] == "orders"


def test_the_clock_of_a_client_that_has_none_is_ours() -> None:
    assert read(plain())["born_ms"] == NOW_MS
    assert read(plain(born_host="h" * 256))["born_host"] == "peer"


@pytest.mark.parametrize(
    ("kind", "name", "field"),
    [
        (d.MessageType.FIFO, "__SHARDINGKEY", {"message_group": "g2"}),
        (d.MessageType.TRANSACTION, "__transactionId__", {"message_id": "g2"}),
    ],
)
def test_a_message_that_was_received_may_be_sent_on_with_all_its_properties(
    kind: int, name: str, field: dict[str, str]
) -> None:
    message = plain(message_type=kind, **field)
    message.user_properties.update({name: "g1", "mine": "v"})
    properties = read(message)["properties"]
    assert properties.count(name) == 1
    assert decode_properties(properties)[name] == "g2" and decode_properties(properties)["mine"] == "v"
    other = plain()
    other.user_properties.update({name: "g1"})
    assert decode_properties(read(other)["properties"])[name] == "g1"
