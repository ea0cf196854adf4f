"""Answers for messages: a verdict for each receipt."""

import pytest

from timeball import Timeball
from timeball.client.messages import Member
from timeball.client.network import run
from timeball.model import limits


def test_each_answer_has_its_verdict(ball: Timeball, monkeypatch: pytest.MonkeyPatch) -> None:
    """In requests of three receipts, and in the order of the receipts."""
    ball.create_topic("parts", 1)
    ball.send_many([{"body": b"%d" % i} for i in range(7)], topic="parts")
    leases: list[tuple[Member, str]] = []
    while len(leases) < 7:
        leases += [message.lease for message in ball.pull("parts", "g")]
    receipts = [receipt for _, receipt in leases]
    monkeypatch.setattr(limits, "POP_ROWS_MAX", 3)
    member, _ = leases[0]
    assert run(member.ack([])) == []
    assert run(member.ack(receipts[:1])) == receipts[:1]
    changed = run(member.extend(receipts[:5], 60_000))
    assert [one is not None for one in changed] == [False, True, True, True, True]
    dead = run(member.dead_letter([receipts[0], receipts[5]]))
    assert [one is not None for one in dead] == [False, True]
    newest = [one for one in changed if one is not None]
    assert run(member.ack([*newest, receipts[5], receipts[6]])) == [*newest, None, receipts[6]]
