"""A scheduled message is read from its current row, under its own number."""

from __future__ import annotations

import numpy as np
import pytest
from tests.schedule.rigs import HourLogRig
from tests.schedule.world import World

from timeball.broker.accepting.delivery import moved_rows
from timeball.model.errors import OutOfRange
from timeball.schedule.locations import take_scheduled


def test_scheduled_messages_are_equal_in_any_row() -> None:
    world = World(HourLogRig())
    try:
        first = world.now_ms
        seqs = np.array(world.admit([first + ms for ms in (5, 6, 7)]))
        before = take_scheduled(world.reader, seqs)
        world.advance(2)
        first_seq = world.writer.next_seq
        world.run(_appended(world, moved_rows(before, now_ms=world.now_ms)))
        at = np.array([first_seq + 2, seqs[1], first_seq])
        after = take_scheduled(world.reader, at)
        assert after["seq"].to_pylist() == [seqs[2], seqs[1], seqs[0]]
        assert after.equals(before.take([2, 1, 0]))
        assert set(after["store_ms"].to_pylist()) == {first}, "accepted then, whenever it was moved"
        # Moved once more from where it lies: still the same scheduled message.
        second_at = world.writer.next_seq
        world.run(_appended(world, moved_rows(after, now_ms=world.now_ms)))
        assert take_scheduled(world.reader, np.array([second_at])).equals(before.slice(2))
        with pytest.raises(OutOfRange):
            take_scheduled(world.reader, np.array([second_at + 100]))
    finally:
        world.close()


async def _appended(world: World, rows: object) -> None:
    await world.writer.append(rows)[1]
