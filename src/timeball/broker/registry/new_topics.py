"""How many topics clients may make: in one request, in a second, and each account in all.

A message makes the topic it names, and a topic stays: in memory, in the log, in every snapshot. A client that
puts a key in the place of a topic would fill the broker for everybody. What the broker makes by itself (retry and dead
letter topics, the topic of a promise that is due) is not counted: a message that was accepted must have a place to go.
"""

from __future__ import annotations

from collections.abc import Iterable

from timeball import limits
from timeball.broker.registry.topics import Topics
from timeball.clock import Clock
from timeball.errors import OverLimit


class NewTopics:
    """Counts what each account makes. Belongs to the event loop."""

    def __init__(self, topics: Topics, clock: Clock) -> None:
        self._topics, self._clock = topics, clock
        self._allowance: dict[str, tuple[float, int]] = {}  # by account: topics it might make, at this time

    def admit(self, names: Iterable[str], account: str = "") -> None:
        """Let an account make those of these topics that are missing, or raise OverLimit for all."""
        count = sum(self._topics.find(name) is None for name in names)
        if count:
            self._admit(count, account)

    def _admit(self, count: int, account: str) -> None:
        if count > limits.NEW_TOPICS_PER_REQUEST_MAX:
            raise OverLimit(
                f"{count} new topics in one request; at most {limits.NEW_TOPICS_PER_REQUEST_MAX}: "
                "is a topic named where a key is meant? Create many topics one by one"
            )
        if self._topics.made_by.get(account, 0) + count > limits.NEW_TOPICS_PER_ACCOUNT_MAX:
            who = f"account {account!r} has" if account else "clients have"
            raise OverLimit(
                f"{who} made {self._topics.made_by[account]} topics; at most {limits.NEW_TOPICS_PER_ACCOUNT_MAX}: "
                "send to topics that exist"
            )
        now_ms, left = self._clock.monotonic_ns() // 1_000_000, float(limits.NEW_TOPICS_BURST)
        if account in self._allowance:
            before, at_ms = self._allowance[account]
            left = min(left, before + (now_ms - at_ms) * limits.NEW_TOPICS_PER_SECOND / limits.SECOND_MS)
        if count > left:
            raise OverLimit(
                f"more than {limits.NEW_TOPICS_PER_SECOND} new topics a second; try again in a moment"
            )
        self._allowance[account] = (left - count, now_ms)
