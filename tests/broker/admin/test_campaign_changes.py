"""A campaign is paused, resumed and cancelled as a whole, and its scheduled messages keep their identity."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import on_node
from tests.broker.revoking.test_cancel import delivered, said
from tests.crash.checker import Sent
from tests.crash.damage import names
from tests.crash.lives import run, until_cut
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, SECOND_MS, CutFiles, World, table_rows

from timeball.broker import maintenance
from timeball.broker.registry.campaigns import CampaignFacts
from timeball.broker.tables import compact
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.errors import Corrupt, InvalidMessage, NotFound, OutOfRange, OverLimit
from timeball.model.message import Kind
from timeball.table import layout
from timeball.table.attachment import Attachment
from timeball.table.merging import FILES_MIN

DAY_MS = 24 * HOUR_MS
MINUTE_MS = 60 * SECOND_MS


def state(world: World, name: str = "spring") -> str:
    return str(world.broker.campaigns(name)[0].state)


def numbers_of(world: World, name: str = "spring") -> list[int]:
    [(first_seq, rows)] = world.broker.campaigns(name)[0].ranges
    return list(range(first_seq, first_seq + rows))


async def without_caches(world: World) -> None:
    """Restart the node with only the log and the data files."""
    await world.stop()
    world.files = world.files.crash(survival="everything")
    for name in list(names(world.files)):
        if not name.endswith(".log") and not name.startswith("pending/bucket="):
            world.files.remove(name)
    await world.start()


# ---- states of a campaign --------------------------------------------------------------------------------------


@on_node()
async def test_a_campaign_is_planned_running_and_finished_in_turn(world: World) -> None:
    change = world.broker.change_campaign
    with pytest.raises(NotFound, match="no campaign 'spring'"):
        await change("spring", "pause")
    planned = await change("spring", "plan", rows=2)
    assert (planned.state, planned.rows, planned.ranges) == ("planned", 2, [])
    with pytest.raises(OutOfRange, match="is planned, and nothing of it is attached yet"):
        await change("spring", "resume")
    assert (await change("spring", "plan", rows=9)).rows == 2  # a repeated plan changes nothing
    keys = await world.campaign("spring", "a", [SECOND_MS, HOUR_MS])
    assert state(world) == "running"
    assert (await change("spring", "pause")).state == "paused"
    assert (await change("spring", "pause")).repeated
    assert await world.resume("spring", keys) == 2
    assert (await change("spring", "resume")).repeated
    await world.advance(HOUR_MS + 1)
    assert state(world) == "finished"
    assert await delivered(world) == keys


@on_node()
async def test_a_repeated_plan_keeps_the_groups_of_the_first_one(world: World) -> None:
    change = world.broker.change_campaign
    assert (await change("spring", "plan", rows=1, groups=["g1", "g2"])).groups == ["g1", "g2"]
    assert (await change("spring", "plan", rows=1, groups=["g1"])).groups == ["g1", "g2"]
    await world.campaign("spring", "a", [HOUR_MS])
    await without_caches(world)
    assert world.broker.campaigns("spring")[0].groups == ["g1", "g2"]
    assert (await world.broker.change_campaign("autumn", "plan", rows=1)).groups == []


@on_node()
async def test_a_pause_holds_pending_messages_in_each_place_and_a_resume_releases_them(world: World) -> None:
    keys = await world.campaign("spring", "a", [SECOND_MS, 2 * SECOND_MS, MINUTE_MS, HOUR_MS, 40 * DAY_MS])
    others = await world.bulk("a", [2 * SECOND_MS, HOUR_MS], 1)
    numbers = numbers_of(world)
    await world.advance(SECOND_MS)  # the first is released, the next is in the wheel
    log_end = world.broker.log.writer.next_seq
    await world.broker.change_campaign("spring", "pause")
    assert world.broker.log.writer.next_seq == log_end + 1  # one row, however many messages are held
    await world.advance(2 * HOUR_MS)
    assert await delivered(world) == sorted([keys[0], *others])
    assert await world.resume("spring", keys[1:]) == 4
    await world.settled()
    assert await delivered(world) == sorted([*keys[:4], *others])
    assert numbers_of(world) == numbers
    verdicts = await world.broker.cancel(ids=keys[4:])
    assert [(v.verdict, v.seq) for v in verdicts] == [("cancelled", numbers[4])]


@on_node()
async def test_a_resume_with_a_shift_delays_all_messages_by_the_length_of_the_pause(world: World) -> None:
    keys = await world.campaign("spring", "a", [MINUTE_MS, 2 * HOUR_MS])
    await world.broker.change_campaign("spring", "pause")
    await world.advance(HOUR_MS)
    assert await world.resume("spring", keys, shift=True) == 2
    await world.advance(MINUTE_MS - 1)
    assert await delivered(world) == []
    await world.advance(1)
    assert await delivered(world) == keys[:1]
    await world.advance(2 * HOUR_MS - MINUTE_MS - 1)
    assert await delivered(world) == keys[:1]
    await world.advance(1)
    assert await delivered(world) == keys


@on_node()
async def test_held_messages_can_be_cancelled_and_rescheduled(world: World) -> None:
    keys = await world.campaign("spring", "a", [SECOND_MS] * 2 + [HOUR_MS] * 4)
    await world.broker.change_campaign("spring", "pause")
    await world.advance(2 * HOUR_MS)
    assert await said(world, ids=keys[:1]) == ["cancelled"]
    assert await said(world, ids=keys[:1]) == ["already_cancelled"]
    assert (await world.broker.reschedule(ids=keys[1:2], delay_ms=SECOND_MS))[0].verdict == "rescheduled"
    await world.advance(SECOND_MS)
    assert await delivered(world) == keys[1:2]  # the rescheduled message is no longer held with its campaign
    assert await world.resume("spring", keys[2:]) == 4
    await world.settled()
    assert await delivered(world) == sorted(keys[1:])


@on_node()
async def test_a_cancel_of_a_paused_campaign_cancels_its_held_messages_for_good(world: World) -> None:
    keys = await world.campaign("spring", "a", [SECOND_MS, MINUTE_MS, FAR_MS])
    await world.advance(SECOND_MS)
    await world.broker.change_campaign("spring", "pause")
    await world.advance(HOUR_MS)
    done = await world.broker.change_campaign("spring", "cancel")
    assert (done.state, done.count, done.repeated, done.held_from_ms) == ("cancelled", 2, False, None)
    again = await world.broker.change_campaign("spring", "cancel")
    assert (again.count, again.repeated) == (0, True)
    for change in ("pause", "resume"):
        with pytest.raises(InvalidMessage, match="was cancelled"):
            await world.broker.change_campaign("spring", change)
    await without_caches(world)
    await world.advance(2 * FAR_MS)
    assert await delivered(world) == keys[:1]


@on_node()
async def test_the_count_of_a_cancelled_campaign_survives_a_restart(world: World) -> None:
    """Messages that were settled one by one before are not counted by the cancel."""
    keys = await world.campaign("spring", "a", [SECOND_MS, HOUR_MS, HOUR_MS])
    await said(world, ids=keys[1:2])
    await world.broker.change_campaign("spring", "pause")
    await world.advance(2 * SECOND_MS)
    await world.checkpoint()
    await world.restart()
    for count in (2, 0):
        done = await world.broker.change_campaign("spring", "cancel")
        assert (done.count, done.cancelled) == (count, 2)


def world_after_cut_in_cancel(call: int) -> World:
    """Cut the power at this call of a cancel, whose campaign has three files. Returns a world on the remaining disk."""
    files, clock = CutFiles(), ManualClock()
    world = World(files, clock)

    async def live() -> None:
        await world.start()
        await world.campaign("spring", "a", [MINUTE_MS, FAR_MS, 40 * DAY_MS])
        files.crash_at = files.calls + call
        await world.end_campaign("spring")

    run(until_cut(world, files, live))
    return World(files.crash(survival="everything"), clock, world.observed)


def test_a_cancel_that_was_interrupted_by_a_kill_is_finished_after_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In an earlier version only a repeated command finished the cancel, and until then messages were released."""
    monkeypatch.setattr(maintenance, "CANCELS_INTERVAL_MS", 200)
    has_held_messages = set()

    async def after(world: World) -> None:
        await world.start()
        try:
            assert state(world) == "cancelled"
            has_held_messages.add(world.broker.campaigns("spring")[0].held_from_ms is not None)
            await world.advance(HOUR_MS)
            assert await delivered(world) == []
            await world.until(
                lambda: not len(world.broker.scheduling.outcomes.holds), "the cancel is finished"
            )
            assert (
                world.broker.campaigns("spring")[0].cancelled == 3
            )  # the messages that were cancelled before the cut count, too
            await without_caches(world)
            await world.advance(41 * DAY_MS)
            assert await delivered(world) == []
        finally:
            await world.abandon()

    for call in (1, 4, 20):
        run(after(world_after_cut_in_cancel(call)))
    assert has_held_messages == {True, False}, "some cuts came before the end of the cancel, some after it"


@on_node()
async def test_a_cancel_that_fails_is_tried_again_and_does_not_stop_the_broker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.campaign("spring", "a", [MINUTE_MS])
    for error in (OverLimit("the disk is full"), Corrupt("a file is damaged")):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(world.broker.campaign_changes, "_cancel_ranges", AsyncMock(side_effect=error))
            await world.broker.change_campaign("spring", "cancel")
    with monkeypatch.context() as patch:
        patch.setattr(world.broker.campaign_changes, "_cancel_ranges", AsyncMock(side_effect=error))
        await world.broker.campaign_changes.finish_cancels()
    await world.advance(HOUR_MS)
    # Not tried again without a command, because each try reads all files before the damaged file.
    await world.broker.campaign_changes.finish_cancels()
    assert world.broker.campaigns("spring")[0].held_from_ms is not None
    spring = await world.broker.change_campaign("spring", "cancel")
    assert (spring.state, spring.held_from_ms, spring.cancelled) == ("cancelled", None, 1)
    assert await delivered(world) == []


@on_node()
async def test_a_campaign_cancelled_before_its_attach_is_never_attached(world: World) -> None:
    await world.broker.change_campaign("spring", "plan", rows=1)
    await world.broker.change_campaign("spring", "cancel")
    with pytest.raises(InvalidMessage, match="campaign spring was cancelled"):
        await world.bulk("a", [SECOND_MS], 0, "spring")
    await world.advance(MINUTE_MS)
    assert await delivered(world) == []


@on_node()
async def test_at_the_limit_campaigns_that_are_over_are_deleted_for_new_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CAMPAIGNS_MAX", 2)
    await world.campaign("one", "a", [HOUR_MS])
    await world.campaign("two", "a", [SECOND_MS])
    with pytest.raises(OverLimit, match="2 campaigns are not over yet"):
        await world.broker.change_campaign("three", "plan", rows=1)
    await world.advance(2 * SECOND_MS)
    await world.broker.change_campaign("three", "plan", rows=1)
    assert [each.campaign for each in world.broker.campaigns()] == ["one", "three"]


@on_node()
async def test_a_plan_with_the_id_of_a_deleted_campaign_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version accepted the plan and answered the attach of new rows as a repetition: the rows were lost."""
    monkeypatch.setattr(limits, "CAMPAIGNS_MAX", 1)
    keys = await world.campaign("one", "a", [SECOND_MS])
    await world.advance(2 * SECOND_MS)
    await world.broker.change_campaign("two", "plan", rows=0)
    for _ in range(2):
        with pytest.raises(OutOfRange, match="rows were attached as one before"):
            await world.broker.change_campaign("one", "plan", rows=1)
        await world.restart()
    assert [each.campaign for each in world.broker.campaigns()] == ["two"]
    await world.advance(HOUR_MS)
    assert await delivered(world) == keys


# ---- concurrent operations ------------------------------------------------------------------------------------


@on_node(compact_rows=1_000_000)
async def test_merging_and_removing_files_excludes_files_with_held_messages(world: World) -> None:
    """A merge and the removal of settled rows leave held rows in their files."""
    keys = await world.campaign("spring", "a", [MINUTE_MS, 2 * MINUTE_MS])
    for epoch in range(FILES_MIN):
        await world.bulk("a", [MINUTE_MS, 2 * MINUTE_MS, 3 * MINUTE_MS], epoch + 1)
    await world.broker.change_campaign("spring", "pause")
    await world.advance(2 * MINUTE_MS)
    await world.merge()
    await world.advance(DAY_MS)
    await world.apply_retention()
    assert len(await delivered(world)) == 3 * FILES_MIN
    await world.restart()
    assert await world.resume("spring", keys) == 2
    await world.settled()
    assert len(await delivered(world)) == 3 * FILES_MIN + 2


def call_after_files(
    world: World, monkeypatch: pytest.MonkeyPatch, then: Callable[[], Awaitable[None]]
) -> None:
    """Call `then` once, when the next resume has written its files and before they are in the table."""
    mover = world.broker.mover
    write = mover._write_resumed

    async def write_then_call(*args: object) -> None:
        await write(*args)
        if args[1]:
            monkeypatch.undo()
            await then()

    monkeypatch.setattr(mover, "_write_resumed", write_then_call)


@on_node()
async def test_a_cancel_of_one_message_during_a_resume_stays_in_effect(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel comes while the resume writes its files. The message is not released at its new due time either."""
    keys = await world.campaign("spring", "a", [MINUTE_MS] * 3)
    await world.broker.change_campaign("spring", "pause")
    await world.advance(HOUR_MS)

    async def cancel() -> None:
        assert await said(world, ids=keys[:1]) == ["cancelled"]

    call_after_files(world, monkeypatch, cancel)
    resumed = asyncio.ensure_future(world.broker.change_campaign("spring", "resume", shift=True))
    assert (await resumed).count == 2
    await world.advance(HOUR_MS)
    assert await delivered(world) == keys[1:]
    assert await said(world, ids=keys) == ["already_cancelled", "released", "released"]


@on_node()
async def test_a_resume_passes_through_settled_messages_in_another_thread(world: World) -> None:
    """On the event loop, ten million settled messages would take twenty seconds."""
    threads = set[threading.Thread]()

    class ThreadRecorder(np.ndarray[Any, np.dtype[np.int64]]):
        """A column that records the threads in which numpy computes with it."""

        def __array_function__(self, function: Any, *how: Any) -> Any:
            threads.add(threading.current_thread())
            return super().__array_function__(function, *how)

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **how: Any) -> Any:
            threads.add(threading.current_thread())
            return getattr(ufunc, method)(*map(np.asarray, inputs), **how)

    keys = await world.campaign("spring", "a", [HOUR_MS] * 2)
    assert await said(world, ids=await world.send("a", [DAY_MS])) == ["cancelled"]
    await world.broker.change_campaign("spring", "pause")
    outcomes = world.broker.scheduling.outcomes
    outcomes.settled()
    (settled_run,) = outcomes._cancelled._index._runs
    settled_run.seq = settled_run.seq.view(ThreadRecorder)
    assert await world.resume("spring", keys) == 2
    assert threads and threading.main_thread() not in threads


@on_node()
async def test_messages_due_during_a_pause_or_resume_are_not_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.campaign("spring", "a", [MINUTE_MS, HOUR_MS + MINUTE_MS])
    await world.broker.change_campaign("spring", "pause")
    await world.advance(HOUR_MS)

    async def take_long() -> None:
        world.clock.advance(2 * MINUTE_MS)

    call_after_files(world, monkeypatch, take_long)
    await world.broker.change_campaign("spring", "resume")
    await world.until(lambda: world.broker.lateness.released == 2, "all are released")
    assert world.broker.lateness.max_ms == 0


async def send_in_files(world: World, count: int) -> list[str]:
    """Attach a campaign with `count` files of one message each, due in about a minute, and pause it. Returns keys."""
    first, keys = await world.broker.reserve(count), world.fresh_keys(count)
    now_ms = world.clock.wall
    sent = [Sent(key, "a", b"", now_ms + MINUTE_MS + at) for at, key in enumerate(keys)]
    files = [
        world._write_files(table_rows([message], first + at, now_ms))[0] for at, message in enumerate(sent)
    ]
    await world.broker.change_campaign("spring", "plan", rows=count)
    ranges = [(first, count)]
    await world.broker.attach(Attachment(job="bulk", job_id="spring", epoch=0, files=files, ranges=ranges))
    await world.broker.change_campaign("spring", "pause")
    return keys


def data_files(world: World) -> set[str]:
    return {name for name in names(world.files) if name.endswith(".parquet")}


@on_node()
async def test_a_resume_writes_few_files_for_a_campaign_in_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version wrote a file for each held file. A campaign of more than 5,000 files could not be resumed."""
    monkeypatch.setattr(limits, "ATTACH_FILES_MAX", 12)
    keys = await send_in_files(world, 12)
    await world.advance(10 * MINUTE_MS)
    for shift in (True, False):
        assert (await world.broker.change_campaign("spring", "resume", shift=shift)).count == 12
        assert len(world.broker.scheduling.hour_log.pending.live_entries()) == 1
        await world.broker.change_campaign("spring", "pause")
    await world.broker.change_campaign("spring", "resume")
    await world.advance(HOUR_MS)
    assert await delivered(world) == keys


@on_node()
async def test_a_resume_of_too_many_buckets_is_refused_before_a_file_is_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "FILE_ROWS", 1)
    keys = await world.campaign("spring", "a", [HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS])
    await world.broker.change_campaign("spring", "pause")
    before, write = data_files(world), compact.resume
    with monkeypatch.context() as patch:
        patch.setattr(limits, "ATTACH_FILES_MAX", 2)
        patch.setattr(compact, "resume", lambda *_, **__: pytest.fail("was written"))
        with pytest.raises(OverLimit, match="in place of 3; at most 2"):
            await world.broker.change_campaign("spring", "resume")
    assert (state(world), data_files(world), compact.resume) == ("paused", before, write)
    assert await world.resume("spring", keys) == 3


# `_attach_resumed` holds the lock of all attaches, so no other attach can be under way.
@pytest.mark.parametrize(
    ("step", "amid_an_attach"),
    [
        ("_write_resumed", False),
        ("_write_resumed", True),
        ("_attach_resumed", False),
        ("sorted_files", False),
        ("sorted_files", True),
    ],
)
@on_node()
async def test_a_resume_that_fails_leaves_no_file_behind(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, amid_an_attach: bool
) -> None:
    keys = await world.campaign("spring", "a", [HOUR_MS, 2 * HOUR_MS, 40 * DAY_MS])
    await world.broker.change_campaign("spring", "pause")
    before, mover = data_files(world), world.broker.mover
    work: Any = layout.sorted_files if step == "sorted_files" else getattr(mover, step)

    async def then_fails(*args: Any) -> None:
        await work(*args)
        mover.has_unfinished_attach = (
            amid_an_attach  # as during another attach, between its row and its commit
        )
        raise OverLimit("the disk is full")

    def fails_amid(*args: Any, **options: Any) -> Iterator[Any]:
        yield next(iter(work(*args, **options)))
        mover.has_unfinished_attach = amid_an_attach
        raise OverLimit("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(OverLimit):
        if step == "sorted_files":
            patch.setattr(layout, step, fails_amid)
        elif step == "_attach_resumed":
            patch.setattr(mover, step, AsyncMock(side_effect=OverLimit("the disk is full")))
        else:
            patch.setattr(mover, step, then_fails)
        await world.broker.change_campaign("spring", "resume")
    mover.has_unfinished_attach = False
    assert (state(world), data_files(world)) == ("paused", before)
    assert await world.resume("spring", keys) == 3
    await world.advance(41 * DAY_MS)
    assert await delivered(world) == keys


@on_node()
async def test_an_attach_without_a_plan_creates_no_campaign(world: World) -> None:
    await world.bulk("a", [HOUR_MS], 0, "nameless")
    assert world.broker.campaigns() == []


# ---- random sequences of operations --------------------------------------------------------------------------

STEPS = [
    "pause",
    "resume",
    "shift",
    "cancel one",
    "advance",
    "rewrite",
    "restart",
    "lose caches",
    "checkpoint",
]


@dataclass
class Model:
    """The expected state of a campaign: due times by key, the time of its pause, released and cancelled messages."""

    due_ms: dict[str, int]
    paused_ms: int | None = None
    released: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    def pass_to(self, now_ms: int) -> None:
        """Release the messages that are due."""
        if self.paused_ms is None:
            self.released |= {key for key, due_ms in self.due_ms.items() if due_ms <= now_ms} - self.ended

    def resume(self, now_ms: int, *, shift: bool) -> set[str]:
        """End the pause. Returns the keys of the messages that were held."""
        assert self.paused_ms is not None
        held = self.due_ms.keys() - self.released - self.ended
        later_ms = now_ms - self.paused_ms if shift else 0
        self.due_ms |= {key: max(self.due_ms[key] + later_ms, now_ms) for key in held}
        self.paused_ms = None
        return held


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), min_size=1, max_size=14),
    st.lists(st.sampled_from([SECOND_MS, MINUTE_MS, 3 * MINUTE_MS, HOUR_MS]), min_size=2, max_size=6),
)
def test_each_message_is_released_once_at_its_due_time_through_pauses_and_crashes(
    steps: list[tuple[str, int]], delays_ms: list[int]
) -> None:
    @on_node()
    async def live(world: World) -> None:
        start_ms = world.clock.wall
        keys = await world.campaign("spring", "a", delays_ms)
        numbers = dict(zip(keys, numbers_of(world), strict=True))
        due_ms = [start_ms + delay_ms for delay_ms in sorted(delays_ms)]
        model = Model(dict(zip(keys, due_ms, strict=True)))
        # The messages of a second job, which share files with the campaign after a rewrite.
        others = Model(dict(zip(await world.bulk("a", delays_ms, 1), due_ms, strict=True)))
        for step, number in steps:
            now_ms = world.clock.wall
            if step == "pause":
                await world.broker.change_campaign("spring", "pause")
                model.paused_ms = now_ms if model.paused_ms is None else model.paused_ms
            elif step in ("resume", "shift") and model.paused_ms is not None:
                held = model.resume(now_ms, shift=step == "shift")
                assert await world.resume("spring", held, shift=step == "shift") == len(held)
                await world.settled()
            elif step == "cancel one":
                key = keys[number % len(keys)]
                [verdict] = await world.broker.cancel(ids=[key])
                assert (verdict.verdict == "cancelled") == (key not in model.released | model.ended)
                assert verdict.seq == numbers[key]
                if key not in model.released:
                    model.ended.add(key)
            elif step == "advance":
                await world.advance([SECOND_MS, 10 * SECOND_MS, MINUTE_MS, HOUR_MS, 500, 0][number])
            elif step == "rewrite":
                await merge_files(world, number)
            elif step == "restart":
                await world.restart()
                await world.settled()
            elif step == "lose caches":
                await without_caches(world)
                await world.settled()
            elif step == "checkpoint":
                await world.checkpoint()
            for each in (model, others):
                each.pass_to(world.clock.wall)
            assert await delivered(world) == sorted(model.released | others.released), step
            remaining = set(keys) - model.released - model.ended | others.due_ms.keys() - others.released
            assert world.broker.pending_messages == len(remaining), step
        if model.paused_ms is not None:
            await world.resume("spring", model.resume(world.clock.wall, shift=True), shift=True)
        await world.advance(DAY_MS)
        assert await delivered(world) == sorted((set(keys) - model.ended) | set(others.due_ms))

    live()


async def merge_files(world: World, epoch: int) -> None:
    """Rewrite all files of the table, as the broker does when there are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("timeball.table.merging.FILES_MIN", 1)
        await world.merge()


@on_node()
async def test_a_schedule_that_forgets_a_hold_is_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without the hold, the messages of a paused campaign are released."""
    keys = await world.campaign("spring", "a", [SECOND_MS])
    monkeypatch.setattr(world.broker.scheduling.outcomes.holds, "add", lambda *_: None)
    monkeypatch.setattr(world.broker.scheduling.scheduler.loaded, "remove_held", lambda _: None)
    await world.broker.change_campaign("spring", "pause")
    await world.advance(MINUTE_MS)
    assert await delivered(world) == keys


@on_node()
async def test_each_change_of_a_campaign_is_a_row_with_its_new_state(world: World) -> None:
    await world.campaign("spring", "a", [HOUR_MS])
    await world.broker.change_campaign("spring", "pause")
    reader = world.broker.log.reader
    rows = [
        row["body"]
        for batch in reader.rows(reader.first_seq, reader.next_seq, [Kind.META])
        for row in batch.to_pylist()
        if row["unique_key"] == "campaign/spring"
    ]
    logged_facts = [msgspec.json.decode(row, type=CampaignFacts) for row in rows]
    assert [facts.state for facts in logged_facts] == ["planned", "running", "paused"]
    assert logged_facts[-1].held_from_ms is not None
