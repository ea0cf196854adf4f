"""Flight's protobuf messages: read as protobuf's own classes write them, and refused when they are none."""

import itertools

import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.flight import protobuf
from timeball.model.errors import InvalidMessage


@given(st.binary(max_size=300), st.binary(max_size=20_000), st.binary(max_size=300), st.data())
def test_a_data_message_comes_back_however_it_was_cut(
    header: bytes, body: bytes, metadata: bytes, cutting: st.DataObject
) -> None:
    message = b"".join(protobuf.data_parts(header, memoryview(body), metadata))
    cuts = sorted(cutting.draw(st.lists(st.integers(0, len(message)), max_size=4)))
    parts = [message[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(message)])]
    for data in (protobuf.data([message]), protobuf.data(parts)):
        assert (bytes(data.header), b"".join(data.body), data.path) == (header, body, None)
        assert bytes(data.metadata) == metadata
        assert data.size_bytes == len(message)


def test_a_body_that_other_fields_follow_is_read_too() -> None:
    body, header = protobuf.data_parts(body=memoryview(b"body" * 9)), protobuf.data_parts(b"header")
    message = b"".join([*body, *header])
    for parts in ([message], [message[:7], message[7:]]):
        data = protobuf.data(parts)
        assert (bytes(data.header), b"".join(data.body)) == (b"header", b"body" * 9)


@pytest.mark.parametrize(
    ("descriptor", "path"),
    [
        (flight.FlightDescriptor.for_path(b"send"), [b"send"]),
        (flight.FlightDescriptor.for_path(b"a", b"b"), [b"a", b"b"]),
        (flight.FlightDescriptor.for_command(b"send"), None),
    ],
)
def test_a_descriptor_s_path(descriptor: flight.FlightDescriptor, path: list[bytes] | None) -> None:
    written = descriptor.serialize()
    assert protobuf.data([b"\x0a" + bytes([len(written)]) + written]).path == path


def test_actions_and_tickets() -> None:
    verb, body = protobuf.action(b"\x0a\x06status\x12\x02{}")
    assert (verb, bytes(body)) == ("status", b"{}")
    assert protobuf.ticket(flight.Ticket(b"x" * 300).serialize()) == b"x" * 300
    assert protobuf.action(b"") == ("", b"")


def test_answers_are_what_flight_reads() -> None:
    assert protobuf.result(b"{}") == b"\x0a\x02{}"
    assert protobuf.action_type("status", "what") == b"\x0a\x06status\x12\x04what"


@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_refused(junk: bytes) -> None:
    for read, message in (
        (protobuf.action, junk),
        (protobuf.ticket, junk),
        (protobuf.data, [junk]),
        (protobuf.data, [junk[:9], junk[9:]]),
    ):
        try:
            read(message)  # type: ignore[operator]
        except InvalidMessage:
            pass


@pytest.mark.parametrize(
    "junk",
    [b"\x0a\x05abc", b"\x0a", b"\x0b", b"\xff" * 12, b"\x08\x01", b"\x0a\x01\xff"],
    ids=["short", "no-length", "group", "endless", "number", "not-utf8"],
)
def test_what_is_no_action_is_refused(junk: bytes) -> None:
    with pytest.raises(InvalidMessage):
        protobuf.action(junk)
