"""Detection of different subscriptions in one group: conflicts are logged, and shown to operators.

The members of a group share the messages of a topic, even if they ask for different ones. A member that wants tag `red`
removes messages with tag `blue` from the group's queues, so another member that wants `blue` never gets them. The same
happens when RocketMQ's members subscribe to different topics: queues of a topic are assigned to members that do not
read it. The members get no error, so the broker reports it.

Members repeat their filters with each heartbeat, request or settings. Two filters conflict while both are repeated: the
older one was repeated after the first use of the younger one, and both were used within `WINDOW_MS`. So a group that
changes its filter between two releases conflicts only while members of both releases run.

The state is in memory only: after a restart, members repeat their filters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from timeball.model import limits
from timeball.model.answers import Conflict

logger = logging.getLogger(__name__)

# RocketMQ's members send a heartbeat every 30 s and are given up after 120 s.
WINDOW_MS = 2 * limits.MINUTE_MS
LOG_EVERY_MS = 10 * limits.MINUTE_MS  # for each group and topic
WISHES_MAX = 8  # of a group and topic: more would be a conflict all the same
KEYS_MAX = 16_384  # groups and topics, 10 MB in all
ASKED_MAX = 4_096  # different filters between two drains
ASKED_CHARACTERS_MAX = 512  # of each filter: longer ones are compared by their beginning
SHOWN_CHARACTERS_MAX = 200  # of a filter, or of a list of topics
TOPICS = ""  # the key under which a member's list of topics is stored


@dataclass(slots=True)
class _Wish:
    """The times (monotonic) at which members first and last used a filter."""

    first_ms: int
    last_ms: int


class Subscriptions:
    """The filters of the members of all groups. Belongs to the event loop."""

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        # Group, topic and filter of the receives since the last drain. To stay fast, a receive only adds to it.
        self.asked: set[tuple[str, str, str]] = set()
        self._wishes: dict[tuple[str, str], dict[str, _Wish]] = {}
        self._several: dict[str, set[str]] = {}  # group -> topics for which its members used several filters
        self._logged_ms: dict[tuple[str, str], int] = {}

    def hear(self, group: str, topic: str, wanted: str) -> None:
        """Record that a member wants messages of a topic through this filter."""
        if len(wanted) > SHOWN_CHARACTERS_MAX:
            # A filter may have thousands of characters. Its beginning is shown, with a hash of the whole text.
            wanted = f"{wanted[:SHOWN_CHARACTERS_MAX]}… ({hash(wanted):x})"
        now_ms, key = self._monotonic_ns() // 1_000_000, (group, topic)
        wishes = self._wishes.get(key)
        if wishes is None:
            wishes = self._wishes[key] = self._made()
        wish = wishes.get(wanted)
        if wish is None or now_ms - wish.last_ms > WINDOW_MS:
            # Clients choose the texts, and each takes memory.
            if len(wishes) >= WISHES_MAX:
                del wishes[min(wishes, key=lambda text: wishes[text].last_ms)]
            wish = wishes[wanted] = _Wish(now_ms, now_ms)
        wish.last_ms = now_ms
        # Nearly all groups use one filter for a topic, so the search for conflicts is seldom necessary.
        if len(wishes) > 1:
            self._several.setdefault(group, set()).add(topic)
            self._look(key, now_ms)

    async def drain(self) -> None:
        """Process the filters of recent receives. Called about once a second."""
        self._drain()

    def _drain(self) -> None:
        asked, self.asked = self.asked, set()
        for group, topic, wanted in sorted(asked):
            self.hear(group, topic, wanted)

    def hear_topics(self, group: str, topics: Iterable[str]) -> None:
        """Record that a member subscribes to exactly these topics."""
        self.hear(group, TOPICS, ", ".join(sorted(topics)))

    def conflicts(self, group: str) -> list[Conflict]:
        """Find the topics for which members of a group use different filters now."""
        self._drain()
        now_ms, topics = self._monotonic_ns() // 1_000_000, sorted(self._several.get(group, ()))
        looked = (Conflict(topic, self._conflicting(self._wishes[group, topic], now_ms)) for topic in topics)
        return [found for found in looked if found.wanted]

    def groups(self) -> list[str]:
        """List the groups with conflicts now, sorted."""
        self._drain()
        return [group for group in sorted(self._several) if self.conflicts(group)]

    def _made(self) -> dict[str, _Wish]:
        # Clients choose the names. At the bound, the oldest keys are removed. Those in use are soon recorded again.
        while len(self._wishes) >= KEYS_MAX:
            key = next(iter(self._wishes))
            del self._wishes[key]
            self._logged_ms.pop(key, None)
            topics = self._several.get(key[0], set())
            topics.discard(key[1])
            if not topics:
                self._several.pop(key[0], None)
        return {}

    def _look(self, key: tuple[str, str], now_ms: int) -> None:
        found = self._conflicting(self._wishes[key], now_ms)
        logged_ms = self._logged_ms.get(key)
        if found and (logged_ms is None or now_ms - logged_ms >= LOG_EVERY_MS):
            self._logged_ms[key] = now_ms
            group, topic = key
            if topic == TOPICS:
                logger.warning("members subscribe to different topics group=%s topics=%s", group, found)
            else:
                logger.warning("members filter differently group=%s topic=%s filters=%s", group, topic, found)

    def _conflicting(self, wishes: dict[str, _Wish], now_ms: int) -> list[str]:
        # Filters of members that have gone are no longer repeated.
        fresh = {text: wish for text, wish in wishes.items() if now_ms - wish.last_ms <= WINDOW_MS}
        # A filter that was not repeated since another one began has been replaced by that one.
        begun_ms = max((wish.first_ms for wish in fresh.values()), default=0)
        both = sorted(text for text, wish in fresh.items() if wish.last_ms >= begun_ms)
        return both if len(both) > 1 else []
