"""The JSON of the Flight edge: accepted requests, refused requests with their errors, and hostile input."""

import json
from base64 import b64decode

import msgspec
import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.flight import codec
from timeball.model import answers, limits, wire
from timeball.model.errors import InvalidMessage, NotFound, OverLimit, RequestError, TimeballError
from timeball.table.attachment import Attachment


def body(**fields: object) -> bytes:
    """Return the body of a request with these fields."""
    return json.dumps(fields).encode()


def test_empty_body_means_no_arguments() -> None:
    assert codec.decode_action("status", b"") == wire.Nothing()
    assert codec.decode_action("status", b"{}") == wire.Nothing()


def test_actions_decode_into_their_structs() -> None:
    queues = codec.decode_action("queues", body(topic="t"))
    assert queues == wire.Queues(topic="t")
    assert codec.decode_action("reserve", body(rows=10)) == wire.Reserve(rows=10)
    attach = codec.decode_action("attach", body(job="bulk", job_id="x", epoch=1))
    assert attach == Attachment(job="bulk", job_id="x", epoch=1)


def test_every_verb_is_described_and_bounded() -> None:
    for verb, (_, size_bytes, text) in codec.ACTIONS.items():
        assert text and size_bytes == codec.body_bytes_max(verb)
        with pytest.raises(OverLimit, match=verb):
            codec.decode_action(verb, b" " * (size_bytes + 1))


def test_the_error_for_an_unknown_action_lists_the_actions() -> None:
    with pytest.raises(NotFound, match=r"no action 'shutdown'.*status"):
        codec.decode_action("shutdown", b"{}")


@pytest.mark.parametrize(
    ("verb", "fields", "named"),
    [
        ("queues", {"topic": ""}, "topic"),
        ("queues", {"topic": "t" * 256}, "topic"),
        ("queues", {}, "topic"),
        ("queues", {"topic": "t", "owner": "me"}, "owner"),
        ("reserve", {"rows": 10**30}, "rows"),
        ("reserve", {"rows": 1.5}, "rows"),
        ("starts", {"from_seq": 2**63}, "from_seq"),
        ("campaign", {"campaign": "a", "change": "pause", "at_ms": -1}, "at_ms"),
        ("campaign", {"campaign": "a", "change": "stop"}, "change"),
        ("cancel_range", {"ranges": [[-1, 1]]}, "ranges"),
        ("cancel_range", {"ranges": []}, "ranges"),
        ("reserve", {"rows": 0}, "rows"),
        ("compactor", {"lease_ms": -1}, "lease_ms"),
        ("dispatcher", {"lease_ms": -1}, "lease_ms"),
        ("status", {"verbose": True}, "verbose"),
    ],
)
def test_wrong_fields_are_named(verb: str, fields: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        codec.decode_action(verb, body(**fields))


def test_a_cancel_of_more_ranges_than_the_limit_is_refused() -> None:
    maximum = [[1, 1]] * limits.ATTACH_FILES_MAX
    codec.decode_action("cancel_range", body(ranges=maximum))
    with pytest.raises(RequestError, match="ranges"):
        codec.decode_action("cancel_range", body(ranges=[*maximum, [1, 1]]))


def test_tickets_decode_by_what_they_read() -> None:
    log = codec.decode_ticket(body(read="log", from_seq=3, to_seq=9, kinds=[1, 3]))
    assert log == wire.ReadLog(from_seq=3, to_seq=9, kinds=[1, 3], coalesce_rows=wire.COALESCE_ROWS)
    pull = codec.decode_ticket(body(read="pull", topic="t", offsets={"0": 1}, rows=5, wait_ms=10))
    assert pull == wire.Pull(topic="t", offsets={0: 1}, rows=5, wait_ms=10)


@pytest.mark.parametrize(
    "ticket",
    [
        b"",
        b"null",
        b"[]",
        body(read="disk"),
        body(read="receive", topic="t", group="g", rows=1),
        body(read="pull", topic="t", offsets={"-1": 0}, rows=1),
        body(read="pull", topic="t", offsets={"0": -1}, rows=1),
        body(read="pull", topic="t", offsets={"zero": 1}, rows=1),
        body(read="log", from_seq=5, to_seq=4),
        body(read="log", from_seq=0, to_seq=2**64),
        body(read="log", from_seq=0, to_seq=1, kinds=[1] * 17),
        body(read="log", from_seq=0, to_seq=1, columns=["sequence"]),
        body(read="log", from_seq=0, to_seq=1, columns=["seq", "seq"]),
        body(read="log", from_seq=0, to_seq=1, columns=[]),
        body(read="pull", topic="t", offsets={}, rows=1),
        body(read="pull", topic="t", offsets={"0": 0}, rows=limits.PULL_ROWS_MAX + 1),
        body(read="pull", topic="t", offsets={"0": 0}, rows=1, wait_ms=limits.PULL_WAIT_MS_MAX + 1),
        body(read="queue", topic="t", queue_id=limits.QUEUES_PER_TOPIC_MAX, offset=0, rows=1),
    ],
)
def test_impossible_tickets_are_refused(ticket: bytes) -> None:
    with pytest.raises(RequestError):
        codec.decode_ticket(ticket)


@pytest.mark.parametrize(
    "bomb",
    [
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"rows":' + b"9" * 60_000 + b"}",
        b'{"rows":NaN}',
        b'{"rows":1e999}',
        b'{"rows":"\\ud800"}',
        b'{"rows":\xff}',
    ],
)
def test_decoding_bombs_are_refused_with_typed_errors(bomb: bytes) -> None:
    with pytest.raises(RequestError):
        codec.decode_action("reserve", bomb)
    with pytest.raises(RequestError):
        codec.decode_ticket(bomb)


def test_a_too_long_ticket_is_refused_before_decoding() -> None:
    with pytest.raises(OverLimit, match="ticket"):
        codec.decode_ticket(b"x" * (wire.TICKET_BYTES_MAX + 1))


@given(st.binary(max_size=200), st.sampled_from(sorted(codec.ACTIONS)))
def test_any_bytes_decode_or_raise_a_timeball_error(data: bytes, verb: str) -> None:
    for decode in (codec.decode_ticket, lambda data: codec.decode_action(verb, data)):
        try:
            decode(data)
        except TimeballError:
            continue


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(sorted(codec.ACTIONS)),
    st.dictionaries(
        st.sampled_from(["topic", "group", "queues", "offsets", "rows", "ids", "seqs"]), json_values
    ),
)
def test_any_json_decodes_within_limits_or_raises_a_timeball_error(
    verb: str, fields: dict[str, object]
) -> None:
    try:
        request = codec.decode_action(verb, json.dumps(fields).encode())
    except TimeballError:
        return
    # A second decoding, which checks all limits again, gives the same request.
    plain = msgspec.to_builtins(request, str_keys=True)
    assert msgspec.convert(plain, type(request), strict=False) == request


@given(
    st.builds(
        wire.Pull,
        topic=st.text("abc", min_size=1, max_size=127),
        offsets=st.dictionaries(
            st.integers(0, wire.QUEUE_ID_MAX), st.integers(0, wire.INT64_MAX), min_size=1, max_size=20
        ),
        rows=st.integers(1, limits.PULL_ROWS_MAX),
        wait_ms=st.integers(0, limits.PULL_WAIT_MS_MAX),
    )
)
def test_an_encoded_ticket_decodes_to_the_same_ticket(ticket: wire.Pull) -> None:
    assert codec.decode_ticket(codec.encode(ticket)) == ticket


def test_acknowledgement_and_refusal_are_the_documented_json() -> None:
    assert json.loads(codec.encode(answers.SendAck(5, 2, 1000))) == {
        "first_seq": 5,
        "rows": 2,
        "store_ms": 1000,
    }
    refusal = json.loads(codec.encode_refusal(InvalidMessage("tag too long")))
    assert refusal == {"error": "invalid_message", "text": "tag too long"}


def trailers_of(error: BaseException) -> dict[str, str | bytes]:
    """Decode the trailers of an error as a client of gRPC does: with hpack, and those of -bin from base64."""
    fields = Decoder().decode(codec.error_trailers(error))
    return {name: b64decode(text) if name.endswith("-bin") else text for name, text in fields}


def test_timeball_errors_are_encoded_with_code_and_text() -> None:
    error = NotFound("no topic 'x'")
    assert codec.status_text(error) == "no topic 'x'. Detail: Failed"
    assert trailers_of(error) == {
        "grpc-status-details-bin": b"not_found",
        "x-arrow-status": "5",
        "x-arrow-status-detail-bin": b"Failed",
        "x-arrow-status-message-bin": b"no topic 'x'",
    }


def test_the_text_of_internal_faults_is_not_sent() -> None:
    error = ValueError("secret")
    reported = [codec.status_text(error), str(trailers_of(error)), str(codec.encode_refusal(error))]
    assert not any("secret" in text for text in reported)
    assert trailers_of(error)["grpc-status-details-bin"] == b"error"
