"""Stored messages as clients decode them, the records of batches, hosts and ids."""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

import pyarrow as pa
import pytest
from benchmarks.stored_message import decode_stored
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.remoting.codec.codes import MessageFlag
from timeball.edges.remoting.codec.implementation import COMPILED, PYTHON, Codec
from timeball.edges.remoting.codec.records import (
    MAGIC_V1,
    MAGIC_V2,
    BatchRecord,
    Host,
    UniqueKeys,
    decode_batch,
    encode_batch,
    encode_stored,
    offset_msg_id,
    parse_host,
    parse_offset_msg_id,
)
from timeball.model.errors import InvalidMessage
from timeball.model.message import READ_SCHEMA, Kind, build_rows, encode_properties

V4 = Host(bytes([127, 0, 0, 1]), 10911)
V6 = Host(bytes(15) + b"\x01", 10911)
NOBODY = Host(bytes(4), 0)
CODECS = [PYTHON, *([COMPILED] if COMPILED else [])]
REGION = "MSG_REGION\x01DefaultRegion\x02"

bodies = st.binary(max_size=40)
properties = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
records = st.lists(st.builds(BatchRecord, st.integers(-5, 5), bodies, properties), max_size=6)


def decode_messages(data: bytes) -> list[dict[str, Any]]:
    """Decode stored messages field by field, as a client does. Assert that lengths and checksums are right."""
    result: list[dict[str, Any]] = []
    at = 0

    def take(layout: str) -> Any:
        nonlocal at
        values = struct.unpack_from(">" + layout, data, at)
        at += struct.calcsize(">" + layout)
        return values[0] if len(values) == 1 else values

    while at < len(data):
        begin = at
        total, magic, crc, queue_id, flag, offset, physical, sys_flag, born_ms = take("iIIiiqqiq")
        born = take("16s" if sys_flag & MessageFlag.BORN_HOST_V6 else "4s"), take("i")
        store_ms = take("q")
        store = take("16s" if sys_flag & MessageFlag.STORE_HOST_V6 else "4s"), take("i")
        times, prepared = take("iq")
        body = take(f"{take('i')}s")
        topic = take(f"{take('h' if magic == MAGIC_V2 else 'B')}s").decode()
        text = take(f"{take('H')}s").decode()
        assert at - begin == total
        assert crc == crc32(body) & 0x7FFFFFFF
        result.append(
            {
                "magic": magic, "queue_id": queue_id, "flag": flag, "queue_offset": offset, "seq": physical,
                "sys_flag": sys_flag, "born_ms": born_ms, "born": born, "store_ms": store_ms, "store": store,
                "reconsume_times": times, "prepared_seq": prepared, "body": body, "topic": topic,
                "properties": text,
            }
        )  # fmt: skip
    return result


def rows(**columns: list[Any]) -> pa.RecordBatch:
    """Return rows with these columns. All other columns are null."""
    count = len(next(iter(columns.values())))
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in READ_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=READ_SCHEMA)


def test_a_stored_message_contains_all_fields_of_its_row() -> None:
    batch = rows(
        seq=[17], topic=["orders"], queue_id=[3], queue_offset=[9], body=[b"close it"],
        properties=["KEYS\x0117\x02TAGS\x01A\x02"], born_ms=[1_000], born_host=["10.1.2.3:4567"],
        store_ms=[2_000], flag=[5], sys_flag=[MessageFlag.COMPRESSED], reconsume_times=[2], source_seq=[4],
    )  # fmt: skip
    [message] = decode_messages(encode_stored(batch, store_host=V4, born_host=NOBODY))
    assert message == {
        "magic": MAGIC_V1, "queue_id": 3, "flag": 5, "queue_offset": 9, "seq": 17, "sys_flag": 1, "born_ms": 1_000,
        "born": (bytes([10, 1, 2, 3]), 4567), "store_ms": 2_000, "store": (V4.address, V4.port),
        "reconsume_times": 2, "prepared_seq": 0, "body": b"close it", "topic": "orders",
        "properties": "KEYS\x0117\x02TAGS\x01A\x02" + REGION,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "encoded"),
    [
        ("", REGION), ("TAGS\x01A", f"TAGS\x01A\x02{REGION}"), ("TAGS\x01A\x02", f"TAGS\x01A\x02{REGION}"),
        ("MSG_REGION\x01eu\x02", f"MSG_REGION\x01eu\x02{REGION}"),  # clients use the last one
        ("p" * 32_741, "p" * 32_741 + "\x02" + REGION), ("p" * 32_742, "p" * 32_742),
        ("p" * 32_741 + "\x02", "p" * 32_741 + "\x02" + REGION), ("p" * 32_742 + "\x02", "p" * 32_742 + "\x02"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_the_region_is_added_to_the_properties_if_it_fits(codec: Codec, sent: str, encoded: str) -> None:
    """Java's client ignores properties whose length is above 32,767."""
    batch = rows(seq=[1] * 4, topic=["a"] * 4, queue_id=[0] * 4, properties=[sent] * 4)
    result = decode_messages(b"".join(codec.encode_each(batch, store_host=V4, born_host=NOBODY)))
    assert [message["properties"] for message in result] == [encoded] * 4


@pytest.mark.parametrize(
    ("sent", "adds_properties"),
    [
        ("TIMER_DELAY_SEC\x015\x02TAGS\x01A\x02", True),
        ("TAGS\x01A\x02TIMER_DELIVER_MS\x019000", True),
        ("TAGS\x01A\x02", False),  # the message was sent through another protocol
        # The properties are there already.
        ("DELAY\x011\x02REAL_TOPIC\x01orders\x02REAL_QID\x010\x02TIMER_DELAY_MS\x015\x02", False),
        # A consumer has sent a released message again.
        ("TIMER_OUT_MS\x017\x02TIMER_DELAY_MS\x015\x02", False),
    ],
)
def test_a_released_message_with_a_timer_has_the_timer_properties(sent: str, adds_properties: bool) -> None:
    released = rows(
        seq=[17], topic=["orders"], queue_id=[3], properties=[sent], store_ms=[9_002], due_ms=[9_000],
        accepted_ms=[4_000],
    )  # fmt: skip
    [message] = decode_messages(encode_stored(released, store_host=V4, born_host=NOBODY))
    added = (
        "TIMER_OUT_MS\x019000\x02REAL_TOPIC\x01orders\x02REAL_QID\x013\x02TIMER_ENQUEUE_MS\x014000\x02"
        "TIMER_DEQUEUE_MS\x019002\x02"
    )
    end = "" if sent.endswith("\x02") else "\x02"
    assert message["properties"] == sent + end + (added if adds_properties else "") + REGION


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("tag", [None, "t"])
def test_timer_properties_that_do_not_fit_are_not_added(codec: Codec, tag: str | None) -> None:
    sizes = [32_600, 32_675, 32_676, 32_740, 32_767]
    sent = [("TIMER_DELAY_SEC\x015\x02" + "p" * size)[:size] for size in sizes]
    released = rows(
        seq=[1] * 5, topic=["orders"] * 5, queue_id=[3] * 5, properties=sent, tag=[tag] * 5,
        store_ms=[9_002] * 5, due_ms=[9_000] * 5, accepted_ms=[4_000] * 5,
    )  # fmt: skip
    result = codec.encode_each(released, store_host=V4, born_host=NOBODY)
    assert result == PYTHON.encode_each(released, store_host=V4, born_host=NOBODY)
    texts = [message["properties"] for message in decode_messages(b"".join(result))]
    if tag is None:
        assert ["TIMER_OUT_MS" in text for text in texts] == [True, True, False, False, False]
        assert [REGION in text for text in texts] == [True, False, True, True, False]
        assert max(map(len, texts)) <= 32_767


def test_a_pending_message_with_a_timer_has_no_timer_properties() -> None:
    sent = "TIMER_DELAY_SEC\x015\x02"
    pending = rows(
        seq=[17], topic=["orders"], queue_id=[3], properties=[sent], store_ms=[4_000], due_ms=[9_000]
    )
    [message] = decode_messages(encode_stored(pending, store_host=V4, born_host=NOBODY))
    assert message["properties"] == sent + REGION


def test_only_a_committed_message_has_a_prepared_offset() -> None:
    flags = [
        MessageFlag.TRANSACTION_COMMIT,
        MessageFlag.TRANSACTION_PREPARED,
        MessageFlag.TRANSACTION_ROLLBACK,
        0,
    ]
    batch = rows(seq=[1] * 4, topic=["a"] * 4, queue_id=[0] * 4, sys_flag=flags, source_seq=[7] * 4)
    result = decode_messages(encode_stored(batch, store_host=V4, born_host=NOBODY))
    assert [message["prepared_seq"] for message in result] == [7, 0, 0, 0]


def test_missing_values_of_a_row_are_zero_or_empty() -> None:
    batch = rows(seq=[1], topic=["a"], queue_id=[0], born_host=["broker.example"])
    [message] = decode_messages(encode_stored(batch, store_host=V4, born_host=NOBODY))
    assert message["born"] == (bytes(4), 0)
    assert (message["body"], message["properties"], message["store_ms"], message["flag"]) == (
        b"",
        REGION,
        0,
        0,
    )


@pytest.mark.parametrize(("length", "magic"), [(127, MAGIC_V1), (128, MAGIC_V2), (300, MAGIC_V2)])
def test_a_long_topic_makes_a_record_of_version_2(length: int, magic: int) -> None:
    batch = rows(seq=[1], topic=["t" * length], queue_id=[0])
    [message] = decode_messages(encode_stored(batch, store_host=V4, born_host=NOBODY))
    assert (message["magic"], message["topic"]) == (magic, "t" * length)


def test_the_sys_flag_states_whether_hosts_are_ipv6() -> None:
    batch = rows(seq=[1], topic=["a"], queue_id=[0], born_host=["[::1]:7"], sys_flag=[0])
    [message] = decode_messages(encode_stored(batch, store_host=V6, born_host=NOBODY))
    assert message["sys_flag"] == MessageFlag.BORN_HOST_V6 | MessageFlag.STORE_HOST_V6
    assert message["born"] == (V6.address, 7)
    # The bits that a producer sends are ignored.
    with_bits = rows(seq=[1], topic=["a"], queue_id=[0], born_host=["1.2.3.4:7"], sys_flag=[16 | 32 | 1])
    [message] = decode_messages(encode_stored(with_bits, store_host=V4, born_host=NOBODY))
    assert message["sys_flag"] == MessageFlag.COMPRESSED


@given(st.lists(st.tuples(bodies, properties), min_size=1, max_size=5))
def test_several_stored_messages_are_encoded_in_sequence(messages: list[tuple[bytes, str]]) -> None:
    batch = rows(
        seq=list(range(len(messages))), topic=["a"] * len(messages), queue_id=[0] * len(messages),
        body=[body for body, _ in messages], properties=[text for _, text in messages],
    )  # fmt: skip
    result = decode_messages(encode_stored(batch, store_host=V4, born_host=NOBODY))
    expected = [(body, text + "\x02" * (text[-1:] not in ("", "\x02")) + REGION) for body, text in messages]
    assert [(m["body"], m["properties"]) for m in result] == expected


# ---- batches ---------------------------------------------------------------------------------------------------


@given(records)
def test_an_encoded_batch_is_decoded_to_the_same_records(batch: list[BatchRecord]) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(records.filter(bool), st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_batch_is_decoded_or_refused(batch: list[BatchRecord], at: int, value: int) -> None:
    data = bytearray(encode_batch(batch))
    data[at % len(data)] = value
    try:
        decode_batch(bytes(data))
    except InvalidMessage:
        return


@given(records.filter(bool), st.integers(1, 400))
def test_a_cut_batch_has_whole_records_or_is_refused(batch: list[BatchRecord], number: int) -> None:
    data = encode_batch(batch)
    record_ends = [0]
    for record in batch:
        record_ends.append(record_ends[-1] + len(encode_batch([record])))
    end = number % len(data)  # less than the length, so at least one byte is cut
    if end in record_ends:
        assert decode_batch(data[:end]) == batch[: record_ends.index(end)]
    else:
        with pytest.raises(InvalidMessage):
            decode_batch(data[:end])


def test_a_batch_with_too_many_records_is_refused() -> None:
    batch = [BatchRecord(0, b"", "")] * 4
    assert len(decode_batch(encode_batch(batch), rows_max=4)) == 4
    with pytest.raises(InvalidMessage, match="split"):
        decode_batch(encode_batch(batch), rows_max=3)


# ---- hosts and ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("127.0.0.1:10911", V4),
        ("127.0.0.1", Host(V4.address, 0)),
        ("[::1]:10911", V6),
        ("::1", Host(V6.address, 0)),
        ("broker.example:10911", NOBODY),
        ("", NOBODY),
        ("1.2.3.4:port", NOBODY),
    ],
)
def test_hosts_are_parsed_from_text(text: str, host: Host) -> None:
    assert parse_host(text, NOBODY) == host


@pytest.mark.parametrize("host", [V4, V6])
def test_an_offset_msg_id_has_the_host_and_the_sequence_number(host: Host) -> None:
    text = offset_msg_id(host, 1_234_567)
    assert len(text) in (32, 56) and text == text.upper()
    assert parse_offset_msg_id(text) == (host, 1_234_567)
    assert offset_msg_id(V4, 17) == "7F00000100002A9F0000000000000011"


@pytest.mark.parametrize("text", ["", "7F", "zz" * 16, "7F" * 20])
def test_an_invalid_offset_msg_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage, match="offsetMsgId"):
        parse_offset_msg_id(text)


def encode_bodies(bodies: list[bytes], topic: str = "orders", host: Host = V4) -> bytes:
    """Encode stored messages with these bodies. Their sequence numbers begin at 7."""
    rows = build_rows(
        len(bodies), kind=int(Kind.MESSAGE), topic=topic, queue_id=3, queue_offset=list(range(len(bodies))),
        body=bodies, properties=encode_properties({"a": "b"}), born_ms=1, born_host="1.2.3.4:5", store_ms=2, flag=4,
        sys_flag=0, reconsume_times=5,
    )  # fmt: skip
    whole = pa.RecordBatch.from_arrays(
        [pa.array(range(7, 7 + len(bodies)), pa.int64()), *rows.columns], schema=READ_SCHEMA
    )
    return encode_stored(whole, store_host=host, born_host=V4)


@pytest.mark.parametrize("host", [V4, V6])
@pytest.mark.parametrize("topic", ["orders", "x" * 127, "x" * 200])
@given(bodies=st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_the_decoder_of_the_benchmarks_returns_what_was_encoded(
    host: Host, topic: str, bodies: list[bytes]
) -> None:
    result = decode_stored(encode_bodies(bodies, topic, host))
    assert [m.body for m in result] == bodies
    assert [m.seq for m in result] == list(range(7, 7 + len(bodies)))
    first = result[0]
    assert (first.topic, first.queue_id, first.queue_offset, first.flag) == (topic, 3, 0, 4)
    assert (first.born_ms, first.store_ms, first.reconsume_times, first.prepared_seq) == (1, 2, 5, 0)
    assert (first.store_host, first.born_host, first.properties) == (
        host,
        Host(bytes([1, 2, 3, 4]), 5),
        {"a": "b", "MSG_REGION": "DefaultRegion"},
    )


@given(at=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 200))
def test_the_decoder_of_the_benchmarks_never_returns_a_damaged_body(at: int, value: int, cut: int) -> None:
    whole = encode_bodies([b"body"])
    for data in (whole[:cut], whole[:at] + bytes([value]) + whole[at + 1 :]):
        try:
            messages = decode_stored(data)
        except InvalidMessage:
            continue
        assert all(message.body == b"body" for message in messages)


def test_unique_keys_have_32_digits_and_differ() -> None:
    unique_keys = UniqueKeys(bytes([127, 0, 0, 1]), 4242, 99)
    keys = [unique_keys.next(1_761_000_000_000) for _ in range(10_000)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 and key == key.upper() and int(key, 16) for key in keys)
    assert keys[0].startswith("7F000001" + f"{4242:04X}")


def test_unique_keys_with_different_run_numbers_differ() -> None:
    assert UniqueKeys(b"", 1, 1).next(5) != UniqueKeys(b"", 1, 2).next(5)
