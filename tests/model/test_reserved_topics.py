"""The topic names that clients may not write to, and the text of the refusal."""

from __future__ import annotations

import pytest

from timeball.model import rules

NOT_WRITABLE = [
    rules.SCHEDULE_TOPIC, "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "rmq_sys_wheel_timer", "rmq_sys_",
    "rmq_sys_REVIVE_LOG_DefaultCluster",
]  # fmt: skip


@pytest.mark.parametrize("topic", NOT_WRITABLE)
def test_the_brokers_own_topics_refuse_sends_with_rocketmqs_text(topic: str) -> None:
    assert rules.forbidden(topic) == f"Sending message to topic[{topic}] is forbidden."
    assert rules.conflict(topic) == f"The topic[{topic}] is conflict with system topic."


@pytest.mark.parametrize("topic", ["TBW102", "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC"])
def test_some_system_topics_may_be_written_to_but_not_created(topic: str) -> None:
    assert rules.forbidden(topic) is None
    assert rules.conflict(topic) == f"The topic[{topic}] is conflict with system topic."


@pytest.mark.parametrize(
    "topic", ["orders", "RMQ_SYS_wheel_timer", "%RETRY%g", "schedule_topic_xx", "my_rmq_sys_"]
)
def test_other_topics_may_be_written_to_and_created(topic: str) -> None:
    assert rules.forbidden(topic) is None
    assert rules.conflict(topic) is None


def test_the_schedule_topic_has_rocketmqs_name() -> None:
    assert rules.SCHEDULE_TOPIC == "SCHEDULE_TOPIC_" + "X" * 4
