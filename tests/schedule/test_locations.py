"""A scheduled message is read from its current row, under its own number."""

from __future__ import annotations

import numpy as np
import pytest
from tests.schedule.rigs import HourLogRig
from tests.schedule.world import World

from timeball.broker.accepting.delivery import moved_rows
from timeball.model.errors import OutOfRange
from timeball.schedule.locations import take_scheduled


def test_scheduled_message_reads_the_same_from_any_of_its_rows() -> None:
    world = World(HourLogRig())
    try:
        accepted_ms = world.now_ms
        seqs = np.array(world.admit([accepted_ms + ms for ms in (5, 6, 7)]))
        before = take_scheduled(world.reader, seqs)
        world.advance(2)
        first_seq = world.writer.next_seq
        world.run(append_durably(world, moved_rows(before, now_ms=world.now_ms)))
        row_seqs = np.array([first_seq + 2, seqs[1], first_seq])
        after = take_scheduled(world.reader, row_seqs)
        assert after["seq"].to_pylist() == [seqs[2], seqs[1], seqs[0]]
        assert after.equals(before.take([2, 1, 0]))
        assert set(after["store_ms"].to_pylist()) == {accepted_ms}, (
            "the time of the acceptance, also after a move"
        )
        # A second move, from the row of the first one, leaves the message equal as well.
        second_row_seq = world.writer.next_seq
        world.run(append_durably(world, moved_rows(after, now_ms=world.now_ms)))
        assert take_scheduled(world.reader, np.array([second_row_seq])).equals(before.slice(2))
        with pytest.raises(OutOfRange):
            take_scheduled(world.reader, np.array([second_row_seq + 100]))
    finally:
        world.close()


async def append_durably(world: World, rows: object) -> None:
    await world.writer.append(rows)[1]
