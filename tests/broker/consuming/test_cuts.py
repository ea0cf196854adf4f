"""A power cut at every disk call while messages are received and acknowledged.

With `ack_save_ms` 0, every answer stays in effect. With the default 50 ms, messages received or acknowledged since the
last save may be delivered again: at once, or when their lease ends. No message is lost, and dead letters are durable.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from tests.broker.consuming.subscriber import (
    AGAIN,
    DEAD,
    MINUTE_MS,
    TOPIC,
    bodies,
    engine,
    in_queue,
    pass_time,
    receive,
    send,
    try_at_most,
)
from tests.crash.lives import run, until_cut
from tests.crash.world import CutFiles, World
from tests.crash_files import CrashFiles, Survival

from timeball.broker.consuming import engine as consuming_engine
from timeball.broker.consuming import lease_saver, leases
from timeball.broker.consuming.requests import Received
from timeball.io.clock import ManualClock

LONG_MS = 10 * MINUTE_MS
PART = 2  # positions in a part, so that a queue of these tests has several parts
SENT = [b"%d" % i for i in range(12)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (leases, lease_saver):
        monkeypatch.setattr(module, "PART_POSITIONS", PART)


class Known:
    """The bodies of the messages, by the answers that clients received while the power was on."""

    def __init__(self, files: CutFiles, save_ms: int) -> None:
        self.files, self.save_ms = files, save_ms
        self.sent: set[bytes] = set()
        self.in_flight: set[bytes] = set()
        self.acked: set[bytes] = set()
        self.dead: set[bytes] = set()
        # Requested, with or without an answer.
        self.ack_asked: set[bytes] = set()
        self.dead_asked: set[bytes] = set()

    def note(self, into: set[bytes], bodies: list[bytes]) -> None:
        """Add bodies to one of the sets, unless the power is cut: then the client got no answer."""
        if not self.files.cut:
            into.update(bodies)


async def work(world: World, known: Known) -> None:
    """Send 12 messages, receive them in three requests of 4, and give four different answers to each request."""
    verbs = engine(world)
    await send(world, SENT)
    known.note(known.sent, SENT)

    async def take(rows: int) -> Received:
        received = await receive(world, rows, invisible_ms=LONG_MS)
        known.note(known.in_flight, bodies(received))
        return received

    async def answer(received: Received) -> None:
        texts, receipts = bodies(received), received.receipts
        known.ack_asked.update(texts[:1])
        if await verbs.acknowledge(receipts[:1]) == [True]:
            known.note(known.acked, texts[:1])
        known.dead_asked.update(texts[1:2])
        if await verbs.dead_letter(receipts[1]):
            known.note(known.dead, texts[1:2])
        if await verbs.change_invisible_time(receipts[2], 2 * LONG_MS) is not None:
            known.note(known.in_flight, texts[2:3])
        await verbs.nack(receipts[3], LONG_MS)

    first = await take(4)
    await answer(first)
    assert world.node is not None
    await world.node.maintenance.save_offsets()
    second, third = await asyncio.gather(take(4), take(4))
    await asyncio.gather(answer(second), answer(third), world.node.maintenance.save_offsets())
    await world.checkpoint()


def live(crash_at: int | None = None, save_ms: int = 0) -> tuple[CutFiles, Known]:
    """Run a broker and its consumers until the disk call `crash_at` (None: to the end)."""
    files, clock = CutFiles(crash_at=crash_at), ManualClock()
    world, known = World(files, clock, ack_save_ms=save_ms), Known(files, save_ms)

    async def steps() -> None:
        await world.start()
        try_at_most(world, 5)
        await work(world, known)
        await world.stop()

    run(until_cut(world, files, steps))
    return files, known


async def check_after_restart(image: CrashFiles, known: Known) -> None:
    """Start on the surviving disk, and receive all messages, now and after all leases have ended."""
    world = World(image, ManualClock())
    await world.start()
    try:
        if TOPIC not in world.broker.topics():
            assert not known.sent, "lost"
            return
        try_at_most(world, 5)
        fresh = bodies(await receive(world, 32, invisible_ms=LONG_MS))
        if not known.save_ms:
            assert not known.in_flight & set(fresh), "in two hands"
        await pass_time(world, 3 * LONG_MS)
        late = bodies(await receive(world, 32, invisible_ms=LONG_MS))
        dead = await in_queue(world, DEAD)
        assert max(Counter([*late, *dead]).values(), default=0) <= 1, "twice"
        if not known.save_ms:
            assert not known.acked & {*late, *dead}, "acknowledged and comes again"
        assert known.dead <= set(dead) <= known.dead_asked, "a dead letter is lost, or nobody's"
        assert known.sent - known.ack_asked <= {*late, *dead}, "lost"
        # Each acknowledged message is gone or comes again.
        assert set(fresh) <= set(late) and set(late) == set(await in_queue(world, AGAIN))
        await world.stop()
    finally:
        await world.abandon()


SURVIVALS: list[Survival] = ["nothing", "everything", "random"]


@pytest.mark.parametrize("save_ms", [0, 50])
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_power_cut_at_any_disk_call_loses_no_message_and_no_durable_answer(step: int, save_ms: int) -> None:
    files, known = live(save_ms=save_ms)
    assert len(known.acked) == len(known.dead) == 3 and len(known.in_flight) == 12, "all steps were executed"
    calls = files.calls
    assert calls > 20
    for call in range(1, calls + 1, step):
        files, known = live(call, save_ms)
        for survival in SURVIVALS:
            run(check_after_restart(files.crash(call, survival), known))


def test_a_look_would_notice_leases_that_are_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a start that does not restore the leases."""
    calls = live()[0].calls
    monkeypatch.setattr(consuming_engine, "restored_queues", lambda *_: ([], {}))

    def noticed(call: int) -> bool:
        """Check whether a cut at this call shows that a leased message has a second lease."""
        files, known = live(call)
        try:
            run(check_after_restart(files.crash(call, "everything"), known))
        except AssertionError as error:
            return str(error).startswith("in two hands")
        return False

    assert any(noticed(call) for call in range(1, calls + 1))


def test_a_look_would_notice_answers_that_are_not_saved() -> None:
    """Negative control: a broker that saves late, judged as if it had saved before each answer."""
    calls = live(save_ms=1_000)[0].calls
    faults = set()
    for call in range(1, calls + 1):
        files, known = live(call, 1_000)
        known.save_ms = 0  # the check of a broker that saves before each answer
        try:
            run(check_after_restart(files.crash(call, "nothing"), known))
        except AssertionError as error:
            faults.add(str(error).partition("\n")[0])
    assert faults == {"in two hands", "acknowledged and comes again"}
