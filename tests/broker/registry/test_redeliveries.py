"""Counts of messages that wait for their next delivery: equal to a model's, also after a checkpoint and a replay."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.consuming.subscriber import AGAIN, GROUP, TOPIC, engine, receive, send
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming.redelivery_rows import copy_properties, nack_properties
from timeball.broker.registry import redeliveries
from timeball.broker.registry.redeliveries import Redeliveries, keys_of, spans
from timeball.model.message import LOG_SCHEMA, Kind, build_rows, encode_properties, with_seq

KEYS = [("g", "orders"), ("g", "bills"), ("h", "orders"), None]
NUMBERS = st.lists(st.integers(1, 60), max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=5), st.integers(0, 3)),
        st.tuples(st.just("end"), NUMBERS),
        st.tuples(st.just("restore")),
    ),
    max_size=40,
)


def numbers(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """An array of numbers of messages."""
    return np.array(values, dtype=np.int64)


@given(STEPS)
def test_counts_of_redeliveries_equal_those_of_a_model(steps: list[tuple[object, ...]]) -> None:
    waiting, model, next_number = Redeliveries(), dict[int, tuple[str, str]](), 1
    for name, *arguments in steps:
        if name == "add":
            keys, gap = arguments
            first = next_number + gap
            next_number = first + len(keys)
            waiting.add(keys, numbers(list(range(first, next_number))))
            model |= {first + at: key for at, key in enumerate(keys) if key is not None}
        elif name == "restore":
            facts, waiting = waiting.facts(), Redeliveries()
            waiting.restore(facts)
        else:
            (ended,) = arguments
            waiting.end(numbers(ended))
            for number in ended:
                model.pop(number, None)
        model_keys = list(model.values())
        assert waiting.counts() == {key: model_keys.count(key) for key in model_keys}
        assert [waiting.count(key) for key in KEYS] == [model_keys.count(key) for key in KEYS]
        assert waiting.waiting_rows == len(model)
        assert [n for n in range(1, next_number + 1) if waiting.is_waiting(n)] == sorted(model)


def test_a_number_that_occurs_twice_in_one_call_is_subtracted_once() -> None:
    waiting = Redeliveries()
    waiting.add([KEYS[0]] * 3, numbers([7, 8, 9]))
    waiting.end(numbers([9, 7, 9]))
    assert (waiting.counts(), waiting.waiting_rows) == ({KEYS[0]: 1}, 1)
    assert [waiting.is_waiting(number) for number in (6, 7, 8, 9, 10)] == [False, False, True, False, False]


def test_ended_redeliveries_are_swept_from_memory() -> None:
    waiting = Redeliveries()
    for first in range(0, 200_000, 100):
        waiting.add([KEYS[0]] * 100, np.arange(first, first + 100))
        waiting.end(np.arange(first, first + 100))
    assert len(waiting._number) <= 2 * redeliveries.SWEEP_ROWS_MIN


def test_consecutive_numbers_of_a_key_are_one_range() -> None:
    assert spans(numbers([3, 4, 5, 9, 11, 12]), numbers([0] * 6)) == {0: [(3, 3), (9, 1), (11, 2)]}
    assert spans(numbers([0, 1, 2, 3, 4, 5]), numbers([7, 7, 0, 7, 0, 0])) == {
        0: [(2, 1), (4, 2)],
        7: [(0, 2), (3, 1)],
    }
    assert spans(numbers([]), numbers([])) == {}


def scheduled_rows(texts: list[str | None], topics: list[str]) -> pa.RecordBatch:
    """Scheduled messages with these properties and topics, as rows of the log."""
    rows = build_rows(
        len(texts), kind=int(Kind.SCHEDULED), topic=topics, properties=pa.array(texts, pa.string()),
        due_ms=np.arange(len(texts)), source_seq=np.arange(len(texts)),
    )  # fmt: skip
    return with_seq(rows, 10)


def test_a_scheduled_message_names_its_group_and_topic() -> None:
    of_orders = encode_properties({"a": "ORIGIN_GROUP", **copy_properties("g", "orders", 1)})
    of_first = encode_properties({**copy_properties("g", "first", 1), "z": "1"})
    # The name of a retry topic decides, before the properties.
    rows = scheduled_rows(
        [of_orders, of_orders, of_first, "", None],
        ["%RETRY%g_orders", "%DLQ%g", "%RETRY%g_a_b", "%RETRY%g_orders", "%RETRY%g_orders"],
    )
    assert keys_of(rows) == [("g", "orders"), ("g", "orders"), ("g", "a_b"), None, None]


def test_replayed_rows_of_the_log_change_the_counts() -> None:
    text = encode_properties({**copy_properties("g", "orders", 1), **nack_properties("", 5)})

    def row(
        kind: Kind, source_seq: int | None, properties: str | None = None, due_ms: int | None = 5
    ) -> pa.RecordBatch:
        return build_rows(
            1, kind=int(kind), topic="%RETRY%g_orders", due_ms=due_ms, source_seq=source_seq, properties=properties
        )  # fmt: skip

    # These rows have the numbers from 10 on: 10 to 13 are redeliveries, and 14 and 15 are not.
    rows = [
        row(Kind.SCHEDULED, 1, text), row(Kind.SCHEDULED, 2, text), row(Kind.SCHEDULED, 3, text),
        row(Kind.SCHEDULED, 4, text), row(Kind.SCHEDULED, 5, ""), row(Kind.SCHEDULED, None, text),
        row(Kind.MOVED, 10, text), row(Kind.CANCEL, 11), row(Kind.RELEASE, 12, text), row(Kind.RELEASE, 99, text),
        row(Kind.CANCEL, 13, None, None),
    ]  # fmt: skip
    waiting = Redeliveries()
    waiting.replay(with_seq(pa.Table.from_batches(rows, LOG_SCHEMA).combine_chunks().to_batches()[0], 10))
    assert waiting.counts() == {("g", "orders"): 2}
    # A move keeps the number, and a cancel without a due time ends a half message and no redelivery.
    assert [number for number in range(10, 22) if waiting.is_waiting(number)] == [10, 13]


def counts_of_world(world: World) -> dict[tuple[str, str], int]:
    """The broker's counts by group and topic."""
    waiting: Redeliveries = world.broker.redeliveries
    assert waiting.waiting_rows == sum(waiting.counts().values())
    return waiting.counts()


@on_node()
async def test_a_message_given_back_with_a_delay_waits_until_its_release_also_across_a_crash(
    world: World,
) -> None:
    await send(world, [b"a", b"b", b"c"])
    receipts = (await receive(world, 3)).receipts
    await engine(world).nack(receipts[0], 5_000)
    await engine(world).nack(receipts[1], 9_000)
    await engine(world).nack(receipts[2], 0)
    assert counts_of_world(world) == {(GROUP, TOPIC): 2}, "the third one is visible at once"
    for restores in (world.restart, crash_of(world), world.checkpoint, crash_of(world)):
        await restores()
        assert counts_of_world(world) == {(GROUP, TOPIC): 2}
    await world.advance(5_000)
    assert counts_of_world(world) == {(GROUP, TOPIC): 1}
    again = await receive(world, 3)
    await engine(world).nack(again.receipts[0], 60_000)
    assert counts_of_world(world) == {(GROUP, TOPIC): 2}, (
        "a message that is given back again counts for its topic"
    )
    await world.advance(9_000)
    assert counts_of_world(world) == {(GROUP, TOPIC): 1}
    await crash_of(world)()
    assert counts_of_world(world) == {(GROUP, TOPIC): 1}


def crash_of(world: World) -> Callable[[], Awaitable[None]]:
    """Build the step that kills the broker and starts it with the synced files."""

    async def crash() -> None:
        await world.abandon()
        world.files = world.files.crash(survival="nothing")
        await world.start()

    return crash


@on_node()
async def test_a_redelivery_is_counted_until_it_is_cancelled_and_while_it_is_moved(
    world: World,
) -> None:
    await send(world, [b"a", b"b", b"c"], unique_key=["a", "b", "c"])
    for receipt in (await receive(world, 3)).receipts:
        await engine(world).nack(receipt, 5_000)
    (verdict,) = await world.broker.cancel(ids=["a"], topic=AGAIN)
    assert verdict.verdict == "cancelled" and counts_of_world(world) == {(GROUP, TOPIC): 2}
    (verdict,) = await world.broker.reschedule(ids=["b"], topic=AGAIN, delay_ms=20_000)
    assert verdict.verdict == "rescheduled" and counts_of_world(world) == {(GROUP, TOPIC): 2}
    await crash_of(world)()
    assert counts_of_world(world) == {(GROUP, TOPIC): 2}
    await world.advance(5_000)
    assert counts_of_world(world) == {(GROUP, TOPIC): 1}
    await world.advance(15_000)
    assert counts_of_world(world) == {}
    await crash_of(world)()
    assert counts_of_world(world) == {}
