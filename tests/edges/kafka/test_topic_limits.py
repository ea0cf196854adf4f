"""Limits of topics, as Kafka reports them. For a real Kafka with access rules see tests/interop/test_kafka.py."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AclOperation

from timeball.edges.kafka.delivery import LIMITS_KEPT_MS, TopicLimits
from timeball.io.clock import ManualClock


class Admin:
    """Answers as Kafka's admin client. The topic `closed` may not be written, and `secret` may not be described."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []

    def describe_topics(self, topics: Any, **_: object) -> dict[str, Future[Any]]:
        names = topics.topic_names if hasattr(topics, "topic_names") else topics._topic_names
        self.asked.append(set(names))
        answers: dict[str, Future[Any]] = {name: Future() for name in names}
        for name, answer in answers.items():
            if name == "secret":
                answer.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
            else:
                operations = [AclOperation.READ] + [AclOperation.WRITE] * (name != "closed")
                answer.set_result(SimpleNamespace(authorized_operations=operations))
        return answers

    def describe_configs(self, resources: Iterable[Any], **_: object) -> dict[Any, Future[Any]]:
        answers: dict[Any, Future[Any]] = {resource: Future() for resource in resources}
        for resource, answer in answers.items():
            if resource.name == "secret":
                answer.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
            else:
                answer.set_result({"max.message.bytes": SimpleNamespace(value="100")})
        return answers


def limits(*, is_compressed: bool = False) -> tuple[TopicLimits, Admin, ManualClock]:
    """Return limits after a refresh for three topics, the client of Kafka that answered, and the clock."""
    admin, clock = Admin(), ManualClock()
    topic_limits = TopicLimits(admin, clock, is_compressed=is_compressed)  # type: ignore[arg-type]
    topic_limits.refresh(["open", "closed", "secret"])
    return topic_limits, admin, clock


def test_a_record_beyond_the_limits_of_its_topic_is_refused() -> None:
    topic_limits, *_ = limits()
    assert topic_limits.refusal("open", 100) is None
    reason = "Kafka: 101 bytes; the topic takes at most 100 (max.message.bytes)"
    assert topic_limits.refusal("open", 101) == reason
    assert "may not write" in (topic_limits.refusal("closed", 1) or "")


@pytest.mark.parametrize("topic", ["secret", "never asked for"])
def test_a_record_for_a_topic_without_known_limits_is_tried(topic: str) -> None:
    topic_limits, *_ = limits()
    assert topic_limits.refusal(topic, 10**9) is None


def test_a_compressed_record_is_not_refused_for_its_size() -> None:
    topic_limits, *_ = limits(is_compressed=True)
    assert topic_limits.refusal("open", 101) is None and topic_limits.refusal("closed", 1) is not None


def test_limits_are_asked_for_again_after_limits_kept_ms() -> None:
    topic_limits, admin, clock = limits()
    topic_limits.refresh(["open", "other"])
    clock.advance(LIMITS_KEPT_MS)
    topic_limits.refresh(["open"])
    assert admin.asked == [{"open", "closed", "secret"}, {"other"}, {"open"}]


def test_a_kafka_that_does_not_answer_is_waited_for_only_once() -> None:
    class Silent(Admin):
        def describe_topics(self, topics: Any, **_: object) -> dict[str, Future[Any]]:
            self.answers = super().describe_topics(topics)
            self.late = {name: Future[Any]() for name in self.answers}
            return self.late

    admin, clock = Silent(), ManualClock()
    topic_limits = TopicLimits(admin, clock, is_compressed=False)  # type: ignore[arg-type]
    topic_limits.refresh(["closed"])
    assert topic_limits.refusal("closed", 1) is None
    assert not topic_limits._is_responsive
    admin.late["closed"].set_result(admin.answers["closed"].result())
    assert topic_limits.refusal("closed", 1) is not None
    assert topic_limits._is_responsive
