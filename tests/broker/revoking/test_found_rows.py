"""The scan of the log by number; test_scheduled_lookup.py has the other rows that a look-up reads."""

from __future__ import annotations

import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.revoking.test_cancel import remove_all_rows
from tests.crash.world import HOUR_MS, World

from timeball.broker.revoking.found_rows import scan
from timeball.model.errors import OutOfRange
from timeball.model.message import Kind


@on_node()
async def test_a_scan_finds_the_moves_and_ends_of_the_given_numbers_only(world: World) -> None:
    first = (await world.broker.send(batch(4, delay_ms=[1_000, HOUR_MS, HOUR_MS, HOUR_MS]))).first_seq
    released, moved, cancelled, pending = range(first, first + 4)
    for delay_ms in (5_000, 9_000):
        await world.broker.reschedule(seqs=[moved], delay_ms=delay_ms)
    await world.broker.cancel(seqs=[moved, cancelled])
    await world.advance(1_000)
    reader = world.broker.log.reader
    rows = scan(reader, {released, moved, 1 << 40})
    assert [(row.kind, row.number) for row in rows] == [
        (Kind.MOVED, moved), (Kind.MOVED, moved), (Kind.CANCEL, moved), (Kind.RELEASE, released),
    ]  # fmt: skip
    assert scan(reader, {pending}) == []


@on_node(retention_ms=1)
async def test_a_scan_leaves_out_segments_that_retention_removes_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (await world.broker.send(batch(1, delay_ms=[1_000]))).first_seq
    await world.advance(1_000)
    await remove_all_rows(world)
    reader, first_remaining = world.broker.log.reader, world.broker.log.reader.first_seq
    assert first_remaining > first
    # `scan` reads `first_seq` just before retention, so its first read of the log fails.
    first_seqs = iter([first, first_remaining, first_remaining])
    monkeypatch.setattr(type(reader), "first_seq", property(lambda self: next(first_seqs)))
    assert scan(reader, {first}) == []
    # The log has not changed meanwhile: then the error is no effect of retention.
    first_seqs = iter([first, first])
    with pytest.raises(OutOfRange):
        scan(reader, {first})
