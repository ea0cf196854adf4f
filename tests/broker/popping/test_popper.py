"""POP: each message to one consumer at a time, until its receipt comes back, its time is over, or it is given up."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.broker.on_node import batch, column, on_node
from tests.crash.world import World

from timeball import limits
from timeball.broker import retry
from timeball.broker.filters import compile_filter
from timeball.broker.groups import SubscriptionGroup
from timeball.broker.popping.copies import retry_topic
from timeball.broker.popping.popper import Ask, Popped, Popper, Receipt
from timeball.errors import InvalidMessage, NotFound, OutOfRange
from timeball.message import decode_properties

MINUTE_MS = 60_000
GROUP, TOPIC = "g", "orders"


def popper(world: World) -> Popper:
    found: Popper = world.broker.popper
    return found


async def send(world: World, bodies: list[bytes], **columns: Any) -> None:
    if TOPIC not in world.broker.topics():
        await world.broker.create_topic(TOPIC, 2)
    await world.broker.send(batch(len(bodies), topic=[TOPIC] * len(bodies), body=bodies, **columns))


async def pop(world: World, rows: int = 32, wait_ms: int = 0, **ask: Any) -> Popped:
    return await popper(world).pop(Ask(GROUP, TOPIC, rows=rows, **ask), wait_ms)


def bodies(popped: Popped) -> list[bytes]:
    return [bytes(body) for body in column(popped.rows, "body")]


async def pass_time(world: World, ms: int) -> None:
    """Let time pass and whatever is due come back: into the retry topic or to its place."""
    world.clock.advance(ms)
    popper(world).wake()
    now_ms = world.clock.wall

    def all_back() -> bool:
        held = [one for w in popper(world).windows.all() for one in w.held.values()]
        return all(one.deadline_ms > now_ms for one in held)

    await world.until(all_back, "all whose time is over has come back")


def stored(world: World, topic: str = TOPIC) -> dict[int, int]:
    found: dict[int, int] = world.broker.offsets(GROUP, topic)
    return found


# ---- handing out and receipts -------------------------------------------------------------------------------


@on_node()
async def test_each_message_is_handed_out_once_and_acked(world: World) -> None:
    await send(world, [b"%d" % i for i in range(10)])
    first, second = await pop(world, 6), await pop(world, 6)
    assert sorted(bodies(first) + bodies(second)) == [b"%d" % i for i in range(10)]
    assert stored(world) == {0: 0, 1: 0}
    assert popper(world).ack(first.receipts(GROUP) + second.receipts(GROUP)) == [True] * 10
    assert stored(world) == {0: 5, 1: 5}
    assert not (await pop(world)).rows.num_rows


@on_node()
async def test_a_receipt_counts_once_and_only_for_its_group(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world)).receipts(GROUP)
    wrong = [
        receipt._replace(group="other"), receipt._replace(offset=1), receipt._replace(topic="none"),
        receipt._replace(queue_id=7), receipt._replace(pop_ms=receipt.pop_ms + 1), receipt._replace(pop_ms=-1),
    ]  # fmt: skip
    assert popper(world).ack(wrong) == [False] * len(wrong)
    assert popper(world).ack([receipt, receipt]) == [True, False]


@on_node()
async def test_groups_do_not_take_from_each_other(world: World) -> None:
    await send(world, [b"a"])
    assert bodies(await pop(world)) == [b"a"]
    assert bodies(await popper(world).pop(Ask("h", TOPIC), 0)) == [b"a"]


@on_node()
async def test_one_queue_may_be_asked_for(world: World) -> None:
    await send(world, [b"0", b"1"], queue_id=pa.array([0, 1], pa.int32()))
    assert bodies(await pop(world, queue_id=1)) == [b"1"]
    assert bodies(await pop(world)) == [b"0"]


@on_node()
async def test_the_offset_stands_before_the_first_message_in_hand(world: World) -> None:
    await send(world, [b"0", b"1", b"2"], queue_id=pa.array([0, 0, 0], pa.int32()))
    receipts = (await pop(world)).receipts(GROUP)
    popper(world).ack([receipts[0], receipts[2]])
    assert stored(world)[0] == 1
    popper(world).ack([receipts[1]])
    assert stored(world)[0] == 3


@on_node()
async def test_what_cannot_be_is_refused(world: World) -> None:
    await send(world, [b"a"])
    for wrong in ({"rows": 0}, {"rows": limits.POP_ROWS_MAX + 1}, {"queue_id": 9}, {"queue_id": -2},
                  {"invisible_ms": 0}, {"invisible_ms": limits.INVISIBLE_MS_MAX + 1}):  # fmt: skip
        with pytest.raises(OutOfRange):
            await pop(world, **wrong)
    with pytest.raises(NotFound):
        await popper(world).pop(Ask(GROUP, "none"), 0)
    with pytest.raises(InvalidMessage, match="topic"):
        await popper(world).pop(Ask("g" * 100, "t" * 100), 0)


@on_node()
async def test_a_new_group_begins_where_it_is_told_or_at_a_young_queues_beginning(world: World) -> None:
    await send(world, [b"a"])
    assert bodies(await pop(world, from_max=True)) == [b"a"]
    assert bodies(await popper(world).pop(Ask("h", TOPIC, from_max=False), 0)) == [b"a"]


@on_node()
async def test_an_offset_set_by_somebody_else_counts(world: World) -> None:
    await send(world, [b"0", b"1", b"2"], queue_id=pa.array([0, 0, 0], pa.int32()))
    receipts = (await pop(world)).receipts(GROUP)
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 2})
    assert bodies(await pop(world)) == [b"2"]
    assert popper(world).ack(receipts[:2]) == [False, False]


# ---- time -----------------------------------------------------------------------------------------------------


@on_node()
async def test_what_is_not_acked_in_time_comes_again_counted_and_says_whence(world: World) -> None:
    await send(
        world, [b"a"], tag=["t"], keys=["k"], unique_key=["u"], properties=["DELAY\x013\x02MINE\x01x\x02"]
    )
    popped = await pop(world, invisible_ms=MINUTE_MS)
    await pass_time(world, MINUTE_MS - 1)
    assert not (await pop(world)).rows.num_rows
    await pass_time(world, 1)
    again = await pop(world)
    assert bodies(again) == [b"a"]
    assert [column(again.rows, n)[0] for n in ("reconsume_times", "tag", "keys", "unique_key", "due_ms")] == [
        1, "t", "k", "u", None,
    ]  # fmt: skip
    assert decode_properties(column(again.rows, "properties")[0]) == {
        "MINE": "x", "RETRY_TOPIC": TOPIC, "1ST_POP_TIME": str(popped.pop_ms), "ORIGIN_GROUP": GROUP,
    }  # fmt: skip
    assert popper(world).ack(popped.receipts(GROUP)) == [False]
    assert popper(world).ack(again.receipts(GROUP)) == [True]
    assert stored(world) == {0: 0, 1: 0} or sum(stored(world).values()) == 1
    assert stored(world, retry_topic(GROUP, TOPIC)) == {0: 1}


@on_node()
async def test_after_its_last_try_a_message_is_a_dead_letter(world: World) -> None:
    world.broker.parts.groups.update(SubscriptionGroup(GROUP, retry_max_times=2))
    await send(world, [b"a"])
    for times in range(3):
        popped = await pop(world)
        assert column(popped.rows, "reconsume_times") == [times]
        await pass_time(world, MINUTE_MS)
    assert not (await pop(world)).rows.num_rows
    dead = await world.broker.read_queue(retry.dead_letter_topic(GROUP), 0, 0, 10)
    assert column(dead, "body") == [b"a"] and column(dead, "reconsume_times") == [3]


@on_node()
async def test_more_time_means_a_new_receipt(world: World) -> None:
    await send(world, [b"a"])
    (old,) = (await pop(world, invisible_ms=MINUTE_MS)).receipts(GROUP)
    new = await popper(world).change_invisible(old, 3 * MINUTE_MS)
    assert new is not None and new != old
    assert popper(world).ack([old]) == [False]
    assert await popper(world).change_invisible(old, 1) is None
    await pass_time(world, 2 * MINUTE_MS)
    assert not (await pop(world)).rows.num_rows
    assert popper(world).ack([new]) == [True]


@on_node()
async def test_less_time_brings_it_back_sooner(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world, invisible_ms=MINUTE_MS)).receipts(GROUP)
    await popper(world).change_invisible(receipt, 10)
    await pass_time(world, 10)
    assert bodies(await pop(world)) == [b"a"]


@on_node()
async def test_a_message_may_be_given_up_at_once(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world)).receipts(GROUP)
    assert await popper(world).dead_letter(receipt)
    assert not await popper(world).dead_letter(receipt)
    assert column(await world.broker.read_queue("%DLQ%g", 0, 0, 9), "body") == [b"a"]
    assert sum(stored(world).values()) == 1


@on_node()
async def test_names_that_make_the_same_retry_topic_are_kept_apart(world: World) -> None:
    assert retry_topic("a_b", "c") == retry_topic("a", "b_c")
    await world.broker.send(batch(1, topic=["c"]))
    await world.broker.send(batch(1, topic=["b_c"], body=[b"other"]))
    assert (await popper(world).pop(Ask("a_b", "c"), 0)).rows.num_rows
    await pass_time(world, MINUTE_MS)
    taken = await popper(world).pop(Ask("a", "b_c", rows=10), 0)
    assert bodies(taken) == [b"other"]
    assert bodies(await popper(world).pop(Ask("a_b", "c"), 0)) == [b"body"]


# ---- waiting --------------------------------------------------------------------------------------------------


@on_node()
async def test_a_pop_waits_for_what_is_sent_and_for_what_is_released(world: World) -> None:
    await send(world, [b"seen"])
    popper(world).ack((await pop(world)).receipts(GROUP))
    waiting = asyncio.create_task(pop(world, wait_ms=30_000))
    await world.until(lambda: world.broker.waiters._count, "it waits")
    await send(world, [b"later"], due_ms=[world.clock.wall + 1_000])
    assert not waiting.done()
    await world.advance(1_000)
    assert bodies(await waiting) == [b"later"]


@on_node()
async def test_a_pop_waits_for_what_comes_back(world: World) -> None:
    await send(world, [b"a"])
    await pop(world)
    waiting = asyncio.create_task(pop(world, wait_ms=30_000))
    await world.until(lambda: world.broker.waiters._count, "it waits")
    await pass_time(world, MINUTE_MS)
    assert bodies(await waiting) == [b"a"]


@on_node()
async def test_of_many_that_wait_as_many_get_something_as_there_is(world: World) -> None:
    await send(world, [b"seen"])
    popper(world).ack((await pop(world)).receipts(GROUP))
    waiting = [asyncio.create_task(pop(world, 1, wait_ms=30_000)) for _ in range(20)]
    await world.until(lambda: popper(world)._lines.length == 20, "they wait")
    assert world.broker.waiters._count == 1  # one watches for all of them
    await send(world, [b"%d" % i for i in range(15)])
    await world.until(lambda: sum(task.done() for task in waiting) == 15, "15 got something")
    await send(world, [b"%d" % i for i in range(15, 20)])
    found = [body for popped in await asyncio.gather(*waiting) for body in bodies(popped)]
    assert sorted(found) == sorted(b"%d" % i for i in range(20))


@on_node()
async def test_a_consumer_may_ask_whether_there_is_something(world: World) -> None:
    await send(world, [b"a"])
    assert await popper(world).wait_for_some(Ask(GROUP, TOPIC), 0)
    await pop(world)
    assert not await popper(world).wait_for_some(Ask(GROUP, TOPIC), 0)
    waiting = asyncio.create_task(popper(world).wait_for_some(Ask(GROUP, TOPIC), 30_000))
    await world.until(lambda: world.broker.waiters._count, "it waits")
    await send(world, [b"b"])
    assert await waiting


# ---- filters --------------------------------------------------------------------------------------------------


@on_node()
async def test_only_what_is_wanted_is_handed_out_and_the_rest_is_done(world: World) -> None:
    await send(
        world,
        [b"%d" % i for i in range(6)],
        tag=["Aa", "BB", "x"] * 2,
        queue_id=pa.array([0] * 6, pa.int32()),
    )
    popped = await pop(world, wanted=compile_filter("BB"))  # "Aa" has the same hash
    assert bodies(popped) == [b"1", b"4"]
    assert stored(world)[0] == 1
    popper(world).ack(popped.receipts(GROUP))
    assert stored(world)[0] == 6


@on_node()
async def test_a_filter_that_passes_few_finds_them_far_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timeball.broker.popping.taking.SCAN_ENTRIES", 4)
    await send(world, [b"x"] * 50 + [b"hit"], tag=["no"] * 50 + ["yes"])
    assert bodies(await pop(world, wanted=compile_filter("yes"))) == [b"hit"]


# ---- in order -------------------------------------------------------------------------------------------------


async def send_in_order(world: World, count: int = 4) -> None:
    await send(world, [b"%d" % i for i in range(count)], queue_id=pa.array([0] * count, pa.int32()))


@on_node()
async def test_in_order_a_queue_gives_nothing_while_any_of_it_is_in_hand(world: World) -> None:
    await send_in_order(world)
    popped = await pop(world, 2, in_order=True)
    assert bodies(popped) == [b"0", b"1"] and popped.times == [0, 0]
    waiting = asyncio.create_task(pop(world, 2, in_order=True, wait_ms=30_000))
    receipts = popped.receipts(GROUP)
    popper(world).ack(receipts[:1])
    assert not (await pop(world, in_order=True)).rows.num_rows
    assert stored(world)[0] == 1
    popper(world).ack(receipts[1:])
    assert bodies(await waiting) == [b"2", b"3"]


@on_node()
async def test_in_order_what_comes_back_is_the_next_counted_and_under_a_new_receipt(world: World) -> None:
    await send_in_order(world)
    popped = await pop(world, 2, in_order=True)
    popper(world).ack(popped.receipts(GROUP)[:1])
    await pass_time(world, MINUTE_MS)
    again = await pop(world, 2, in_order=True)
    assert bodies(again) == [b"1", b"2"] and again.times == [1, 0]
    assert popper(world).ack(popped.receipts(GROUP)[1:]) == [False]
    assert popper(world).ack(again.receipts(GROUP)) == [True, True]
    assert retry_topic(GROUP, TOPIC) not in world.broker.topics()


@on_node()
async def test_in_order_more_time_keeps_the_receipt(world: World) -> None:
    await send_in_order(world, 1)
    (receipt,) = (await pop(world, in_order=True)).receipts(GROUP)
    assert await popper(world).change_invisible(receipt, 2 * MINUTE_MS) == receipt
    await pass_time(world, MINUTE_MS)
    assert not (await pop(world, in_order=True)).rows.num_rows
    await pass_time(world, MINUTE_MS)
    assert bodies(await pop(world, in_order=True)) == [b"0"]


@on_node()
async def test_in_order_the_same_attempt_is_answered_again(world: World) -> None:
    await send_in_order(world)
    first = await pop(world, 2, in_order=True, attempt_id="x")
    assert not (await pop(world, 2, in_order=True, attempt_id="y")).rows.num_rows
    again = await pop(world, 2, in_order=True, attempt_id="x")
    assert bodies(again) == bodies(first) and again.times == [0, 0]
    assert popper(world).ack(first.receipts(GROUP)) == [False, False]
    assert popper(world).ack(again.receipts(GROUP)) == [True, True]


# ---- bounds ---------------------------------------------------------------------------------------------------


@on_node()
async def test_a_queue_gives_no_more_than_may_be_in_hand(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_HELD_PER_QUEUE_MAX", 3)
    await send(world, [b"%d" % i for i in range(8)])
    popped = await pop(world)
    assert popped.rows.num_rows == 6 and popped.rest == 2
    waiting = asyncio.create_task(pop(world, wait_ms=30_000))
    await world.until(lambda: world.broker.waiters._count, "it waits")
    popper(world).ack(popped.receipts(GROUP)[:1])
    assert (await waiting).rows.num_rows == 1


@on_node()
async def test_no_more_is_in_hand_altogether_than_may_be(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_HELD_MAX", 3)
    await send(world, [b"%d" % i for i in range(8)])
    popped = await pop(world)
    assert popped.rows.num_rows == 3
    assert not (await popper(world).pop(Ask("h", TOPIC), 0)).rows.num_rows
    popper(world).ack(popped.receipts(GROUP))
    assert (await popper(world).pop(Ask("h", TOPIC), 0)).rows.num_rows == 3


@on_node()
async def test_what_a_group_holds_for_long_waits_in_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_HELD_PER_QUEUE_MAX", 4)
    await send_in_order(world)
    receipts = (await pop(world)).receipts(GROUP)
    assert await popper(world).change_invisible(receipts[0], 10 * MINUTE_MS)
    assert stored(world)[0] == 1
    popper(world).ack(receipts[1:])
    await pass_time(world, 5 * MINUTE_MS)
    assert not (await pop(world)).rows.num_rows
    await world.advance(5 * MINUTE_MS)
    again = await pop(world)
    assert bodies(again) == [b"0"] and column(again.rows, "reconsume_times") == [1]


@on_node()
async def test_one_slow_message_does_not_hold_up_the_offset_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_SPAN_MAX", 10)
    await send_in_order(world, 20)
    slow, *others = (await pop(world, 32)).receipts(GROUP)
    popper(world).ack(others)
    await world.until(lambda: stored(world)[0] == 20, "the log keeps the slow one")
    assert popper(world).ack([slow]) == [False]
    await world.advance(MINUTE_MS)
    assert bodies(await pop(world)) == [b"0"]


# ---- failures and restarts ------------------------------------------------------------------------------------


@on_node()
async def test_a_consumer_that_goes_away_leaves_nothing_in_hand(world: World) -> None:
    await send(world, [b"a"])
    asking = asyncio.create_task(pop(world))
    await asyncio.sleep(0)  # it has taken and waits for the reader
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert bodies(await pop(world)) == [b"a"]


async def crash(world: World) -> None:
    """The process is killed: what is saved is saved."""
    assert world.node is not None
    await world.node.upkeep.save_small_state()
    await world.abandon()
    world.clock.advance(1_000)
    await world.start()


@on_node()
async def test_after_a_crash_what_was_in_hand_is_handed_out_again(world: World) -> None:
    await send_in_order(world)
    receipts = (await pop(world)).receipts(GROUP)
    popper(world).ack([receipts[0], receipts[3]])
    await crash(world)
    assert bodies(await pop(world)) == [b"1", b"2", b"3"]


@on_node()
async def test_a_receipt_of_before_a_crash_counts_until_its_message_is_handed_out_again(world: World) -> None:
    await send_in_order(world)
    receipts = (await pop(world)).receipts(GROUP)
    await crash(world)
    assert popper(world).ack([receipts[2], receipts[2]._replace(offset=99)]) == [True, False]
    popped = await pop(world)
    assert bodies(popped) == [b"0", b"1", b"3"]
    assert popper(world).ack(receipts) == [False] * 4
    assert popper(world).ack(popped.receipts(GROUP)) == [True] * 3
    assert stored(world)[0] == 4
    assert popper(world).windows.count.rows == 0


@on_node()
async def test_after_a_stop_what_is_in_hand_is_still_in_hand(world: World) -> None:
    await send_in_order(world, 6)
    receipts = (await pop(world, 4, invisible_ms=MINUTE_MS)).receipts(GROUP)
    popper(world).ack([receipts[0], receipts[2]])
    world.clock.advance(1_000)
    await world.restart()
    assert bodies(await pop(world)) == [b"4", b"5"]
    assert popper(world).ack([receipts[1], receipts[2]]) == [True, False]
    await pass_time(world, MINUTE_MS - 1_000)
    again = await pop(world)
    assert bodies(again) == [b"3"] and column(again.rows, "reconsume_times") == [1]


@on_node()
async def test_many_consumers_at_once_share(world: World) -> None:
    await send(world, [b"%d" % i for i in range(200)])
    taken = await asyncio.gather(*(pop(world, 7) for _ in range(40)))
    found = [body for popped in taken for body in bodies(popped)]
    assert sorted(found) == sorted(b"%d" % i for i in range(200))
    assert np.all([popped.rows.num_rows <= 7 for popped in taken])
    assert all(isinstance(r, Receipt) for popped in taken for r in popped.receipts(GROUP))
