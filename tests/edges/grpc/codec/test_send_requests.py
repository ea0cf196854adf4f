"""The compiled decoder of plain sends gives the same row as the reference (protobuf and messages_in.py)."""

from __future__ import annotations

import gzip
import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from tests.edges.grpc.sending import message, send_request

from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated.service_pb2 import SendMessageRequest
from timeball.edges.grpc.codec import messages_in
from timeball.edges.grpc.codec.messages_in import (
    check_delivery_time,
    decode_send,
    encode_row,
    message_type_of,
    read_plain,
    topics_in_send,
)
from timeball.edges.grpc.codec.messages_out import RESERVED
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits
from timeball.model.message import SendRow

NOW_MS, PEER, QUEUES = 1_800_000_000_000, "10.0.0.7", 8
Type = definition.MessageType

needs_compiled = pytest.mark.skipif(read_plain is None, reason="the codec is not compiled here")

Row = tuple[list[tuple[str, str]], SendRow]


def reference(data: bytes) -> Row | str:
    """Decode with protobuf and messages_in.py. Returns topics and row, or the reason of the refusal."""
    try:
        request = SendMessageRequest.FromString(data)
    except DecodeError:
        return "no request"
    if len(request.messages) != 1:
        return "not one message"
    [given_message] = request.messages
    try:
        message_type = message_type_of(given_message.system_properties)
        row = encode_row(given_message, message_type, "topic", QUEUES, NOW_MS, limits.DELAY_MS_MAX, PEER)
    except Refused as error:
        return str(error)
    return [(each.resource_namespace, each.name) for each in topics_in_send(request)], row


def decode_compiled(data: bytes) -> Row | str | None:
    """Decode with the compiled decoder. Returns like `reference`, or None for a send that is not plain."""
    plain: Any = read_plain(data)
    if plain is None:
        return None
    try:
        if plain.due_ms is not None:
            check_delivery_time(plain.due_ms, NOW_MS, limits.DELAY_MS_MAX)
    except Refused as error:
        return str(error)
    row = plain.row("topic", NOW_MS if plain.needs_now else 0, PEER)
    assert plain.size_bytes == len(row[1]) + len(row[5])
    return [(each.resource_namespace, each.name) for each in topics_in_send(plain)], row


def check_plain(data: bytes) -> bool:
    """Check that both decoders agree. Returns whether the send is plain."""
    result = decode_compiled(data)
    assert result is None or result == reference(data)
    return result is not None


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
TIMES = st.builds(
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
        "born_timestamp": TIMES,
        "delivery_timestamp": TIMES,
        "body_digest": st.builds(lambda text: {"type": definition.DigestType.CRC32, "checksum": text}, TEXTS),
        "store_host": TEXTS,
        "properties": st.dictionaries(TEXTS, TEXTS, max_size=2),
    },
)


@needs_compiled
@given(FIELDS, st.binary(max_size=40), TEXTS, TEXTS)
@example({"message_type": Type.DELAY, "delivery_timestamp": {"seconds": 1, "nanos": 1}}, b"b", "t", "n")
@example({"message_type": Type.DELAY, "delivery_timestamp": {"seconds": 253_402_300_799}}, b"b", "t", "")
def test_a_plain_send_gives_the_same_row_as_the_reference(
    fields: dict[str, Any], body: bytes, topic: str, namespace: str
) -> None:
    given_message = message(body, topic=topic, namespace=namespace, **fields)
    check_plain(send_request(given_message).SerializeToString())


@needs_compiled
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_corrupted_bytes_give_no_other_row_than_the_reference(chance: random.Random, changes: int) -> None:
    data = bytearray(send_request(TYPICAL[chance.randrange(len(TYPICAL))]).SerializeToString())
    for _ in range(changes):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice([0, 1, 1, 2, 9]))
        data[at:end] = chance.randbytes(chance.choice([0, 1, 1, 2, 9]))
    check_plain(bytes(data))


@needs_compiled
@given(st.binary(max_size=60))
def test_random_bytes_give_no_other_row_than_the_reference(data: bytes) -> None:
    check_plain(data)


def typical(**fields: Any) -> definition.Message:
    """Create a message like RocketMQ's own producers."""
    return message(
        bytes(128), namespace="shop", tag="TagA", keys=["k1", "k2"], born_host="client.example", queue_id=3,
        body_encoding=definition.Encoding.IDENTITY, message_id="0156F7E71C361B21BC024CCDBE00000000", **fields,
    )  # fmt: skip


TYPICAL = [
    typical(),
    typical(due_ms=NOW_MS + 5_077),
    typical(properties={"who": "Ada"}),
    message(b"x"),
    message(b"x", body_encoding=definition.Encoding.IDENTITY, born_timestamp={}),
]
UNUSUAL: list[dict[str, Any]] = [
    {"body": gzip.compress(b"x"), "body_encoding": definition.Encoding.GZIP},
    {"message_type": Type.FIFO, "message_group": "g"},
    {"message_type": Type.TRANSACTION},
    {"properties": {"a": "1", "b": "2"}},
    {"properties": {"TAGS": "x"}},
    {"properties": {"TIMEBALL_LOCAL_TIME": "2030-01-31T09:00 Europe/Berlin"}},
    {"tag": "é"},
    {"keys": [""] * (limits.KEYS_PER_MESSAGE_MAX + 1)},
    {"keys": [str(n) for n in range(17)]},
    {"message_id": ""},
    {"trace_context": "00-ab"},
    {"body_digest": {"type": definition.DigestType.CRC32, "checksum": "0"}},
]


@needs_compiled
def test_messages_of_rocketmq_s_producers_are_plain_sends() -> None:
    *usual, with_empty_born_timestamp = [
        check_plain(send_request(each).SerializeToString()) for each in TYPICAL
    ]
    assert all(usual) and not with_empty_born_timestamp
    assert check_plain(send_request(message(bytes(limits.BODY_BYTES_MAX // 64 - 1))).SerializeToString())


@needs_compiled
@pytest.mark.parametrize("fields", UNUSUAL)
def test_unusual_messages_are_decoded_by_protobuf(fields: dict[str, Any]) -> None:
    request = send_request(message(**fields))
    check_plain(request.SerializeToString())
    assert decode_send(request.SerializeToString()) == request


@needs_compiled
def test_several_messages_and_repeated_fields_are_no_plain_send() -> None:
    request = send_request(typical()).SerializeToString()
    assert read_plain(request) is not None
    assert read_plain(request + request) is None
    assert read_plain(b"") is None
    body = b"\x22\x01y"  # a second body field in the message. protobuf takes the last
    assert read_plain(b"\x0a" + len_bytes(len(request) - 3 + 3) + request[3:] + body) is None


def len_bytes(size: int) -> bytes:
    """Encode a length as a varint of two bytes."""
    return bytes([size & 127 | 128, size >> 7])


def test_without_the_compiled_decoder_protobuf_decodes_all_sends() -> None:
    data = send_request(typical()).SerializeToString()
    decoded = decode_send(data)
    assert (decoded == SendMessageRequest.FromString(data)) == (messages_in.read_plain is None)


def test_topics_in_send_lists_each_topic_once() -> None:
    request = send_request(message(topic="a"), message(topic="b"), message(topic="a", namespace="n"))
    assert [(each.resource_namespace, each.name) for each in topics_in_send(request)] == [
        ("", "a"),
        ("", "b"),
        ("n", "a"),
    ]
