"""The contract for power cuts: after a cut at any call of the disk, no scheduled message is lost or repeated.

    A scenario runs once to count the calls. Then it is cut at each of them, and a new world starts from the disk
    that survived. This is repeated, because one cut may leave different disks.

    no acknowledged message is lost · a durable release is not repeated · no cancelled message is released · an
    unacknowledged operation is complete or absent

The model of the cut world states what was acknowledged. Other rows of the surviving log count as well.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, ClassVar, TypeVar

import pytest
from tests.crash_files import CrashFiles, PowerCut, Survival
from tests.rounds import rounds
from tests.schedule.attaching import rows_of
from tests.schedule.moves import release_all_pending, sleep_until_rewriting
from tests.schedule.stage import Restart, Rig, Saved
from tests.schedule.world import CHECKPOINT, World

from timeball.model import limits
from timeball.model.errors import TimeballError
from timeball.model.message import Kind
from timeball.table import attachment as att

T = TypeVar("T")

HOUR, DAY = limits.HOUR_MS, limits.DAY_MS
CUTS_FAST = 6
# What survives a cut. "random" uses a different seed for each cut.
FEW: list[Survival] = ["nothing", "random"]
MANY: list[Survival] = ["nothing", "everything", "random", "random"]


class Cuts:
    """Tests that cut the power at each call. A part of `contract.Contract`."""

    new_rig: ClassVar[Callable[[], Rig]]
    # Number of calls from one cut to the next in a siege. A `Variant` of a strategy takes every twelfth call. The slow
    # part takes a third of these cuts. A hash of the class's name selects the first cut.
    cuts_step: ClassVar[int] = 3

    def test_power_cuts_at_a_few_calls_violate_nothing(self) -> None:
        first, last = calls_of(type(self).new_rig)
        # Different subclasses of one strategy cut at different calls.
        offset = zlib.crc32(type(self).__name__.encode()) % CUTS_FAST
        cuts = [first + (n * CUTS_FAST + offset) * (last - first) // CUTS_FAST**2 for n in range(CUTS_FAST)]
        assert violations(type(self).new_rig, cuts, FEW) == []

    @pytest.mark.slow
    @pytest.mark.siege
    @pytest.mark.timeout(1_800)
    def test_power_cuts_at_many_calls_violate_nothing(self) -> None:
        first, last = calls_of(type(self).new_rig)
        step = self.cuts_step * rounds(12, 1)
        first += zlib.crc32(type(self).__name__.encode()) % step
        assert violations(type(self).new_rig, range(first, last + 1, step), MANY) == []

    @pytest.mark.slow
    @pytest.mark.siege
    @pytest.mark.timeout(1_800)
    def test_second_power_cut_during_recovery_violates_nothing(self) -> None:
        first, last = calls_of(type(self).new_rig)
        for cut in range(first, last + 1, 5 * self.cuts_step * rounds(8, 1)):
            with cut_world(type(self).new_rig, cut) as before_cut:
                for second_cut in range(1 + cut % 5, 30, 7):
                    files = before_cut.files.crash(cut, crash_at=second_cut)
                    with pytest.raises(PowerCut), closing(SurvivingWorld(before_cut, files)):
                        raise PowerCut("the recovery has fewer calls")
                    check_survivor(SurvivingWorld(before_cut, files.crash(second_cut)))


def scenario(world: World) -> None:
    """Two runs of a broker over some weeks, with every operation of a strategy and with pauses."""
    now_ms = world.now_ms
    near = world.admit([now_ms + ms for ms in (0, 0, 700, 2_000, 2_000)])
    far = world.admit([now_ms + ms for ms in (HOUR, 5 * DAY, 5 * DAY, 5 * DAY + HOUR, 20 * DAY)])
    world.save()
    world.drain()
    world.cancel([near[3], far[1]])
    if world.rig.has_table:
        bulk = world.prepare_bulk([now_ms + ms for ms in (10, 3_000, DAY, 6 * DAY)])
        world.attach_now(world.prepare_compact(0.7))
        world.attach_now(bulk)
    world.release_part(1)
    world.begin_save()
    world.admit([now_ms + ms for ms in (1_000, 4_000, 30 * DAY)])
    world.end_save()
    world.advance(2_000)
    world.settle()
    world.take(2)
    world.take(1)
    world.release(1)
    if world.rig.has_table:
        world.attach_now(world.prepare_compact())
        world.attach_now(world.prepare_rewrite())
    world.advance(HOUR)
    world.drain()
    world.release()
    sleep_until_rewriting(world, 2)
    world.cancel(far[2:3])
    world.finish_part_of_rewrite(1)
    world.save()
    world.take()
    world.finish_rewrites()
    world.admit([world.now_ms + ms for ms in (-HOUR, 0, 7 * DAY)] * 20)
    world.apply_retention()
    world.restart()
    world.drain()
    world.advance(6 * DAY)
    world.drain()
    world.release_part(3)
    world.apply_retention()
    world.release()
    world.save()


# -- cutting ---------------------------------------------------------------------------------------------------


class Cut(World):
    """A world whose power may be cut at any call of the disk, which then raises PowerCut."""

    files: CrashFiles
    calls_before: int  # calls of the disk before the scenario

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = self.loop.create_task(coroutine)

        def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if self.files.cut:
                task.cancel()  # the callback that it waits for has failed
            else:
                loop.default_exception_handler(context)

        self.loop.set_exception_handler(on_error)
        try:
            return self.loop.run_until_complete(task)
        except BaseException as error:
            if self.files.cut:
                raise PowerCut(*error.args) from error
            raise

    def stop_all_tasks(self) -> None:
        """Cancel all tasks and close the loop."""
        self.loop.set_exception_handler(lambda loop, context: None)
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()


@contextmanager
def cut_world(new_rig: Callable[[], Rig], cut: int | None, **forget: bool) -> Iterator[Cut]:
    """Run the scenario until its end or until the power cut at call `cut`. `forget`: options of CrashFiles."""
    world = Cut(new_rig(), CrashFiles(**forget))
    world.calls_before = world.files.calls
    world.files.crash_at = cut
    try:
        scenario(world)
    except PowerCut:
        assert world.files.cut, "only a power cut may end the scenario"
    try:
        yield world
    finally:
        world.stop_all_tasks()


def calls_of(new_rig: Callable[[], Rig]) -> tuple[int, int]:
    """Count the disk calls of the scenario: the first and the last number."""
    with cut_world(new_rig, None) as world:
        assert not world.files.cut
        return world.calls_before + 1, world.files.calls


def violations(
    new_rig: Callable[[], Rig],
    cuts: Sequence[int],
    survivals: Sequence[Survival],
    *,
    violations_max: int = 10,
    **forget: bool,
) -> list[str]:
    """List up to `violations_max` violations after these cuts. `forget` contains options of CrashFiles."""
    violation_texts: list[str] = []
    for cut in cuts:
        if len(violation_texts) >= violations_max:
            break
        with cut_world(new_rig, cut, **forget) as before_cut:
            for seed, survival in enumerate(survivals, cut * len(survivals)):
                try:
                    check_survivor(SurvivingWorld(before_cut, before_cut.files.crash(seed, survival)))
                except (AssertionError, TimeballError) as error:
                    violation_texts.append(
                        f"cut at {cut} ({before_cut.files.trace[-1]}), {survival} ({seed}): {error!r}"
                    )
    return violation_texts


# -- after a cut -----------------------------------------------------------------------------------------------


class SurvivingWorld(World):
    """A world that starts from the disk that a cut world has left."""

    def __init__(self, before_cut: World, files: CrashFiles) -> None:
        self._before_cut = before_cut
        number = files.content(CHECKPOINT) if files.exists(CHECKPOINT) else b""
        # A damaged checkpoint is not used, as in the broker.
        checkpoints = [before_cut.ever_saved[int(number)]] if number.isdigit() else []
        super().__init__(before_cut.rig, files, wall_ms=before_cut.manual.wall, checkpoints=checkpoints)

    def _read_back(self, saved: Saved) -> Restart:
        self._set_model()
        return super()._read_back(saved)

    def _set_model(self) -> None:
        """Set the model to the acknowledged state, and apply the rows of the surviving log."""
        before_cut, model = self._before_cut.model, self.model
        model.accepted, model.at = dict(before_cut.accepted), dict(before_cut.at)
        model.released = dict(before_cut.released)
        model.cancelled = {
            s: due for s, due in before_cut.cancelled.items() if s not in before_cut.cancelling
        }
        model.waiting = before_cut.waiting | before_cut.cancelling
        for handed_out in before_cut.in_flight:
            model.waiting |= handed_out
        self.attached = [(seq, a) for seq, a in self._before_cut.attached if seq < self.reader.first_seq]
        for rows in self.reader.rows(self.reader.first_seq, self.reader.next_seq):
            for row in rows.to_pylist():
                self._apply_to_model(row)
        self.watermark = max((a.to_seq for _, a in self.attached if a.job == "compact"), default=1)
        for seq in (*model.released, *model.cancelled):
            model.waiting.pop(seq, None)
        if not self.rig.has_table:
            model.apply_retention(self.reader.first_seq)

    def _apply_to_model(self, row: dict[str, Any]) -> None:
        model, seq, source_seq = self.model, row["seq"], row["source_seq"]
        if row["kind"] == self.rig.kind:
            model.waiting[seq], model.at[seq] = (row["due_ms"], row["body"]), seq
            model.accepted[seq] = row["store_ms"]
        elif row["kind"] == Kind.MOVED:
            model.at[source_seq] = seq
        elif row["kind"] == Kind.RELEASE:
            model.released[source_seq] = row["due_ms"]
        elif row["kind"] == Kind.CANCEL:
            model.cancelled[source_seq] = row["due_ms"]
        elif row["kind"] == Kind.TABLE:
            attachment = att.decode_change(row["body"])
            if isinstance(attachment, att.Reservation):
                return
            self.attached.append((seq, attachment))
            for entry in attachment.files if attachment.job == "bulk" else ():
                for bulk_row in rows_of(self.files, entry).to_pylist():
                    model.waiting[bulk_row["seq"]] = (bulk_row["due_ms"], bulk_row["body"])
                    model.accepted[bulk_row["seq"]] = bulk_row["accepted_ms"]


def check_survivor(world: SurvivingWorld) -> None:
    """Continue, and check that old and new messages are released exactly once."""
    with closing(world):
        world.check_sleep()
        world.admit([world.now_ms + ms for ms in (0, 1, HOUR, 3 * DAY)])
        release_all_pending(world)
        world.release()
        world.save()
        world.restart()
        assert world.drain() == []
