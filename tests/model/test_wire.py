"""The broker decodes requests as clients encode them, and clients decode answers as the broker encodes them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.flight import codec
from timeball.model import answers, wire

NAMES = st.text("abc%|-_", min_size=1, max_size=8)
NUMBERS = st.integers(0, wire.INT64_MAX)
REQUESTS = {
    "status": st.just(wire.Nothing()),
    "queues": st.builds(wire.Queues, topic=NAMES),
    "cancel_range": st.builds(wire.CancelRange, ranges=st.just([(1, 5)]), reason=st.text(max_size=5)),
    "campaigns": st.builds(wire.Campaigns, campaign=st.none() | NAMES),
    "campaign": st.builds(wire.ChangeCampaign, campaign=NAMES, change=st.sampled_from(["pause", "resume"])),
    "starts": st.builds(wire.Starts, from_seq=NUMBERS, to_seq=NUMBERS),
    "occurrences": st.builds(
        wire.Occurrences, from_ms=NUMBERS, to_ms=NUMBERS, width_ms=st.integers(1_000, 86_400_000)
    ),
    "schedules": st.builds(wire.Schedules, page=NAMES),
    "selections": st.just(wire.Selections()),
    "reserve": st.builds(wire.Reserve, rows=st.integers(1, 2**40)),
    "compactor": st.builds(wire.Lease, lease_ms=st.integers(0, 1_000)),
    "source_positions": st.builds(wire.SourcePositions, source=st.text("aZ0._-", min_size=1, max_size=8)),
    "drain": st.builds(wire.Drain, heir=NAMES, dry_run=st.booleans()),
    "dispatcher": st.builds(wire.DispatcherLease, lease_ms=st.integers(0, 1_000)),
}
TICKETS = [
    wire.ReadLog(from_seq=1, to_seq=5, kinds=[1, 2], columns=["seq", "topic"]),
    wire.ReadLog(from_seq=1, to_seq=1),
    wire.ReadQueue(topic="t", queue_id=3, offset=7, rows=1),
    wire.Pull(topic="t", offsets={0: 5, 3: 1}, rows=10, wait_ms=5),
]


def test_every_request_except_the_attachment_is_tested() -> None:
    same_body = {"compact"}  # as status
    assert REQUESTS.keys() | same_body | {"attach"} == codec.ACTIONS.keys()


@pytest.mark.parametrize("verb", REQUESTS)
@given(data=st.data())
def test_a_request_is_decoded_to_an_equal_one(verb: str, data: st.DataObject) -> None:
    request = data.draw(REQUESTS[verb])
    assert codec.decode_action(verb, msgspec.json.encode(request)) == request


@pytest.mark.parametrize("ticket", TICKETS)
def test_a_ticket_is_decoded_to_an_equal_one(ticket: wire.Ticket) -> None:
    assert codec.decode_ticket(msgspec.json.encode(ticket)) == ticket


def test_an_acknowledgement_and_a_refusal_are_decoded_to_one_struct() -> None:
    ack = msgspec.json.decode(codec.encode(answers.SendAck(5, 2, 7)), type=answers.SendAnswer)
    assert ack == answers.SendAnswer(5, 2, 7) and ack.error is None
    refusal = msgspec.json.decode(
        codec.encode(answers.SendRefusal("over_limit", "later")), type=answers.SendAnswer
    )
    assert (refusal.error, refusal.text) == ("over_limit", "later")
    release_answer = msgspec.json.decode(codec.encode(answers.ReleaseAck(3, 1)), type=answers.ReleaseAnswer)
    assert release_answer == answers.ReleaseAnswer(3, 1)


def test_a_decoded_verdict_is_cancelled_if_the_message_is_not_delivered() -> None:
    data = codec.encode([answers.Verdict("a", "cancelled", 5, 7), answers.Verdict("b", "not_found")])
    cancelled, missing = msgspec.json.decode(data, type=list[answers.Verdict])
    assert cancelled == answers.Verdict("a", "cancelled", 5, 7) and cancelled.cancelled
    assert missing == answers.Verdict("b", "not_found") and not missing.cancelled
