"""A consumer that pops, and a clock for its leases. The tests of this folder share it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from tests.broker.on_node import batch, column
from tests.crash.world import World

from timeball.broker.consuming.engine import Consuming
from timeball.broker.consuming.requests import Received, ReceiveRequest

MINUTE_MS = 60_000
GROUP, TOPIC = "g", "orders"


def engine(world: World) -> Consuming:
    """The broker's consuming engine."""
    consuming: Consuming = world.broker.consuming
    return consuming


async def send(world: World, bodies: list[bytes], **columns: Any) -> None:
    """Send messages to TOPIC, which has two queues. They go to the queues in turn."""
    if TOPIC not in world.broker.topics():
        await world.broker.create_topic(TOPIC, 2)
    await world.broker.send(batch(len(bodies), topic=[TOPIC] * len(bodies), body=bodies, **columns))


async def pop(world: World, rows: int = 32, wait_ms: int = 0, **ask: Any) -> Received:
    """Lease messages for GROUP, as RocketMQ's POP does. `ask`: fields of the request."""
    return await engine(world).receive(ReceiveRequest(GROUP, TOPIC, rows=rows, **ask), wait_ms)


def bodies(popped: Received) -> list[bytes]:
    """The bodies of these messages, in the order of the answer."""
    return [bytes(body) for body in column(popped.rows, "body")]


async def pass_time(world: World, ms: int) -> None:
    """Let time pass, and wait until all due messages are back: in the retry topic or in their queue."""
    world.clock.advance(ms)
    engine(world).wake()
    now_ms = world.clock.wall

    def all_back() -> bool:
        leases = [lease for queue in engine(world).leases.all() for lease in queue.in_flight.values()]
        return all(lease.deadline_ms > now_ms for lease in leases)

    await world.until(all_back, "all messages whose leases have ended are back")


def stored(world: World, topic: str = TOPIC) -> dict[int, int]:
    """The stored offsets of GROUP, by queue."""
    offsets: dict[int, int] = world.broker.offsets(GROUP, topic)
    return offsets


async def send_in_order(world: World, count: int = 4) -> None:
    """Send messages to queue 0. Their bodies are their offsets."""
    await send(world, [b"%d" % i for i in range(count)], queue_id=pa.array([0] * count, pa.int32()))
