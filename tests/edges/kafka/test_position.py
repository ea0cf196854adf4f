"""The position is the last one that was committed, however far back it stands."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from tests.bounds import BOUND_S
from tests.edges.kafka.conftest import SmallKafka

from timeball.edges.kafka import delivery
from timeball.edges.kafka.delivery import KEY, make_topics, read_position
from timeball.edges.kafka.options import BridgeOptions


def test_the_last_committed_position_counts(
    kafka: SmallKafka, options: BridgeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_position(options) is None
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": options.name})
    producer.init_transactions(BOUND_S)
    for offset in (0, 5, 17):
        producer.begin_transaction()
        producer.produce(options.position_topic, b'{"offset":%d}' % offset, KEY, partition=0)
        producer.commit_transaction(BOUND_S)
    assert read_position(options) == 17
    # Of a topic with more behind it than one look reads, as aborted transactions leave: it looks further back.
    monkeypatch.setattr(delivery, "BACK", 1)
    assert read_position(options) == 17


def test_topics_that_are_there_are_not_made(options: BridgeOptions) -> None:
    make_topics(options, {options.dead: 1, options.position_topic: 1})
