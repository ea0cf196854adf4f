"""Detect members of one group that subscribe differently: log the conflict, and show it to operators.

The members of a group share the messages of a topic, even if their filters differ. A member with the filter `red` skips
messages with tag `blue` for the whole group, so another member with the filter `blue` never gets them. The same happens
when RocketMQ's members subscribe to different topics: queues of a topic are assigned to members that do not read it.
The members get no error, so the broker reports the conflict.

Members repeat their filters with each heartbeat, request or settings. Two filters conflict while both are repeated: the
older filter was repeated after the first use of the newer filter, and both were used within `WINDOW_MS`. So a rollout
that changes the filter of a group is a conflict only while members of both versions run.

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
FILTERS_MAX = 8  # of a group and topic: more of them would not change the conflict
KEYS_MAX = 16_384  # groups and topics, 10 MB in all
RECENT_MAX = 4_096  # different filters of receives between two drains
RECENT_CHARACTERS_MAX = 512  # of each filter: longer filters are compared by their beginning
SHOWN_CHARACTERS_MAX = 200  # of a filter, or of a list of topics
TOPICS = ""  # the key under which a member's list of topics is stored


@dataclass(slots=True)
class _FilterUse:
    """The times (monotonic) at which members first and last used a filter."""

    first_ms: int
    last_ms: int


class Subscriptions:
    """The filters of the members of all groups. Belongs to the event loop."""

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        # Group, topic and filter of the receives since the last drain. A receive only adds to this set, to stay fast.
        self.recent: set[tuple[str, str, str]] = set()
        self._uses: dict[tuple[str, str], dict[str, _FilterUse]] = {}
        # Group -> topics for which its members have used several filters.
        self._topics_with_several: dict[str, set[str]] = {}
        self._logged_ms: dict[tuple[str, str], int] = {}

    def hear(self, group: str, topic: str, filter_text: str) -> None:
        """Record that a member of a group uses a filter for a topic."""
        if len(filter_text) > SHOWN_CHARACTERS_MAX:
            # A filter may have thousands of characters. Its beginning is shown, with a hash of the whole text.
            filter_text = f"{filter_text[:SHOWN_CHARACTERS_MAX]}… ({hash(filter_text):x})"
        now_ms, key = self._monotonic_ns() // 1_000_000, (group, topic)
        uses = self._uses.get(key)
        if uses is None:
            uses = self._uses[key] = self._new_uses()
        use = uses.get(filter_text)
        if use is None or now_ms - use.last_ms > WINDOW_MS:
            # Clients choose the texts, and each takes memory.
            if len(uses) >= FILTERS_MAX:
                del uses[min(uses, key=lambda text: uses[text].last_ms)]
            use = uses[filter_text] = _FilterUse(now_ms, now_ms)
        use.last_ms = now_ms
        # Nearly all groups use one filter for a topic, so the search for conflicts is seldom necessary.
        if len(uses) > 1:
            self._topics_with_several.setdefault(group, set()).add(topic)
            self._log_conflict(key, now_ms)

    async def drain(self) -> None:
        """Record the filters of recent receives. Called about once a second."""
        self._drain()

    def _drain(self) -> None:
        recent, self.recent = self.recent, set()
        for group, topic, filter_text in sorted(recent):
            self.hear(group, topic, filter_text)

    def hear_topics(self, group: str, topics: Iterable[str]) -> None:
        """Record that a member subscribes to exactly these topics."""
        self.hear(group, TOPICS, ", ".join(sorted(topics)))

    def conflicts(self, group: str) -> list[Conflict]:
        """Find the topics for which members of a group use conflicting filters now."""
        self._drain()
        now_ms, topics = self._monotonic_ns() // 1_000_000, sorted(self._topics_with_several.get(group, ()))
        candidates = (
            Conflict(topic, self._conflicting(self._uses[group, topic], now_ms)) for topic in topics
        )
        return [conflict for conflict in candidates if conflict.wanted]

    def groups(self) -> list[str]:
        """List the groups with conflicts now, sorted."""
        self._drain()
        return [group for group in sorted(self._topics_with_several) if self.conflicts(group)]

    def _new_uses(self) -> dict[str, _FilterUse]:
        # Clients choose the names, so the number of keys is limited. Removed keys that are in use are soon recorded
        # again.
        while len(self._uses) >= KEYS_MAX:
            key = next(iter(self._uses))
            del self._uses[key]
            self._logged_ms.pop(key, None)
            topics = self._topics_with_several.get(key[0], set())
            topics.discard(key[1])
            if not topics:
                self._topics_with_several.pop(key[0], None)
        return {}

    def _log_conflict(self, key: tuple[str, str], now_ms: int) -> None:
        conflicting = self._conflicting(self._uses[key], now_ms)
        logged_ms = self._logged_ms.get(key)
        if conflicting and (logged_ms is None or now_ms - logged_ms >= LOG_EVERY_MS):
            self._logged_ms[key] = now_ms
            group, topic = key
            if topic == TOPICS:
                logger.warning("members subscribe to different topics group=%s topics=%s", group, conflicting)
            else:
                logger.warning(
                    "members filter differently group=%s topic=%s filters=%s", group, topic, conflicting
                )

    def _conflicting(self, uses: dict[str, _FilterUse], now_ms: int) -> list[str]:
        # Filters of members that have gone are no longer repeated.
        current = {text: use for text, use in uses.items() if now_ms - use.last_ms <= WINDOW_MS}
        # A filter that was not repeated since the first use of the newest filter has been replaced by it.
        newest_first_ms = max((use.first_ms for use in current.values()), default=0)
        repeated = sorted(text for text, use in current.items() if use.last_ms >= newest_first_ms)
        return repeated if len(repeated) > 1 else []
