"""The scheduled messages of a bulk job are cancelled as a whole: the count is exact, and none of them is delivered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bounds import BOUND_S
from tests.broker.on_node import InTurn, on_node
from tests.broker.revoking.test_cancel import delivered, said
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, SECOND_MS, World

from timeball.broker.revoking import ranges
from timeball.broker.revoking.ranges import check_numbers
from timeball.model import limits
from timeball.model.answers import RangesCancelled
from timeball.model.errors import NotFound, OutOfRange, RequestError
from timeball.model.message import CANCEL_REASON, Kind, decode_properties
from timeball.table.attachment import overlap, within
from timeball.table.data_file import DataFile, overlapping

SOON_MS = 2 * SECOND_MS
DAY_MS = 24 * HOUR_MS


async def attached(
    world: World, delays_ms: Sequence[int], epoch: int = 1
) -> tuple[list[str], tuple[int, int]]:
    """Attach messages of a bulk job. Return their ids in the order of the due times, and the range of their numbers."""
    keys = await world.bulk("a", delays_ms, epoch)
    entries = world.broker.scheduling.hour_log.pending.live_entries()
    newest = max(entry.max_seq for entry in entries)
    return keys, (newest - len(keys) + 1, len(keys))


def cancel_log(world: World) -> list[tuple[int, str]]:
    """Return the number of the message and the reason of every CANCEL row."""
    rows = world.broker.log.reader.rows(
        world.broker.log.reader.first_seq, world.broker.log.reader.next_seq, [Kind.CANCEL]
    )
    return [
        (row["source_seq"], decode_properties(row["properties"] or "").get(CANCEL_REASON, ""))
        for batch in rows
        for row in batch.to_pylist()
    ]


# ---- counts and deliveries -------------------------------------------------------------------------------------


@on_node()
async def test_a_jobs_pending_messages_are_cancelled_wherever_they_are(world: World) -> None:
    others, _ = await attached(world, [SOON_MS, FAR_MS], 1)
    single = await world.send("a", [FAR_MS])
    keys, numbers = await attached(world, [SECOND_MS, SOON_MS, SOON_MS, FAR_MS, 40 * DAY_MS], 2)
    await world.advance(SECOND_MS)  # the first is released, the next two are in the wheel
    assert await said(world, ids=[keys[3]]) == ["cancelled"]

    first = await world.broker.cancel_ranges([numbers], "campaign spring")
    assert first == RangesCancelled(rows=5, cancelled=3, already_cancelled=1, settled=2)
    assert sorted(cancel_log(world)) == sorted(
        (numbers[0] + at, "" if at == 3 else "campaign spring") for at in (1, 2, 3, 4)
    )
    again = await world.broker.cancel_ranges([numbers])
    assert again == RangesCancelled(rows=5, cancelled=0, already_cancelled=4, settled=5)
    await world.advance(41 * DAY_MS)
    assert await delivered(world) == sorted([keys[0], *others, *single])
    assert await said(world, ids=keys) == ["released"] + ["already_cancelled"] * 4


@pytest.mark.parametrize("reason", ["x\x02NEXT\x017", "x\n"])
@on_node()
async def test_a_reason_with_unprintable_characters_is_refused(world: World, reason: str) -> None:
    _, numbers = await attached(world, [FAR_MS])
    with pytest.raises(RequestError, match="printable"):
        await world.broker.cancel_ranges([numbers], reason)
    assert cancel_log(world) == []


@on_node()
async def test_a_rescheduled_message_is_not_cancelled_with_its_range(world: World) -> None:
    keys, numbers = await attached(world, [FAR_MS, FAR_MS])
    await world.broker.reschedule(ids=keys[:1], delay_ms=HOUR_MS)
    counted = await world.broker.cancel_ranges([numbers], "campaign spring")
    assert counted == RangesCancelled(rows=2, cancelled=1, already_cancelled=1, settled=1)
    await world.advance(HOUR_MS)
    assert await delivered(world) == keys[:1]


@on_node()
async def test_a_repeated_cancel_after_a_crash_counts_nothing_again(world: World) -> None:
    keys, numbers = await attached(world, [SOON_MS, FAR_MS, FAR_MS + DAY_MS])
    assert (await world.broker.cancel_ranges([numbers])).cancelled == 3
    await world.stop()
    world.files = world.files.crash(survival="nothing")
    if world.files.exists("checkpoint"):
        world.files.remove("checkpoint")
    await world.start()
    assert (await world.broker.cancel_ranges([numbers])).cancelled == 0
    await world.advance(3 * DAY_MS)
    assert await delivered(world) == []
    assert await said(world, ids=keys) == ["already_cancelled"] * 3


@pytest.mark.parametrize("saved", [True, False])
@on_node()
async def test_released_messages_do_not_count_as_cancelled_after_a_restart(world: World, saved: bool) -> None:
    """An earlier version counted released messages that were due after the schedule's mark as cancelled.

    The mark is the due time before which all messages are settled. `saved`: the restart has a checkpoint.
    """
    keys, numbers = await attached(world, [SECOND_MS] * 3 + [FAR_MS] * 2)
    assert await said(world, ids=keys[3:4]) == ["cancelled"]
    await world.bulk("a", [0], 2)
    await world.advance(SECOND_MS)
    assert await delivered(world) != []
    if saved:
        await world.checkpoint()
    await world.stop()
    world.files = world.files.crash(survival="nothing")
    await world.start()
    counted = await world.broker.cancel_ranges([numbers])
    assert counted == RangesCancelled(rows=5, cancelled=1, already_cancelled=1, settled=4)


@on_node()
async def test_one_call_cancels_several_ranges_also_after_a_rewrite(world: World) -> None:
    (_, first), (_, second) = await attached(world, [FAR_MS] * 3, 1), await attached(world, [FAR_MS] * 4, 2)
    await world.rewrite(1)
    assert (await world.broker.cancel_ranges([second, first])).cancelled == 7
    await world.advance(2 * DAY_MS)
    assert await delivered(world) == []


@on_node()
async def test_a_cancel_of_ranges_waits_for_an_attach_that_has_begun(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version did not wait. The numbers were used, but their files were not in the table yet: all messages
    counted as settled, and were delivered.
    """
    first = await world.broker.reserve(3)
    scheduler, requests = world.broker.scheduling.scheduler, []
    attach = scheduler.attach

    async def attach_slowly(*args: object) -> None:
        requests.append(asyncio.ensure_future(world.broker.cancel_ranges([(first, 3)])))
        for _ in range(20):
            await asyncio.sleep(0.001)
        await attach(*args)

    monkeypatch.setattr(scheduler, "attach", attach_slowly)
    monkeypatch.setattr(world.broker, "reserve", AsyncMock(return_value=first))
    await world.bulk("a", [SOON_MS] * 3, 1)
    assert (await requests[0]).cancelled == 3
    await world.advance(DAY_MS)
    assert await delivered(world) == []


@on_node(retention_ms=1)
async def test_files_that_a_rewrite_replaces_meanwhile_stay_until_the_cancel_has_read_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version failed at a missing file: a rewrite had replaced it and retention had removed it."""
    _, numbers = await attached(world, [HOUR_MS, FAR_MS, 40 * DAY_MS])
    read = ranges.group_in_ranges
    loop = asyncio.get_running_loop()

    async def replace_all() -> None:
        for epoch, file in enumerate(world.broker.scheduling.hour_log.pending.all()):
            await world.rewrite(epoch)
            file.close()  # a file that is still mapped could be read after its deletion
        await world.advance(SECOND_MS)

    async def replace_and_remove_files() -> None:
        assert world.node is not None
        monkeypatch.setattr(ranges, "group_in_ranges", read)
        await replace_all()
        await world.apply_retention()

    removals: list[asyncio.Task[None]] = []

    def start_removal_and_read(file: DataFile, *args: Any) -> object:
        loop.call_soon_threadsafe(lambda: removals.append(loop.create_task(replace_and_remove_files())))
        return read(file, *args)

    monkeypatch.setattr(ranges, "group_in_ranges", start_removal_and_read)
    cancel = ranges._cancel

    async def cancel_after_removal(*args: Any, **kwargs: Any) -> int:
        await removals[0]
        return await cancel(*args, **kwargs)

    monkeypatch.setattr(ranges, "_cancel", cancel_after_removal)
    before = {f"pending/{entry.path}" for entry in world.broker.scheduling.hour_log.pending.live_entries()}
    assert (await world.broker.cancel_ranges([numbers])).cancelled == 3
    live_entries = world.broker.scheduling.hour_log.pending.live_entries()
    assert not before & {f"pending/{entry.path}" for entry in live_entries}
    await world.apply_retention()
    assert not any(world.files.exists(name) for name in before)


@on_node()
async def test_many_ranges_are_checked_quickly(world: World) -> None:
    """An earlier version compared each range with each reservation on the event loop, which took seconds."""
    _, (first, rows) = await attached(world, [FAR_MS] * limits.ATTACH_FILES_MAX)
    world.broker.attach_state.reserved |= {(1 << 50) + at: 1 for at in range(limits.RESERVATIONS_MAX)}
    begin_s = time.perf_counter()
    broker = world.broker
    check_numbers(
        [(first + at, 1) for at in range(rows)], reader=broker.log.reader, attach_state=broker.attach_state
    )
    assert time.perf_counter() - begin_s < BOUND_S / 20


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([SECOND_MS, SOON_MS, 9 * SECOND_MS, HOUR_MS]), min_size=1, max_size=12),
    st.sampled_from([0, SECOND_MS, SOON_MS, 10 * SECOND_MS]),
    st.integers(0, 6),
)
def test_in_a_race_with_its_release_a_message_is_either_counted_or_delivered(
    delays_ms: list[int], passed_ms: int, turns: int
) -> None:
    @on_node(InTurn)
    async def race(world: World) -> None:
        keys, numbers = await attached(world, delays_ms)
        advancing = asyncio.ensure_future(world.advance(passed_ms))
        for _ in range(turns):
            await asyncio.sleep(0)
        counts = await world.broker.cancel_ranges([numbers])
        await advancing
        verdicts = await said(world, ids=keys)
        assert verdicts.count("already_cancelled") == counts.cancelled
        assert verdicts.count("released") == counts.settled
        await world.advance(DAY_MS)
        assert await delivered(world) == sorted(
            key for key, verdict in zip(keys, verdicts, strict=True) if verdict == "released"
        )

    race()


# ---- refused numbers -------------------------------------------------------------------------------------------


@on_node()
async def test_numbers_that_no_bulk_job_has_attached_are_refused(world: World) -> None:
    keys, (first, rows) = await attached(world, [FAR_MS] * 3)
    await world.send("a", [FAR_MS, None])
    in_log = world.broker.log.writer.next_seq - 2
    reserved = await world.broker.reserve(10)
    for numbers, error, text in (
        ([(reserved, 10)], NotFound, "set aside"),
        ([(first, rows), (reserved + 9, 1)], NotFound, "set aside"),
        ([(in_log, 1)], OutOfRange, "not the range of a bulk attach"),
        ([(first, rows), (first + rows - 1, 1)], OutOfRange, "named twice"),
        ([(1 << 40, 1)], OutOfRange, "beyond"),
    ):
        with pytest.raises(error, match=text):
            await world.broker.cancel_ranges(numbers)
    assert await said(world, ids=keys) == ["cancelled"] * 3, "the refused calls cancelled none of them"


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 9)),
        min_size=1,
        max_size=6,
        unique_by=lambda first_and_rows: first_and_rows[0],
    ),
    st.lists(st.integers(0, 80), max_size=30),
)
def test_within_finds_exactly_the_numbers_in_the_ranges(
    ranges: list[tuple[int, int]], seqs: list[int]
) -> None:
    disjoint = [
        (first, min(rows, next_first - first))
        for (first, rows), (next_first, _) in zip(
            sorted(ranges), [*sorted(ranges)[1:], (1000, 0)], strict=True
        )
    ]
    expected = [any(first <= seq < first + rows for first, rows in disjoint) for seq in seqs]
    assert within(np.array(seqs, dtype=np.int64), disjoint).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=6), st.data())
def test_overlap_finds_exactly_the_spans_that_share_a_number(
    spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=6))
    disjoint, end = [], 0
    for gap, rows in sizes:
        disjoint.append((end + gap, rows))
        end += gap + rows
    begin, count = np.array(spans, np.int64).reshape(-1, 2).T
    expected = [
        any(set(range(low, low + size)) & set(range(first, first + rows)) for first, rows in disjoint)
        for low, size in spans
    ]
    assert overlap(begin, begin + count, disjoint[::-1]).tolist() == expected


@on_node()
async def test_only_files_that_may_have_the_numbers_are_read_and_the_soonest_first(world: World) -> None:
    await attached(world, [FAR_MS], 1)
    _, numbers = await attached(world, [40 * DAY_MS, SOON_MS, FAR_MS], 2)
    files = overlapping(world.broker.scheduling.hour_log.pending.all(), [numbers])
    begins = [file.entry.min_due_ms for file in files]
    assert begins == sorted(begins) and sum(file.entry.rows for file in files) == 3
