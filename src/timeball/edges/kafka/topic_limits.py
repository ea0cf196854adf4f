"""Kafka's limits for writes to a topic, which the bridge asks for before it writes a record.

A record that Kafka refuses ends its whole transaction, and costs a new producer. So the bridge does not write a record
that is certain to be refused, because its topic may not be written or its bytes exceed the topic's limit. If Kafka does
not report the limits (an old version, or no permission to ask), the record is tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType

from timeball.io.clock import Clock

KEPT_MS = 10_000  # after this time a limit is asked for again
TIMEOUT_S = 10.0
WAIT_S = 0.5  # no message is delivered meanwhile
SIZE = "max.message.bytes"


class Limit(NamedTuple):
    """The limits of one topic. `size_bytes` limits a record batch. None if Kafka did not report it."""

    may_write: bool = True
    size_bytes: int | None = None


class TopicLimits:
    """Stores the limits of topics, and renews them every few seconds. Belongs to one thread."""

    def __init__(self, admin: AdminClient, clock: Clock, *, is_compressed: bool) -> None:
        self._admin, self._clock, self._is_compressed = admin, clock, is_compressed
        self._known: dict[str, Limit] = {}
        # by topic: when its limits are asked for again, by the boot clock
        self._until_ms: dict[str, int] = {}
        self._is_answered = True  # False after a request without an answer in time, until the next answer

    def refusal(self, topic: str, size_bytes: int) -> str | None:
        """Find the reason for which Kafka would refuse a record of this size. None if Kafka may accept it.

        Call `look` before, which asks for the limits.
        """
        limit = self._known.get(topic, Limit())
        if not limit.may_write:
            return "Kafka: the bridge may not write to this topic"
        # `size_bytes` only counts key, value and headers. A record batch has a few more bytes, and a compressed one
        # fewer.
        if limit.size_bytes is not None and size_bytes > limit.size_bytes and not self._is_compressed:
            return f"Kafka: {size_bytes} bytes; the topic takes at most {limit.size_bytes} ({SIZE})"
        return None

    def look(self, topics: Iterable[str]) -> None:
        """Ask Kafka for the limits of those topics whose limits are unknown or too old.

        Waits up to WAIT_S for the answers. A later answer counts from then on. After a request without an answer,
        further requests do not wait.
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

    # Threads of Kafka's client call these. Each call replaces one entry, so a reader sees the old entry or the new one.

    def _note_operations(self, topic: str, answer: Future[Any]) -> None:
        self._is_answered = True
        if answer.exception() is None and (allowed := answer.result().authorized_operations):
            may_write = AclOperation.WRITE in allowed or AclOperation.ALL in allowed
            self._known[topic] = self._known.get(topic, Limit())._replace(may_write=may_write)

    def _note_size(self, topic: str, answer: Future[Any]) -> None:
        self._is_answered = True
        if answer.exception() is None and (found := answer.result().get(SIZE)) is not None:
            self._known[topic] = self._known.get(topic, Limit())._replace(size_bytes=int(found.value))
