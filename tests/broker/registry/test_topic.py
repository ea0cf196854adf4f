"""One topic: its queues are made when they are asked for, and what is saved of it is what it is."""

from __future__ import annotations

import numpy as np
import pytest
from tests.crash_files import CrashFiles

from timeball.broker.registry.topic import (
    Queues,
    Topic,
    TopicConfig,
    TopicFacts,
    altered_attributes,
    at_least,
    check_config,
)
from timeball.log.queue_index import QueueIndexes
from timeball.model import limits
from timeball.model.errors import OutOfRange, RequestError


def queues(count: int) -> Queues:
    return Queues(QueueIndexes(CrashFiles()), "t", count)


def test_a_queue_is_made_when_it_is_asked_for_and_stays_the_same() -> None:
    found = queues(1_000)
    assert (len(found), len(found._made)) == (1_000, 0)
    found[7].index.append(*[np.array([1])] * 3)
    found[7].next_offset = 5
    assert (found[7].index.max_offset, found[7].next_offset, len(found._made)) == (1, 5, 1)
    assert (found[8].index.topic, found[8].index.queue_id) == ("t", 8)


def test_queues_are_a_sequence() -> None:
    found = queues(3)
    assert [queue.index.queue_id for queue in found] == [0, 1, 2]
    assert found[:2] == [found[0], found[1]]
    for at in (3, -1):
        with pytest.raises(IndexError, match=f"queue {at} of 3"):
            found[at]
    found.widen(5)
    found.widen(2)
    assert len(found) == 5


def test_a_topic_is_restored_from_its_facts() -> None:
    facts = TopicFacts(4, "MULTI_TAG", TopicConfig(2, None, perm=4), emptied_before_seq=9, made_by="anna")
    topic = Topic("t", queues(4), facts)
    assert topic.facts() == facts
    assert (topic.read_queues, topic.write_queues, topic.perm) == (2, 4, 4)


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
def test_configurations_that_rocketmq_allows_are_accepted(config: TopicConfig) -> None:
    check_config(config)


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
def test_invalid_configurations_are_refused(config: TopicConfig, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_config(config)


def test_queues_are_shown_and_not_hidden() -> None:
    assert at_least(TopicConfig(1, 4, perm=4), 3) == TopicConfig(3, 4, perm=4)
    assert at_least(TopicConfig(), 3) == TopicConfig()


def test_attributes_change_one_by_one() -> None:
    found = altered_attributes({}, "+message.type=DELAY, +cleanup.policy=DELETE")
    assert found == {"message.type": "DELAY", "cleanup.policy": "DELETE"}
    assert altered_attributes(found, "") == found
    assert altered_attributes(found, "-cleanup.policy,+message.type=FIFO,-queue.type") == {
        "message.type": "FIFO"
    }
    assert found["message.type"] == "DELAY", "the old ones are not touched"


@pytest.mark.parametrize(
    "changes",
    [
        "message.type=DELAY", "+message.type", "-message.type=DELAY", "+", "+=", "+a=b", "-a", "+message.type=delay",
        "+cleanup.policy=COMPACTION",
    ],
)  # fmt: skip
def test_unknown_attributes_and_values_are_refused(changes: str) -> None:
    with pytest.raises(RequestError):
        altered_attributes({}, changes)
