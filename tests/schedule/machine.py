"""The contract with random steps: any operation of a broker in any order, between any two steps of a gather.

`machine(rig)` is a hypothesis state machine. `contract.py` runs it for each backlog, `test_wrong.py` for the wrong
ones. One step lasts up to forty days, and due times are up to ten years ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.schedule.moves import sleep_until_rewriting
from tests.schedule.stage import Rig
from tests.schedule.world import World

from timeball.model import limits
from timeball.table.attachment import Attachment

# Distances from now: past, now, the same few milliseconds, within the lead of a gather, around it, far, ten years.
DISTANCES_MS = st.one_of(
    st.sampled_from([0, 1, 1, 2, -1, -limits.HOUR_MS, limits.DELAY_MS_MAX]),
    st.integers(-5_000, 5_000),
    st.integers(0, 30_000),
    st.integers(0, 90 * limits.DAY_MS),
)
FAR_MS = st.one_of(st.integers(10_000, 120_000), st.integers(10_000, 3 * limits.DAY_MS))
STEPS_MS = st.one_of(
    st.sampled_from([0, 1, 1, 2, 999, 1_000, 5_000, 10_000, limits.HOUR_MS, 40 * limits.DAY_MS]),
    st.integers(0, 20_000),
)
WALL_STEPS_MS = st.one_of(
    st.sampled_from(
        [-limits.DAY_MS, -60_000, -1_001, -1_000, -500, -1, 1, 500, 1_001, 60_000, limits.DAY_MS]
    ),
    st.integers(-3_000, 3_000),
)


class Machine(RuleBasedStateMachine):
    """Random steps on a world."""

    new_rig: ClassVar[Callable[[], Rig]]

    @initialize(reader_is_open=st.booleans())
    def open(self, reader_is_open: bool) -> None:
        self.world = World(type(self).new_rig(), reader_is_open=reader_is_open)
        self.written: Attachment | None = None  # written files that are not attached yet
        self.bulk: Attachment | None = None
        self.saving = False

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()

    # -- scheduled messages ------------------------------------------------------------------------------

    @rule(distances=st.lists(DISTANCES_MS, min_size=1, max_size=12))
    def admit(self, distances: list[int]) -> None:
        now_ms = self.world.now_ms
        self.world.admit([max(0, now_ms + distance) for distance in distances])

    @rule(distance=DISTANCES_MS, count=st.integers(20, 200))
    def admit_many_for_one_instant(self, distance: int, count: int) -> None:
        self.world.admit([self.world.now_ms + distance] * count)

    @rule(limit=st.sampled_from([1, 3, 1_000]))
    def take(self, limit: int) -> None:
        self.world.take(limit)

    @rule(limit=st.sampled_from([1, 7, 1_000_000]))
    def drain(self, limit: int) -> None:
        self.world.drain(limit if len(self.world.model.waiting) < 50 else 1_000_000)

    @rule(batches=st.integers(1, 5))
    def release(self, batches: int) -> None:
        self.world.release(batches)

    @rule(rows=st.sampled_from([1, 2, 50]))
    def release_part(self, rows: int) -> None:
        self.world.release_part(rows)

    @precondition(lambda self: self.world.model.moving)
    @rule(batches=st.integers(1, 5))
    def finish_rewrites(self, batches: int) -> None:
        self.world.finish_rewrites(batches)

    @precondition(lambda self: self.world.model.moving)
    @rule(rows=st.sampled_from([1, 2, 50]))
    def finish_part_of_rewrite(self, rows: int) -> None:
        self.world.finish_part_of_rewrite(rows)

    @precondition(lambda self: self.world.rig.has_files)
    @rule(distance=FAR_MS, count=st.integers(1, 12), times=st.integers(1, 4), late_ms=st.integers(0, 2_000))
    def move_again_and_again(self, distance: int, count: int, times: int, late_ms: int) -> None:
        """Admit a far message and let it be rewritten repeatedly, each time a little late except the last."""
        self.world.admit([self.world.now_ms + distance + 100 * n for n in range(count)])
        for _ in range(times):
            self.world.drain()
            sleep_until_rewriting(self.world)
            self.world.advance(late_ms)

    @rule(limit=st.sampled_from([1, 3, 1_000]), data=st.data())
    def sleep_until_rewriting(self, limit: int, data: st.DataObject) -> None:
        sleep_until_rewriting(self.world, limit)
        being_rewritten = sorted(self.world.model.being_rewritten)
        if being_rewritten:
            event = data.draw(st.sampled_from(["nothing", "cancel", "restart", "come due"]))
            if event == "cancel":
                self.world.cancel([data.draw(st.sampled_from(being_rewritten))])
            elif event == "restart":
                self.restart(0, None, data.draw(st.booleans()))
            elif event == "come due":
                due_ms = self.world.model.due_of(being_rewritten[0])
                self.world.advance(max(0, due_ms - self.world.now_ms))
                self.world.take()

    @rule(data=st.data(), count=st.integers(1, 5))
    def cancel(self, data: st.DataObject, count: int) -> None:
        known = self.world.model.known
        if known:
            chosen = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=count, unique=True))
            self.world.cancel(chosen)

    @rule(offset=st.integers(-2, 2), data=st.data())
    def cancel_around_the_instant(self, offset: int, data: st.DataObject) -> None:
        first = self.world.model.first_due_ms
        if first is not None:
            self.world.advance(max(0, first + offset - self.world.now_ms))
            due_first = sorted(s for s, (due, _) in self.world.model.waiting.items() if due == first)
            if data.draw(st.booleans()):
                self.world.take(data.draw(st.sampled_from([1, 1_000])))
            self.world.cancel([data.draw(st.sampled_from(due_first))])

    @rule()
    def look_a_millisecond_before(self) -> None:
        first = self.world.model.first_due_ms
        if first is not None:
            self.world.advance(max(0, first - 1 - self.world.now_ms))
            self.world.drain()

    # -- time ----------------------------------------------------------------------------------------------

    @rule(ms=STEPS_MS)
    def advance(self, ms: int) -> None:
        self.world.advance(ms)

    @rule(ms=WALL_STEPS_MS)
    def step_wall(self, ms: int) -> None:
        self.world.manual.step_wall(ms)

    @rule()
    def sleep_until_next(self) -> None:
        upcoming = self.world.strategy.next_due_ms()
        if upcoming is not None:
            self.world.advance(max(0, upcoming - self.world.now_ms))

    @rule()
    def let_reader_work(self) -> None:
        self.world.reader_thread.step()
        self.world.turn()

    # -- files of the table ------------------------------------------------------------------------------

    @precondition(lambda self: type(self).new_rig().has_table and self.written is None)
    @rule(share=st.sampled_from([0.3, 1.0]), rewrite=st.booleans())
    def write_files(self, share: float, rewrite: bool) -> None:
        self.written = self.world.prepare_rewrite() if rewrite else self.world.prepare_compact(share)

    @precondition(lambda self: self.written is not None)
    @rule()
    def attach(self) -> None:
        assert self.written is not None
        self.world.attach(self.written)
        self.written = None

    @precondition(lambda self: type(self).new_rig().has_table and self.bulk is None)
    @rule(distances=st.lists(DISTANCES_MS, min_size=1, max_size=30))
    def write_bulk(self, distances: list[int]) -> None:
        now_ms = self.world.now_ms
        self.bulk = self.world.prepare_bulk([max(0, now_ms + distance) for distance in distances])

    @precondition(lambda self: self.bulk is not None)
    @rule()
    def attach_bulk(self) -> None:
        assert self.bulk is not None
        self.world.attach(self.bulk)
        self.bulk = None

    @precondition(lambda self: type(self).new_rig().has_table and self.written is None)
    @rule(distances=st.lists(st.integers(0, 15_000), min_size=2, max_size=20), steps=st.integers(0, 3))
    def attach_in_a_gather(self, distances: list[int], steps: int) -> None:
        """Attach files with rows that are near while the reader thread reads bodies."""
        world, half = self.world, len(distances) // 2
        base_ms = world.now_ms + 10_000
        world.admit([base_ms + distance for distance in distances[:half]])
        world.attach_now(world.prepare_compact())
        world.admit([base_ms + distance for distance in distances[half:]])
        compacted = world.prepare_compact()
        world.settle()
        world.advance(10_000)
        world.reader_thread.is_open, was_open = False, world.reader_thread.is_open
        world.take()
        for _ in range(steps):
            self.let_reader_work()
        world.attach_now(compacted)
        world.reader_thread.is_open = was_open
        world.settle()

    # -- checkpoints and restarts ------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        self.world.save()
        self.saving = False

    @rule()
    def save_by_halves(self) -> None:
        """Take the first half of a checkpoint now, and the second when this rule runs again."""
        if self.saving:
            self.world.end_save()
        else:
            self.world.begin_save()
        self.saving = not self.saving

    @rule()
    def apply_retention(self) -> None:
        self.world.apply_retention()
        self.saving = False

    @rule(back=st.integers(0, 2), power_cut=st.none() | st.integers(0, 1_000), unreported=st.booleans())
    def restart(self, back: int, power_cut: int | None, unreported: bool) -> None:
        self.written, self.saving = None, False  # the process that wrote them has ended
        self.world.restart(back=back, power_cut=power_cut, unreported=unreported)

    # -- what holds after each step ----------------------------------------------------------------------

    @invariant()
    def wakes_in_time(self) -> None:
        self.world.check_sleep()

    @invariant()
    def nothing_has_failed(self) -> None:
        assert not self.world.failures, self.world.failures


def machine(new_rig: Callable[[], Rig]) -> type[Machine]:
    """Build the state machine for one strategy."""
    return type("MachineOf" + new_rig().name.title(), (Machine,), {"new_rig": staticmethod(new_rig)})
