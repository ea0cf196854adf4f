"""Random consumers and power cuts: no message is lost, and none has two leases at once."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.broker.on_node import InTurn
from tests.crash.lives import run
from tests.crash_files import CrashFiles

from timeball.broker.consuming.engine import Consuming
from timeball.broker.consuming.requests import Receipt, ReceiveRequest
from timeball.io.clock import ManualClock

GROUP, TOPIC, QUEUES = "g", "orders", 2
INVISIBLE_MS = 1_000
# A method of `Life` (with blanks), and its argument: messages, rows, an index of a receipt, or ms.
STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(1, 4)),
    st.tuples(st.just("pop"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["ack", "ack stale", "more time", "less time"]), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.sampled_from([1, 400, 1_000, 3_000])),
    st.tuples(st.sampled_from(["restart", "save", "power cut"]), st.just(0)),
)


@dataclasses.dataclass
class InHand:
    """A consumer's knowledge of one receipt: the message, and the end of its lease by the wall clock."""

    body: str
    until_ms: int


class Life:
    """A node, and consumers that remember their answers."""

    def __init__(self, *, in_order: bool) -> None:
        self.clock, self.files = ManualClock(), CrashFiles()
        self.in_order = in_order
        self.sent: list[str] = []
        self.acked: set[str] = set()
        self.seen: set[str] = set()
        self.hands: dict[Receipt, InHand] = {}
        self.stale: list[Receipt] = []  # receipts that are not valid any more
        self.saved: set[str] = set()  # the bodies in `acked` whose acknowledgement is durable

    async def live(self, steps: list[tuple[str, int]]) -> None:
        """Take the steps, then receive and acknowledge all messages, and check that none is lost."""
        self.world = InTurn(self.files, self.clock)
        await self.world.start()
        await self.world.broker.create_topic(TOPIC, QUEUES)
        for name, n in steps:
            await getattr(self, name.replace(" ", "_"))(n)
        for _ in range(80):  # an ordered group gets one message after another, which takes some rounds
            await self.wait(4_000)
            await self.pop(32)
            for receipt in [*self.hands]:
                await self.done(receipt)
        assert self.seen == set(self.sent), "lost"
        await self.world.stop()

    @property
    def engine(self) -> Consuming:
        """The consuming engine of the present node."""
        consuming: Consuming = self.world.broker.consuming
        return consuming

    async def send(self, n: int) -> None:
        bodies = [f"m{len(self.sent) + i}" for i in range(n)]
        columns = {"topic": [TOPIC] * n, "body": [body.encode() for body in bodies]}
        self.sent += bodies  # no send is interrupted here, so all of them are in the log
        await self.world.broker.send(pa.RecordBatch.from_pydict(columns))

    async def pop(self, n: int) -> None:
        ask = ReceiveRequest(GROUP, TOPIC, rows=n, invisible_ms=INVISIBLE_MS, in_order=self.in_order)
        popped = await self.engine.receive(ask, 0)
        bodies = [bytes(body).decode() for body in popped.rows.column("body").to_pylist()]
        for receipt, body in zip(popped.receipts, bodies, strict=True):
            others = [hand for hand in self.hands.values() if hand.until_ms > self.clock.wall]
            assert body not in {hand.body for hand in others}, f"{body} is in two hands"
            assert body not in self.acked, f"{body} is acked and comes again"
            self.hands[receipt] = InHand(body, self.clock.wall + INVISIBLE_MS)
            self.seen.add(body)

    async def ack(self, n: int) -> None:
        if self.hands:
            await self.done([*self.hands][n % len(self.hands)])

    async def done(self, receipt: Receipt) -> None:
        """Acknowledge a message. The answer may be False only after the end of its lease."""
        hand = self.hands.pop(receipt)
        (is_valid,) = self.engine.acknowledge_now([receipt])
        assert is_valid or hand.until_ms <= self.clock.wall
        self.stale.append(receipt)
        if is_valid:
            self.acked.add(hand.body)

    async def ack_stale(self, n: int) -> None:
        if self.stale:
            assert self.engine.acknowledge_now([self.stale[n % len(self.stale)]]) == [False]

    async def more_time(self, n: int, ms: int = 2_500) -> None:
        """Let a lease end in `ms` ms."""
        if self.hands:
            receipt = [*self.hands][n % len(self.hands)]
            new = await self.engine.change_invisible_time(receipt, ms)
            hand = self.hands.pop(receipt)
            assert new is not None or hand.until_ms <= self.clock.wall
            if new is not None:
                self.hands[new] = InHand(hand.body, self.clock.wall + ms)
                self.stale += [receipt] if new != receipt else []

    async def less_time(self, n: int) -> None:
        await self.more_time(n, 1)

    async def wait(self, ms: int) -> None:
        """Let time pass, until the messages whose leases have ended are back."""
        self.clock.advance(ms)
        self.engine.wake()

        def are_back() -> bool:
            queues = self.engine.leases.all()
            leases = [lease for queue in queues for lease in queue.in_flight.values()]
            return all(lease.deadline_ms > self.clock.wall for lease in leases)

        await self.world.until(are_back, "all messages whose leases have ended are back")

    async def save(self, _: int) -> None:
        await self.world.node.maintenance.save_offsets()
        self.saved = set(self.acked)

    async def restart(self, _: int) -> None:
        await self.world.restart()  # receipts stay valid
        self.saved = set(self.acked)

    async def power_cut(self, _: int) -> None:
        await self.world.abandon()
        self.files = self.files.crash(survival="nothing")
        self.world = InTurn(self.files, self.clock)
        await self.world.start()
        self.forget()

    def forget(self) -> None:
        """Let the consumers forget all receipts. Messages that were acknowledged since the last save may come again."""
        self.clock.advance(1)
        self.acked = set(self.saved)
        self.hands.clear()
        self.stale.clear()


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, max_size=40), st.booleans())
@example([("send", 2), ("pop", 2), ("less time", 0), ("less time", 1)], True)
@example([("send", 2), ("pop", 2), ("less time", 0), ("less time", 1)], False)
def test_no_message_is_lost_or_leased_twice_at_the_same_time(
    steps: list[tuple[str, int]], in_order: bool
) -> None:
    run(Life(in_order=in_order).live(steps))


def test_a_life_would_notice_a_loss() -> None:
    """Negative control: an offset beyond the messages that were handed out, set by an administrator, loses messages."""
    life = Life(in_order=False)

    async def skip(_: int) -> None:
        await life.world.broker.commit_offsets(GROUP, TOPIC, {0: 1, 1: 1})

    life.save = skip  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="lost"):
        run(life.live([("send", 2), ("save", 0)]))


def test_a_life_would_notice_an_acknowledgement_that_is_not_saved() -> None:
    """Negative control: a save that does not reach the log."""
    life = Life(in_order=False)

    async def believe(_: int) -> None:
        life.saved = set(life.acked)

    life.save = believe  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="acked and comes again"):
        run(life.live([("send", 1), ("pop", 1), ("ack", 0), ("save", 0), ("power cut", 0), ("pop", 1)]))


def test_a_life_would_notice_two_hands() -> None:
    """Negative control: a consumer that believes in its lease for longer than it was told."""
    life = Life(in_order=False)

    async def believe(_: int) -> None:
        for hand in life.hands.values():
            hand.until_ms += 10_000

    life.save = believe  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="in two hands"):
        run(life.live([("send", 1), ("pop", 1), ("save", 0), ("wait", 3_000), ("pop", 1)]))
