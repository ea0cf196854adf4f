"""The scan of the log by number; test_scheduled_lookup.py has the other rows that a look-up reads."""

from __future__ import annotations

import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.revoking.test_cancel import let_go_of_all
from tests.crash.world import HOUR_MS, World

from timeball.broker.revoking.found_rows import scan
from timeball.model.errors import OutOfRange
from timeball.model.message import Kind


@on_node()
async def test_moves_and_ends_of_just_these(world: World) -> None:
    first = (await world.broker.send(batch(4, delay_ms=[1_000, HOUR_MS, HOUR_MS, HOUR_MS]))).first_seq
    seqs = range(first, first + 4)
    for delay_ms in (5_000, 9_000):
        await world.broker.reschedule(seqs=[seqs[1]], delay_ms=delay_ms)
    await world.broker.cancel(seqs=[seqs[1], seqs[2]])
    await world.advance(1_000)
    reader = world.broker.log.reader
    rows = scan(reader, {seqs[0], seqs[1], 1 << 40})
    assert [(row.kind, row.number) for row in rows] == [
        (Kind.MOVED, seqs[1]), (Kind.MOVED, seqs[1]), (Kind.CANCEL, seqs[1]), (Kind.RELEASE, seqs[0]),
    ]  # fmt: skip
    assert scan(reader, {seqs[3]}) == []


@on_node(retention_ms=1)
async def test_a_segment_that_goes_meanwhile_is_missing_and_no_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (await world.broker.send(batch(1, delay_ms=[1_000]))).first_seq
    await world.advance(1_000)
    await let_go_of_all(world)
    reader, kept_from = world.broker.log.reader, world.broker.log.reader.first_seq
    assert kept_from > first
    # As seen just before it went: then the first look at it fails.
    seen = iter([first, kept_from, kept_from])
    monkeypatch.setattr(type(reader), "first_seq", property(lambda self: next(seen)))
    assert scan(reader, {first}) == []
    seen = iter([first, first])
    with pytest.raises(OutOfRange):
        scan(reader, {first})
