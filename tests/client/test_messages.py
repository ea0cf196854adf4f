"""Answers for messages by their receipts."""

import pytest

from timeball import Timeball
from timeball.client.messages import Member
from timeball.client.network import run
from timeball.model import limits


def test_each_receipt_gets_its_own_answer_in_order_over_several_requests(
    ball: Timeball, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has at most three receipts here. None is the answer for a lease that has ended."""
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
    extended = run(member.extend(receipts[:5], 60_000))
    assert [receipt is not None for receipt in extended] == [False, True, True, True, True]
    dead = run(member.dead_letter([receipts[0], receipts[5]]))
    assert [receipt is not None for receipt in dead] == [False, True]
    new_receipts = [receipt for receipt in extended if receipt is not None]
    answers = run(member.ack([*new_receipts, receipts[5], receipts[6]]))
    assert answers == [*new_receipts, None, receipts[6]], "the sixth message is a dead letter already"
