"""A message that is rescheduled many times is released once, at its newest due time, under its first number."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.broker.revoking.test_cancel import remove_all_rows
from tests.crash.world import HOUR_MS, SECOND_MS, World

from timeball.broker.recovery import Replayed
from timeball.broker.revoking import cancel
from timeball.broker.revoking.cancel import encode_handle
from timeball.broker.revoking.scheduled_lookup import Names
from timeball.log import checkpoint
from timeball.model.answers import Verdict
from timeball.model.message import Kind
from timeball.schedule.outcomes import Moved
from timeball.table import merging

STRATEGIES = ("hour_log", "timer_wheel", "level_cascade")
# Soon, within the wheel's minute, beyond it, far enough for a file of another hour.
DELAYS_MS = st.sampled_from([500, 20 * SECOND_MS, 90 * SECOND_MS, HOUR_MS, 5 * HOUR_MS])
WHICH = st.integers(0, 3)  # the index of a message
BY_ID, BY_NUMBER, BY_HANDLE = range(3)  # how a cancel names its message
# Steps: their kind, the index of a message, and a time in ms (or, for "cancel", how it names its message).
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.just(0), DELAYS_MS),
        st.tuples(st.just("move"), WHICH, DELAYS_MS),
        st.tuples(st.just("back"), WHICH, st.just(0)),  # to the due time of the send
        st.tuples(st.just("cancel"), WHICH, st.sampled_from([BY_ID, BY_NUMBER, BY_HANDLE])),
        st.tuples(st.sampled_from(["compact", "rewrite", "restart", "lose"]), st.just(0), st.just(0)),
        st.tuples(st.just("pass"), st.just(0), st.sampled_from([400, 15 * SECOND_MS, 80 * SECOND_MS])),
    ),
    min_size=3,
    max_size=14,
)


class Model:
    """The last accepted due times by number, and the cancelled scheduled messages."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.numbers: list[int] = []
        self.first_ms: dict[int, int] = {}
        self.due_ms: dict[int, int] = {}
        self.cancelled: set[int] = set()

    def is_pending(self, number: int) -> bool:
        return number not in self.cancelled and self.due_ms[number] > self.world.clock.wall

    async def step(self, what: str, which: int, amount: int) -> None:
        """Carry out one of `STEPS`, if it is possible now."""
        world, broker = self.world, self.world.broker
        if what == "send":
            await self.send(amount)
        elif what == "pass":
            for _ in range(8):
                await world.advance(amount // 8)
        elif what in ("restart", "lose"):
            await world.stop()
            if what == "lose":
                lose_caches(world)
            await world.start()
        elif what == "compact" and broker.scheduling.compacts:
            await world.compact()
        elif what == "rewrite":
            await world.merge()
        elif what in ("move", "back", "cancel") and which < len(self.numbers):
            await self.settle(what, self.numbers[which], amount)

    async def send(self, delay_ms: int) -> None:
        """Send a message, and add it to the model."""
        key = f"k{len(self.numbers)}"
        sent = await self.world.broker.send(batch(1, unique_key=[key], delay_ms=[delay_ms]))
        self.numbers.append(sent.first_seq)
        self.first_ms[sent.first_seq] = self.due_ms[sent.first_seq] = self.world.clock.wall + delay_ms

    def names(self, number: int) -> tuple[dict[str, list], dict[str, list]]:
        """Build the arguments that name a message by its id, and by its number."""
        return {"ids": [f"k{self.numbers.index(number)}"]}, {"seqs": [number]}

    async def settle(self, what: str, number: int, amount: int) -> None:
        """Cancel or move a message, and check the verdict."""
        broker, now_ms = self.world.broker, self.world.clock.wall
        by_id, by_number = self.names(number)
        was_pending = self.is_pending(number)
        if what == "cancel" and amount == BY_HANDLE:
            key = by_id["ids"][0]
            handle = encode_handle("orders", broker.settings.broker_name, now_ms + 1, key)
            if was_pending or number in self.cancelled:
                assert await broker.recall("orders", handle) == key
        elif what == "cancel":
            [verdict] = await broker.cancel(**(by_id, by_number)[amount])
            self.check(verdict, number, was_pending, "cancelled")
        else:
            due_ms = now_ms + amount if what == "move" else max(self.first_ms[number], now_ms)
            # Every second message is moved by its number.
            names = (by_id, by_number)[self.numbers.index(number) % 2]
            [verdict] = await broker.reschedule(**names, due_ms=due_ms)
            self.check(verdict, number, was_pending, "rescheduled")
            if was_pending:
                self.due_ms[number] = due_ms
            if due_ms <= now_ms:
                await self.world.advance(0)  # it is due: until its release, a cancel may still come in time
        if what == "cancel" and was_pending:
            self.cancelled.add(number)
        if not self.is_pending(number):
            verdicts = [await broker.cancel(**names) for names in (by_id, by_number)]
            assert len({(verdict.verdict, verdict.seq, verdict.at_ms) for [verdict] in verdicts}) == 1, (
                verdicts
            )

    def check(self, verdict: Verdict, number: int, was_pending: bool, success: str) -> None:
        """Check a verdict: `success` for a message that was pending, otherwise the end that the model knows."""
        assert verdict.seq == number
        ended = "already_cancelled" if number in self.cancelled else "released"
        assert verdict.verdict == (success if was_pending else ended)

    async def end(self) -> list[str]:
        """Let all messages become due. Return the messages whose ends in the log differ from the expectation."""
        for _ in range(14):
            await self.world.advance(HOUR_MS // 2)
        reader = self.world.broker.log.reader
        ends: dict[int, list[tuple[Kind, int]]] = {}
        for rows in self.world.broker.read_log(1, reader.next_seq, [Kind.RELEASE, Kind.CANCEL]):
            for row in rows.to_pylist():
                ends.setdefault(row["source_seq"], []).append((Kind(row["kind"]), row["due_ms"]))
        expected = {
            number: [(Kind.CANCEL if number in self.cancelled else Kind.RELEASE, self.due_ms[number])]
            for number in self.numbers
        }
        return [
            f"{number}: {ends.get(number)}, not {expected.get(number)}"
            for number in {**ends, **expected}
            if ends.get(number) != expected.get(number)
        ]


def lose_caches(world: World) -> None:
    """Delete the checkpoint and the Delta log of a stopped node, which it can rebuild."""
    if world.files.exists(checkpoint.NAME):
        world.files.remove(checkpoint.NAME)
    for name in (
        world.files.list_dir("pending/_delta_log") if world.files.exists("pending/_delta_log") else ()
    ):
        world.files.remove(f"pending/_delta_log/{name}")


async def life(world: World, strategy: str, steps: list[tuple[str, int, int]]) -> list[str]:
    """Send a message due in an hour, and carry out the steps. Return the result of `Model.end`."""
    await world.restart(strategy=strategy, timer_wheel_ms=60 * SECOND_MS)
    model = Model(world)
    await model.send(HOUR_MS)
    for step in steps:
        await model.step(*step)
    return await model.end()


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_each_message_is_released_once_at_its_newest_due_time(
    strategy: str, steps: list[tuple[str, int, int]]
) -> None:
    @on_node()
    async def run(world: World) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(merging, "FILES_MIN", 1)
            assert await life(world, strategy, steps) == []

    run()


INTERRUPTIONS = ("restart", "lose", "compact", "rewrite")
MOVE_AND_BACK = [("compact", 0, 0), ("move", 0, 2 * HOUR_MS), ("compact", 0, 0), ("back", 0, 0)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_a_message_that_is_moved_back_to_its_first_due_time_is_released_once(
    strategy: str, interruption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outdated first version is in a file and has the due time of the valid third one."""
    monkeypatch.setattr(merging, "FILES_MIN", 1)
    steps = [step for move in MOVE_AND_BACK for step in (move, (interruption, 0, 0))]

    @on_node()
    async def run(world: World) -> None:
        assert await life(world, strategy, steps) == []

    run()


def test_a_recovery_that_forgets_moves_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a recovery without the newest versions of moved messages."""
    monkeypatch.setattr(Replayed, "_replay_moves", lambda self, rows: None)

    @on_node()
    async def run(world: World) -> None:
        steps = [("compact", 0, 0), ("move", 0, 2 * HOUR_MS), ("lose", 0, 0)]
        assert await life(world, "hour_log", steps) != []

    run()


def test_a_map_that_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: look-ups that do not know the newest version of a message."""
    monkeypatch.setattr(Moved, "newest", lambda self, number: None)

    @on_node(retention_ms=1)
    async def run(world: World) -> None:
        first = (await world.broker.send(batch(1, delay_ms=[HOUR_MS]))).first_seq
        await world.broker.reschedule(seqs=[first], delay_ms=2 * HOUR_MS)
        await remove_all_rows(world)
        [verdict] = await world.broker.cancel(seqs=[first])
        assert verdict.verdict != "cancelled"

    run()


@on_node(retention_ms=1, strategy="timer_wheel", timer_wheel_ms=60 * SECOND_MS)
async def test_a_moved_message_without_id_is_found_after_retention_removed_its_rows(world: World) -> None:
    """Also if retention removes its row between the lookup and the read of its body."""
    first = (await world.broker.send(batch(1, delay_ms=[5 * HOUR_MS]))).first_seq

    async def remove_rows_until(seq: int) -> None:
        for _ in range(200):
            if world.broker.log.reader.first_seq > seq:
                return
            await world.advance(60 * SECOND_MS)  # the timer wheel writes a new row of the message
            await world.send("filler", [None] * 6, 100_000)
            await world.checkpoint()
            await world.apply_retention()
        raise AssertionError(f"the log begins at {world.broker.log.reader.first_seq}")

    for delay_ms in (6 * HOUR_MS, 7 * HOUR_MS):
        [verdict] = await world.broker.reschedule(seqs=[first], delay_ms=delay_ms)
        assert (verdict.verdict, verdict.seq) == ("rescheduled", first)
        await remove_rows_until(world.broker.log.reader.next_seq - 1)
    look_ups = world.broker.look_ups
    before = await look_ups.look_up(Names(seqs=[first]))
    await remove_rows_until(world.broker.log.reader.next_seq - 1)
    [current] = await cancel.recheck_unsettled(look_ups, before.candidates, {})
    assert current.number == first
    assert current.at_seq >= world.broker.log.reader.first_seq > before.candidates[0].at_seq
    [verdict] = await world.broker.cancel(seqs=[first])
    assert (verdict.verdict, verdict.seq) == ("cancelled", first)
