"""Records of Kafka become messages of Timeball, once each, even if they are read again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from tests.edges.kafka.conftest import SmallKafka
from tests.node_fixture import RunningNode, eventually

from timeball.client.calls import Calls
from timeball.client.exchange import Source
from timeball.edges.kafka import intake
from timeball.edges.kafka.intake import Intake, split_batches
from timeball.edges.kafka.options import BridgeOptions, BridgeQueue, Counts
from timeball.edges.kafka.records import BridgeMessage, Headers, Record, envelope_of
from timeball.io.clock import SystemClock
from timeball.model import limits
from timeball.model.errors import Conflict, InvalidDelay, NotFound, OverLimit, SetupError

Make = Callable[[], tuple[Intake, Counts]]
LATER: Headers = [("after", b"1h")]
CANCEL: Headers = [("cancel", b"")]


@pytest.fixture
def made(options: BridgeOptions, queue: BridgeQueue, calls: Calls) -> Iterator[Make]:
    def make() -> tuple[Intake, Counts]:
        counts = Counts()
        return Intake(options, queue, Source(calls, options.name), counts, SystemClock()), counts

    yield make


def run_until_taken(made: Make, count: int) -> Counts:
    """Run an intake until it has taken `count` records, and return its counts."""
    stop, (reader, counts) = threading.Event(), made()
    running = threading.Thread(target=reader.run, args=(stop,))
    running.start()
    eventually(lambda: counts.taken >= count, f"{count} records are taken")
    stop.set()
    running.join()
    return counts


def test_a_restarted_intake_continues_at_the_positions_in_the_log(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, made: Make
) -> None:
    kafka.produce(options.own, *({"value": b"%d" % at, "headers": LATER} for at in range(5)))
    assert run_until_taken(made, 5).taken == 5
    kafka.produce(
        options.own, {"value": b"5", "headers": LATER}, {"value": b"6", "partition": 2, "headers": LATER}
    )
    assert run_until_taken(made, 2).taken == 2
    positions = node.broker.tables.source_positions.of("", options.name)
    assert positions == {0: 6, 1: 0, 2: 1, 3: 0}  # by partition: the offset after the last record
    with node.client() as ball:
        assert ball.get(f"{options.name}-0-5").state == "waiting"


def test_a_message_cancelled_in_its_own_batch_is_never_sent(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, made: Make
) -> None:
    kafka.produce(options.own, {"value": b"0", "key": b"k", "headers": LATER})
    run_until_taken(made, 1)
    kafka.produce(
        options.own,
        {"value": b"1", "key": b"k", "headers": LATER},
        {"key": b"k", "headers": [("cancel", b"")]},
        {"value": b"3", "key": b"k", "headers": LATER},
        {"headers": [("cancel", b"")]},
    )
    counts = run_until_taken(made, 4)
    assert (counts.cancelled, counts.dead) == (2, 1)
    with node.client() as ball:
        states = [ball.get(f"{options.name}-0-{at}").state for at in (0, 3, 4)]
        assert states == ["cancelled", "waiting", "visible"]
        assert [verdict.verdict for verdict in ball.cancel(key=f"{options.name}/k")].count("cancelled") == 1


def test_a_record_with_a_header_name_that_is_not_text_becomes_a_dead_letter(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, queue: BridgeQueue, made: Make
) -> None:
    # Many records, so that Python has specialized the calls before the faulty one.
    kafka.produce(options.own, *({"value": b"0", "headers": LATER} for _ in range(100)))
    kafka.produce_header_name(options.own, b"caf\xe9", b"1")
    kafka.produce(options.own, {"value": b"2", "headers": LATER})
    counts = run_until_taken(made, 102)
    assert (counts.taken, counts.dead) == (102, 1)
    with node.client() as ball:
        scheduled, dead = ball.get(f"{options.name}-0-101"), ball.get(f"{options.name}-0-100")
        assert (scheduled.state, dead.state) == ("waiting", "visible")
    rows = queue.pull(0, 1, 10_000)
    envelope = envelope_of(rows["properties"][0].as_py())
    assert envelope is not None and envelope.topic == options.dead
    assert dict(envelope.headers)["timeball-reason"] == b"a header name is not UTF-8"


def test_a_cancel_waits_for_the_batch_before_it(
    kafka: SmallKafka, options: BridgeOptions, made: Make, stop: threading.Event
) -> None:
    kafka.produce(options.own, {"value": b"0", "key": b"k", "headers": LATER})
    reader, counts = made()
    reader._assign_partitions()
    record = Record(options.own, 0, 0, b"k", b"0", LATER, 1_900_000_000_000)
    for offset, headers in enumerate((LATER, CANCEL, LATER, CANCEL)):
        reader._accept([record._replace(offset=offset, headers=headers)], stop)
    assert counts.cancelled == 2
    reader._pending_send.result()
    assert counts.taken == 4
    reader._consumer.close()


def test_a_record_due_soon_shortens_the_linger_time(made: Make) -> None:
    reader, _ = made()
    record, now_ms = Record(reader._options.own, 0, 0, b"k", b"0", LATER, 0), reader._clock.wall_ms()
    soon, later = (record._replace(timestamp_ms=now_ms + ms - limits.HOUR_MS) for ms in (400, 5_000))
    without_due_time = record._replace(headers=[])  # becomes a dead letter, which is due now
    lingers_s = []
    for batch in ([later], [later, soon], [later], [later, without_due_time], [later]):
        reader._convert(batch)
        lingers_s.append(reader._linger_s)
    assert lingers_s == [intake.FAR_LINGER_S, intake.LINGER_S] * 2 + [intake.FAR_LINGER_S]
    reader._consumer.close()


def test_a_message_that_timeball_refuses_becomes_a_dead_letter(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, made: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # The bridge does not know all limits of the broker, such as --delay-ms-max.
    # Without the path for small batches, all batches pass `admit`.
    monkeypatch.setattr(node.broker.appender, "_send_small_batch", lambda *_: None)
    monkeypatch.setattr(node.broker.appender, "admit", refusing_bad_bodies(node.broker.appender.admit))
    kafka.produce(options.own, *({"value": value, "headers": LATER} for value in (b"a", b"bad", b"c")))
    counts = run_until_taken(made, 3)
    assert (counts.taken, counts.dead) == (3, 1)
    assert node.broker.tables.source_positions.of("", options.name)[0] == 3


def refusing_bad_bodies(admit: Callable[..., object]) -> Callable[..., object]:
    """Return an `admit` that refuses a scheduled message with the body "bad"."""

    def refuse_bad(batch: object) -> object:
        rows = zip(batch.column("body").to_pylist(), batch.column("due_ms").to_pylist())  # type: ignore[attr-defined]
        if any(body == b"bad" and due_ms is not None for body, due_ms in rows):
            raise InvalidDelay("further ahead than this broker takes")
        return admit(batch)

    return refuse_bad


def test_a_stop_while_timeball_is_full_skips_no_record(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, made: Make,
    stop: threading.Event, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The broker could accept the second batch, but not before the first one, which it has refused."""
    admit = node.broker.appender.admit

    def refuse_first(batch: pa.RecordBatch) -> object:
        if b"0" in batch.column("body").to_pylist():
            stop.set()
            raise OverLimit("the disk is full")
        return admit(batch)

    kafka.produce(options.own, *({"value": b"%d" % at, "headers": LATER} for at in range(2)))
    reader, counts = made()
    with monkeypatch.context() as patch:
        patch.setattr(intake, "BATCH_BYTES", 1)
        # Without the path for small batches, all batches pass `admit`.
        patch.setattr(node.broker.appender, "_send_small_batch", lambda *_: None)
        patch.setattr(node.broker.appender, "admit", refuse_first)
        reader.run(stop)
    assert stop.is_set() and counts.taken == 0
    assert node.broker.tables.source_positions.of("", options.name)[0] == 0
    assert run_until_taken(made, 2).taken == 2


def test_a_batch_that_another_process_has_sent_is_refused_with_conflict(
    kafka: SmallKafka, calls: Calls, options: BridgeOptions, made: Make
) -> None:
    kafka.produce(options.own, {"value": b"0", "headers": LATER})
    reader, _ = made()
    reader._assign_partitions()
    run_until_taken(made, 1)
    record = Record(options.own, 0, 0, None, b"0", [("after", b"1h")], 1_795_000_000_000)
    reader._accept([record, record._replace(offset=1)], threading.Event())
    with pytest.raises(Conflict, match="stands at 1"):
        reader._accept([record._replace(offset=2)], threading.Event())
    reader._consumer.close()


def test_an_intake_from_latest_skips_no_record_that_arrives_later(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, queue: BridgeQueue, calls: Calls
) -> None:
    kafka.produce(options.own, {"value": b"before", "headers": LATER})
    latest = replace(options, start="latest")

    def make() -> tuple[Intake, Counts]:
        counts = Counts()
        return Intake(latest, queue, Source(calls, options.name), counts, SystemClock()), counts

    first, _ = make()
    first._assign_partitions()
    first._consumer.close()
    kafka.produce(options.own, {"value": b"later", "headers": LATER})  # while no bridge runs
    assert run_until_taken(make, 1).taken == 1
    with node.client() as ball:
        assert ball.get(f"{options.name}-0-1").state == "waiting"
        with pytest.raises(NotFound):
            ball.get(f"{options.name}-0-0")


def test_records_lost_to_retention_are_counted_once(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, made: Make
) -> None:
    kafka.produce(options.own, {"value": b"0", "headers": LATER})
    run_until_taken(made, 1)
    # The mock keeps 5 MiB of a partition.
    kafka.produce(options.own, *({"value": bytes(900_000), "headers": LATER} for _ in range(8)))
    lost_counts = []
    for _ in range(2):
        reader, counts = made()
        reader._assign_partitions()
        reader._consumer.close()
        lost_counts.append(counts.lost)
    assert lost_counts[0] > 0 and lost_counts[1] == 0
    assert node.broker.tables.source_positions.of("", options.name)[0] == 1 + lost_counts[0]


def test_a_topic_that_was_created_again_is_a_setup_error(
    kafka: SmallKafka, calls: Calls, options: BridgeOptions, made: Make
) -> None:
    source = Source(calls, options.name)
    source.send(pa.RecordBatch.from_pylist([], intake.SCHEMA), {0: 0}, {0: 100})
    source.close()
    reader, _ = made()
    with pytest.raises(
        SetupError, match=r"continues at offset 100 of .*, which ends at 0: the topic was created again"
    ):
        reader.run(threading.Event())


def test_items_are_split_into_batches_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "BATCH_BYTES", 1_000)
    record, overhead_bytes = Record("t", 0, 0, None, None, [], 0), 65  # of the estimate `records.size_bytes`

    def item(size_bytes: int | None) -> intake.Item:
        """Build an item of this size. None: without a message."""
        if size_bytes is None:
            return record, None
        return record, BridgeMessage("i", b"x" * (size_bytes - overhead_bytes), None, "", 0, None)

    items = [item(size_bytes) for size_bytes in (100, 700, 2_000, 65, None, 900, 100)]
    batches = list(split_batches(items))
    assert [len(batch) for batch in batches] == [2, 1, 3, 1]
    assert [each for batch in batches for each in batch] == items
    assert list(split_batches([])) == []
