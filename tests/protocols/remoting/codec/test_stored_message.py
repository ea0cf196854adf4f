"""Stored messages read back: what was encoded, and nothing that was damaged."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.errors import InvalidMessage
from timeball.message import READ_SCHEMA, Kind, build_rows, encode_properties
from timeball.protocols.remoting.codec.records import Host, encode_stored
from timeball.protocols.remoting.codec.stored_message import decode_stored

V4, V6 = Host(bytes([10, 0, 0, 1]), 10911), Host(bytes(range(16)), 1)


def encoded(bodies: list[bytes], topic: str = "orders", host: Host = V4) -> bytes:
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
def test_back_again(host: Host, topic: str, bodies: list[bytes]) -> None:
    found = decode_stored(encoded(bodies, topic, host))
    assert [m.body for m in found] == bodies
    assert [m.seq for m in found] == list(range(7, 7 + len(bodies)))
    first = found[0]
    assert (first.topic, first.queue_id, first.queue_offset, first.flag) == (topic, 3, 0, 4)
    assert (first.born_ms, first.store_ms, first.reconsume_times, first.prepared_seq) == (1, 2, 5, 0)
    assert (first.store_host, first.born_host, first.properties) == (
        host,
        Host(bytes([1, 2, 3, 4]), 5),
        {"a": "b"},
    )


@given(at=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 200))
def test_damage_is_refused_or_elsewhere(at: int, value: int, cut: int) -> None:
    whole = encoded([b"body"])
    for data in (whole[:cut], whole[:at] + bytes([value]) + whole[at + 1 :]):
        try:
            messages = decode_stored(data)
        except InvalidMessage:
            continue
        assert all(message.body == b"body" for message in messages)
