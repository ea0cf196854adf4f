"""Any message becomes a row, or is refused with a code; and what a row says is what the message said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball import limits
from timeball.broker import admission
from timeball.broker.send_rows import NAMES, batch_of
from timeball.message import decode_properties
from timeball.protocols.grpc._generated import definition_pb2 as d
from timeball.protocols.grpc.codec.messages_in import row_of, type_of
from timeball.protocols.grpc.codec.property_names import RESERVED
from timeball.protocols.grpc.codec.statuses import Refused
from timeball.schedule.delay_levels.levels import LevelTable

NOW_MS = 1_800_000_000_000
QUEUES = 3
INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NAMED = st.one_of(TEXT, st.sampled_from(sorted(RESERVED)))


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


# Every field of a message, with whatever its type can hold; most often what a client would send, so that rows come out.
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


MESSAGE = st.builds(built, st.binary(max_size=4), st.dictionaries(NAMED, TEXT, max_size=3), SYSTEM)


def read(message: d.Message) -> dict[str, Any]:
    kind = type_of(message.system_properties)
    row = row_of(message, kind, "orders", QUEUES, NOW_MS, limits.DELAY_MS_MAX, "peer")
    return {"kind": kind, **dict(zip(NAMES, row, strict=True))}


def plain(**fields: Any) -> d.Message:
    system = d.SystemProperties(**{"message_id": "01AB", **fields})
    return d.Message(body=b"body", system_properties=system)


@given(message=MESSAGE)
def test_any_message_is_a_row_or_refused(message: d.Message) -> None:
    try:
        row = read(message)
    except Refused as refused:
        assert 40_000 <= refused.status_code < 60_000
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
    assert properties.pop("__SHARDINGKEY", "") == system.message_group
    assert properties.pop("TRACE_CONTEXT", "") == system.trace_context
    assert (properties.pop("TRAN_MSG", "") == "true") == (kind == d.MessageType.TRANSACTION)
    assert ("TIMER_DELIVER_MS" in properties) == (kind == d.MessageType.DELAY)
    assert {name: value for name, value in properties.items() if name not in RESERVED} == dict(
        message.user_properties
    )
    assert row["due_ms"] is None or NOW_MS < row["due_ms"] <= NOW_MS + limits.DELAY_MS_MAX
    assert (row["queue_id"] >= 0) == (kind == d.MessageType.FIFO) and row["queue_id"] < QUEUES


@given(message=MESSAGE)
def test_and_so_is_whatever_came_over_the_wire(message: d.Message) -> None:
    """The same from bytes: what a parser leaves is what handlers see."""
    again = d.Message.FromString(message.SerializeToString())
    outcomes = []
    for each in (message, again):
        try:
            outcomes.append(read(each))
        except Refused as refused:
            outcomes.append({"refused": refused.status_code})
    assert outcomes[0] == outcomes[1]


def test_some_messages_do_become_rows() -> None:
    """The control of both: else a codec that refuses everything would pass."""
    for fields in ({}, {"message_group": "g"}, {"message_type": d.MessageType.TRANSACTION}):
        assert read(plain(**fields))["unique_key"] == "01AB"


@pytest.mark.parametrize(
    ("seconds", "nanos", "due_ms"),
    [
        (1_800_000_001, 0, 1_800_000_001_000),
        (1_800_000_001, 1, 1_800_000_001_001),
        (1_800_000_001, 1_000_000, 1_800_000_001_001),
        (1_800_000_001, 999_999_999, 1_800_000_002_000),
        (1_800_000_000, 0, None),
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
    assert refused.value.status_code == d.Code.ILLEGAL_DELIVERY_TIME


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
