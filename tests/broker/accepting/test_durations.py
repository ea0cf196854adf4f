"""Leases, retries and relative delays follow elapsed time: a step of the clock changes none of them.

Due times that a sender states follow the clock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.broker.consuming.subscriber import AGAIN, MINUTE_MS, bodies, engine, in_queue, receive, send
from tests.broker.on_node import TURNS, batch, on_node, settled
from tests.crash.world import HOUR_MS, SECOND_MS, World

from timeball.io.clock import PROBATION_MS, STEP_MS
from timeball.model.config import STRATEGIES
from timeball.model.message import Kind

# Steps of the wall clock: large and small, back and forward.
STEPS_MS = (-24 * HOUR_MS, -HOUR_MS, -STEP_MS, -200, 200, STEP_MS, HOUR_MS, 24 * HOUR_MS)
# After a small step back, durations are shifted once a second, so they may end this much late.
SMALL_STEP_DELAY_MS = STEP_MS

DELAYED_TOPIC = "later"


# Sends a message that is delivered or redelivered after a minute of elapsed time.
SendDuration = Callable[[World], Awaitable[None]]


async def lease(world: World) -> None:
    """Lease a message for a minute."""
    await send(world, [b"a"])
    assert bodies(await receive(world, invisible_ms=MINUTE_MS)) == [b"a"]


async def nack(world: World) -> None:
    """Nack a message, to be redelivered in a minute."""
    await send(world, [b"a"])
    [receipt] = (await receive(world, invisible_ms=HOUR_MS)).receipts
    assert await engine(world).nack(receipt, MINUTE_MS, "busy")


async def change(world: World) -> None:
    """Change the invisible time of a leased message to a minute."""
    await send(world, [b"a"])
    [receipt] = (await receive(world, invisible_ms=10 * SECOND_MS)).receipts
    assert await engine(world).change_invisible_time(receipt, MINUTE_MS)


async def delay(world: World) -> None:
    """Send a message with a delay of a minute."""
    await world.broker.send(batch(1, topic=[DELAYED_TOPIC], body=[b"a"], delay_ms=[MINUTE_MS]))


async def level(world: World) -> None:
    """Send a message with the delay level 5, which is a minute."""
    await world.broker.send(batch(1, topic=[DELAYED_TOPIC], body=[b"a"], delay_level=[5]))


async def timer(world: World) -> None:
    """Send as the remoting edge does: the delay is a due time, and a property contains the delay."""
    await world.broker.send(
        batch(1, topic=[DELAYED_TOPIC], body=[b"a"], due_ms=[world.clock.wall + MINUTE_MS],
              properties=[f"TIMER_DELAY_MS\x01{MINUTE_MS}\x02"])
    )  # fmt: skip


async def reschedule(world: World) -> None:
    """Reschedule a message to a minute from now."""
    await world.broker.send(
        batch(1, topic=[DELAYED_TOPIC], body=[b"a"], unique_key=["k"], due_ms=[world.clock.wall + HOUR_MS])
    )
    [verdict] = await world.broker.reschedule(ids=["k"], delay_ms=MINUTE_MS)
    assert verdict.verdict == "rescheduled"


DURATIONS = [lease, nack, change, delay, level, timer, reschedule]


async def delivered_bodies(world: World) -> list[bytes]:
    """Return the bodies of the messages that were delivered or redelivered."""
    return sorted([*await in_queue(world, AGAIN), *await in_queue(world, DELAYED_TOPIC)])


async def advance_until_delivered(world: World, ms: int, *, rows: int = 1) -> int | None:
    """Advance the clock by up to `ms`. Return the ms after which `rows` messages were delivered, None if never."""
    passed_ms = 0
    while passed_ms < ms:
        advance_ms = min(500, ms - passed_ms)
        world.clock.advance(advance_ms)
        passed_ms += advance_ms
        await settled(world)
        if len(await delivered_bodies(world)) >= rows:
            return passed_ms
    return None


@pytest.mark.parametrize("step_ms", STEPS_MS)
@pytest.mark.parametrize("make", DURATIONS)
@on_node()
async def test_a_duration_elapses_while_the_clock_is_set(
    world: World, make: SendDuration, step_ms: int
) -> None:
    await make(world)
    assert await advance_until_delivered(world, 20 * SECOND_MS) is None
    world.clock.step_wall(step_ms)
    assert await advance_until_delivered(world, 40 * SECOND_MS - 1) is None, "early"
    late_ms = SMALL_STEP_DELAY_MS if -STEP_MS <= step_ms < 0 else 1
    assert await advance_until_delivered(world, late_ms) is not None, "late"


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "hour_log"])
@pytest.mark.parametrize("step_ms", [-HOUR_MS, HOUR_MS])
@pytest.mark.parametrize("make", [lease, nack, delay, level, reschedule])
@on_node()
async def test_durations_elapse_with_each_strategy(
    world: World, make: SendDuration, step_ms: int, strategy: str
) -> None:
    await world.restart(strategy=strategy)
    await make(world)
    world.clock.step_wall(step_ms)
    assert await advance_until_delivered(world, MINUTE_MS - 1) is None, "early"
    assert await advance_until_delivered(world, 1) == 1, "late"


@pytest.mark.parametrize("step_ms", [-HOUR_MS, HOUR_MS])
@pytest.mark.parametrize("make", [nack, delay])
@on_node()
async def test_durations_elapse_for_messages_in_data_files(
    world: World, make: SendDuration, step_ms: int
) -> None:
    await make(world)
    await world.compact()
    world.clock.step_wall(step_ms)
    assert await advance_until_delivered(world, MINUTE_MS - 1) is None, "early"
    assert await advance_until_delivered(world, 1) == 1, "late"
    world.clock.step_wall(-step_ms)
    for _ in range(2):
        assert await advance_until_delivered(world, 2 * PROBATION_MS) is not None
        await world.restart()
    assert await delivered_bodies(world) == [b"a"], "once, also after a restart"


@pytest.mark.parametrize("make", [lease, nack, change, delay, level, timer])
@on_node()
async def test_durations_end_although_the_clock_was_set_back_while_no_broker_ran(
    world: World, make: SendDuration
) -> None:
    """The length of the outage is not known. No message waits longer than its whole delay from the start on."""
    await make(world)
    assert await advance_until_delivered(world, 20 * SECOND_MS) is None
    await world.stop()
    world.clock.step_wall(-HOUR_MS)
    await world.start()
    assert await advance_until_delivered(world, 40 * SECOND_MS - 1) is None, "early"
    assert await advance_until_delivered(world, 20 * SECOND_MS + 1) is not None, "late"


@on_node()
async def test_durations_elapse_for_messages_from_before_a_restart(world: World) -> None:
    for make in (lease, nack, delay):
        await make(world)
    await world.restart()
    world.clock.step_wall(-HOUR_MS)
    assert await advance_until_delivered(world, MINUTE_MS - 1) is None, "early"
    assert await advance_until_delivered(world, 1, rows=3) == 1, "late"
    assert await delivered_bodies(world) == [b"a", b"a", b"a"]


@pytest.mark.parametrize("step_ms", [200, STEP_MS])
@on_node()
async def test_durations_of_before_a_restart_are_not_early_while_their_rows_are_read(
    world: World, step_ms: int
) -> None:
    """After a step forward their due times are in the past, until the rows from before the start have been read."""
    await delay(world)
    await nack(world)
    await advance_until_delivered(world, MINUTE_MS - 200)
    await world.restart()
    assert await advance_until_delivered(world, 10) is None  # in these 10 ms the bodies are loaded
    durations, next_seq = world.broker.scheduling.scheduler.durations, world.broker.log.reader.next_seq
    find, may_end = durations.find, threading.Event()

    def find_slowly(*bounds: Any) -> Any:
        assert may_end.wait(BOUND_S)
        return find(*bounds)

    durations.find = find_slowly
    world.clock.step_wall(step_ms)
    for _ in range(10):
        world.clock.advance(10)
        world.broker.ticker.wake()
        for _ in range(TURNS):
            await asyncio.sleep(0)
    rows = world.broker.log.reader.next_seq - next_seq
    may_end.set()
    assert rows == 0, "early"
    assert await advance_until_delivered(world, MINUTE_MS, rows=2) is not None
    assert await delivered_bodies(world) == [b"a", b"a"]


@on_node()
async def test_durations_survive_repeated_restarts(world: World) -> None:
    """Messages are sent between steps in both directions. Each is delivered once, after its own delay."""
    for number, step_ms in enumerate([-HOUR_MS, HOUR_MS, -24 * HOUR_MS, 24 * HOUR_MS, -HOUR_MS]):
        await world.broker.send(batch(1, topic=[DELAYED_TOPIC], body=[b"%d" % number], delay_ms=[MINUTE_MS]))
        world.clock.step_wall(step_ms)
        await advance_until_delivered(world, 10 * SECOND_MS)
        assert await delivered_bodies(world) == []
    for number in range(5):
        assert await advance_until_delivered(world, 10 * SECOND_MS - 1, rows=number + 1) is None
        assert await delivered_bodies(world) == [b"%d" % n for n in range(number)]
        assert await advance_until_delivered(world, 1, rows=number + 1) == 1
        assert await delivered_bodies(world) == [b"%d" % n for n in range(number + 1)]


@on_node()
async def test_a_due_time_that_its_sender_states_follows_the_clock(world: World) -> None:
    due_ms = world.clock.wall + MINUTE_MS
    await world.broker.send(batch(1, topic=[DELAYED_TOPIC], body=[b"a"], due_ms=[due_ms]))
    world.clock.step_wall(-HOUR_MS)
    assert await advance_until_delivered(world, MINUTE_MS) is None
    world.clock.step_wall(HOUR_MS)
    assert await advance_until_delivered(world, PROBATION_MS + 500) is not None


@pytest.mark.parametrize("step_ms", [-HOUR_MS, HOUR_MS])
@on_node()
async def test_a_receipt_is_valid_for_the_elapsed_time_of_its_lease(world: World, step_ms: int) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world, invisible_ms=MINUTE_MS)
    world.clock.step_wall(step_ms)
    await advance_until_delivered(world, 30 * SECOND_MS)
    assert await engine(world).acknowledge(received.receipts[:1]) == [True]
    await advance_until_delivered(world, 31 * SECOND_MS)
    assert await engine(world).acknowledge(received.receipts) == [False, False]
    assert await in_queue(world, AGAIN) == [b"b"]


@on_node()
async def test_a_release_after_a_clock_step_contains_the_shifted_and_the_original_due_time(
    world: World,
) -> None:
    await delay(world)
    due_ms = world.clock.wall + MINUTE_MS
    world.clock.step_wall(-HOUR_MS)
    assert await advance_until_delivered(world, MINUTE_MS) is not None
    [release] = [
        row
        for part in world.broker.read_log(world.broker.log.reader.first_seq, 1 << 60, [Kind.RELEASE])
        for row in part.to_pylist()
    ]
    assert (release["due_ms"], release["from_due_ms"]) == (due_ms - HOUR_MS, due_ms)
    assert release["store_ms"] == world.clock.wall
    assert world.broker.status()["lateness"]["max_ms"] == 0


YEAR_MS = 365 * 24 * HOUR_MS


@pytest.mark.parametrize("wrong_ms", [4 * YEAR_MS, -16 * YEAR_MS])
@on_node()
async def test_durations_elapse_on_a_machine_that_boots_with_a_wrong_date(
    world: World, wrong_ms: int
) -> None:
    """Without a battery, the clock shows any date until NTP answers. No message waits for years or is due at once."""
    await world.stop()
    world.clock.step_wall(wrong_ms)
    await world.start()
    await lease(world)
    await level(world)
    await delay(world)
    world.clock.step_wall(-wrong_ms)
    assert await advance_until_delivered(world, MINUTE_MS - 1) is None, "early"
    assert await advance_until_delivered(world, 1, rows=3) == 1, "late"
    due_ms = world.clock.wall + MINUTE_MS
    await world.broker.send(batch(1, topic=[DELAYED_TOPIC], body=[b"b"], due_ms=[due_ms]))
    assert await advance_until_delivered(world, MINUTE_MS - 1, rows=4) is None
    assert await advance_until_delivered(world, 1, rows=4) == 1


@on_node()
async def test_durations_end_after_a_restart_with_a_clock_that_was_a_year_ahead(world: World) -> None:
    await world.stop()
    world.clock.step_wall(YEAR_MS)
    await world.start()
    for make in (lease, nack, level, delay):
        await make(world)
    await world.checkpoint()
    await world.stop()
    world.clock.step_wall(-YEAR_MS)
    await world.start()
    assert await advance_until_delivered(world, MINUTE_MS, rows=4) is not None, "no message waits for a year"
    await send(world, [b"b"])
    assert b"b" in bodies(await receive(world))
