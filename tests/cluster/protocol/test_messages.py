"""Messages between replicas: their bytes, messages in split or damaged streams, and their bounds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.cluster.protocol import messages as m
from timeball.cluster.protocol.messages import EpochEnd, Receiver
from timeball.model.errors import PeerError

small = st.integers(0, 2**31 - 1)
large = st.integers(0, 2**63 - 1)
names = st.text(max_size=20)
frames = st.binary(min_size=1, max_size=200)
paths = st.text(min_size=1, max_size=40).filter(lambda path: len(path.encode("utf-8", "replace")) > 0)

ENDS = (EpochEnd(1, 1, 640, 11), EpochEnd(4, 2, 128, 12))
MESSAGES = st.one_of(
    st.builds(m.Hello, large, names, names, small),
    st.builds(m.Begin, large, small, large, large, st.binary(min_size=64, max_size=64)),
    st.builds(m.Data, large, small, large, large, large, frames),
    st.builds(m.Cut, large, small, large, large),
    st.builds(m.Fetch, large, small, large, large),
    st.builds(m.Ping, large, large, large, large),
    st.builds(m.File, large, large, large, paths, small, st.binary(max_size=200)),
    st.builds(m.Want, large, large, paths),
    st.builds(m.Promise, large, names, st.sampled_from([(), ENDS[:1], ENDS]), small, large),
    st.builds(m.Refuse, large),
    st.builds(m.Ack, large, small, large, large),
    st.builds(m.Bytes, large, small, large, large, frames),
    st.builds(m.Have, large, large, paths),
    st.builds(m.Pong, large, large, large),
    st.builds(m.Complete, large, large),
)


def encoded(message: m.Message) -> bytes:
    """Return all bytes of a message."""
    return b"".join(m.encode(message))


def test_the_bytes_of_a_message_are_the_documented_ones() -> None:
    assert encoded(m.Ack(2, 3, 128, 9)) == (
        b"TBR1\x0d" + b"\x02\0\0\0\0\0\0\0" + b"\x03\0\0\0" + b"\x80\0\0\0\0\0\0\0"
        b"\x09\0\0\0\0\0\0\0" + b"\0\0\0\0\0\0\0\0" + b"\0\0\0\0"
    )
    assert encoded(m.Data(1, 1, 64, 2, 1, b"frame"))[41:] == b"\x05\0\0\0frame"
    assert encoded(m.Promise(2, "b/1", ENDS))[45:] == (
        b'{"replica":"b/1","ends":[[1,1,640,11],[4,2,128,12]],"version":1}'
    )


def test_the_numbers_of_the_message_types_are_fixed() -> None:
    numbers = {kind.__name__.upper(): number for number, kind in m.KINDS.items()}
    assert numbers == {
        "HELLO": 1, "BEGIN": 2, "DATA": 3, "CUT": 4, "FETCH": 5, "PING": 6, "FILE": 7, "WANT": 8,
        "PROMISE": 11, "REFUSE": 12, "ACK": 13, "BYTES": 14, "HAVE": 15, "PONG": 16, "COMPLETE": 17,
    }  # fmt: skip


@given(st.lists(MESSAGES, max_size=4), st.lists(st.integers(0, 600), max_size=8))
def test_messages_are_received_however_their_bytes_are_split(sent: list[m.Message], cuts: list[int]) -> None:
    raw = b"".join(encoded(message) for message in sent)
    borders = sorted({0, len(raw), *(min(cut, len(raw)) for cut in cuts)})
    receiver, received = Receiver(), []
    for begin, end in itertools.pairwise(borders):
        received += receiver.receive(raw[begin:end])
    assert received == sent


@given(st.lists(MESSAGES, max_size=4), st.integers(1, 600))
def test_received_messages_outlive_their_buffer(sent: list[m.Message], size: int) -> None:
    raw, buffer = b"".join(encoded(message) for message in sent), bytearray(size)
    receiver, received = Receiver(), []
    for begin in range(0, len(raw), size):
        part = raw[begin : begin + size]
        buffer[: len(part)] = part
        received += receiver.receive(memoryview(buffer)[: len(part)])
        buffer[:] = bytes(size)
    assert received == sent


@given(MESSAGES)
def test_a_message_is_received_only_with_its_last_byte(message: m.Message) -> None:
    receiver, raw = Receiver(), encoded(message)
    for number in range(len(raw) - 1):
        assert not list(receiver.receive(raw[number : number + 1]))
    assert list(receiver.receive(raw[-1:] + b"T")) == [message]


@given(MESSAGES, st.data())
def test_a_flipped_bit_gives_another_message_or_a_peer_error(message: m.Message, data: st.DataObject) -> None:
    raw = bytearray(encoded(message))
    raw[data.draw(st.integers(0, min(len(raw), 120) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        received = list(Receiver().receive(raw))
    except PeerError:
        return
    # No checksum here: TLS carries it, and frames have their own. But one message has one form.
    assert received != [message]


@pytest.mark.parametrize(
    "message",
    [m.Hello(0, "", "", 0), m.Promise(0, "a/1", ()), m.Hello(1, "g", "a/1", 1, m.Members(3, ("b/1",)), True)],
)
def test_a_flipped_bit_in_a_json_payload_never_gives_the_same_message(message: m.Message) -> None:
    for bit in range(8 * len(encoded(message))):
        raw = bytearray(encoded(message))
        raw[bit // 8] ^= 1 << bit % 8
        try:
            assert list(Receiver().receive(raw)) != [message], bit
        except PeerError:
            pass


@given(st.binary(min_size=45, max_size=200))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(PeerError, match="no message of the replication protocol"):
        list(Receiver().receive(raw))


def header(number: int, *, length: int = 0, epoch: int = 1, values: tuple[int, ...] = (0, 0, 0, 0)) -> bytes:
    """Encode the header of a message of this type."""
    return m.HEADER.pack(m.MAGIC, number, epoch, *values, length)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (header(9), "type 9"),
        (header(3, length=m.FRAMES_BYTES_MAX + 1), "payload of"),
        (header(13, length=1), "payload of 1 bytes, 0 to 0"),
        (header(2, length=63), "payload of 63"),
        (header(12, epoch=-1), "below zero"),
        (header(13, values=(1, -64, 0, 0)), "below zero"),
        (header(12, values=(1, 0, 0, 0)), "does not have"),
        (header(11, length=2) + b"{}", "cannot be read"),
        (header(1, length=2) + b"\xff\xff", "cannot be read"),
        (header(11, length=53) + b'{"replica":"b","ends":[[2,1,1,1],[1,1,2,2]],"version":1}'[:53], "cannot be read"),
        (header(1, length=3_005) + b'{"x":' + b"[" * 3_000, "cannot be read"),
        (header(15, length=1) + b"\xff", "not UTF-8"),
        (header(7, length=6) + b"\x01\0\0\0\0\0", "a path of 1 bytes"),
        (header(7, length=6) + b"\0\0\0\0\0\0", "a path of 0 bytes"),
    ],
)  # fmt: skip
def test_a_message_that_breaks_a_rule_is_refused_with_the_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        list(Receiver().receive(raw))


def test_a_payload_above_its_bound_is_refused_before_it_arrives() -> None:
    receiver = Receiver()
    with pytest.raises(PeerError):
        list(receiver.receive(header(14, length=2**32 - 1)))


@pytest.mark.parametrize("ends", [ENDS[::-1], (ENDS[0], ENDS[0]), (EpochEnd(1, 1, -64, 1),)])
def test_a_promise_whose_epochs_are_not_in_order_is_refused(ends: tuple[EpochEnd, ...]) -> None:
    with pytest.raises(PeerError, match="order of a log"):
        list(Receiver().receive(encoded(m.Promise(2, "b/1", ends))))


def test_a_message_beyond_its_bound_is_not_sent() -> None:
    with pytest.raises(AssertionError):
        m.encode(m.Have(1, 1, "x" * (m.PATH_BYTES_MAX + 1)))
