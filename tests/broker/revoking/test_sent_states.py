"""The states of messages by their numbers, for a repeated send: all kinds, in the requested order."""

from __future__ import annotations

import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import HOUR_MS, World

from timeball.model import limits


@on_node()
async def test_states_of_more_numbers_than_one_look_up_takes_are_in_their_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CANCELS_PER_REQUEST_MAX", 2)
    now_ms = world.clock.wall
    accepted = await world.broker.send(
        batch(5, due_ms=[now_ms + HOUR_MS, now_ms + HOUR_MS, None, now_ms - 1, now_ms + 3 * HOUR_MS])
    )
    first = accepted.first_seq
    await world.broker.cancel(seqs=[first + 1])
    await world.broker.compact()
    await world.advance(2 * HOUR_MS)
    waiting, released, cancelled, immediate, past_due = first + 4, first, first + 1, first + 2, first + 3
    numbers = [waiting, released, cancelled, immediate, past_due]
    states = await world.broker.sent_states(numbers)
    assert [state.state for state in states] == ["waiting", "visible", "cancelled", "visible", "visible"]
    due_times_ms = [state.due_ms for state in states]
    assert due_times_ms[:3] == [now_ms + 3 * HOUR_MS, now_ms + HOUR_MS, now_ms + HOUR_MS]
    assert [state.is_settled for state in states] == [False, True, True, True, True]


@on_node(segment_bytes=1024 * 1024, retention_ms=60_000)
async def test_a_message_that_retention_has_removed_is_expired(world: World) -> None:
    accepted = await world.broker.send(batch(due_ms=[world.clock.wall + HOUR_MS]))
    number = accepted.first_seq
    await world.broker.compact()
    await world.advance(2 * HOUR_MS)
    for _ in range(3):
        await world.broker.send(batch(body=[b"x" * 700_000]))
    await world.advance(HOUR_MS)
    await world.apply_retention()
    assert world.broker.log.reader.first_seq > number
    (state,) = await world.broker.sent_states([number])
    assert state.state == "expired" and state.is_settled
