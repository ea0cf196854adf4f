"""The compiled reader of sends is the reference's twin: of what it takes for plain, both make the same row."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from tests.edges.grpc.sending import message, send_request

from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc._generated.service_pb2 import SendMessageRequest
from timeball.edges.grpc.codec import send_requests
from timeball.edges.grpc.codec.messages_in import check_instant, row_of, type_of
from timeball.edges.grpc.codec.messages_out import RESERVED
from timeball.edges.grpc.codec.send_requests import decoder_of, read_plain, topics_of
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits
from timeball.model.message import SendRow

NOW_MS, PEER, QUEUES = 1_800_000_000_000, "10.0.0.7", 8
Type = d.MessageType

needs_compiled = pytest.mark.skipif(read_plain is None, reason="the codec is not compiled here")

Row = tuple[list[tuple[str, str]], SendRow]


def reference(data: bytes) -> Row | str:
    """The topic and the row that protobuf and messages_in.py make of these bytes, or why there is none."""
    try:
        request = SendMessageRequest.FromString(data)
    except DecodeError:
        return "no request"
    if len(request.messages) != 1:
        return "not one message"
    [given_message] = request.messages
    try:
        kind = type_of(given_message.system_properties)
        row = row_of(given_message, kind, "topic", QUEUES, NOW_MS, limits.DELAY_MS_MAX, PEER)
    except Refused as error:
        return str(error)
    return [(each.resource_namespace, each.name) for each in topics_of(request)], row


def compiled(data: bytes) -> Row | str | None:
    """The same of the compiled reader; None for what is not plain."""
    plain: Any = read_plain(data)
    if plain is None:
        return None
    try:
        if plain.due_ms is not None:
            check_instant(plain.due_ms, NOW_MS, limits.DELAY_MS_MAX)
    except Refused as error:
        return str(error)
    row = plain.row("topic", NOW_MS if plain.needs_now else 0, PEER)
    assert plain.size_bytes == len(row[1]) + len(row[5])
    return [(each.resource_namespace, each.name) for each in topics_of(plain)], row


def is_same(data: bytes) -> bool:
    """Compare both; return whether it was plain."""
    found = compiled(data)
    assert found is None or found == reference(data)
    return found is not None


TEXTS = st.sampled_from(
    [
        "",
        "a",
        "TagA",
        "a b",
        " ",
        "a|b",
        "\x01",
        "\x7f",
        "é",
        "n" * 255,
        "n" * 256,
        "k" * 9_000,
        "~",
        *sorted(RESERVED)[:3],
    ]
)
INSTANTS = st.builds(
    lambda seconds, nanos: {"seconds": seconds, "nanos": nanos},
    st.sampled_from([0, 1, -1, NOW_MS // 1_000, NOW_MS // 1_000 + 60, 253_402_300_799, 2**62]),
    st.sampled_from([0, 1, 999_999_999, 1_000_000, -1, 1_000_000_000, 2**31 - 1]),
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "message_type": st.sampled_from([*Type.values(), 77, -1]),
        "tag": TEXTS,
        "keys": st.lists(TEXTS, max_size=20),
        "message_id": TEXTS,
        "body_encoding": st.sampled_from([0, 1, 2, 3, -1]),
        "born_host": TEXTS,
        "queue_id": st.sampled_from([0, 7, -1]),
        "message_group": TEXTS,
        "trace_context": TEXTS,
        "lite_topic": TEXTS,
        "priority": st.integers(0, 1),
        "born_timestamp": INSTANTS,
        "delivery_timestamp": INSTANTS,
        "body_digest": st.builds(lambda text: {"type": d.DigestType.CRC32, "checksum": text}, TEXTS),
        "store_host": TEXTS,
        "properties": st.dictionaries(TEXTS, TEXTS, max_size=2),
    },
)


@needs_compiled
@given(FIELDS, st.binary(max_size=40), TEXTS, TEXTS)
@example({"message_type": Type.DELAY, "delivery_timestamp": {"seconds": 1, "nanos": 1}}, b"b", "t", "n")
@example({"message_type": Type.DELAY, "delivery_timestamp": {"seconds": 253_402_300_799}}, b"b", "t", "")
def test_a_plain_send_is_the_row_that_the_reference_makes(
    fields: dict[str, Any], body: bytes, topic: str, namespace: str
) -> None:
    given_message = message(body, topic=topic, namespace=namespace, **fields)
    is_same(send_request(given_message).SerializeToString())


@needs_compiled
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_bytes_that_were_changed_on_their_way_are_read_alike(chance: random.Random, changes: int) -> None:
    data = bytearray(send_request(ORDINARY[chance.randrange(len(ORDINARY))]).SerializeToString())
    for _ in range(changes):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice([0, 1, 1, 2, 9]))
        data[at:end] = chance.randbytes(chance.choice([0, 1, 1, 2, 9]))
    is_same(bytes(data))


@needs_compiled
@given(st.binary(max_size=60))
def test_any_bytes_are_read_alike(data: bytes) -> None:
    is_same(data)


def ordinary(**fields: Any) -> d.Message:
    """As stock producers write it."""
    return message(
        bytes(128), namespace="shop", tag="TagA", keys=["k1", "k2"], born_host="client.example", queue_id=3,
        body_encoding=d.Encoding.IDENTITY, message_id="0156F7E71C361B21BC024CCDBE00000000", **fields,
    )  # fmt: skip


ORDINARY = [
    ordinary(),
    ordinary(due_ms=NOW_MS + 5_077),
    ordinary(properties={"who": "Ada"}),
    message(b"x"),
    message(b"\x1f\x8b", body_encoding=d.Encoding.GZIP, born_timestamp={}),
]
UNUSUAL: list[dict[str, Any]] = [
    {"message_type": Type.FIFO, "message_group": "g"},
    {"message_type": Type.TRANSACTION},
    {"properties": {"a": "1", "b": "2"}},
    {"properties": {"TAGS": "x"}},
    {"tag": "é"},
    {"keys": [""] * (limits.KEYS_PER_MESSAGE_MAX + 1)},
    {"keys": [str(n) for n in range(17)]},
    {"message_id": ""},
    {"trace_context": "00-ab"},
    {"body_digest": {"type": d.DigestType.CRC32, "checksum": "0"}},
]


@needs_compiled
def test_what_producers_send_is_plain() -> None:
    assert [is_same(send_request(each).SerializeToString()) for each in ORDINARY] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert is_same(send_request(message(bytes(limits.BODY_BYTES_MAX // 64 - 1))).SerializeToString())


@needs_compiled
@pytest.mark.parametrize("fields", UNUSUAL)
def test_what_is_unusual_is_protobufs(fields: dict[str, Any]) -> None:
    request = send_request(message(**fields))
    is_same(request.SerializeToString())
    assert decoder_of("auto")(request.SerializeToString()) == request


@needs_compiled
def test_several_messages_or_fields_twice_are_protobufs() -> None:
    one = send_request(ordinary()).SerializeToString()
    assert read_plain(one) is not None
    assert read_plain(one + one) is None
    assert read_plain(b"") is None
    body = b"\x22\x01y"  # a second body, within the message: of two the last counts
    assert read_plain(b"\x0a" + len_bytes(len(one) - 3 + 3) + one[3:] + body) is None


def len_bytes(size: int) -> bytes:
    """A length of protobuf's of two bytes."""
    return bytes([size & 127 | 128, size >> 7])


def test_without_the_compiled_reader_protobuf_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    data = send_request(ordinary()).SerializeToString()
    assert decoder_of("python")(data) == SendMessageRequest.FromString(data)
    monkeypatch.setattr(send_requests, "read_plain", None)
    assert decoder_of("auto")(data) == SendMessageRequest.FromString(data)


def test_the_topics_of_a_send() -> None:
    request = send_request(message(topic="a"), message(topic="b"), message(topic="a", namespace="n"))
    assert [(each.resource_namespace, each.name) for each in topics_of(request)] == [
        ("", "a"),
        ("", "b"),
        ("n", "a"),
    ]
