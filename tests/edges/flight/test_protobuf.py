"""Flight's protobuf messages: decoded as protobuf's own classes encode them. Other bytes are refused."""

import itertools

import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.flight import codec
from timeball.model.errors import InvalidMessage


@given(st.binary(max_size=300), st.binary(max_size=20_000), st.binary(max_size=300), st.data())
def test_flight_data_decodes_from_any_chunks(
    header: bytes, body: bytes, metadata: bytes, cutting: st.DataObject
) -> None:
    message = b"".join(codec.encode_data(header, memoryview(body), metadata))
    cuts = sorted(cutting.draw(st.lists(st.integers(0, len(message)), max_size=4)))
    parts = [message[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(message)])]
    for data in (codec.parse_data([message]), codec.parse_data(parts)):
        assert (bytes(data.header), b"".join(data.body), data.path) == (header, body, None)
        assert bytes(data.metadata) == metadata
        assert data.size_bytes == len(message)


def test_a_body_before_other_fields_is_decoded() -> None:
    body, header = codec.encode_data(body=memoryview(b"body" * 9)), codec.encode_data(b"header")
    message = b"".join([*body, *header])
    for parts in ([message], [message[:7], message[7:]]):
        data = codec.parse_data(parts)
        assert (bytes(data.header), b"".join(data.body)) == (b"header", b"body" * 9)


@pytest.mark.parametrize(
    ("descriptor", "path"),
    [
        (flight.FlightDescriptor.for_path(b"send"), [b"send"]),
        (flight.FlightDescriptor.for_path(b"a", b"b"), [b"a", b"b"]),
        (flight.FlightDescriptor.for_command(b"send"), None),
    ],
)
def test_only_a_descriptor_of_type_path_has_a_path(
    descriptor: flight.FlightDescriptor, path: list[bytes] | None
) -> None:
    written = descriptor.serialize()
    assert codec.parse_data([b"\x0a" + bytes([len(written)]) + written]).path == path


def test_actions_and_tickets_of_pyarrow_are_decoded() -> None:
    verb, body = codec.parse_action(b"\x0a\x06status\x12\x02{}")
    assert (verb, bytes(body)) == ("status", b"{}")
    assert codec.parse_ticket(flight.Ticket(b"x" * 300).serialize()) == b"x" * 300
    assert codec.parse_action(b"") == ("", b"")


def test_results_and_action_types_are_encoded_as_protobuf() -> None:
    assert codec.encode_result(b"{}") == b"\x0a\x02{}"
    assert codec.encode_action_type("status", "what") == b"\x0a\x06status\x12\x04what"


@given(st.binary(max_size=64))
def test_any_bytes_are_decoded_or_refused(junk: bytes) -> None:
    for decode, message in (
        (codec.parse_action, junk),
        (codec.parse_ticket, junk),
        (codec.parse_data, [junk]),
        (codec.parse_data, [junk[:9], junk[9:]]),
    ):
        try:
            decode(message)  # type: ignore[operator]
        except InvalidMessage:
            pass


@pytest.mark.parametrize(
    "junk",
    [b"\x0a\x05abc", b"\x0a", b"\x0b", b"\xff" * 12, b"\x08\x01", b"\x0a\x01\xff"],
    ids=["short", "no-length", "group", "endless", "number", "not-utf8"],
)
def test_bytes_that_are_not_an_action_are_refused(junk: bytes) -> None:
    with pytest.raises(InvalidMessage):
        codec.parse_action(junk)
