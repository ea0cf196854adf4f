"""A read finds the last committed position, however far from the end it is."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from tests.bounds import BOUND_S
from tests.edges.kafka.conftest import SmallKafka

from timeball.edges.kafka import delivery
from timeball.edges.kafka.delivery import POSITION_KEY, make_topics, read_position
from timeball.edges.kafka.options import BridgeOptions


def test_the_last_committed_position_is_read(
    kafka: SmallKafka, options: BridgeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_position(options) is None
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": options.name})
    producer.init_transactions(BOUND_S)
    for offset in (0, 5, 17):
        producer.begin_transaction()
        producer.produce(options.position_topic, b'{"offset":%d}' % offset, POSITION_KEY, partition=0)
        producer.commit_transaction(BOUND_S)
    assert read_position(options) == 17
    # Aborted transactions can lie between the position and the end, so that the first read finds no position.
    monkeypatch.setattr(delivery, "LOOK_BACK_OFFSETS", 1)
    assert read_position(options) == 17


def test_existing_topics_are_not_created_again(options: BridgeOptions) -> None:
    make_topics(options, {options.dead: 1, options.position_topic: 1})
