"""The topics of Kafka and their numbers of partitions, cached for a few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from timeball.io.clock import Clock

KEPT_MS = 10_000
AGAIN_MS = 1_000  # an unknown name is asked for again after this time, and not for each record
TIMEOUT_S = 10.0


class Topics:
    """A cache of the topics. `list_topics` is the method of any Kafka client. Belongs to one thread."""

    def __init__(self, list_topics: Callable[..., Any], clock: Clock) -> None:
        self._list, self._clock = list_topics, clock
        self._known: dict[str, int] = {}  # the number of partitions, by topic
        self._at_ms: int | None = None

    def partitions(self, name: str) -> int:
        """Return the number of a topic's partitions; 0 if the topic does not exist."""
        now_ms = self._clock.monotonic_ns() // 1_000_000
        age_ms = KEPT_MS if self._at_ms is None else now_ms - self._at_ms
        if age_ms >= KEPT_MS or (name not in self._known and age_ms >= AGAIN_MS):
            found = self._list(timeout=TIMEOUT_S).topics
            self._known = {one.topic: len(one.partitions) for one in found.values() if one.error is None}
            self._at_ms = now_ms
        return self._known.get(name, 0)

    def gone(self, names: Iterable[str]) -> list[str]:
        """Return those of the topics that do not exist now, whatever the cache contains."""
        self._at_ms = None
        return [name for name in names if not self.has(name)]

    def has(self, name: str) -> bool:
        """Return whether the topic exists."""
        return self.partitions(name) > 0
