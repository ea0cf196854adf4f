"""What verbs return as JSON, without a node: nothing that is not known is said."""

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


def said(answer: object) -> dict[str, object]:
    found: dict[str, object] = json.loads(codec.encode(answer))
    return found


def test_a_place_says_what_is_known() -> None:
    bare = said(answers_codec.place_shown(MessagePlace("expired", 7)))
    assert bare == {"state": "expired", "seq": 7}
    content = Content(b"\xff", 1, None, [], {})
    groups = [GroupPlace("g", "leased", 2, AT_MS), GroupPlace("h", "waiting")]
    place = MessagePlace("visible", 7, "t", 1, 0, AT_MS, None, content, groups)
    assert said(answers_codec.place_shown(place)) == {
        "state": "visible", "seq": 7, "topic": "t", "queue_id": 1, "queue_offset": 0, "at_ms": AT_MS, "at": AT,
        "keys": [], "properties": {}, "size_bytes": 1, "base64": "/w==",
        "groups": [
            {"group": "g", "state": "leased", "attempts": 2, "until_ms": AT_MS, "until": AT},
            {"group": "h", "state": "waiting"},
        ],
    }  # fmt: skip


def test_a_verdict_that_was_granted() -> None:
    moved = said(answers_codec.granted(Verdict("a", "rescheduled", 3, AT_MS, AT_MS)))
    assert moved == {"id": "a", "seq": 3, "verdict": "rescheduled", "at": AT, "due": AT, "due_ms": AT_MS}


def test_dead_letters_and_what_came_of_them() -> None:
    row = DeadLetterRow(
        dead_letter="0-1", id=None, topic="t", died_ms=AT_MS, attempts=3, body=b"ab", size_bytes=5, tag=None, keys=[],
        properties={},
    )  # fmt: skip
    (letter,) = json.loads(codec.encode(answers_codec.dead_letters(DeadLetterPage([row]))))["dead_letters"]
    assert (letter["body"], letter["body_cut"], letter["died"]) == ("ab", True, AT)
    assert not {"id", "tag", "reason"} & letter.keys()
    assert said(answers_codec.dealt(["0-1", "0-2"], [True, False], 1, "resent")) == {
        "count": 1,
        "results": [
            {"dead_letter": "0-1", "verdict": "resent"},
            {"dead_letter": "0-2", "verdict": "not_found"},
        ],
    }


def test_a_campaign_has_its_instants_as_texts_too() -> None:
    campaign = Campaign(
        campaign="c", state="planned", since_ms=AT_MS, planned_ms=AT_MS, planned_seq=1, rows=2
    )
    shown = said(answers_codec.campaign_shown(campaign))
    assert (shown["since"], shown["planned"], shown["cancelled"], shown["ranges"]) == (AT, AT, 0, [])
    assert "held_from" not in shown
