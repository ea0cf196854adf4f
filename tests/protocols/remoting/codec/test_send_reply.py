"""Answers to sends, read back by the decoder of commands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.protocols.remoting.codec.codes import BROKER_VERSION
from timeball.protocols.remoting.codec.frame import BINARY, JSON, Splitter, decode
from timeball.protocols.remoting.codec.records import Host, offset_msg_id
from timeball.protocols.remoting.codec.send_reply import encode_reply, host_digits


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
@given(
    opaque=st.integers(-(1 << 31), (1 << 31) - 1),
    queue_id=st.integers(0, 1023),
    offset=st.integers(0, 1 << 62),
    key=st.text(st.characters(codec="utf-8"), max_size=40),
    handle=st.sampled_from(["", "djEgdA=="]),
)
def test_both_forms_are_what_the_decoder_reads(
    serialisation: int, opaque: int, queue_id: int, offset: int, key: str, handle: str
) -> None:
    data = encode_reply(opaque, serialisation, queue_id, offset, "00AB", key, handle)
    [frame] = Splitter().feed(data)
    answer = decode(frame)
    assert (answer.code, answer.opaque, answer.flag, answer.version) == (0, opaque, 1, BROKER_VERSION)
    expected = {
        "queueId": str(queue_id), "queueOffset": str(offset), "msgId": "00AB", "transactionId": key,
        "TRACE_ON": "true", "MSG_REGION": "DefaultRegion",
    }  # fmt: skip
    assert answer.ext == expected | ({"recallHandle": handle} if handle else {})


@pytest.mark.parametrize("host", [Host(bytes([127, 0, 0, 1]), 10911), Host(bytes(range(16)), 65535)])
def test_a_message_id_is_the_host_and_the_sequence_number(host: Host) -> None:
    assert f"{host_digits(host)}{77:016X}" == offset_msg_id(host, 77)
