"""A group that receives, and a clock for its receipts. The tests of this folder share it."""

from __future__ import annotations

from typing import Any

from tests.broker.on_node import batch, column, settled
from tests.crash.world import World

from timeball.broker.consuming.engine import Consuming
from timeball.broker.consuming.requests import Received, ReceiveRequest
from timeball.broker.registry.groups import SubscriptionGroup

MINUTE_MS = 60_000
GROUP, TOPIC = "g", "orders"
AGAIN = f"%RETRY%{GROUP}_{TOPIC}"  # the retry topic, in which the group gets messages of TOPIC again
DEAD = f"%DLQ%{GROUP}"  # the group's dead letters


def engine(world: World) -> Consuming:
    """The broker's consuming engine."""
    consuming: Consuming = world.broker.consuming
    return consuming


async def send(world: World, bodies: list[bytes], **columns: Any) -> None:
    """Send messages to TOPIC, which has two queues. They go to the queues in turn."""
    if TOPIC not in world.broker.topics():
        await world.broker.create_topic(TOPIC, 2)
    await world.broker.send(batch(len(bodies), topic=[TOPIC] * len(bodies), body=bodies, **columns))


async def receive(world: World, rows: int = 32, wait_ms: int = 0, **ask: Any) -> Received:
    """Lease messages for GROUP for one minute. The broker counts the attempts. `ask`: fields of the request."""
    return await engine(world).receive(
        ReceiveRequest(
            GROUP,
            ask.pop("topic", TOPIC),
            rows=rows,
            **{"counts_times": True, "invisible_ms": MINUTE_MS, **ask},
        ),
        wait_ms,
    )


async def acknowledge(world: World, received: Received) -> list[bool]:
    """Acknowledge all these messages. Returns for each whether its receipt was valid."""
    return await engine(world).acknowledge(received.receipts)


def bodies(received: Received) -> list[bytes]:
    """The bodies of these messages, in the order of the answer."""
    return [bytes(body) for body in column(received.rows, "body")]


def attempts(received: Received) -> list[int]:
    """The number of the attempt of each message, from 1."""
    return [times + 1 for times in column(received.rows, "reconsume_times")]


async def pass_time(world: World, ms: int) -> None:
    """Let time pass: overdue leases have ended, and due messages are visible."""
    world.clock.advance(ms)
    await settled(world)


async def power_cut(world: World) -> None:
    """Cut the power: everything that was not synced is lost."""
    files = world.files
    await world.abandon()
    world.files = files.crash(survival="nothing")
    await world.start()


def try_at_most(world: World, times_max: int) -> None:
    """Let each message of the group be delivered `times_max` times after its first delivery."""
    world.broker.tables.groups.update(SubscriptionGroup(GROUP, retry_max_times=times_max))


async def in_queue(world: World, topic: str) -> list[bytes]:
    """The bodies of all messages that ever became visible in a topic, queue by queue."""
    if topic not in world.broker.topics():
        return []
    visible_bodies: list[bytes] = []
    for queue, (_, end) in world.broker.queues(topic).items():
        if end:  # most queues are empty, and tests read the topic after each step of a clock
            rows = await world.broker.read_queue(topic, queue, 0, 1_000)
            visible_bodies += [bytes(body) for body in column(rows, "body")]
    return visible_bodies
