"""What a member of a group says of the messages it has: done, later, longer. Receipts are texts of the broker's."""

from __future__ import annotations

from collections.abc import Sequence

from timeball import limits, wire
from timeball.client.calls import Calls


class Member:
    """The receipts of one group in one topic. Thread safe."""

    def __init__(self, calls: Calls, topic: str, group: str) -> None:
        self._calls = calls
        self.topic = topic
        self.group = group

    def ack(self, receipts: Sequence[str]) -> list[bool]:
        """End these leases for good; false for one that had ended: its message comes again."""
        found: list[bool] = []
        for part in _parts(receipts, limits.CANCELS_PER_REQUEST_MAX):
            body = wire.Acknowledge(topic=self.topic, group=self.group, receipts=part)
            found += self._calls.action("ack", body, dict[str, list[bool]])["valid"]
        return found

    def change(
        self, receipts: Sequence[str], invisible_ms: int | None, *, counts: bool = True
    ) -> list[str | None]:
        """Return the receipts with which leases end so far from now; None for one that had ended.

        `invisible_ms` None: after as long as the group's retry policy says. `counts`: the lease is an attempt.
        """
        found: list[str | None] = []
        for part in _parts(receipts, limits.POP_ROWS_MAX):
            body = wire.ChangeInvisibleTime(
                topic=self.topic, group=self.group, receipts=part, invisible_ms=invisible_ms, counts=counts
            )
            answer = self._calls.action("change_invisible_time", body, dict[str, list[str | None]])
            found += answer["receipts"]
        return found

    def dead_letter(self, receipts: Sequence[str]) -> list[bool]:
        """Put messages into the group's dead letters; false for one whose lease had ended."""
        found: list[bool] = []
        for part in _parts(receipts, limits.POP_ROWS_MAX):
            body = wire.DeadLetter(topic=self.topic, group=self.group, receipts=part)
            found += self._calls.action("dead_letter", body, dict[str, list[bool]])["valid"]
        return found


def _parts(receipts: Sequence[str], most: int) -> list[list[str]]:
    return [list(receipts[begin : begin + most]) for begin in range(0, len(receipts), most)]
