"""Each record of a source is in the log once, also after repeated batches and power cuts."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa
import pytest
from tests.broker.accepting.test_keyed_sends import bodies
from tests.broker.on_node import batch, on_node
from tests.crash.lives import run, until_cut
from tests.crash.world import HOUR_MS, CutFiles, World
from tests.crash_files import CrashFiles

from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import Piece
from timeball.broker.registry import idempotency
from timeball.io.clock import ManualClock
from timeball.model.access import ANONYMOUS
from timeball.model.errors import Conflict, InvalidName
from timeball.model.message import build_rows
from timeball.model.wire import SourceStep

RECORDS = 9


class RecordSender:
    """An edge that sends the records of one partition. `put` returns a future. Record n has the body n."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._futures: dict[int, asyncio.Future[Accepted]] = {}

    @property
    def position(self) -> int:
        return self._world.broker.tables.source_positions.of("", "s").get(0, 0)

    def put(self, begin: int, end: int, rows: pa.RecordBatch | None = None) -> asyncio.Future[Accepted]:
        if rows is None:
            rows = batch(end - begin, body=[str(number).encode() for number in range(begin, end)])
        piece = Piece(self, rows, rows.num_rows, rows.nbytes, 0, ANONYMOUS)
        future = self._futures[id(piece)] = asyncio.get_running_loop().create_future()
        self._world.broker.sourced_sends.put(piece, SourceStep(source="s", begin={0: begin}, end={0: end}))
        return future

    async def send(self, begin: int, end: int, rows: pa.RecordBatch | None = None) -> Accepted:
        return await asyncio.wait_for(self.put(begin, end, rows), 60)

    def answer(self, pieces: list[Piece], accepted: Accepted) -> None:
        for piece in pieces:
            self._futures.pop(id(piece)).set_result(accepted)

    def refuse(self, pieces: list[Piece], error: BaseException) -> None:
        for piece in pieces:
            self._futures.pop(id(piece)).set_exception(error)


@on_node()
async def test_a_repeated_source_batch_raises_conflict(world: World) -> None:
    sender = RecordSender(world)
    first = await sender.send(0, 2)
    later = await sender.send(2, 5, batch(3, delay_ms=[None, HOUR_MS, None]))
    assert later.first_seq > first.first_seq and sender.position == 5
    for begin, end in ((0, 2), (2, 5), (4, 9), (6, 9)):
        with pytest.raises(Conflict):
            sender.put(begin, end)
    assert len(bodies(world)) == 5 and sender.position == 5


@on_node()
async def test_consecutive_source_batches_may_be_sent_before_the_first_is_durable(world: World) -> None:
    sender = RecordSender(world)
    await asyncio.gather(*(sender.put(number, number + 1) for number in range(20)))
    assert bodies(world) == [b"%d" % number for number in range(20)]


@on_node()
async def test_a_refused_batch_does_not_move_the_source_position(world: World) -> None:
    sender = RecordSender(world)
    with pytest.raises(InvalidName):
        sender.put(0, 1, batch(topic=["no topic!"]))
    assert sender.position == 0
    await sender.send(0, 1)
    assert sender.position == 1


@on_node()
async def test_an_empty_batch_moves_the_source_position(world: World) -> None:
    sender = RecordSender(world)
    accepted = await sender.send(0, 7, build_rows(0))
    assert accepted.rows == 0 and sender.position == 7 and bodies(world) == []
    with pytest.raises(Conflict):
        sender.put(0, 7, build_rows(0))


# ---- power cuts ------------------------------------------------------------------------------------------------


async def send_records(world: World) -> None:
    """Send the records from the position of the source in the log on, three at a time."""
    sender = RecordSender(world)
    for begin in range(sender.position, RECORDS, 3):
        await sender.send(begin, min(begin + 3, RECORDS))


def continue_after_cut(call: int | None, seed: int) -> tuple[int, list[bytes]]:
    """Cut the power at a call of the disk, restart, and continue. Return the number of calls, and the logged bodies."""
    files, clock = CutFiles(crash_at=call), ManualClock()
    world = World(files, clock)

    async def live() -> None:
        await world.start()
        await send_records(world)

    async def restart_and_continue(image: CrashFiles) -> list[bytes]:
        second = World(image, clock)
        await second.start()
        try:
            await send_records(second)
            logged = bodies(second)
            await second.stop()
        finally:
            await second.abandon()
        return logged

    run(until_cut(world, files, live))
    return files.calls, run(restart_and_continue(files.crash(seed, "random")))


ONCE = [b"%d" % number for number in range(RECORDS)]


def test_after_a_power_cut_each_record_is_in_the_log_once() -> None:
    calls, logged = continue_after_cut(None, 1)
    assert logged == ONCE
    for call in sorted(np.random.default_rng(1).choice(np.arange(1, calls + 1), 12, replace=False).tolist()):
        assert continue_after_cut(call, call)[1] == ONCE, f"call {call} of {calls}"


@pytest.mark.slow
def test_after_any_power_cut_each_record_is_in_the_log_once() -> None:
    calls, _ = continue_after_cut(None, 1)
    for call in range(1, calls + 1):
        for seed in range(2):
            assert continue_after_cut(call, seed)[1] == ONCE, f"call {call} of {calls}, seed {seed}"


def test_a_source_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a broker that ignores the position of a source has its records twice."""
    monkeypatch.setattr(idempotency.SourcePositions, "of", lambda *_: {})
    assert sorted(continue_after_cut(None, 1)[1]) == sorted(2 * ONCE)
