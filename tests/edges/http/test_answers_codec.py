"""Results of verbs as JSON, without a node: fields without information are left out."""

from __future__ import annotations

import json

from timeball.edges.http import answers_codec, codec
from timeball.model.answers import (
    Campaign,
    Content,
    DeadLetterPage,
    DeadLetterRow,
    GroupPlace,
    MessagePlace,
    Verdict,
)

AT_MS, AT = 1_927_616_400_000, "2031-01-31T09:00:00.000Z"


def encode_and_parse(answer: object) -> dict[str, object]:
    """Return an answer as its client reads it."""
    result: dict[str, object] = json.loads(codec.encode(answer))
    return result


def test_a_message_is_shown_without_its_empty_fields() -> None:
    bare = encode_and_parse(answers_codec.show_message(MessagePlace("expired", 7)))
    assert bare == {"state": "expired", "seq": 7}
    content = Content(b"\xff", 1, None, [], {})
    groups = [GroupPlace("g", "leased", 2, AT_MS), GroupPlace("h", "waiting")]
    place = MessagePlace("visible", 7, "t", 1, 0, AT_MS, None, content, groups)
    assert encode_and_parse(answers_codec.show_message(place)) == {
        "state": "visible", "seq": 7, "topic": "t", "queue_id": 1, "queue_offset": 0, "at_ms": AT_MS, "at": AT,
        "keys": [], "properties": {}, "size_bytes": 1, "base64": "/w==",
        "groups": [
            {"group": "g", "state": "leased", "attempts": 2, "until_ms": AT_MS, "until": AT},
            {"group": "h", "state": "waiting"},
        ],
    }  # fmt: skip


def test_a_granted_verdict_is_shown_with_its_times() -> None:
    moved = encode_and_parse(answers_codec.show_verdict(Verdict("a", "rescheduled", 3, AT_MS, AT_MS)))
    assert moved == {"id": "a", "seq": 3, "verdict": "rescheduled", "at": AT, "due": AT, "due_ms": AT_MS}


def test_dead_letters_are_shown_with_their_outcomes() -> None:
    row = DeadLetterRow(
        dead_letter="0-1", id=None, topic="t", died_ms=AT_MS, attempts=3, body=b"ab", size_bytes=5, tag=None, keys=[],
        properties={},
    )  # fmt: skip
    (letter,) = json.loads(codec.encode(answers_codec.show_dead_letters(DeadLetterPage([row]))))[
        "dead_letters"
    ]
    assert (letter["body"], letter["body_cut"], letter["died"]) == ("ab", True, AT)
    assert not {"id", "tag", "reason"} & letter.keys()
    assert encode_and_parse(answers_codec.show_outcomes(["0-1", "0-2"], [True, False], 1, "resent")) == {
        "count": 1,
        "results": [
            {"dead_letter": "0-1", "verdict": "resent"},
            {"dead_letter": "0-2", "verdict": "not_found"},
        ],
    }


def test_a_campaign_has_its_times_as_text_and_as_numbers() -> None:
    campaign = Campaign(
        campaign="c", state="planned", since_ms=AT_MS, planned_ms=AT_MS, planned_seq=1, rows=2
    )
    shown = encode_and_parse(answers_codec.show_campaign(campaign))
    assert (shown["since"], shown["planned"], shown["cancelled"], shown["ranges"]) == (AT, AT, 0, [])
    assert "held_from" not in shown
