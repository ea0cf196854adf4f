"""Random consumers and power cuts: the log and a model agree on every message.

The model knows of each message its number of attempts, and the receipt and end of its lease. It is updated with each
answer. A leased message has no second lease. An acknowledged one never comes again. One whose lease has ended comes
again exactly once, with an attempt counted. One without remaining attempts becomes a dead letter, once. After each step
the broker's figures equal the model's: leased messages, messages that wait for their next delivery, and pending
scheduled messages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.broker.consuming.subscriber import (
    AGAIN,
    DEAD,
    GROUP,
    TOPIC,
    engine,
    in_queue,
    receive,
    try_at_most,
)
from tests.broker.on_node import InTurn, batch, column, settled
from tests.crash.lives import run
from tests.crash_files import CrashFiles

from timeball.broker.admin.administration import add_in_flight
from timeball.broker.consuming import engine as consuming_engine
from timeball.broker.consuming.requests import Receipt
from timeball.broker.registry.redeliveries import Redeliveries
from timeball.io.clock import ManualClock
from timeball.model.config import StrategyName
from timeball.model.limits import DAY_MS
from timeball.model.message import NACK_REASON, decode_properties

TIMES_MAX, INVISIBLE_MS = 2, 1_000
# A method of `Life` (with blanks), and its argument: messages, rows, an index of a receipt, or ms.
STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(1, 4)),
    st.tuples(st.just("receive"), st.integers(1, 4)),
    st.tuples(
        st.sampled_from(
            ["ack", "ack stale", "more time", "less time", "suspend", "dead letter", "nack", "nack silently"]
        ),
        st.integers(0, 9),
    ),
    st.tuples(st.sampled_from(["send for later", "cancel"]), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.sampled_from([1, 400, 1_000, 3_000])),
    # A step of a second or less is waited for, so a lease may end up to a second late (schedule/durations.py).
    st.tuples(st.just("clock back"), st.sampled_from([1_300, 5_000, 60_000])),
    st.tuples(st.sampled_from(["restart", "save", "power cut", "kill", "compact", "checkpoint"]), st.just(0)),
)


@dataclasses.dataclass
class Message:
    """The model of one message. `tried`: attempts that have ended. `again`: number of redeliveries.

    Its lease ends at `ends_ms` of elapsed time. The row has `due_ms` and `store_ms`, by the clock at that time.
    """

    tried: int = 0
    again: int = 0
    receipt: Receipt | None = None
    ends_ms: int = 0
    due_ms: int = 0
    store_ms: int = 0
    counts: bool = True
    is_nacked: bool = False
    reason: str | None = None
    acked: bool = False
    dead: bool = False


class Life:
    """A node, and the model beside it."""

    def __init__(self, schedule: StrategyName = "hour_log") -> None:
        self.schedule = schedule
        self.clock, self.files = ManualClock(), CrashFiles()
        self.messages: dict[str, Message] = {}
        self.stale: list[Receipt] = []
        self.scheduled: set[str] = set()
        self.cancelled_rows = 0
        self.set_back_ms = 0

    async def live(self, steps: list[tuple[str, int]]) -> None:
        """Take the steps, check the figures after each of them, and check the outcome of every message at the end."""
        self.world = self.new_world()
        await self.world.start()
        try:
            await self.world.broker.create_topic(TOPIC, 2)
            try_at_most(self.world, TIMES_MAX)
            await self.world.broker.log.writer.flushed()
            for name, n in steps:
                await getattr(self, name.replace(" ", "_"))(n)
                self.check_figures()
            await self.to_the_end()
            await self.world.stop()
        finally:
            await self.world.abandon()

    def new_world(self) -> InTurn:
        # Each answer waits for the disk, so the model is exact.
        return InTurn(self.files, self.clock, strategy=self.schedule, ack_save_ms=0)

    async def to_the_end(self) -> None:
        """Let all attempts end, and check that each message has exactly the outcome that the model expects."""
        for _ in range(TIMES_MAX + 3):
            await self.receive(32)
            await self.wait(5_000 + self.set_back_ms)
        messages = self.messages.items()
        unsettled = [body for body, message in messages if not (message.acked or message.dead)]
        assert not unsettled, f"lost: {unsettled}"
        dead = sorted(body.decode() for body in await in_queue(self.world, DEAD))
        assert dead == sorted(body for body, message in messages if message.dead), "dead letters"
        again = [body.decode() for body in await in_queue(self.world, AGAIN)]
        for body, message in messages:
            count = again.count(body)
            assert count == message.again, f"{body} came {count} times, not {message.again}"

    @property
    def now_ms(self) -> int:
        """The broker's time, which does not follow every step of the machine's clock."""
        now_ms: int = self.world.broker.clock.now_ms()
        return now_ms

    def check_figures(self) -> None:
        """Compare the broker's figures with the model's."""
        broker = self.world.broker
        nacked = sum(message.is_nacked for message in self.messages.values())
        in_flight: dict[tuple[str, str], int] = {}
        add_in_flight(in_flight, broker.consuming.leases.all())
        for expected, counts in ((len(self.in_flight()), in_flight), (nacked, broker.redeliveries.counts())):
            assert sum(counts.values()) == expected, f"held {counts}, not {expected}"
            assert counts.keys() <= {(GROUP, TOPIC)}
        assert broker.redeliveries.waiting_rows == nacked
        assert broker.pending_messages == len(self.scheduled), "scheduled messages that wait"

    def in_flight(self) -> list[tuple[str, Message]]:
        """The leased messages, with their bodies."""
        return [(body, message) for body, message in self.messages.items() if message.receipt is not None]

    def pick(self, n: int) -> Message | None:
        """Choose one of the leased messages by a number. None if there is none."""
        in_flight = self.in_flight()
        return in_flight[n % len(in_flight)][1] if in_flight else None

    # -- the steps of consumers --------------------------------------------------------------------------------

    async def send(self, n: int) -> None:
        bodies = [f"m{len(self.messages) + i}" for i in range(n)]
        columns = {"topic": [TOPIC] * n, "body": [body.encode() for body in bodies]}
        await self.world.broker.send(pa.RecordBatch.from_pydict(columns))
        self.messages.update({body: Message() for body in bodies})

    async def receive(self, n: int) -> None:
        received = await receive(self.world, n, invisible_ms=INVISIBLE_MS)
        columns = (column(received.rows, name) for name in ("body", "reconsume_times", "properties"))
        for body, times, text, receipt in zip(*columns, received.receipts, strict=True):
            message = self.messages[bytes(body).decode()]
            assert message.receipt is None, f"{body!r} is in two hands"
            assert not message.acked, f"{body!r} was acknowledged and comes again"
            assert not message.dead, f"{body!r} is dead and comes again"
            assert times == message.tried, f"{body!r}: attempt {times + 1} after {message.tried}"
            assert not message.is_nacked, f"{body!r} was given back and comes early"
            reason = decode_properties(text or "").get(NACK_REASON)
            assert reason == message.reason, f"{body!r} shows the reason of its last nack"
            message.receipt, message.counts = receipt, True
            self.lease(message, INVISIBLE_MS)

    async def ack(self, n: int) -> None:
        if (message := self.pick(n)) is not None:
            assert await engine(self.world).acknowledge([self.take_receipt(message)]) == [True]
            message.acked = True

    async def ack_stale(self, n: int) -> None:
        if self.stale:
            stale = self.stale[n % len(self.stale)]
            assert await engine(self.world).acknowledge([stale, stale]) == [False, False]
            assert await engine(self.world).change_invisible_time(stale, 5_000) is None
            assert not await engine(self.world).dead_letter(stale)

    async def more_time(self, n: int, ms: int = 2_500, counts: bool = True) -> None:
        """Let a lease end in `ms` ms."""
        if (message := self.pick(n)) is not None:
            receipt = message.receipt
            assert isinstance(receipt, Receipt)
            assert await engine(self.world).change_invisible_time(receipt, ms, counts=counts) == receipt
            message.counts = counts
            self.lease(message, ms)
            await self.wait(0)

    async def nack(self, n: int, reason: str | None = "no stock") -> None:
        """Give a message back for 900 ms. The broker replaces the line end in the reason by a blank."""
        if (message := self.pick(n)) is not None:
            text = "" if reason is None else f"{reason}\n{n}"
            receipt = self.take_receipt(message)
            assert await engine(self.world).nack(receipt, 900, text) == receipt
            message.tried += 1
            message.dead = message.tried > TIMES_MAX
            message.is_nacked = not message.dead
            self.lease(message, 900)
            message.reason = None if reason is None else f"{reason} {n}"
            await self.wait(0)

    async def nack_silently(self, n: int) -> None:
        await self.nack(n, None)

    async def send_for_later(self, n: int) -> None:
        names = [f"s{len(self.scheduled) + self.cancelled_rows + i}" for i in range(n)]
        await self.world.broker.send(batch(n, unique_key=names, delay_ms=[40 * DAY_MS] * n))
        self.scheduled.update(names)

    async def cancel(self, n: int) -> None:
        names = sorted(self.scheduled)[:n]
        if names:
            verdicts = await self.world.broker.cancel(ids=names)
            assert [verdict.verdict for verdict in verdicts] == ["cancelled"] * len(names)
            self.scheduled -= set(names)
            self.cancelled_rows += len(names)

    async def less_time(self, n: int) -> None:
        await self.more_time(n, 0)

    async def suspend(self, n: int) -> None:
        await self.more_time(n, 700, counts=False)

    async def dead_letter(self, n: int) -> None:
        if (message := self.pick(n)) is not None:
            assert await engine(self.world).dead_letter(self.take_receipt(message))
            message.dead = True

    def lease(self, message: Message, ms: int) -> None:
        """Model a lease, or the wait of a nacked message, that ends in `ms` ms."""
        message.store_ms, message.due_ms = self.now_ms, self.now_ms + ms
        message.ends_ms = self.clock.boot + ms

    def restarted(self) -> None:
        """Model a restart: leases end by the wall clock.

        A lease whose row seems to be from the future ends within its whole length.
        """
        for message in self.messages.values():
            due_ms = message.due_ms - max(0, message.store_ms - self.now_ms)
            message.ends_ms = self.clock.boot + due_ms - self.now_ms

    def take_receipt(self, message: Message) -> Receipt:
        """End the lease of a message in the model. Returns its receipt, which is `stale` from now on."""
        receipt, message.receipt = message.receipt, None
        assert isinstance(receipt, Receipt)
        self.stale.append(receipt)
        return receipt

    # -- time, and the life of the broker ----------------------------------------------------------------------

    async def wait(self, ms: int) -> None:
        """Let time pass, and model the leases and delays that end."""
        self.clock.advance(ms)
        await settled(self.world)
        for _, message in self.in_flight():
            if message.ends_ms <= self.clock.boot:
                self.take_receipt(message)
                message.tried += message.counts
                message.dead = message.tried > TIMES_MAX
                message.again += not message.dead
        for message in self.messages.values():
            if message.is_nacked and message.ends_ms <= self.clock.boot:
                message.is_nacked = False
                message.again += 1

    async def clock_back(self, ms: int) -> None:
        self.clock.step_wall(-ms)
        self.set_back_ms += ms
        await self.wait(0)

    async def save(self, _: int) -> None:
        assert self.world.node is not None
        await self.world.node.maintenance.save_offsets()

    async def checkpoint(self, _: int) -> None:
        await self.world.checkpoint()

    async def compact(self, _: int) -> None:
        if self.schedule == "hour_log":
            await self.world.compact()

    async def restart(self, _: int) -> None:
        await self.world.restart()
        self.restarted()
        await self.wait(0)

    async def power_cut(self, _: int, survival: Any = "nothing") -> None:
        await self.world.abandon()
        self.files = self.files.crash(survival=survival)
        self.world = self.new_world()
        await self.world.start()
        self.restarted()
        await self.wait(0)

    async def kill(self, _: int) -> None:
        await self.power_cut(0, "everything")


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, max_size=40))
@example(
    [
        ("send", 1),
        ("receive", 1),
        ("save", 0),
        ("suspend", 0),
        ("power cut", 0),
        ("wait", 1_000),
        ("receive", 1),
    ]
)
@example(
    [
        ("send", 3),
        ("receive", 2),
        ("power cut", 0),
        ("receive", 2),
        ("restart", 0),
        ("power cut", 0),
        ("ack", 1),
    ]
)
# An acknowledgement saves the other lease anew after the clock was set back.
@example([("send", 3), ("receive", 3), ("clock back", 1_300), ("ack", 0), ("restart", 0)])
# The stop writes rows, so the last row of the log is not from the future, but the lease is.
@example([("send", 1), ("receive", 1), ("clock back", 1_300), ("restart", 0), ("wait", 1_000)])
def test_every_message_is_delivered_as_a_model_of_the_consumers_expects(steps: list[tuple[str, int]]) -> None:
    run(Life().live(steps))


@pytest.mark.parametrize("schedule", ["timer_wheel", "level_cascade"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, max_size=40))
@example(steps=[("send", 3), ("receive", 3), ("more time", 0), ("power cut", 0), ("suspend", 1), ("ack", 0)])
def test_every_message_is_delivered_as_the_model_expects_with_each_strategy(
    schedule: StrategyName, steps: list[tuple[str, int]]
) -> None:
    run(Life(schedule).live(steps))


GIVEN_BACK_AND_CUT = [("send", 2), ("receive", 2), ("nack", 0), ("power cut", 0)]


def test_a_life_would_notice_leases_that_are_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a start that does not read the log for the counts."""
    monkeypatch.setattr(Redeliveries, "replay", lambda *_: None)
    with pytest.raises(AssertionError, match="held"):
        run(Life().live(GIVEN_BACK_AND_CUT))


TAKEN_AND_CUT = [("send", 2), ("receive", 2), ("power cut", 0), ("receive", 2)]


def test_a_life_would_notice_positions_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a start that does not restore the leases."""
    monkeypatch.setattr(consuming_engine, "restored_queues", lambda *_: ([], {}))
    life = Life()
    life.check_figures = lambda: None  # type: ignore[method-assign]  # they would notice it first
    with pytest.raises(AssertionError, match="in two hands"):
        run(life.live(TAKEN_AND_CUT))


def test_a_life_would_notice_an_acknowledgement_that_is_lost() -> None:
    """Negative control: a consumer that believes in acknowledgements that the broker did not get."""
    life = Life()

    async def believe(_: int) -> None:
        for _, message in life.in_flight():
            message.acked, message.receipt = True, None

    life.save = believe  # type: ignore[method-assign]
    life.check_figures = lambda: None  # type: ignore[method-assign]  # they would notice it first
    with pytest.raises(AssertionError, match="acknowledged and comes again"):
        run(life.live([("send", 1), ("receive", 1), ("save", 0), ("wait", 3_000), ("receive", 1)]))


def test_a_life_would_notice_a_loss() -> None:
    """Negative control: an administrator moves the group beyond the messages that were handed out."""
    life = Life()

    async def skip(_: int) -> None:
        await life.world.broker.commit_offsets(GROUP, TOPIC, {0: 1, 1: 1})

    life.save = skip  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="lost"):
        run(life.live([("send", 2), ("save", 0)]))
