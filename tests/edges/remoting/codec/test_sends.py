"""Headers of sends in both serialisations, with and without the cache of the binary decoder, and answers to sends."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.remoting.codec import sends
from timeball.edges.remoting.codec.codes import BROKER_VERSION, RequestCode
from timeball.edges.remoting.codec.frame import (
    BINARY,
    JSON,
    BadFrame,
    BadHeader,
    Command,
    Frame,
    Splitter,
    decode,
    encode,
)
from timeball.edges.remoting.codec.records import Host, offset_msg_id
from timeball.edges.remoting.codec.sends import SendFields, encode_reply, host_digits, read_send

SHORT = {
    "a": "producers", "b": "orders", "c": "TBW102", "d": "4", "e": "3", "f": "0", "g": "1761000000000", "h": "7",
    "i": "UNIQ_KEY\x01AB\x02TAGS\x01A\x02", "j": "1", "k": "false", "l": "16", "m": "false",
}  # fmt: skip
EXPECTED = SendFields(
    "orders", "producers", "TBW102", 4, 3, 0, 1_761_000_000_000, 7, "UNIQ_KEY\x01AB\x02TAGS\x01A\x02", 1, False, 16,
    False,
)  # fmt: skip
LONG = {sends.LONG_NAMES[name]: SHORT[short] for name, short in sends.SHORT_NAMES.items()}


def frame(ext: dict[str, str], code: int = RequestCode.SEND_MESSAGE_V2, serialisation: int = JSON) -> Frame:
    """Return the frame of a send with these fields."""
    [result] = Splitter().feed(encode(Command(code=code, opaque=5, ext=ext, serialisation=serialisation)))
    return result


@pytest.fixture(autouse=True)
def empty_caches() -> None:
    sends._first_parts.clear()
    sends._last_parts.clear()


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE])
def test_a_send_with_short_names_is_read(serialisation: int, code: int) -> None:
    for _ in range(2):  # the second time, the cache is used
        result = read_send(frame(SHORT, code, serialisation))
        assert result is not None
        assert (result.code, result.opaque, result.fields) == (code, 5, EXPECTED)


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
def test_a_send_with_long_names_is_read(serialisation: int) -> None:
    result = read_send(frame(LONG, RequestCode.SEND_MESSAGE, serialisation))
    assert result is not None
    assert msgspec.structs.astuple(result.fields) == msgspec.structs.astuple(EXPECTED)


def test_json_numbers_and_booleans_are_read() -> None:
    header = (
        b'{"code":310,"flag":0,"language":"NODE","opaque":9,"version":121,"extFields":'
        b'{"a":"g","b":"t","e":2,"g":1761000000000,"i":null,"k":false,"l":null,"AccessKey":"x"}}'
    )
    result = read_send(Frame(JSON, header, b""))
    assert result is not None
    assert (result.fields.queue_id, result.fields.born_ms, result.fields.properties) == (
        2,
        1_761_000_000_000,
        None,
    )


def test_a_header_that_does_not_begin_with_its_code_is_read() -> None:
    header = b'{"extFields":{"b":"t"},"opaque":4,"code":310}'
    result = read_send(Frame(JSON, header, b""))
    assert result is not None and result.fields.topic == "t"
    assert read_send(Frame(JSON, b'{"opaque":4,"code":11}', b"")) is None


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
def test_other_requests_are_not_read_as_sends(serialisation: int) -> None:
    assert read_send(frame(SHORT, RequestCode.PULL_MESSAGE, serialisation)) is None


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
@pytest.mark.parametrize(
    "wrong",
    [
        {"e": "three"}, {"e": "3000000000"}, {"g": "99999999999999999999"}, {"k": "maybe"},
        {"h": "2147483648"}, {"h": "-2147483649"}, {"j": "2147483648"}, {"f": "2147483648"},
    ],
)  # fmt: skip
def test_an_invalid_number_is_a_bad_header(serialisation: int, wrong: dict[str, str]) -> None:
    with pytest.raises(BadHeader) as caught:
        read_send(frame({**SHORT, **wrong}, serialisation=serialisation))
    assert (caught.value.request.opaque, caught.value.request.serialisation) == (5, serialisation)


def test_a_send_without_a_topic_is_a_bad_header() -> None:
    for serialisation in (JSON, BINARY):
        with pytest.raises(BadHeader):
            read_send(frame({"a": "x"}, serialisation=serialisation))


text = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


@given(
    a=text, b=text, e=st.integers(-1, 2000), i=text, more=st.dictionaries(text, text, max_size=2), last=text
)
def test_binary_and_json_headers_give_the_same_fields(
    a: str, b: str, e: int, i: str, more: dict[str, str], last: str
) -> None:
    """The group may contain the bytes by which the cached decoder finds the field `g`."""
    field_g = "\x00\x01g\x00\x00\x00\x0d1761000000000"
    for group in (a, a + field_g, field_g):
        ext = {
            **SHORT,
            "a": group,
            "b": b,
            "e": str(e),
            "i": i + last,
            **{f"x{k}": v for k, v in more.items()},
        }
        assert msgspec.structs.astuple(_fields(ext, BINARY)) == msgspec.structs.astuple(_fields(ext, JSON))


def _fields(ext: dict[str, str], serialisation: int) -> SendFields:
    result = read_send(frame(ext, serialisation=serialisation))
    assert result is not None
    return result.fields


@given(data=st.binary(max_size=200), at=st.integers(0, 300), cut=st.integers(0, 300))
def test_damaged_binary_headers_are_refused_or_read(data: bytes, at: int, cut: int) -> None:
    whole = frame(SHORT, serialisation=BINARY).header
    read_send(Frame(BINARY, whole, b""))  # fills the caches
    for header in (whole[:cut], whole[:at] + data + whole[at + len(data) :], whole[:at] + data):
        try:
            result = read_send(Frame(BINARY, header, b""))
        except BadFrame:
            continue
        assert result is None or isinstance(result.fields.topic, str)


def test_a_false_length_is_not_accepted_by_the_cached_decoder() -> None:
    whole = frame(SHORT, serialisation=BINARY).header
    read_send(Frame(BINARY, whole, b""))
    false_length = whole[:17] + struct.pack(">i", len(whole)) + whole[21:]
    with pytest.raises(BadFrame):
        read_send(Frame(BINARY, false_length, b""))


def test_the_cache_has_a_maximum_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sends, "CACHED_MAX", 8)
    for group in range(100):
        read_send(frame({**SHORT, "a": str(group)}, serialisation=BINARY))
    assert 0 < len(sends._first_parts) <= 8


def test_large_parts_are_not_cached() -> None:
    """A header may have 64 KiB. Thousands of them in the cache would take hundreds of megabytes."""
    bytes_max = sends.CACHED_BYTES_MAX
    for group in range(20):
        assert read_send(frame({**SHORT, "a": f"{group:0{bytes_max}}"}, serialisation=BINARY)) is not None
    for cache in (sends._first_parts, sends._last_parts):
        assert max(map(len, cache), default=0) <= bytes_max
    assert bytes_max * sends.CACHED_MAX <= 4 * 1024 * 1024


# ---- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
@given(
    opaque=st.integers(-(1 << 31), (1 << 31) - 1),
    queue_id=st.integers(0, 1023),
    offset=st.integers(0, 1 << 62),
    key=st.text(st.characters(codec="utf-8"), max_size=40),
    handle=st.sampled_from(["", "djEgdA=="]),
)
def test_answers_in_both_serialisations_can_be_decoded(
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
