"""Limits of topics, as Kafka tells them. A real Kafka with rules of access: tests/interop/test_kafka.py."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AclOperation

from timeball.edges.kafka.delivery import KEPT_MS, TopicLimits
from timeball.io.clock import ManualClock


class Admin:
    """Answers as Kafka's admin client: `closed` may not be written, `secret` is not told about."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []

    def describe_topics(self, topics: Any, **_: object) -> dict[str, Future[Any]]:
        names = topics.topic_names if hasattr(topics, "topic_names") else topics._topic_names
        self.asked.append(set(names))
        found: dict[str, Future[Any]] = {name: Future() for name in names}
        for name, answer in found.items():
            if name == "secret":
                answer.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
            else:
                operations = [AclOperation.READ] + [AclOperation.WRITE] * (name != "closed")
                answer.set_result(SimpleNamespace(authorized_operations=operations))
        return found

    def describe_configs(self, resources: Iterable[Any], **_: object) -> dict[Any, Future[Any]]:
        found: dict[Any, Future[Any]] = {resource: Future() for resource in resources}
        for resource, answer in found.items():
            if resource.name == "secret":
                answer.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
            else:
                answer.set_result({"max.message.bytes": SimpleNamespace(value="100")})
        return found


def limits(*, is_compressed: bool = False) -> tuple[TopicLimits, Admin, ManualClock]:
    admin, clock = Admin(), ManualClock()
    found = TopicLimits(admin, clock, is_compressed=is_compressed)  # type: ignore[arg-type]
    found.look(["open", "closed", "secret"])
    return found, admin, clock


def test_a_record_is_refused_that_kafka_would_refuse() -> None:
    found, *_ = limits()
    assert found.refusal("open", 100) is None
    assert found.refusal("open", 101) == "Kafka: 101 bytes; the topic takes at most 100 (max.message.bytes)"
    assert "may not write" in (found.refusal("closed", 1) or "")


@pytest.mark.parametrize("topic", ["secret", "never asked for"])
def test_a_topic_that_is_not_told_about_is_tried(topic: str) -> None:
    found, *_ = limits()
    assert found.refusal(topic, 10**9) is None


def test_a_compressed_record_may_be_smaller_than_its_bytes() -> None:
    found, *_ = limits(is_compressed=True)
    assert found.refusal("open", 101) is None and found.refusal("closed", 1) is not None


def test_kafka_is_asked_again_after_a_while() -> None:
    found, admin, clock = limits()
    found.look(["open", "other"])
    clock.advance(KEPT_MS)
    found.look(["open"])
    assert admin.asked == [{"open", "closed", "secret"}, {"other"}, {"open"}]


def test_a_kafka_that_does_not_answer_is_waited_for_once() -> None:
    class Silent(Admin):
        def describe_topics(self, topics: Any, **_: object) -> dict[str, Future[Any]]:
            found = super().describe_topics(topics)
            self.late = {name: Future[Any]() for name in found}
            self.answers = found
            return self.late

    admin, clock = Silent(), ManualClock()
    found = TopicLimits(admin, clock, is_compressed=False)  # type: ignore[arg-type]
    found.look(["closed"])
    assert found.refusal("closed", 1) is None and not found._is_answered
    admin.late["closed"].set_result(admin.answers["closed"].result())
    assert found.refusal("closed", 1) is not None and found._is_answered
