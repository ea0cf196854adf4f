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
from timeball.client.source import Source
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


def taken(made: Make, count: int) -> Counts:
    """Run an intake until it has taken so many records."""
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
    assert taken(made, 5).taken == 5
    kafka.produce(
        options.own, {"value": b"5", "headers": LATER}, {"value": b"6", "partition": 2, "headers": LATER}
    )
    assert taken(made, 2).taken == 2
    positions = node.broker.tables.source_positions.of("", options.name)
    assert positions == {0: 6, 1: 0, 2: 1, 3: 0}
    with node.client() as ball:
        assert ball.get(f"{options.name}-0-5").state == "waiting"


def test_a_message_cancelled_in_its_own_batch_is_never_sent(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, made: Make
) -> None:
    kafka.produce(options.own, {"value": b"0", "key": b"k", "headers": LATER})
    taken(made, 1)
    kafka.produce(
        options.own,
        {"value": b"1", "key": b"k", "headers": LATER},
        {"key": b"k", "headers": [("cancel", b"")]},
        {"value": b"3", "key": b"k", "headers": LATER},
        {"headers": [("cancel", b"")]},
    )
    counts = taken(made, 4)
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
    counts = taken(made, 102)
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
    seen = []
    for result in ([later], [later, soon], [later], [later, record._replace(headers=[])], [later]):
        reader._convert(result)
        seen.append(reader._linger_s)
    assert seen == [intake.FAR_LINGER_S, intake.LINGER_S] * 2 + [intake.FAR_LINGER_S]
    reader._consumer.close()


def test_a_message_that_timeball_refuses_becomes_a_dead_letter(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, made: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # As an operator's --delay-ms-max would have it, which the bridge does not know.
    monkeypatch.setattr(
        node.broker.appender, "_send_small_batch", lambda *_: None
    )  # all batches are admitted
    monkeypatch.setattr(node.broker.appender, "admit", strict(node.broker.appender.admit))
    kafka.produce(options.own, *({"value": value, "headers": LATER} for value in (b"a", b"bad", b"c")))
    counts = taken(made, 3)
    assert (counts.taken, counts.dead) == (3, 1)
    assert node.broker.tables.source_positions.of("", options.name)[0] == 3


def strict(admit: Callable[..., object]) -> Callable[..., object]:
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
    """The broker has room for the second batch again, but the first one is in the log before it or neither is."""
    admit = node.broker.appender.admit

    def full(batch: pa.RecordBatch) -> object:
        if b"0" in batch.column("body").to_pylist():
            stop.set()
            raise OverLimit("no room")
        return admit(batch)

    kafka.produce(options.own, *({"value": b"%d" % at, "headers": LATER} for at in range(2)))
    reader, counts = made()
    with monkeypatch.context() as patch:
        patch.setattr(intake, "BATCH_BYTES", 1)
        patch.setattr(node.broker.appender, "_send_small_batch", lambda *_: None)  # all batches are admitted
        patch.setattr(node.broker.appender, "admit", full)
        reader.run(stop)
    assert stop.is_set() and counts.taken == 0
    assert node.broker.tables.source_positions.of("", options.name)[0] == 0
    assert taken(made, 2).taken == 2


def test_a_batch_that_another_process_has_sent_is_refused_with_conflict(
    kafka: SmallKafka, calls: Calls, options: BridgeOptions, made: Make
) -> None:
    kafka.produce(options.own, {"value": b"0", "headers": LATER})
    reader, _ = made()
    reader._assign_partitions()
    taken(made, 1)
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
    assert taken(make, 1).taken == 1
    with node.client() as ball:
        assert ball.get(f"{options.name}-0-1").state == "waiting"
        with pytest.raises(NotFound):
            ball.get(f"{options.name}-0-0")


def test_records_lost_to_retention_are_counted_once(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, made: Make
) -> None:
    kafka.produce(options.own, {"value": b"0", "headers": LATER})
    taken(made, 1)
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
    sizes = [100, 700, 2_000, 50, None, 900, 10]
    record = Record("t", 0, 0, None, None, [], 0)
    items = [
        (record, None if size is None else BridgeMessage("i", b"x" * (size - 65), None, "", 0, None)) if size != 50
        else (record, BridgeMessage("i", b"", None, "", 0, None))
        for size in sizes
    ]  # fmt: skip
    batches = list(split_batches(items))
    assert [len(batch) for batch in batches] == [2, 1, 3, 1] and [
        item for batch in batches for item in batch
    ] == items
    assert list(split_batches([])) == []
