"""The contract of a schedule: a base class of tests that every strategy must pass unchanged.

    never early · never lost · never twice · the body is kept · in (due_ms, seq) order within a hand-out and across the
    hand-outs of one due time · a cancelled message is never handed out, a handed-out one is never cancelled ·
    `next_due_ms` is never after a due time and never makes the ticker loop without work · `settled` lists exactly the
    settled messages

`moves.py` has the contract for rewritten messages, `clocks.py` that for clocks, `cuts.py` that for power cuts. The
tests here cover known edges; `machine.py` runs random steps. Both use a `World`, which compares every result with a
model. A strategy joins with one class:

    class TestHourLog(Contract):
        new_rig = HourLogRig

and with a `Variant` for each other size or shape of it, which only `make slow` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import hypothesis
import pytest
from _pytest.mark import ParameterSet
from hypothesis.stateful import run_state_machine_as_test
from tests.rounds import rounds
from tests.schedule.clocks import Clocks
from tests.schedule.cuts import Cuts
from tests.schedule.machine import machine
from tests.schedule.moves import Moves, sleep_through
from tests.schedule.stage import Rig
from tests.schedule.world import World

from timeball.model import limits

T = TypeVar("T")

FAST = hypothesis.settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
# Nothing is shrunk, because only the fact of the failure matters.
UNTIL_CAUGHT = hypothesis.settings(
    FAST, max_examples=400, database=None, derandomize=True, report_multiple_bugs=False,
    phases=[hypothesis.Phase.generate],
)  # fmt: skip
MANY = 2_000  # messages, more than one read of bodies loads
WORDS_MIN = 5  # of a reason


def assert_caught(new_rig: Callable[[], Rig]) -> None:
    """Check that the state machine finds a wrong strategy."""
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(machine(new_rig), settings=UNTIL_CAUGHT)
    # A check of the tests must fail, not an assertion in the strategy.
    assert caught.traceback[-1].path.name in ("stage.py", "world.py", "moves.py")


def split_by_target(wrongs: Sequence[T]) -> list[ParameterSet]:
    """Mark the parameters: the first one runs in `make test`, some run in `make slow`, all in `make siege`."""
    first, *others = wrongs
    some = others[:: rounds(3, 1)]
    return [pytest.param(first), *(pytest.param(other, marks=pytest.mark.slow) for other in some)]


def invalid_exemptions(contract: type[Contract]) -> list[str]:
    """List the exemptions that name no test, or whose reason is too short."""
    return [
        name
        for name, reason in contract.exempt.items()
        if not name.startswith("test_") or not hasattr(contract, name) or len(reason.split()) < WORDS_MIN
    ]


class Contract(Moves, Clocks, Cuts):
    """All tests of the contract. A strategy joins with `new_rig`."""

    # The longest delay of a message. It is shorter if a message is rewritten every few seconds.
    far_ms: ClassVar[int] = 400 * limits.DAY_MS
    # Tests that a strategy need not pass, each with the reason. There are none.
    exempt: ClassVar[dict[str, str]] = {}
    new_rig: ClassVar[Callable[[], Rig]]
    examples: ClassVar[int] = FAST.max_examples
    slow_factor: ClassVar[int] = 4

    @pytest.fixture
    def world(self) -> Iterator[World]:
        world = World(type(self).new_rig())
        yield world
        world.close()

    @pytest.fixture(autouse=True)
    def skip_exempt_tests(self, request: pytest.FixtureRequest) -> None:
        reason = self.exempt.get(request.node.originalname)
        if reason is not None:
            pytest.skip(reason)

    def test_each_exemption_has_a_test_and_a_reason(self) -> None:
        assert invalid_exemptions(type(self)) == []

    @pytest.fixture
    def table_world(self, world: World) -> World:
        if not world.rig.has_table:
            pytest.skip("this strategy keeps no table")
        return world

    # -- at random -----------------------------------------------------------------------------------------

    def test_random_steps_keep_the_contract(self) -> None:
        settings = hypothesis.settings(FAST, max_examples=self.examples)
        run_state_machine_as_test(machine(type(self).new_rig), settings=settings)

    @pytest.mark.slow
    @pytest.mark.siege
    @pytest.mark.timeout(1_200)
    def test_many_random_steps_keep_the_contract(self) -> None:
        count = -(-self.slow_factor * self.examples // rounds(8, 1))
        settings = hypothesis.settings(FAST, max_examples=count, stateful_step_count=60)
        run_state_machine_as_test(machine(type(self).new_rig), settings=settings)

    # -- never early, never lost ---------------------------------------------------------------------------

    def test_empty_schedule_hands_out_nothing_and_has_no_next_time(self, world: World) -> None:
        assert world.drain() == []
        assert world.strategy.next_due_ms() is None

    @pytest.mark.parametrize(
        "delay_ms",
        [
            0,
            1,
            999,
            1_000,
            1_001,
            9_999,
            10_000,
            10_001,
            limits.HOUR_MS,
            40 * limits.DAY_MS,
            limits.DELAY_MS_MAX,
        ],
    )
    def test_message_is_handed_out_at_its_due_millisecond(self, world: World, delay_ms: int) -> None:
        due_ms = world.now_ms + delay_ms
        (seq,) = world.admit([due_ms])
        if delay_ms:
            world.advance(delay_ms - 1)
            assert world.drain() == []
            world.advance(1)
        assert world.drain() == [(due_ms, seq)]

    def test_message_with_a_past_due_time_is_handed_out_at_once(self, world: World) -> None:
        late_ms = world.now_ms - limits.DAY_MS
        (seq,) = world.admit([late_ms])
        assert world.drain() == [(late_ms, seq)]

    def test_a_sleeper_wakes_for_each_scheduled_message(self, world: World) -> None:
        now_ms = world.now_ms
        due_times = sorted(now_ms + ms for ms in (5, 6, 4_000, 12_345, self.far_ms // 400, self.far_ms))
        world.admit(due_times)
        assert [due for due, _ in sleep_through(world)] == due_times

    def test_message_due_earlier_wakes_the_sleeper(self, world: World) -> None:
        now_ms = world.now_ms
        world.admit([now_ms + limits.HOUR_MS])
        assert world.drain() == []
        world.admit([now_ms + 3])
        world.check_sleep()
        world.advance(3)
        assert len(world.drain()) == 1

    def test_later_work_does_not_hide_an_earlier_due_time(self, world: World) -> None:
        """Loading bodies for a later message changes the next time of work. It must not hide an earlier due time."""
        now_ms = world.now_ms
        world.admit([now_ms + 9_500])
        world.drain()
        world.advance(4_000)
        assert world.drain() == []
        world.admit([now_ms + 10_000])
        world.admit([now_ms + 7_000])
        world.check_sleep()

    # -- never twice, in order -----------------------------------------------------------------------------

    def test_messages_of_one_due_time_are_handed_out_in_the_order_of_arrival(self, world: World) -> None:
        due_ms = world.now_ms + 50
        seqs = [seq for _ in range(5) for seq in world.admit([due_ms] * (MANY // 5))]
        world.advance(50)
        assert world.drain(limit=777) == [(due_ms, seq) for seq in seqs]
        assert world.drain() == []

    def test_messages_are_handed_out_by_due_time_and_number(self, world: World) -> None:
        now_ms = world.now_ms
        due_times = [now_ms + (i * 7_919) % 3_000 for i in range(2_000)]
        pairs = sorted(zip(due_times, world.admit(due_times), strict=True))
        world.advance(3_000)
        assert world.drain(limit=100) == pairs

    def test_hand_out_does_not_exceed_the_limit(self, world: World) -> None:
        world.drain()  # work before the first scheduled message is done now
        world.admit([world.now_ms] * 10)
        world.settle()
        assert [len(world.take(3) or []) for _ in range(5)] == [3, 3, 3, 1, 0]

    def test_hand_out_that_becomes_durable_in_parts_repeats_only_the_rest_after_a_restart(
        self, world: World
    ) -> None:
        world.drain()
        seqs = world.admit([world.now_ms] * 10)
        world.settle()
        assert len(world.take() or []) == 10
        world.release_part(4)
        world.save()
        world.release_part(1)
        world.restart()
        assert [seq for _, seq in world.drain()] == seqs[5:]
        world.release()
        world.save()
        world.restart()
        assert world.drain() == []

    # -- cancel --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("delay_ms", [0, 1, 5_000, limits.HOUR_MS, limits.DELAY_MS_MAX])
    def test_cancelled_message_is_not_handed_out(self, world: World, delay_ms: int) -> None:
        pending, cancelled = world.admit([world.now_ms + delay_ms] * 2)
        assert world.cancel([cancelled]) == [True]
        world.advance(delay_ms)
        assert [seq for _, seq in world.drain()] == [pending]

    def test_each_message_is_cancelled_or_handed_out_never_both(self, world: World) -> None:
        first, second, third = world.admit([world.now_ms] * 3)
        world.settle()
        assert world.cancel([second]) == [True]
        assert world.cancel([second, third]) == [False, True]
        world.drain()
        assert world.cancel([first]) == [False]
        world.release()
        assert world.cancel([first, second, third]) == [False] * 3

    def test_was_cancelled_marks_only_cancelled_messages(self, world: World) -> None:
        now_ms = world.now_ms
        released, cancelled, waiting = world.admit([now_ms, now_ms + 5, now_ms + 5])
        world.cancel([cancelled])
        world.drain()
        world.release()
        assert world.was_cancelled([released, cancelled, waiting]) == [False, True, False]

    def test_hand_out_is_empty_if_all_messages_are_cancelled(self, world: World) -> None:
        world.cancel(world.admit([world.now_ms + 10] * 100))
        world.advance(10)
        assert world.drain() == []

    # -- clocks --------------------------------------------------------------------------------------------

    def test_wall_clock_step_forward_is_followed_after_the_probation(self, world: World) -> None:
        world.admit([world.now_ms + limits.HOUR_MS])
        world.manual.step_wall(limits.HOUR_MS)
        assert world.drain() == [], "a step is not followed before the end of its probation"
        world.advance(60_000)
        world.drain()
        world.advance(60_000)
        world.drain()
        assert world.model.first_due_ms is None

    def test_wall_clock_step_back_delays_loaded_messages(self, world: World) -> None:
        seqs = world.admit([world.now_ms + ms for ms in (0, 1_000, 20_000)])
        world.advance(1_000)
        assert [seq for _, seq in world.drain()] == seqs[:2]
        world.manual.step_wall(-limits.DAY_MS)
        assert world.drain() == []
        world.admit([world.now_ms + 5])
        world.check_sleep()
        world.advance(5)
        assert len(world.drain()) == 1
        world.advance(limits.DAY_MS + 20_000)
        assert [seq for _, seq in world.drain()] == seqs[2:]

    def test_wall_clock_step_back_releases_no_near_message_early(self, world: World) -> None:
        due_ms = world.now_ms + 5_000
        seqs = world.admit([due_ms] * 3)
        assert world.drain() == []
        world.manual.step_wall(-2_000)
        assert world.drain() == []
        world.advance(6_999)
        assert world.drain() == []
        world.advance(1)
        assert world.drain() == [(due_ms, seq) for seq in seqs]

    # -- restart -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("back", [0, 1, 2])
    @pytest.mark.parametrize("power_cut", [None, 1])
    def test_restart_from_any_checkpoint_loses_and_repeats_nothing(
        self, world: World, back: int, power_cut: int | None
    ) -> None:
        """`back`: checkpoints older than the newest. `power_cut`: the seed of the lost data. None: no power cut."""
        now_ms = world.now_ms
        world.save()
        seqs = world.admit([now_ms + ms for ms in (0, 0, 2_000, 2_000, limits.DAY_MS)])
        world.drain()
        world.release()
        world.save()
        world.cancel([seqs[3]])
        world.advance(2_000)
        world.drain()
        world.save()
        world.restart(back=back, power_cut=power_cut)
        assert [seq for _, seq in world.drain()] == [seqs[2]], "its release was not durable"
        world.release()
        world.advance(limits.DAY_MS)
        assert [seq for _, seq in world.drain()] == [seqs[4]]

    def test_restart_releases_a_message_that_came_too_late(self, world: World) -> None:
        world.admit([world.now_ms])
        world.drain()
        world.release()
        world.advance(limits.HOUR_MS)
        world.drain()
        world.save()
        late = world.admit([world.now_ms - limits.HOUR_MS])
        world.restart()
        assert [seq for _, seq in world.drain()] == late

    def test_repeated_restarts_lose_and_repeat_nothing(self, world: World) -> None:
        due_times = [world.now_ms + 100 * i for i in range(30)]
        world.admit(due_times)
        taken = []
        for i in range(35):
            taken += world.drain()
            world.release()
            if i % 3 == 0:
                world.save()
            world.restart(power_cut=i)
            world.advance(100)
        assert [due for due, _ in taken] == due_times

    # -- files ---------------------------------------------------------------------------------------------

    def test_compacted_messages_are_handed_out_at_their_due_times(self, table_world: World) -> None:
        world = table_world
        now_ms = world.now_ms
        due_times = sorted(now_ms + ms for ms in (*range(100), 3_000, limits.HOUR_MS, 50 * limits.DAY_MS))
        world.admit(due_times)
        world.attach_now(world.prepare_compact())
        assert sum(file.entry.rows for file in world.live_files()) == len(due_times)
        taken = world.drain()
        for ms in (100, 3_000, limits.HOUR_MS, 50 * limits.DAY_MS):
            world.advance(ms)
            taken += world.drain()
        assert [due for due, _ in taken] == due_times

    @pytest.mark.parametrize("step_before_attach", range(6))
    def test_attach_during_a_gather_loses_and_repeats_nothing(
        self, table_world: World, step_before_attach: int
    ) -> None:
        world = table_world
        world.admit([world.now_ms + 100 * i for i in range(200)])
        world.attach_now(world.prepare_compact(0.5))
        world.reader_thread.is_open = False
        taken = world.take() or []  # a gather begins
        for _ in range(step_before_attach):
            world.reader_thread.step()
            world.turn()
        world.attach_now(world.prepare_compact())
        world.attach_now(world.prepare_bulk([world.now_ms + 50 * i for i in range(100)]))
        world.reader_thread.is_open = True
        world.advance(20_000)
        assert len(taken) + len(world.drain(limit=50)) == 300

    def test_rewrite_attached_during_an_opening_opens_no_message_again(self, table_world: World) -> None:
        """Messages that were opened from the old files are not opened again from the new ones."""
        world = table_world
        world.attach_now(world.prepare_bulk([world.now_ms + 12_000 + 100 * i for i in range(20)]))
        rewrite = world.prepare_rewrite()
        world.drain()
        world.advance(8_000)
        world.reader_thread.is_open = False
        assert world.take() is None  # an opening begins
        world.turn()
        world.attach_now(rewrite)
        world.reader_thread.is_open = True
        world.advance(10_000)
        assert len(world.drain()) == 20

    def test_files_with_overdue_messages_are_released(self, table_world: World) -> None:
        world = table_world
        world.drain()
        bulk = world.prepare_bulk([world.now_ms + ms for ms in (0, 500, 2_000, limits.DAY_MS)])
        world.advance(1_000)
        world.drain()
        world.attach_now(bulk)
        world.check_sleep()
        assert len(world.drain()) == 2
        world.release()
        world.save()
        world.restart()
        world.advance(limits.DAY_MS)
        assert len(world.drain()) == 2

    def test_sleeper_wakes_for_each_row_of_a_file(self, table_world: World) -> None:
        world = table_world
        due_times = [world.now_ms + ms for ms in (222, 9_999, 10_000, 14_999, 15_000, 26_583, 900_000)]
        world.attach_now(world.prepare_bulk(due_times))
        assert [due for due, _ in sleep_through(world)] == due_times

    def test_cancel_settles_messages_in_files(self, table_world: World) -> None:
        world = table_world
        seqs = world.admit([world.now_ms + ms for ms in (1_000, limits.HOUR_MS, limits.HOUR_MS)])
        world.attach_now(world.prepare_compact())
        assert world.cancel(seqs[:2]) == [True, True]
        world.attach_now(world.prepare_rewrite())
        world.save()
        world.restart()
        world.advance(limits.HOUR_MS)
        assert [seq for _, seq in world.drain()] == seqs[2:]

    def test_memory_does_not_grow_with_messages_in_the_table(self, table_world: World) -> None:
        world = table_world
        memory_rows = []
        for day in range(1, 6):
            world.admit([world.now_ms + day * limits.DAY_MS + 1_000 * i for i in range(MANY)])
            world.drain()
            assert world.memory() >= MANY, "messages that are not compacted yet are in memory"
            world.attach_now(world.prepare_compact())
            world.drain()
            memory_rows.append(world.memory())
        assert memory_rows == [0] * 5
        assert sum(file.entry.rows for file in world.live_files()) == 5 * MANY
        # When the first day comes near, only messages due in the next seconds are loaded.
        world.advance(limits.DAY_MS - 1_000)
        world.drain()
        assert world.memory() < MANY // 10
        world.restart()
        assert world.memory() < MANY // 10


@pytest.mark.slow
class Variant(Contract):
    """A strategy in another size or shape. It runs only in `make slow`, with fewer power cuts and random steps."""

    cuts_step = 12
    slow_factor = 2
    # The slow part of each of the two does this and more.
    test_random_steps_keep_the_contract = None  # type: ignore[assignment]
    test_power_cuts_at_a_few_calls_violate_nothing = None  # type: ignore[assignment]
