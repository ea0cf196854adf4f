"""What a topic may be like, and attributes that are set and taken away one by one."""

from __future__ import annotations

import pytest

from timeball import limits
from timeball.broker.registry.topic_config import TopicConfig, altered, at_least, check
from timeball.errors import OutOfRange, RequestError

MAX = limits.QUEUES_PER_TOPIC_MAX


@pytest.mark.parametrize(
    "config",
    [
        TopicConfig(),
        TopicConfig(1, 0),
        TopicConfig(0, 1),
        TopicConfig(MAX, MAX),
        TopicConfig(perm=0),
        TopicConfig(perm=7, order=True, sys_flag=3),
    ],
)
def test_what_rocketmq_allows_is_allowed(config: TopicConfig) -> None:
    check(config)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (TopicConfig(0, 0), OutOfRange),
        (TopicConfig(-1, 1), OutOfRange),
        (TopicConfig(1, MAX + 1), OutOfRange),
        (TopicConfig(perm=8), RequestError),
        (TopicConfig(perm=-1), RequestError),
        (TopicConfig(sys_flag=4), RequestError),
    ],
)
def test_what_cannot_be_is_refused(config: TopicConfig, error: type[Exception]) -> None:
    with pytest.raises(error):
        check(config)


def test_queues_are_shown_and_not_hidden() -> None:
    assert at_least(TopicConfig(1, 4, perm=4), 3) == TopicConfig(3, 4, perm=4)
    assert at_least(TopicConfig(), 3) == TopicConfig()


def test_attributes_change_one_by_one() -> None:
    found = altered({}, "+message.type=DELAY, +cleanup.policy=DELETE")
    assert found == {"message.type": "DELAY", "cleanup.policy": "DELETE"}
    assert altered(found, "") == found
    assert altered(found, "-cleanup.policy,+message.type=FIFO,-queue.type") == {"message.type": "FIFO"}
    assert found["message.type"] == "DELAY", "the old ones are not touched"


@pytest.mark.parametrize(
    "changes",
    [
        "message.type=DELAY", "+message.type", "-message.type=DELAY", "+", "+=", "+a=b", "-a", "+message.type=delay",
        "+cleanup.policy=COMPACTION",
    ],
)  # fmt: skip
def test_attributes_that_mean_nothing_here_are_refused(changes: str) -> None:
    with pytest.raises(RequestError):
        altered({}, changes)
