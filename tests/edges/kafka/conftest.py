"""A Kafka within this process: the mock cluster of librdkafka. For a real Kafka see tests/interop/test_kafka.py."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from tests.bounds import BOUND_S
from tests.node_fixture import RunningNode, running_node

from timeball.client.calls import Calls
from timeball.client.http_calls import HttpCalls
from timeball.edges.kafka.options import BridgeOptions, BridgeQueue

NAMES = itertools.count()


class SmallKafka:
    """A mock of Kafka. A topic exists from its first use on, with four partitions."""

    def __init__(self) -> None:
        self._holder = Producer({"bootstrap.servers": "127.0.0.1:1", "test.mock.num.brokers": 1})
        (broker,) = self._holder.list_topics(timeout=BOUND_S).brokers.values()
        self.bootstrap = f"{broker.host}:{broker.port}"

    def make(self, *names: str) -> None:
        """Create topics."""
        for name in names:
            self._holder.list_topics(name, timeout=BOUND_S)

    def produce(self, topic: str, *records: dict[str, Any]) -> None:
        """Write records to a topic, by default to partition 0. The fields are arguments of `Producer.produce`."""
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for record in records:
            producer.produce(topic, **{"partition": 0, **record})
        assert producer.flush(BOUND_S) == 0

    def produce_header_name(self, topic: str, name: bytes, value: bytes) -> None:
        """Produce a record with a header of this name. confluent_kafka only produces names that are text."""
        (path,) = (Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs").glob("librdkafka*")
        library, error = ctypes.CDLL(str(path)), ctypes.create_string_buffer(512)
        library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = ctypes.c_void_p
        conf = ctypes.c_void_p(library.rd_kafka_conf_new())
        library.rd_kafka_conf_set(conf, b"bootstrap.servers", self.bootstrap.encode(), error, len(error))
        producer = ctypes.c_void_p(library.rd_kafka_new(0, conf, error, len(error)))
        topic_tag, partition_tag, value_tag, header_tag = map(ctypes.c_int, (1, 3, 4, 9))
        sizes, names = (
            [ctypes.c_size_t(len(data)) for data in (value, b"x")],
            map(ctypes.c_char_p, (name, b"x")),
        )
        assert not library.rd_kafka_producev(
            producer, topic_tag, ctypes.c_char_p(topic.encode()), partition_tag, ctypes.c_int32(0),
            value_tag, ctypes.c_char_p(value), sizes[0], header_tag, *names, sizes[1], ctypes.c_int(0),
        )  # fmt: skip
        assert not library.rd_kafka_flush(producer, round(1_000 * BOUND_S))
        library.rd_kafka_destroy(producer)

    def read(self, topic: str) -> list[Any]:
        """Return all records of a topic, from its beginning to its end."""
        properties = {"bootstrap.servers": self.bootstrap, "group.id": "reader", "enable.partition.eof": True}
        consumer, messages, partitions_left = Consumer(properties), [], 4
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(4)])
        while partitions_left:
            message = consumer.poll(BOUND_S)
            assert message is not None
            if message.error() is None:
                messages.append(message)
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF
                partitions_left -= 1
        consumer.close()
        return messages


@pytest.fixture(scope="session")
def kafka() -> SmallKafka:
    return SmallKafka()


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node") / "data") as running:
        yield running


@pytest.fixture
def calls(node: RunningNode) -> Iterator[Calls]:
    calls = Calls(node.endpoint, 30_000)
    yield calls
    calls.close()


@pytest.fixture
def options(kafka: SmallKafka, tmp_path: Path) -> BridgeOptions:
    """The options of a new bridge, whose topics exist."""
    name = f"t{next(NAMES)}"
    kafka.make(name, f"{name}.out", f"{name}.dead", f"{name}.position")
    return BridgeOptions(
        kafka.bootstrap,
        name,
        f"{name}.out",
        f"{name}.dead",
        name,
        f"{name}.position",
        tmp_path / "undeliverable",
    )


@pytest.fixture
def operations(node: RunningNode) -> Iterator[HttpCalls]:
    calls = HttpCalls(node.http_endpoint, 30_000)
    yield calls
    calls.close()


@pytest.fixture
def queue(operations: HttpCalls, calls: Calls, options: BridgeOptions) -> BridgeQueue:
    queue = BridgeQueue(operations, calls, options.topic)
    queue.ensure()
    return queue


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()
