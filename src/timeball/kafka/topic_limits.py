"""The limits that Kafka sets for writes to a topic, asked before a record is written.

A record that Kafka refuses ends its whole transaction, and costs a new producer. So a record that is certain to be
refused is not written: its topic may not be written, or its bytes exceed the topic's limit. Where Kafka does not tell
(an old version, or no permission to ask), records are tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType

from timeball.clock import Clock

KEPT_MS = 10_000
TIMEOUT_S = 10.0
WAIT_S = 0.5  # nothing is delivered meanwhile
SIZE = "max.message.bytes"


class Limit(NamedTuple):
    """The limits of one topic. `size_bytes`: of a record batch; None where Kafka did not tell."""

    may_write: bool = True
    size_bytes: int | None = None


class TopicLimits:
    """Remembers the limits of topics, and renews them every few seconds. Belongs to one thread."""

    def __init__(self, admin: AdminClient, clock: Clock, *, is_compressed: bool) -> None:
        self._admin, self._clock, self._is_compressed = admin, clock, is_compressed
        self._known: dict[str, Limit] = {}
        self._until_ms: dict[str, int] = {}
        self._is_answered = True  # until a request is not answered in time

    def refusal(self, topic: str, size_bytes: int) -> str | None:
        """Return why Kafka would refuse a record of so many bytes; None when it may take it. See `look`."""
        limit = self._known.get(topic, Limit())
        if not limit.may_write:
            return "Kafka: the bridge may not write to this topic"
        # Keys, values and headers alone: a record batch has some more bytes, and a compressed one fewer.
        if limit.size_bytes is not None and size_bytes > limit.size_bytes and not self._is_compressed:
            return f"Kafka: {size_bytes} bytes; the topic takes at most {limit.size_bytes} ({SIZE})"
        return None

    def look(self, topics: Iterable[str]) -> None:
        """Ask Kafka for the limits of those topics that are not known, or not for sure any more.

        Waits a moment for the answers. One that comes later counts from then on, and one that never comes costs no
        further wait.
        """
        now_ms = self._clock.boot_ms()
        wanted = {topic for topic in topics if self._until_ms.get(topic, 0) <= now_ms}
        if not wanted:
            return
        self._until_ms |= dict.fromkeys(wanted, now_ms + KEPT_MS)
        asked = [*self._ask_operations(wanted), *self._ask_sizes(wanted)]
        if self._is_answered:
            self._is_answered = not wait(asked, timeout=WAIT_S).not_done

    def _ask_operations(self, topics: Collection[str]) -> Iterator[Future[Any]]:
        asked = self._admin.describe_topics(
            TopicCollection(list(topics)), include_authorized_operations=True, request_timeout=TIMEOUT_S
        )
        for topic, answer in asked.items():
            answer.add_done_callback(partial(self._note_operations, topic))
            yield answer

    def _ask_sizes(self, topics: Collection[str]) -> Iterator[Future[Any]]:
        wanted = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        for resource, answer in self._admin.describe_configs(wanted, request_timeout=TIMEOUT_S).items():
            answer.add_done_callback(partial(self._note_size, resource.name))
            yield answer

    # Called by a thread of Kafka's client. Each replaces one entry, so that a reader sees the old one or the new one.

    def _note_operations(self, topic: str, answer: Future[Any]) -> None:
        self._is_answered = True
        if answer.exception() is None and (allowed := answer.result().authorized_operations):
            may_write = AclOperation.WRITE in allowed or AclOperation.ALL in allowed
            self._known[topic] = self._known.get(topic, Limit())._replace(may_write=may_write)

    def _note_size(self, topic: str, answer: Future[Any]) -> None:
        self._is_answered = True
        if answer.exception() is None and (found := answer.result().get(SIZE)) is not None:
            self._known[topic] = self._known.get(topic, Limit())._replace(size_bytes=int(found.value))
