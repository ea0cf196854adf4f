"""Answers for messages: a verdict for each receipt."""

from timeball import Timeball
from timeball.client.messages import Member, _chunks


def test_many_receipts_are_split() -> None:
    receipts = [str(n) for n in range(7)]
    assert _chunks(receipts, 3) == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    assert _chunks([], 3) == []


def test_each_answer_has_its_verdict(ball: Timeball) -> None:
    ball.create_topic("parts", 1)
    ball.send_many([{"body": b"%d" % i} for i in range(7)], topic="parts")
    receipts: list[str] = []
    while len(receipts) < 7:
        receipts += [message.lease[1] for message in ball.pull("parts", "g")]
    member = Member(ball._calls, "parts", "g")
    assert member.ack(receipts[:1]) == [True]
    changed = member.change(receipts[:5], 60_000)
    assert [one is not None for one in changed] == [False, True, True, True, True]
    assert member.dead_letter([receipts[0], receipts[5]]) == [False, True]
    newest = [one for one in changed if one is not None]
    assert member.ack([*newest, receipts[5], receipts[6]]) == [True] * 4 + [False, True]
