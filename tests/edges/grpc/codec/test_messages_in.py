"""Any message becomes a row with the same content, or is refused with a code."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.edges.grpc.sending import message

from timeball.broker.accepting import admission
from timeball.broker.accepting.admission import batch_of
from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc.codec import messages_out
from timeball.edges.grpc.codec.messages_in import encode_row, message_type_of
from timeball.edges.grpc.codec.messages_out import RESERVED
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits
from timeball.model.errors import InvalidDelay
from timeball.model.message import SEND_NAMES, decode_properties, with_seq
from timeball.schedule.delay_levels import LevelTable

NOW_MS = 1_800_000_000_000
QUEUES = 3
INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
PROPERTY_NAME = st.one_of(TEXT, st.sampled_from(sorted(RESERVED)))


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Generate None, or a value of the strategy."""
    return st.one_of(st.none(), strategy)


# Every field of a message, with any value of its protobuf type.
SYSTEM = st.fixed_dictionaries(
    {
        "tag": optional(TEXT),
        "keys": st.lists(TEXT, max_size=4),
        "message_id": st.one_of(st.just("01AB"), TEXT),
        "digest": optional(st.tuples(INT32, TEXT)),
        "body_encoding": st.one_of(st.sampled_from([0, 1, 2]), INT32),
        "message_type": st.one_of(st.sampled_from([0, 1, 2, 3, 4]), INT32),
        "born": optional(st.tuples(INT64, INT32)),
        "born_host": TEXT,
        "delivery": optional(
            st.one_of(st.tuples(INT64, INT32), st.tuples(st.integers(0, 2**34), st.integers(0, 10**9 - 1)))
        ),
        "queue_id": INT32,
        "delivery_attempt": optional(INT32),
        "message_group": optional(TEXT),
        "trace_context": optional(TEXT),
        "recovery": optional(st.tuples(INT64, INT32)),
        "lite_topic": optional(st.just("")),
        "priority": st.sampled_from([None, None, None, 1]),
    }
)


def build_message(body: bytes, properties: dict[str, str], fields: dict[str, Any]) -> definition.Message:
    """Return a message. `fields` has values of SYSTEM, None for a field that is not set."""
    fields = dict(fields)
    # Fields that are messages of two values, such as (seconds, nanos).
    pairs = {name: fields.pop(name) for name in ("digest", "born", "delivery", "recovery")}
    system = definition.SystemProperties(
        **{name: value for name, value in fields.items() if value is not None}
    )
    if pairs["digest"] is not None:
        digest_type, checksum = pairs["digest"]
        system.body_digest.CopyFrom(definition.Digest(type=digest_type, checksum=checksum))
    for name, field in (
        ("born", "born_timestamp"),
        ("delivery", "delivery_timestamp"),
        ("recovery", "orphaned_transaction_recovery_duration"),
    ):
        if pairs[name] is not None:
            value = getattr(system, field)
            value.seconds, value.nanos = pairs[name]
            value.SetInParent()
    return definition.Message(body=body, user_properties=properties, system_properties=system)


ANY_MESSAGE = st.builds(
    build_message, st.binary(max_size=4), st.dictionaries(PROPERTY_NAME, TEXT, max_size=3), SYSTEM
)

# Messages that a client would send: type and fields agree, and most texts are printable.
WORD = st.one_of(
    st.text(st.characters(categories=["L", "N", "P"], exclude_characters="|"), min_size=1, max_size=6), TEXT
)
TIME = st.tuples(st.integers(0, NOW_MS // 1_000 + 2 * 10**8), st.integers(0, 10**9 - 1))
FIELDS_OF = {
    definition.MessageType.NORMAL: {},
    definition.MessageType.FIFO: {"message_group": WORD},
    definition.MessageType.DELAY: {"delivery": TIME},
    definition.MessageType.TRANSACTION: {"recovery": optional(st.tuples(st.integers(0, 86_400), INT32))},
}
NO_PAIRS = {name: st.none() for name in ("digest", "born", "delivery", "recovery")}


def typical_message(message_type: int) -> st.SearchStrategy[definition.Message]:
    """Generate messages of this type as clients send them."""
    fields: dict[str, st.SearchStrategy[Any]] = {
        **NO_PAIRS,
        "tag": optional(WORD),
        "keys": st.lists(WORD, max_size=3),
        "message_id": WORD,
        "body_encoding": st.sampled_from([0, 1, 2]),
        "message_type": st.sampled_from(
            [message_type, 0] if message_type != definition.MessageType.TRANSACTION else [message_type]
        ),
        "born": optional(st.tuples(INT64, INT32)),
        "born_host": TEXT,
        "trace_context": optional(WORD),
        **FIELDS_OF[message_type],
    }
    words = st.dictionaries(WORD, WORD, max_size=3)
    return st.builds(build_message, st.binary(min_size=1, max_size=4), words, st.fixed_dictionaries(fields))


TYPICAL_MESSAGE = st.sampled_from(sorted(FIELDS_OF)).flatmap(typical_message)
MESSAGE = st.one_of(ANY_MESSAGE, TYPICAL_MESSAGE)


def row_of(message: definition.Message) -> dict[str, Any]:
    """Return the row that a message becomes, by column. Raise Refused as `encode_row` does."""
    message_type = message_type_of(message.system_properties)
    row = encode_row(message, message_type, "orders", QUEUES, NOW_MS, limits.DELAY_MS_MAX, "peer")
    return {"message_type": message_type, **dict(zip(SEND_NAMES, row, strict=True))}


def plain(**fields: Any) -> definition.Message:
    """Return a message with these system properties."""
    system = definition.SystemProperties(**{"message_id": "01AB", **fields})
    return definition.Message(body=b"body", system_properties=system)


@given(message=MESSAGE)
def test_any_message_becomes_a_valid_row_or_is_refused(message: definition.Message) -> None:
    try:
        row = row_of(message)
    except Refused as refused:
        assert 40_000 <= refused.protocol_code < 60_000
        assert str(refused)
        return
    message_type, system = row.pop("message_type"), message.system_properties
    # The broker accepts every row of the codec. So no message causes the refusal of others in its batch.
    rows, level = admission.admit(
        batch_of([tuple(row.values())]), now_ms=NOW_MS + 1, delay_ms_max=limits.DELAY_MS_MAX, host="h",
        table=LevelTable.parse("1s"),
    )  # fmt: skip
    assert level is None and rows.num_rows == 1
    properties = decode_properties(row["properties"])
    assert properties.pop("UNIQ_KEY") == row["unique_key"] == system.message_id
    assert properties.pop("TAGS", "") == (row["tag"] or "") == system.tag
    assert properties.pop("KEYS", "") == (row["keys"] or "") == " ".join(key for key in system.keys if key)
    if message_type == definition.MessageType.FIFO:
        assert properties.pop("__SHARDINGKEY") == system.message_group
    if message_type == definition.MessageType.TRANSACTION:
        assert properties.pop("__transactionId__") == system.message_id
    assert properties.pop("TRACE_CONTEXT", "") == system.trace_context
    assert (properties.pop("TRAN_MSG", "") == "true") == (message_type == definition.MessageType.TRANSACTION)
    assert ("TIMER_DELIVER_MS" in properties) == (message_type == definition.MessageType.DELAY)
    assert {name: value for name, value in properties.items() if name not in RESERVED} == dict(
        message.user_properties
    )
    assert row["due_ms"] is None or 0 < row["due_ms"] <= NOW_MS + limits.DELAY_MS_MAX
    assert (row["queue_id"] >= 0) == (message_type == definition.MessageType.FIFO) and row[
        "queue_id"
    ] < QUEUES


@given(message=TYPICAL_MESSAGE)
def test_a_received_message_equals_the_sent_one(message: definition.Message) -> None:
    try:
        row = row_of(message)
    except Refused:
        return
    message_type, sent = row.pop("message_type"), message.system_properties
    rows, _ = admission.admit(
        batch_of([tuple(row.values())]), now_ms=NOW_MS, delay_ms_max=limits.DELAY_MS_MAX, host="h",
        table=LevelTable.parse("1s"),
    )  # fmt: skip
    topic = definition.Resource(name="orders")
    [received] = messages_out.messages(with_seq(rows, 1), topic, "orders", "store")
    assert (received.topic, received.body) == (topic, message.body)
    added_properties = {
        definition.MessageType.FIFO: {"__SHARDINGKEY": sent.message_group},
        definition.MessageType.TRANSACTION: {"__transactionId__": sent.message_id},
    }
    assert received.user_properties == {**message.user_properties, **added_properties.get(message_type, {})}
    system = received.system_properties
    for name in ("tag", "message_id", "message_group", "trace_context"):
        assert getattr(system, name) == getattr(sent, name), name
    assert list(system.keys) == [key for key in " ".join(sent.keys).split(" ") if key]
    assert system.body_encoding == (sent.body_encoding or definition.Encoding.IDENTITY)
    assert system.born_host == (sent.born_host or "peer")
    if row["due_ms"] is not None:
        assert (system.message_type, message_type) == (
            definition.MessageType.DELAY,
            definition.MessageType.DELAY,
        )
        assert system.delivery_timestamp.ToMilliseconds() == row["due_ms"]
    elif message_type in (definition.MessageType.FIFO, definition.MessageType.NORMAL):
        assert system.message_type == message_type and not system.HasField("delivery_timestamp")


@given(message=MESSAGE)
def test_a_serialized_message_becomes_the_same_row(message: definition.Message) -> None:
    """A message that was encoded and decoded by protobuf gives the same row."""
    decoded = definition.Message.FromString(message.SerializeToString())
    outcomes = []
    for each in (message, decoded):
        try:
            row = row_of(each)
            outcomes.append({**row, "properties": decode_properties(row["properties"])})
        except Refused as refused:
            outcomes.append({"refused": refused.protocol_code})
    assert outcomes[0] == outcomes[1]


def test_messages_of_each_type_do_become_rows() -> None:
    """Control: the tests above would not notice a codec or a strategy that refuses every message."""
    types: set[int] = set()

    @settings(max_examples=200, database=None)
    @given(message=TYPICAL_MESSAGE)
    def collect_type(message: definition.Message) -> None:
        try:
            types.add(row_of(message)["message_type"])
        except Refused:
            pass

    collect_type()
    assert types == set(FIELDS_OF)


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
def test_a_delivery_timestamp_is_rounded_up_to_a_ms(seconds: int, nanos: int, due_ms: int | None) -> None:
    message = plain(message_type=definition.MessageType.DELAY)
    time = message.system_properties.delivery_timestamp
    time.seconds, time.nanos = seconds, nanos
    assert row_of(message)["due_ms"] == due_ms


def test_an_expiry_before_the_delivery_timestamp_is_refused() -> None:
    message = plain(message_type=definition.MessageType.DELAY)
    message.system_properties.delivery_timestamp.FromMilliseconds(NOW_MS + 1_000)
    message.user_properties["TIMEBALL_EXPIRES_MS"] = str(NOW_MS + 1_000)
    assert row_of(message)["due_ms"] == NOW_MS + 1_000
    message.user_properties["TIMEBALL_EXPIRES_MS"] = str(NOW_MS + 999)
    with pytest.raises(InvalidDelay, match="is due later"):
        row_of(message)


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(2**62, 0), (-(2**62), 0), (0, -1), (0, 10**9), (0, 2**31 - 1)]
)
def test_an_invalid_delivery_timestamp_is_refused(seconds: int, nanos: int) -> None:
    message = plain(message_type=definition.MessageType.DELAY)
    time = message.system_properties.delivery_timestamp
    time.seconds, time.nanos = seconds, nanos
    with pytest.raises(Refused) as refused:
        row_of(message)
    assert refused.value.protocol_code == definition.Code.ILLEGAL_DELIVERY_TIME
    assert f"{seconds} s and {nanos} ns" in str(refused.value)


@pytest.mark.parametrize("seconds", [253_402_300_799, 253_402_300_800, 2**63 - 1, -62_135_596_801])
def test_the_refusal_of_a_delivery_timestamp_out_of_range_quotes_it(seconds: int) -> None:
    message = plain(message_type=definition.MessageType.DELAY)
    message.system_properties.delivery_timestamp.seconds = seconds
    with pytest.raises(Refused) as refused:
        row_of(message)
    assert refused.value.protocol_code == definition.Code.ILLEGAL_DELIVERY_TIME
    assert str(seconds) in str(refused.value)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, None), (1, "1"), (86_400, "86400"), (86_401, "refused"), (-1, "refused")]
)
def test_the_recovery_duration_becomes_a_property_or_is_refused(seconds: int, text: str | None) -> None:
    message = plain(message_type=definition.MessageType.TRANSACTION)
    message.system_properties.orphaned_transaction_recovery_duration.seconds = seconds
    if text == "refused":
        with pytest.raises(Refused, match="a day at most"):
            row_of(message)
        return
    properties = decode_properties(row_of(message)["properties"])
    assert properties.get("CHECK_IMMUNITY_TIME_IN_SECONDS") == text
    assert properties["PGROUP"] == "orders"


def test_a_missing_born_time_and_an_invalid_born_host_are_replaced() -> None:
    assert row_of(plain())["born_ms"] == NOW_MS
    assert row_of(plain(born_host="h" * 256))["born_host"] == "peer"


@pytest.mark.parametrize(
    ("message_type", "name", "field"),
    [
        (definition.MessageType.FIFO, "__SHARDINGKEY", {"message_group": "g2"}),
        (definition.MessageType.TRANSACTION, "__transactionId__", {"message_id": "g2"}),
    ],
)
def test_a_received_message_can_be_forwarded_with_its_properties(
    message_type: int, name: str, field: dict[str, str]
) -> None:
    message = plain(message_type=message_type, **field)
    message.user_properties.update({name: "g1", "mine": "v"})
    properties = row_of(message)["properties"]
    assert properties.count(name) == 1
    assert decode_properties(properties)[name] == "g2" and decode_properties(properties)["mine"] == "v"
    other = plain()
    other.user_properties.update({name: "g1"})
    assert decode_properties(row_of(other)["properties"])[name] == "g1"


def encoded_gzip(body: bytes) -> tuple[bytes, int]:
    encoded = message(body, body_encoding=definition.Encoding.GZIP)
    row = dict(
        zip(
            SEND_NAMES,
            encode_row(encoded, definition.MessageType.NORMAL, "t", 1, NOW_MS, 1, "h"),
            strict=True,
        )
    )
    return row["body"], row["sys_flag"]


def optional_header_parts(data: bytes) -> bytes:
    """A gzip stream with all optional parts of its header: extra field, name, comment and checksum."""
    plain = gzip.compress(data)
    header = plain[:3] + bytes([4 | 8 | 16 | 2]) + plain[4:10] + b"\x03\x00abc" + b"name\x00" + b"comment\x00"
    return header + (zlib.crc32(header) & 0xFFFF).to_bytes(2, "little") + plain[10:]


@pytest.mark.parametrize("level", [0, 1, 9])
@pytest.mark.parametrize(
    "data", [b"", b"text", bytes(limits.BODY_BYTES_MAX)], ids=["empty", "short", "largest"]
)
def test_a_gzip_body_becomes_the_same_data_in_zlib(data: bytes, level: int) -> None:
    compressed = gzip.compress(data, level)
    if len(compressed) <= limits.BODY_BYTES_MAX:
        body, sys_flag = encoded_gzip(compressed)
        assert (zlib.decompress(body), sys_flag) == (data, 1) and len(body) < len(compressed)
    assert zlib.decompress(encoded_gzip(optional_header_parts(b"text"))[0]) == b"text"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (gzip.compress(bytes(limits.BODY_BYTES_MAX + 1)), definition.Code.MESSAGE_BODY_TOO_LARGE),
        (gzip.compress(b"text")[:-1], definition.Code.BAD_REQUEST),
        (gzip.compress(b"text")[:-8] + bytes(8), definition.Code.BAD_REQUEST),  # its checksum is wrong
        (gzip.compress(b"text") + b"more", definition.Code.BAD_REQUEST),
        (zlib.compress(b"text"), definition.Code.BAD_REQUEST),
        (b"\x1f\x8b", definition.Code.BAD_REQUEST),
    ],
    ids=["too large", "cut", "wrong checksum", "more behind it", "zlib", "two bytes"],
)
def test_a_body_that_is_no_readable_gzip_is_refused(body: bytes, code: definition.Code) -> None:
    with pytest.raises(Refused) as refused:
        encoded_gzip(body)
    assert refused.value.protocol_code == code
