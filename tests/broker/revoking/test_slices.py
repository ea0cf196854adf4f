"""A request for one key with many messages runs in slices, and other tasks run in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.recurring.schedule_lives import facts_of
from tests.broker.revoking.test_cancel import candidate
from tests.crash.scenarios import FAR_MS
from tests.crash.world import SECOND_MS, World
from tests.loop_turns import LoopTurns

from timeball.broker.recurring import successors
from timeball.broker.registry.selections import SelectionFacts
from timeball.broker.revoking import cancel, reschedule
from timeball.io import threads
from timeball.io.threads import SLICE_ROWS, in_slices
from timeball.log.row_encoder import rows_of
from timeball.model.access import ANONYMOUS
from timeball.model.message import Int64Array
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler

SLICES = 4
ROWS = (SLICES - 1) * SLICE_ROWS + 7
OCCURRENCES = 60
SOON_MS = 2 * SECOND_MS

Request = Callable[[World], Awaitable[Any]]


async def send_many(world: World, due_ms: int, rows: int = ROWS) -> list[int]:
    """Send messages with one key, and return their numbers."""
    names = {"unique_key": [f"m{row}" for row in range(rows)], "keys": ["campaign"] * rows}
    sent = await world.broker.send(batch(rows, due_ms=[due_ms] * rows, **names))
    return list(range(sent.first_seq, sent.first_seq + rows))


def note_slices(monkeypatch: pytest.MonkeyPatch, method: str, note: Callable[[int], None]) -> None:
    """Call `note` with the number of messages of each decision."""
    decide = getattr(Outcomes, method)

    def noted(self: Outcomes, due_ms: Int64Array, seq: Int64Array) -> np.ndarray:
        note(len(seq))
        return decide(self, due_ms, seq)

    monkeypatch.setattr(Outcomes, method, noted)


async def cancel_all(world: World) -> list[str]:
    """Cancel the messages with the key. Returns the verdicts."""
    return [verdict.verdict for verdict in await world.broker.cancel(keys=["campaign"])]


async def move_all(world: World) -> list[str]:
    """Reschedule the messages with the key. Returns the verdicts."""
    verdicts = await world.broker.reschedule(keys=["campaign"], delay_ms=2 * FAR_MS)
    return [verdict.verdict for verdict in verdicts]


async def in_log(world: World) -> None:
    """Leave the messages in the log."""


async def in_files(world: World) -> None:
    """Move the messages to files of the table."""
    await world.compact()


# ---- messages that are settled in one turn of the event loop ---------------------------------------------------


async def busiest_turn(world: World, request: Request, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """Return the answer, and the number of messages that the busiest turn of the loop settled."""
    turns = LoopTurns()

    def note(rows: int) -> None:
        for _ in range(rows):
            turns.count()

    note_slices(monkeypatch, "cancel", note)
    return await turns.most(request(world))


@pytest.mark.parametrize("place", [in_log, in_files])
@pytest.mark.parametrize(("request_all", "verdict"), [(cancel_all, "cancelled"), (move_all, "rescheduled")])
def test_no_turn_of_the_loop_settles_more_than_a_slice(
    place: Request, request_all: Request, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @on_node()
    async def work(world: World) -> None:
        await send_many(world, world.clock.wall + FAR_MS)
        await place(world)
        verdicts, most = await busiest_turn(world, request_all, monkeypatch)
        assert verdicts == [verdict] * ROWS
        assert 0 < most <= SLICE_ROWS

    work()


async def wake_all(world: World) -> list[str]:
    """Release all occurrences now, by a selection."""
    release = SelectionFacts(seq=0, at_ms=0, action="release", where="TRUE")
    await world.broker.selections.select(release, ANONYMOUS)
    await world.broker.wakers.wake()
    return ["released"] * OCCURRENCES


@pytest.mark.parametrize(
    ("request_all", "verdict"),
    [(cancel_all, "cancelled"), (move_all, "rescheduled"), (wake_all, "released")],
)
def test_no_turn_of_the_loop_evaluates_many_rules(
    request_all: Request, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @on_node()
    async def work(world: World) -> None:
        for number in range(OCCURRENCES):
            await world.broker.schedules.put(f"s{number}", facts_of(keys="campaign"), ANONYMOUS)
        monkeypatch.setattr(successors, "OCCURRENCES_AT_ONCE", 8)
        turns, following = LoopTurns(), successors.following

        def noted(*args: Any, **kwargs: Any) -> successors.Next:
            turns.count()
            return following(*args, **kwargs)

        monkeypatch.setattr(successors, "following", noted)
        verdicts, most = await turns.most(request_all(world))
        assert verdicts == [verdict] * OCCURRENCES
        assert 0 < most <= 2 * successors.OCCURRENCES_AT_ONCE  # two frames are made before one is durable

    work()


def test_a_request_that_settles_all_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a slice of any number of messages."""
    monkeypatch.setattr(threads, "SLICE_ROWS", 1 << 30)

    @on_node()
    async def work(world: World) -> None:
        await send_many(world, world.clock.wall + FAR_MS)
        _, most = await busiest_turn(world, cancel_all, monkeypatch)
        assert most == ROWS

    work()


@pytest.mark.parametrize("request_all", [cancel_all, move_all])
def test_other_tasks_run_between_two_slices(request_all: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    @on_node()
    async def work(world: World) -> None:
        await send_many(world, world.clock.wall + FAR_MS)
        turns = [0]
        turns_at_slices: list[int] = []
        note_slices(monkeypatch, "cancel", lambda rows: turns_at_slices.append(turns[0]))

        async def count_turns() -> None:
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(count_turns())
        await request_all(world)
        other.cancel()
        assert len(turns_at_slices) >= SLICES
        assert all(np.diff(turns_at_slices) > 0), "the other task had a turn between any two slices"

    work()


def test_slices_contain_all_rows_in_order() -> None:
    async def sliced(rows: int) -> list[int]:
        parts = [list(part) async for part in in_slices(range(rows))]
        assert all(0 < len(part) <= SLICE_ROWS for part in parts)
        return [row for part in parts for row in part]

    for rows in (0, 1, SLICE_ROWS, SLICE_ROWS + 1, 3 * SLICE_ROWS):
        assert asyncio.run(sliced(rows)) == list(range(rows))


# ---- events between two slices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("request_all", [cancel_all, move_all])
def test_messages_due_between_two_slices_are_released(
    request_all: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is either settled or delivered, and its verdict is true."""

    @on_node()
    async def work(world: World) -> None:
        await send_many(world, world.clock.wall + SOON_MS)
        decide, settled_by_slice = Scheduler.cancel, list[int]()

        def make_due_after_the_first_slice(
            self: Scheduler, due_ms: Int64Array, seq: Int64Array
        ) -> np.ndarray:
            was_pending = decide(self, due_ms, seq)
            settled_by_slice.append(int(was_pending.sum()))
            if len(settled_by_slice) == 1:
                world.clock.advance(SOON_MS)
                world.broker.ticker.wake()
            return was_pending

        monkeypatch.setattr(Scheduler, "cancel", make_due_after_the_first_slice)
        verdicts = await request_all(world)
        settled, released = sum(settled_by_slice), verdicts.count("released")
        assert settled_by_slice[0] == SLICE_ROWS
        assert settled + released == ROWS and released > 0
        assert len(verdicts) - released == settled
        await world.advance(SECOND_MS)  # not as far as the new due time
        delivered = [row.key for row in (await world.outcome()).rows]
        assert len(delivered) == len(set(delivered)) == released

    work()


@on_node()
async def test_two_requests_for_the_same_messages_settle_each_once(world: World) -> None:
    await send_many(world, world.clock.wall + FAR_MS)
    first, second = await asyncio.gather(cancel_all(world), cancel_all(world))
    assert sorted(first + second) == ["already_cancelled"] * ROWS + ["cancelled"] * ROWS
    await world.advance(2 * FAR_MS)
    assert not (await world.outcome()).rows


@on_node()
async def test_a_request_that_is_interrupted_has_settled_its_first_slices(world: World) -> None:
    await send_many(world, world.clock.wall + FAR_MS)
    before = world.broker.scheduling.outcomes.waiting_rows
    task = asyncio.ensure_future(cancel_all(world))
    await world.until(
        lambda: world.broker.scheduling.outcomes.waiting_rows < before, "the first slice is cancelled"
    )
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert set(await cancel_all(world)) <= {"cancelled", "already_cancelled"}
    await world.restart()
    assert set(await cancel_all(world)) == {"already_cancelled"}
    await world.advance(2 * FAR_MS)
    assert not (await world.outcome()).rows


# ---- bodies of a move ----------------------------------------------------------------------------------------


def test_a_slice_of_a_move_ends_with_the_read_that_reaches_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reschedule, "SLICE_BYTES", 64 * 1024)
    slices: list[int] = []
    note_slices(monkeypatch, "cancel", slices.append)

    @on_node()
    async def work(world: World) -> None:
        rows, due_ms = 3 * reschedule.READ_ROWS, world.clock.wall + FAR_MS
        columns = {"body": [b"x" * 2_048] * rows, "keys": ["campaign"] * rows}
        await world.broker.send(batch(rows, due_ms=[due_ms] * rows, **columns))
        assert await move_all(world) == ["rescheduled"] * rows
        assert slices == [reschedule.READ_ROWS] * 3

    work()


@pytest.mark.parametrize("account", ["", "alice"])
def test_cancel_columns_equal_cancel_rows(account: str) -> None:
    chosen = [candidate("a", 3), candidate("b", 9)]
    values = rows_of(cancel.cancel_rows(chosen, 50, account))
    assert cancel.cancel_columns(chosen, 50, account).equals(values)
