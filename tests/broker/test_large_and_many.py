"""Neither the largest message nor very many with one due time delay others, with each strategy.

RocketMQ's timers stopped at a message of the largest size, and were minutes late when very many fell due at once.
"""

from __future__ import annotations

import pytest
from tests.broker.consuming.subscriber import in_queue
from tests.broker.on_node import batch, on_node
from tests.crash.world import SECOND_MS, World

from timeball.model import limits
from timeball.model.config import STRATEGIES
from timeball.model.message import encode_properties

TOPIC = "later"
MANY = 20_000
LARGE = b"x" * limits.BODY_BYTES_MAX
WAIT_MS = 60 * SECOND_MS


def largest() -> dict[str, list[object]]:
    """Every text has its maximum length, minus the properties that the broker may add."""
    return {
        "body": [LARGE],
        "tag": ["t" * limits.TAG_BYTES_MAX],
        "unique_key": ["u" * limits.UNIQUE_KEY_BYTES_MAX],
        "keys": ["k" * 16_000],
        "properties": [encode_properties({"p": "v" * 16_000})],
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_node()
async def test_the_largest_message_delays_no_later_message(world: World, strategy: str) -> None:
    await world.restart(strategy=strategy)
    due_ms = world.clock.wall + WAIT_MS
    await world.broker.send(batch(1, topic=[TOPIC], due_ms=[due_ms], **largest()))
    await world.broker.send(
        batch(2, topic=[TOPIC] * 2, body=[b"a", b"b"], due_ms=[due_ms, due_ms + SECOND_MS])
    )
    await world.broker.send(batch(1, topic=[TOPIC], delay_level=[5], **largest()))
    await world.restart()
    await world.advance(WAIT_MS + SECOND_MS)
    await world.settled()
    assert sorted(await in_queue(world, TOPIC), key=len) == [b"a", b"b", LARGE, LARGE]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_node()
async def test_all_messages_of_one_due_time_are_released_in_one_tick(world: World, strategy: str) -> None:
    await world.restart(strategy=strategy)
    due_ms = world.clock.wall + WAIT_MS
    bodies = [b"%d" % number for number in range(MANY)]
    await world.broker.send(batch(MANY, topic=[TOPIC] * MANY, body=bodies, due_ms=[due_ms] * MANY))
    await world.advance(WAIT_MS)
    await world.settled()
    assert sum(end for _, end in world.broker.queues(TOPIC).values()) == MANY
    assert world.broker.status()["lateness"]["max_ms"] == 0
