"""The scheduled message of a receipt is known by its newest version, and is settled once."""

from __future__ import annotations

import numpy as np
from tests.broker.consuming.subscriber import MINUTE_MS, engine, receive, send
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming.log_leases import count_ended, decide, newest_versions, settle_leases
from timeball.broker.consuming.requests import Receipt
from timeball.broker.filters.tags import BoolArray


@on_node()
async def test_a_scheduled_message_is_known_by_its_newest_version_and_settled_once(world: World) -> None:
    await send(world, [b"a", b"b"])
    receipts = [one for one in (await receive(world)).receipts if isinstance(one, Receipt)]
    due_ms, version = newest_versions(receipts, outcomes=world.broker.scheduling.outcomes)
    assert version.tolist() == [one.seq for one in receipts]
    assert due_ms.tolist() == [one.due_ms for one in receipts]
    await engine(world).change_invisible_time(receipts[0], 5 * MINUTE_MS)
    moved_ms, moved = newest_versions(receipts, outcomes=world.broker.scheduling.outcomes)
    assert moved[0] > version[1] and moved[1] == version[1]
    assert moved_ms[0] == due_ms[0] + 4 * MINUTE_MS
    assert settle_leases(due_ms[:1], version[:1], scheduler=world.broker.scheduling.scheduler).tolist() == [
        False
    ], "by its old instant"
    twice = np.array([0, 1, 0])
    assert settle_leases(
        moved_ms[twice], moved[twice], scheduler=world.broker.scheduling.scheduler
    ).tolist() == [True, True, False]
    assert settle_leases(moved_ms[:1], moved[:1], scheduler=world.broker.scheduling.scheduler).tolist() == [
        False
    ]
    assert sum(world.broker.lease_counts.held().values()) == 2
    count_ended(receipts, np.array([True, False]), lease_counts=world.broker.lease_counts)
    assert sum(world.broker.lease_counts.held().values()) == 1


@on_node()
async def test_a_decision_is_repeated_while_others_move_the_message(world: World) -> None:
    await send(world, [b"a", b"b"])
    receipts = [one for one in (await receive(world)).receipts if isinstance(one, Receipt)]
    rounds: list[list[int]] = []

    async def attempt(some: object, at: object) -> BoolArray:
        assert isinstance(at, list)
        rounds.append(at)
        if len(rounds) < 3:  # another request moves the first of them, and wins
            await engine(world).change_invisible_time(receipts[0], len(rounds) * MINUTE_MS)
            return np.array([number == 1 for number in at])
        return np.zeros(len(at), np.bool_)

    broker = world.broker
    decided = await decide(receipts, attempt, writer=broker.log.writer, outcomes=broker.scheduling.outcomes)
    assert decided.tolist() == [False, True]
    assert rounds == [[0, 1], [0], [0]], "the last one is lost, and no move was the reason"
