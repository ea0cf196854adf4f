"""The bridge and a real Kafka: each record is delivered once at its due time, whichever process is killed.

The tests count records as a reader with `read_committed` sees them. In a siege the bridge is killed at each step,
otherwise at four of them.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AclOperation
from tests.bounds import BOUND_S
from tests.cli.processes import Running
from tests.interop import killed_bridge
from tests.interop.kafka_server import KafkaServer
from tests.interop.stock_broker import StockBroker
from tests.interop.stock_clients import command
from tests.node_fixture import eventually
from tests.rounds import IS_SIEGE, rounds

from timeball.edges.kafka.records import Undeliverable

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("kafka")]

KILLS = rounds(4, 30)
STEPS = list(killed_bridge.STEPS)
if not IS_SIEGE:
    STEPS = [STEPS[index] for index in (0, 2, 5, 6)]  # two while a batch is sent, two at the commit
NUMBERS = itertools.count()
Headers = list[tuple[str, bytes]]


class Place:
    """Kafka, Timeball, and one test's topics: the bridge reads from `own`, and writes to `out` and `dead`.

    `file` is the file of undeliverable records.
    """

    def __init__(self, kafka: KafkaServer, timeball: StockBroker, name: str, file: Path) -> None:
        self.kafka, self.timeball, self.name, self.file = kafka, timeball, name, file
        self.own, self.out, self.dead = f"{name}.in", f"{name}.out", f"{name}.in.dead"
        self.bridges: list[Running] = []

    def make(self, partitions: int = 3, **config: str) -> None:
        """Create the topics `own` and `out`. `config` configures `out`, with underscores in place of dots."""
        self.kafka.make(self.own, partitions=partitions)
        self.kafka.make(self.out, partitions=partitions, **config)

    def arguments(self) -> list[str]:
        """Return the arguments of `timeball kafka`."""
        return [
            "--in", self.own, "--out", self.out, "--bootstrap", self.kafka.bootstrap,
            "--endpoint", f"http://{self.timeball.http}", "--flight", self.timeball.endpoint, "--json",
            "--status-every", "100ms", "--undeliverable", str(self.file),
        ]  # fmt: skip

    def bridge(self, *, ready: bool = True) -> Running:
        """Start a bridge, and wait until it is ready, unless `ready` is False."""
        self.bridges.append(Running("kafka", *self.arguments()))
        if ready:
            self.bridges[-1].wait_line(event="ready")
        return self.bridges[-1]

    def killed_bridge(self, step: str, times: int) -> Running:
        """Start a bridge that kills itself when it comes to a step for the n-th time (`times`)."""
        program = [sys.executable, killed_bridge.__file__, step, str(times), *self.arguments()]
        self.bridges.append(Running(command=program))
        return self.bridges[-1]

    def produce(self, records: list[dict[str, Any]]) -> None:
        """Write records to `own`, and wait until Kafka has them. The fields are arguments of `Producer.produce`."""
        producer = Producer(
            {"bootstrap.servers": self.kafka.bootstrap, "acks": "all", "enable.idempotence": True}
        )
        for record in records:
            producer.produce(self.own, **record)
        assert producer.flush(BOUND_S) == 0

    def read(self, topic: str, *, isolation: str = "read_committed") -> list[Any]:
        """Return all records of a topic, from its beginning to its end."""
        properties = {
            "bootstrap.servers": self.kafka.bootstrap, "group.id": "reader", "enable.auto.commit": False,
            "auto.offset.reset": "earliest", "isolation.level": isolation, "enable.partition.eof": True,
            "check.crcs": True,
        }  # fmt: skip
        consumer = Consumer(properties)
        partitions = consumer.list_topics(topic, timeout=BOUND_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        partitions_left, records = set(partitions), []
        while partitions_left:
            message = consumer.poll(BOUND_S)
            assert message is not None, f"no answer about {topic}"
            if message.error() is None:
                records.append(message)
            elif message.error().code() == KafkaError._PARTITION_EOF:
                partitions_left.discard(message.partition())
        consumer.close()
        return records

    def wait_for(self, topic: str, count: int) -> list[Any]:
        """Wait until a topic has at least `count` records, and return all of them."""
        records: list[Any] = []

        def has_enough() -> bool:
            records[:] = self.read(topic)
            return len(records) >= count

        eventually(has_enough, f"{count} records in {topic}")
        return records


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    server = KafkaServer(tmp_path_factory.mktemp("kafka") / "kafka", command("kafka"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def timeball(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockBroker]:
    broker = StockBroker(tmp_path_factory.mktemp("timeball") / "data")
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def place(kafka: KafkaServer, timeball: StockBroker, tmp_path: Path) -> Iterator[Place]:
    place = Place(kafka, timeball, f"t{next(NUMBERS)}", tmp_path / "undeliverable.jsonl")
    yield place
    for bridge in place.bridges:
        bridge.end(signal.SIGKILL)


def values(messages: list[Any]) -> Counter[str]:
    """Return how often each value occurs."""
    return Counter(message.value().decode() for message in messages)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# ---- what comes out ---------------------------------------------------------------------------------------------


def test_a_record_is_delivered_unchanged_at_its_due_time(place: Place) -> None:
    place.make()
    place.kafka.make(f"{place.name}.other", partitions=3)
    begin_ms = now_ms()
    avro = b"\x00\x00\x00\x00\x07" + bytes(range(256))  # as a schema registry's serializer writes
    headers = [("a", b"1"), ("a", b"\xff\x00"), ("traceparent", b""), ("none", None), ("after", b"300ms")]
    at = [("at", str(begin_ms + 600).encode())]
    there = [("after", b"PT0.5S"), ("deliver-to", f"{place.name}.other".encode())]
    place.produce(
        [
            {"value": avro, "key": b"\x00key", "headers": headers, "partition": 2},
            {"value": None, "key": b"tombstone", "headers": at, "partition": 1},
            {"value": b"", "headers": there, "partition": 0},
        ]
    )  # fmt: skip
    bridge = place.bridge()
    first, second = sorted(place.wait_for(place.out, 2), key=lambda message: message.key())
    assert (first.value(), first.key(), first.partition()) == (avro, b"\x00key", 2)
    assert first.headers() == headers
    assert (second.value(), second.key(), second.partition()) == (None, b"tombstone", 1)
    (other,) = place.wait_for(f"{place.name}.other", 1)
    assert (other.value(), other.key(), other.partition(), other.headers()) == (b"", None, 0, there)
    # A benchmark measures how late records are.
    assert second.timestamp()[1] >= begin_ms + 600 and first.timestamp()[1] >= begin_ms + 300
    assert place.read(place.dead) == []
    assert bridge.end() == 0
    last = bridge.lines[-1]
    assert (last["taken"], last["delivered"], last["dead"], last["behind"]) == (3, 3, 0, 0)


def test_a_record_cancels_pending_records_with_its_key(place: Place) -> None:
    place.make(partitions=1)
    soon, late = [("after", b"3s")], [("after", b"3200ms")]
    cancel = [("cancel", b"")]
    bridge = place.bridge()
    place.produce(
        [{"value": b"a", "key": b"k1", "headers": soon}, {"value": b"b", "key": b"k 2", "headers": soon}]
    )
    bridge.wait_line(event="status", taken=2)
    place.produce(
        [
            {"value": b"c", "key": b"k3", "headers": soon},
            {"key": b"k 2", "headers": cancel},
            {"key": b"k3", "headers": cancel},  # the bridge may read it together with the record
            {"value": b"d", "key": b"k3", "headers": late},  # a record after the cancel is not cancelled
        ]
    )
    bridge.wait_line(event="status", taken=6)
    bridge.wait_line(event="status", delivered=2)
    assert values(place.read(place.out)) == {"a": 1, "d": 1}
    with place.timeball.client() as ball:
        # Clients of Timeball name the record by the same key.
        assert ball.cancel(key=f"{place.own}/k1")[0].verdict == "released"
    assert bridge.end() == 0 and bridge.lines[-1]["cancelled"] == 2


def test_a_record_that_cannot_be_delivered_is_a_dead_letter(place: Place) -> None:
    place.make(partitions=1, max_message_bytes="20000")
    # Value, headers, and a part of the reason in the dead letter.
    wrong: list[tuple[bytes, Headers, str]] = [
        (b"no header", [], "there are 0"),
        (b"soon", [("after", b"soon")], "units"),
        (b"far", [("at", b"9999-12-31T00:00:00Z")], "days ahead"),
        (b"nowhere", [("after", b"1s"), ("deliver-to", b"no.such.topic")], "no topic"),
        # The client that produces the following records needs a higher limit.
        (b"x" * 5_000_000, [("after", b"1s")], "5000000 bytes"),
        # Timeball accepts this value, and the topic of --out refuses it.
        (b"y" * 30_000, [("after", b"1ms")], "Kafka: "),
        (b"headers", [("after", b"1s"), ("h", b"z" * 40_000)], "key and headers"),
    ]
    place.produce([{"value": value, "key": b"k", "headers": headers} for value, headers, _ in wrong[:4]])
    producer = Producer({"bootstrap.servers": place.kafka.bootstrap, "message.max.bytes": 8_000_000})
    for value, headers, _ in wrong[4:]:
        producer.produce(place.own, value, b"k", headers=headers)
    assert producer.flush(BOUND_S) == 0
    place.produce([{"value": b"good", "headers": [("after", b"1ms")]}])
    place.bridge()
    dead = place.wait_for(place.dead, len(wrong))
    assert len(dead) == len(wrong)
    by_offset: dict[int, tuple[str, bytes]] = {}
    for message in dead:
        dead_headers = dict(message.headers())
        reason = dead_headers["timeball-reason"].decode()
        by_offset[int(dead_headers["timeball-offset"])] = reason, message.value()
    for offset, (value, _, part_of_reason) in enumerate(wrong):
        reason, dead_value = by_offset[offset]
        assert part_of_reason in reason, reason
        is_large = len(value) == 5_000_000  # the dead letter is written without it
        assert dead_value == (b"" if is_large else value)
    assert values(place.wait_for(place.out, 1)) == {"good": 1}


def test_without_their_topic_dead_letters_are_written_to_the_local_file(place: Place) -> None:
    place.make(partitions=1)
    bridge = place.bridge()
    place.produce([{"value": b"first", "headers": [("after", b"1ms")]}])
    place.wait_for(place.out, 1)
    admin = place.kafka.admin()
    admin.delete_topics([place.dead])[place.dead].result(BOUND_S)
    place.produce([{"value": b"wrong", "headers": []}, {"value": b"good", "headers": [("after", b"1ms")]}])
    assert values(place.wait_for(place.out, 2)) == {"first": 1, "good": 1}
    bridge.wait_line(event="status", filed=1)


# ---- records that Kafka refuses at their instants --------------------------------------------------------------------

SMALL = 100_000  # a topic's max.message.bytes


def text(number: int) -> bytes:
    """Return a number as a record's value, key or header."""
    return f"{number}".encode()


def test_undeliverable_records_delay_none_of_ten_thousand_others(place: Place) -> None:
    """There are seven kinds of undeliverable records. Each becomes a dead letter, and the others are delivered once."""
    place.make(partitions=3, max_message_bytes=f"{SMALL}")
    closed, gone, positions = f"{place.name}.closed", f"{place.name}.gone", f"timeball.{place.own}.position"
    place.kafka.make(closed, gone)
    place.kafka.forbid(closed, AclOperation.WRITE)
    soon = ("after", b"4s")
    undeliverable: list[tuple[bytes, Headers]] = [
        (b"no header", []),
        (b"wrong", [("after", b"soon")]),
        (b"nowhere", [soon, ("deliver-to", b"no.such.topic")]),
        (b"closed", [soon, ("deliver-to", closed.encode())]),
        (b"positions", [soon, ("deliver-to", positions.encode())]),
        (b"z" * 3 * SMALL, [soon]),  # small enough when compressed, but the bridge does not compress
        # Its topic is deleted before it is rescheduled to now.
        (b"deleted", [("after", b"9h"), ("deliver-to", gone.encode())]),
    ]
    count, chance = 10_000, random.Random(7)
    # Three records of each kind are at random places.
    places = sorted(chance.sample(range(count), 3 * len(undeliverable)))
    by_number = dict(zip(places, undeliverable * 3, strict=True))
    producer = Producer({"bootstrap.servers": place.kafka.bootstrap, "compression.type": "zstd"})
    due_ms = now_ms() + 15_000  # later than the bridge takes to read all of them
    for number in range(count):
        if number in by_number:
            value, headers = by_number[number]
            producer.produce(place.own, value, text(number), headers=headers)
        else:
            record_due_ms = due_ms + chance.randrange(4_000)
            producer.produce(place.own, text(number), text(number), headers=[("at", text(record_due_ms))])
        producer.poll(0)
    assert producer.flush(BOUND_S) == 0
    bridge = place.bridge()
    bridge.wait_line(event="status", taken=count)
    admin = place.kafka.admin()
    admin.delete_topics([gone])[gone].result(BOUND_S)
    with place.timeball.client() as ball:
        for number in (number for number, (value, _) in by_number.items() if value == b"deleted"):
            (moved,) = ball.reschedule(key=f"{place.own}/{number}", at=datetime.now(UTC))
            assert moved.verdict == "rescheduled"
    bridge.wait_line(event="status", delivered=count)
    delivered = values(place.read(place.out))
    assert delivered == Counter(f"{number}" for number in range(count) if number not in by_number)
    dead = place.read(place.dead)
    assert Counter(message.value() for message in dead) == Counter(value for value, _ in by_number.values())
    bridge.wait_line(event="status", behind=0)
    assert bridge.end() == 0 and bridge.lines[-1]["filed"] == 0
    late_ms = sorted(m.timestamp()[1] - int(dict(m.headers())["at"]) for m in place.read(place.out))
    assert late_ms[0] >= 0, "early"
    print(f"{len(by_number)} undeliverable of {count} records; the others late p50 {late_ms[len(late_ms) // 2]} ms, "
          f"p99 {late_ms[len(late_ms) * 99 // 100]} ms, most {late_ms[-1]} ms")  # fmt: skip


def test_records_that_kafka_refuses_are_found_without_the_limit_of_the_topic(place: Place) -> None:
    """The bridge may not read the limit of the topic. It halves a refused batch until the large records are found."""
    place.make(partitions=3, max_message_bytes=f"{SMALL}")
    place.kafka.forbid(place.out, AclOperation.DESCRIBE_CONFIGS)
    producer = Producer({"bootstrap.servers": place.kafka.bootstrap, "compression.type": "zstd"})
    count, large = 200, {0, 77, 78, 199}
    for number in range(count):
        value = text(number) if number not in large else text(number) * SMALL
        producer.produce(place.own, value, text(number), headers=[("after", b"1ms")])
    assert producer.flush(BOUND_S) == 0
    bridge = place.bridge()
    small = {f"{number}" for number in range(count) if number not in large}
    assert values(place.wait_for(place.out, count - len(large))) == dict.fromkeys(small, 1)
    dead = {
        int(message.key()): dict(message.headers())["timeball-reason"] for message in place.read(place.dead)
    }
    assert dead.keys() == large and all(b"size too large" in reason.lower() for reason in dead.values())
    assert bridge.end() == 0


def test_a_dead_letter_that_is_refused_is_in_the_local_file(place: Place) -> None:
    """The dead letter topic has the limit of --out, so that it takes these dead letters only without their values.

    Later it refuses all dead letters.
    """
    place.make(partitions=1, max_message_bytes=f"{SMALL}")
    place.kafka.make(place.dead, max_message_bytes=f"{SMALL}")
    producer = Producer({"bootstrap.servers": place.kafka.bootstrap, "compression.type": "zstd"})
    for number in range(2):
        producer.produce(place.own, b"z" * 3 * SMALL, b"k", headers=[("after", b"1ms"), ("h", b"\xff")])
        producer.produce(place.own, text(number), headers=[("after", b"2ms")])
    assert producer.flush(BOUND_S) == 0
    bridge = place.bridge()
    assert values(place.wait_for(place.out, 2)) == {"0": 1, "1": 1}
    dead = place.wait_for(place.dead, 2)
    assert [message.value() for message in dead] == [b"", b""]
    assert all(b"file of undeliverable records" in dict(m.headers())["timeball-reason"] for m in dead)
    place.kafka.forbid(place.dead, AclOperation.WRITE)
    producer.produce(place.own, b"no header", b"key")
    producer.produce(place.own, b"2", headers=[("after", b"3ms")])
    assert producer.flush(BOUND_S) == 0
    assert values(place.wait_for(place.out, 3)) == {"0": 1, "1": 1, "2": 1}
    bridge.wait_line(event="status", filed=3)
    assert bridge.end() == 0
    lines = [msgspec.json.decode(line, type=Undeliverable) for line in place.file.read_bytes().splitlines()]
    assert [(line.offset, line.value, line.key) for line in lines] == [
        (0, b"z" * 3 * SMALL, b"k"), (2, b"z" * 3 * SMALL, b"k"), (4, b"no header", b"key"),
    ]  # fmt: skip
    assert lines[0].headers == [("after", b"1ms"), ("h", b"\xff")] and lines[0].to == place.out
    # The next bridge continues after these records.
    place.produce([{"value": b"3", "headers": [("after", b"1ms")]}])
    place.bridge()
    assert values(place.wait_for(place.out, 4))["3"] == 1


def test_records_of_an_aborted_transaction_are_not_counted_as_behind(place: Place) -> None:
    """Aborted records and the marks of a transaction have offsets, but a reader of committed records gets none."""
    place.make(partitions=1)
    producer = Producer({"bootstrap.servers": place.kafka.bootstrap, "transactional.id": place.name})
    producer.init_transactions(BOUND_S)
    for is_kept in (True, False):
        producer.begin_transaction()
        producer.produce(place.own, b"a", headers=[("after", b"1ms")])
        producer.flush(BOUND_S)
        producer.commit_transaction(BOUND_S) if is_kept else producer.abort_transaction(BOUND_S)
    bridge = place.bridge()
    bridge.wait_line(event="status", delivered=1)
    # The count is updated once a second, so that thirty lines contain an updated one.
    eventually(lambda: sum(line.get("delivered") == 1 for line in bridge.lines) > 30, "thirty more lines")
    assert bridge.end() == 0 and bridge.lines[-1]["behind"] == 0


# ---- kills ------------------------------------------------------------------------------------------------------


def batch(count: int, first: int = 0, within_ms: int = 400) -> list[dict[str, Any]]:
    """Return `count` records with numbers from `first` on as values, and random delays below `within_ms`."""
    chance = random.Random(first)
    return [
        {
            "value": f"{number}".encode(),
            "key": f"k{number % 50}".encode(),
            "headers": [("after", f"{chance.randrange(within_ms)}ms".encode())],
        }
        for number in range(first, first + count)
    ]


def check_delivered_once(place: Place, count: int) -> None:
    """Raise AssertionError unless the numbers below `count` are delivered, each once, and no dead letter is written."""
    counts = values(place.wait_for(place.out, count))
    doubled = [number for number, times in counts.items() if times > 1]
    assert not doubled, f"{len(doubled)} records are there more than once: {sorted(doubled)[:5]}"
    expected = {f"{number}" for number in range(count)}
    assert counts.keys() == expected
    assert place.read(place.dead) == []


@pytest.mark.siege
@pytest.mark.parametrize("step", STEPS)
def test_each_record_is_delivered_once_when_the_bridge_is_killed_at_a_step(place: Place, step: str) -> None:
    place.make()
    place.produce(batch(300))
    place.produce([{"key": b"none", "headers": [("cancel", b"")]}])
    # The first batch and the first transaction only store the first positions, without records.
    times = 2 if killed_bridge.STEPS[step][1] in ("_commit", "send", "submit") else 1
    killed = place.killed_bridge(step, times)
    assert killed.wait_end() == -signal.SIGKILL
    place.bridge()
    place.produce(batch(100, 300))
    check_delivered_once(place, 400)


def test_a_position_outside_of_the_transaction_is_noticed(place: Place) -> None:
    """The negative control: this bridge is killed after the records and before the position, and delivers twice."""
    place.make()
    place.produce(batch(200))
    killed = place.killed_bridge(killed_bridge.OUTSIDE, 1)
    assert killed.wait_end() == -signal.SIGKILL
    place.bridge()
    with pytest.raises(AssertionError, match="there more than once"):
        # With 201, `wait_for` waits for a doubled record, too.
        check_delivered_once(place, 201)


@pytest.mark.siege
def test_each_record_is_delivered_once_when_bridge_timeball_and_kafka_are_killed(place: Place) -> None:
    place.make()
    bridge, sent = place.bridge(), 0
    victims = ["bridge", "kafka", "timeball", "bridge", "kafka and bridge"]
    for number in range(KILLS):
        place.produce(batch(1_000, sent, within_ms=1_500))
        sent += 1_000
        time.sleep(random.Random(number).uniform(0.05, 0.8))
        victim = victims[number % len(victims)]
        if "kafka" in victim:
            place.kafka.kill()
        if "timeball" in victim:
            place.timeball.kill()
        if "bridge" in victim:
            bridge.end(signal.SIGKILL)
        if "timeball" in victim:
            place.timeball.start()
        if "kafka" in victim:
            place.kafka.start()
        if "bridge" in victim:
            bridge = place.bridge(ready=False)
    check_delivered_once(place, sent)
    assert bridge.end() == 0


def test_a_second_bridge_with_the_same_name_takes_over(place: Place) -> None:
    place.make()
    first = place.bridge()
    place.produce(batch(200))
    place.bridge()
    place.produce(batch(200, 200))
    check_delivered_once(place, 400)
    assert first.wait_end() == 4 and "another bridge of this name" in "\n".join(first.errors)


def test_an_error_for_the_operator_names_its_cause(place: Place) -> None:
    place.kafka.make(place.out)
    missing = place.bridge(ready=False)
    assert missing.wait_end() == 4 and "--in" in "\n".join(missing.errors)
    place.kafka.make(place.own)
    ready = place.bridge().wait_line(event="ready")
    assert ready == {
        "event": "ready", "name": place.own, "in": place.own, "out": place.out, "dead": place.dead,
        "topic": "kafka-" + place.own.replace(".", "_"),
    }  # fmt: skip
