"""Topics are cached, and a new topic is found within a second."""

from __future__ import annotations

from types import SimpleNamespace

from timeball.edges.kafka.options import Topics
from timeball.io.clock import ManualClock


def test_topics_are_cached_and_a_new_topic_is_found_within_a_second() -> None:
    partitions, requests, clock = {"a": 3}, list[float](), ManualClock()

    def list_topics(timeout: float) -> SimpleNamespace:
        requests.append(timeout)
        topics = [
            SimpleNamespace(topic=name, partitions=range(n), error=None) for name, n in partitions.items()
        ]
        return SimpleNamespace(topics={topic.topic: topic for topic in topics})

    topics = Topics(list_topics, clock)
    assert topics.partitions("a") == 3 and topics.has("a") and not topics.has("b") and len(requests) == 1
    partitions["b"] = 1
    assert not topics.has("b") and len(requests) == 1
    clock.advance(1_000)
    assert topics.has("b") and len(requests) == 2
    partitions["a"] = 4
    assert topics.partitions("a") == 3
    clock.advance(10_000)
    assert topics.partitions("a") == 4 and len(requests) == 3
