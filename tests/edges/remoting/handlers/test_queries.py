"""Queries for messages by unique key, by KEYS and by sequence number."""

from __future__ import annotations

import pytest
from benchmarks.stored_message import StoredMessage, decode_stored
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode

from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.records import parse_offset_msg_id
from timeball.edges.remoting.handlers import queries

QUERY, VIEW = RequestCode.QUERY_MESSAGE, RequestCode.VIEW_MESSAGE_BY_ID


def query_messages(wire: Wire, key: str, topic: str = "orders", **more: object) -> list[StoredMessage]:
    """Query messages by key, at most 32 of any time."""
    fields = {"maxNum": 32, "beginTimestamp": 0, "endTimestamp": (1 << 63) - 1, **more}
    answer = wire.ask(QUERY, topic=topic, key=key, **fields)
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return []
    assert answer.code == 0, answer.remark
    assert int(answer.ext["indexLastUpdatePhyoffset"]) > 0
    return decode_stored(answer.body)


def test_a_message_is_found_by_key(wire: Wire) -> None:
    for n, keys in enumerate(("k1", "k2 k1", "k11", "k1x k", "")):
        sent(wire, b"%d" % n, properties={"KEYS": keys})
    sent(wire, b"other", topic="others", properties={"KEYS": "k1"})
    assert [m.body for m in query_messages(wire, "k1")] == [b"0", b"1"]
    assert [m.body for m in query_messages(wire, "k1", topic="others")] == [b"other"]
    assert query_messages(wire, "k") != [] and query_messages(wire, "unknown") == []
    assert [m.body for m in query_messages(wire, "k1", maxNum=1)] == [b"1"], "the newest message comes first"


def test_a_query_is_limited_to_its_time_range(wire: Wire) -> None:
    sent(wire, properties={"KEYS": "k"})
    [message] = query_messages(wire, "k")
    assert query_messages(wire, "k", beginTimestamp=message.store_ms + 1) == []
    assert query_messages(wire, "k", endTimestamp=message.store_ms - 1) == []


def test_a_message_is_found_by_unique_key(wire: Wire) -> None:
    sent(wire, b"mine", properties={"UNIQ_KEY": "MINE", "KEYS": "YOURS"})
    sent(wire, b"yours", properties={"UNIQ_KEY": "YOURS"})
    assert [m.body for m in query_messages(wire, "YOURS", _UNIQUE_KEY_QUERY=True)] == [b"yours"]
    assert [m.body for m in query_messages(wire, "YOURS")] == [b"mine"]


@pytest.mark.parametrize("delay", [{"TIMER_DELAY_SEC": "3600"}, {"DELAY": "18"}])
def test_a_pending_message_is_found(wire: Wire, delay: dict[str, str]) -> None:
    sent(wire, b"pending", properties={"KEYS": "k", **delay})
    [message] = query_messages(wire, "k")
    assert message.body == b"pending"


def test_a_message_is_found_by_sequence_number(node: RunningNode, wire: Wire) -> None:
    receipt = sent(wire, b"numbered")
    _, seq = parse_offset_msg_id(receipt.ext["msgId"])
    [message] = decode_stored(wire.ask_ok(VIEW, offset=seq).body)
    assert (message.body, message.seq) == (b"numbered", seq)
    for missing_seq in (seq + 1, 0, -1, 1 << 62):
        answer = wire.ask(VIEW, offset=missing_seq)
        assert answer.code == ResponseCode.SYSTEM_ERROR, missing_seq
        assert "can not find" in str(answer.remark)
    assert wire.ask(VIEW, offset=1 << 63).code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize("delay", [{}, {"TIMER_DELAY_SEC": "3600"}])
def test_an_answer_contains_the_newest_messages_that_fit(
    wire: Wire, delay: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(100):
        sent(wire, b"%03d" % n, properties={"KEYS": "k", **delay})
    monkeypatch.setattr(queries, "ROWS_PER_READ", 7)
    assert [int(m.body) for m in query_messages(wire, "k", maxNum=10)] == [*range(90, 100)]
    assert [int(m.body) for m in query_messages(wire, "k", maxNum=1_000)] == [
        *range(100 - queries.ROWS_MAX, 100)
    ]
    monkeypatch.setattr(queries, "BYTES_MAX", 3 * 20 + 2)  # twenty bodies of three bytes fit
    assert [int(m.body) for m in query_messages(wire, "k", maxNum=64)] == [*range(80, 100)]
    monkeypatch.setattr(queries, "BYTES_MAX", 1)
    assert [int(m.body) for m in query_messages(wire, "k", maxNum=64)] == [99], "at least one message"
