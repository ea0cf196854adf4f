"""Records of Kafka as messages of Timeball: once each, also when they are read again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from tests.edges.kafka.conftest import SmallKafka
from tests.node_fixture import RunningNode, eventually

from timeball import Timeball
from timeball.client.calls import Calls
from timeball.client.source import Source
from timeball.edges.kafka import intake
from timeball.edges.kafka.intake import Intake, pieces
from timeball.edges.kafka.options import BridgeOptions, Counts
from timeball.edges.kafka.records import Headers, Record, Waiting
from timeball.edges.kafka.waiting import WaitingQueue
from timeball.io.clock import SystemClock
from timeball.model import limits
from timeball.model.errors import Conflict, InvalidDelay, NotFound, OverLimit, SetupError

Make = Callable[[], tuple[Intake, Counts]]
LATER: Headers = [("after", b"1h")]
CANCEL: Headers = [("cancel", b"")]


@pytest.fixture
def made(options: BridgeOptions, queue: WaitingQueue, calls: Calls) -> Iterator[Make]:
    def make() -> tuple[Intake, Counts]:
        counts = Counts()
        return Intake(options, queue, Source(calls, options.name), counts, SystemClock()), counts

    yield make


def taken(made: Make, count: int) -> Counts:
    """Run an intake until it has taken so many records."""
    stop, (one, counts) = threading.Event(), made()
    running = threading.Thread(target=one.run, args=(stop,))
    running.start()
    eventually(lambda: counts.taken >= count, f"{count} records are taken")
    stop.set()
    running.join()
    return counts


def test_it_goes_on_where_the_log_says(
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
    with Timeball(node.endpoint) as ball:
        assert ball.get(f"{options.name}-0-5").state == "waiting"


def test_what_is_cancelled_in_its_own_batch_is_never_sent(
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
    with Timeball(node.endpoint) as ball:
        states = [ball.get(f"{options.name}-0-{at}").state for at in (0, 3, 4)]
        assert states == ["cancelled", "waiting", "visible"]
        assert [verdict.verdict for verdict in ball.cancel(key=f"{options.name}/k")].count("cancelled") == 1


def test_a_cancel_waits_for_the_batch_before_it(
    kafka: SmallKafka, options: BridgeOptions, made: Make, stop: threading.Event
) -> None:
    kafka.produce(options.own, {"value": b"0", "key": b"k", "headers": LATER})
    one, counts = made()
    one._begin()
    record = Record(options.own, 0, 0, b"k", b"0", LATER, 1_900_000_000_000)
    for offset, headers in enumerate((LATER, CANCEL, LATER, CANCEL)):
        one._take([record._replace(offset=offset, headers=headers)], stop)
    assert counts.cancelled == 2
    one._sending.result()
    assert counts.taken == 4
    one._consumer.close()


def test_what_is_due_soon_waits_less_long_for_others(made: Make) -> None:
    one, _ = made()
    record, now_ms = Record(one._options.own, 0, 0, b"k", b"0", LATER, 0), one._clock.wall_ms()
    soon, later = (record._replace(timestamp_ms=now_ms + ms - limits.HOUR_MS) for ms in (400, 5_000))
    seen = []
    for found in ([later], [later, soon], [later], [later, record._replace(headers=[])], [later]):
        one._messages(found)
        seen.append(one._linger_s)
    assert seen == [intake.FAR_LINGER_S, intake.LINGER_S] * 2 + [intake.FAR_LINGER_S]
    one._consumer.close()


def test_what_timeball_refuses_is_a_dead_letter_and_holds_nothing_up(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, made: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # As an operator's --delay-ms-max would have it, which the bridge does not know.
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


def test_a_stop_while_timeball_is_full_passes_over_no_record(
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
    one, counts = made()
    with monkeypatch.context() as patch:
        patch.setattr(intake, "BATCH_BYTES", 1)
        patch.setattr(node.broker.appender, "admit", full)
        one.run(stop)
    assert stop.is_set() and counts.taken == 0
    assert node.broker.tables.source_positions.of("", options.name)[0] == 0
    assert taken(made, 2).taken == 2


def test_another_process_of_the_same_source_is_noticed_and_asked_for(
    kafka: SmallKafka, calls: Calls, options: BridgeOptions, made: Make
) -> None:
    kafka.produce(options.own, {"value": b"0", "headers": LATER})
    one, _ = made()
    one._begin()
    taken(made, 1)
    record = Record(options.own, 0, 0, None, b"0", [("after", b"1h")], 1_795_000_000_000)
    one._take([record, record._replace(offset=1)], threading.Event())
    with pytest.raises(Conflict, match="stands at 1"):
        one._take([record._replace(offset=2)], threading.Event())
    one._consumer.close()


def test_one_that_begins_at_the_end_leaves_out_nothing_that_comes_later(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, queue: WaitingQueue, calls: Calls
) -> None:
    kafka.produce(options.own, {"value": b"before", "headers": LATER})
    latest = replace(options, start="latest")

    def make() -> tuple[Intake, Counts]:
        counts = Counts()
        return Intake(latest, queue, Source(calls, options.name), counts, SystemClock()), counts

    first, _ = make()
    first._begin()
    first._consumer.close()
    kafka.produce(options.own, {"value": b"later", "headers": LATER})  # while no bridge runs
    assert taken(make, 1).taken == 1
    with Timeball(node.endpoint) as ball:
        assert ball.get(f"{options.name}-0-1").state == "waiting"
        with pytest.raises(NotFound):
            ball.get(f"{options.name}-0-0")


def test_a_topic_that_was_made_anew_is_said(
    kafka: SmallKafka, calls: Calls, options: BridgeOptions, made: Make
) -> None:
    source = Source(calls, options.name)
    source.send(pa.RecordBatch.from_pylist([], intake.SCHEMA), {0: 0}, {0: 100})
    source.close()
    one, _ = made()
    with pytest.raises(
        SetupError, match=r"stands at offset 100 of .*, which ends at 0: the topic was made anew"
    ):
        one.run(threading.Event())


def test_a_batch_is_cut_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "BATCH_BYTES", 1_000)
    sizes = [100, 700, 2_000, 50, None, 900, 10]
    record = Record("t", 0, 0, None, None, [], 0)
    items = [
        (record, None if size is None else Waiting("i", b"x" * (size - 65), None, "", 0, None)) if size != 50
        else (record, Waiting("i", b"", None, "", 0, None))
        for size in sizes
    ]  # fmt: skip
    found = list(pieces(items))
    assert [len(piece) for piece in found] == [2, 1, 3, 1] and [
        item for piece in found for item in piece
    ] == items
    assert list(pieces([])) == []
