"""One topic: its queues are made when they are asked for, and what is saved of it is what it is."""

from __future__ import annotations

import numpy as np
import pytest
from tests.crash_files import CrashFiles

from timeball.broker.registry.topic import Queues, Topic, TopicFacts
from timeball.broker.registry.topic_config import TopicConfig
from timeball.log.queue_index import QueueIndexes


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


def test_what_is_saved_is_what_it_is() -> None:
    facts = TopicFacts(4, "MULTI_TAG", TopicConfig(2, None, perm=4), emptied_before_seq=9, made_by="anna")
    topic = Topic("t", queues(4), facts)
    assert topic.facts() == facts
    assert (topic.read_queues, topic.write_queues, topic.perm) == (2, 4, 4)
