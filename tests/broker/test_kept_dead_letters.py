"""Dead letters outlive the segments of their messages: through restarts, crashes and lost caches."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from tests.broker.consuming.subscriber import AGAIN, DEAD, GROUP, bodies, engine, in_queue, receive, send
from tests.broker.consuming.test_dead_letters import list_dead_letters, make_dead_letters
from tests.broker.on_node import on_node
from tests.crash.lives import run, until_cut
from tests.crash.world import HOUR_MS, CutFiles, World
from tests.crash_files import CrashFiles

from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.limits import DAY_MS

# Retention does not keep unread messages longer, because the group reads no more messages in these tests.
SETTINGS: dict[str, Any] = {"retention_ms": HOUR_MS, "unread_retention_ms": 0}
TEXTS = [b"%d" % number for number in range(7)]


async def apply_retention(world: World, after_ms: int = 2 * HOUR_MS) -> None:
    """Fill segments, wait, and let retention remove the old segments."""
    for _ in range(3):
        await world.send("filler", [None] * 6, 100_000)
    # The offsets are saved by a timer of real time. A row that it writes after the advance would keep its segment.
    await world.broker.consuming.saver.save_and_wait()
    world.clock.advance(after_ms)
    await world.checkpoint()
    await world.apply_retention()


async def crash_and_start(world: World, *, keeps_caches: bool = True) -> None:
    """Cut the power, and start the node on the durable state."""
    files = world.files.crash(survival="nothing")
    await world.abandon()
    world.files = files
    if not keeps_caches:
        for folder in ("queues", "."):
            for name in files.list_dir(folder):
                if folder == "queues" or name == "checkpoint":
                    files.remove(f"{folder}/{name}" if folder != "." else name)
    await world.start()


async def count_expired(world: World) -> int:
    """Count the expired dead letters of the group."""
    expired: int = (await world.broker.groups.one(GROUP, ANONYMOUS)).expired_dead_letters
    return expired


@on_node(**SETTINGS)
async def test_dead_letters_stay_when_retention_removes_their_rows(world: World) -> None:
    await make_dead_letters(world, TEXTS)
    before = await list_dead_letters(world)
    for _ in range(3):
        first_seq = world.broker.log.reader.first_seq
        await apply_retention(world)
        assert world.broker.log.reader.first_seq > first_seq
        assert world.broker.queues(DEAD)[0][0] > 0, (
            "RocketMQ's tools see only dead letters of the retention time"
        )
        # Handles, bodies and the times at which the messages became dead letters have not changed.
        assert await list_dead_letters(world) == before
    assert world.broker.dead_letters.count(GROUP) == len(TEXTS) and await count_expired(world) == 0
    page = await world.broker.dead_letters.page(GROUP, 3, None, ANONYMOUS)
    last_page = await world.broker.dead_letters.page(GROUP, 9, page.next_page, ANONYMOUS)
    assert page.dead_letters + last_page.dead_letters == before


@on_node(**SETTINGS)
async def test_dead_letters_of_a_topic_with_a_rate_limit_stay(world: World) -> None:
    await world.broker.create_topic(DEAD, 1, max_per_second=1)
    await make_dead_letters(world, TEXTS)
    before = await list_dead_letters(world)
    assert world.broker.dead_letters.count(GROUP) == len(TEXTS) == len(before)
    await apply_retention(world)
    assert world.broker.queues(DEAD)[0][0] == len(TEXTS), "the rows of the dead letters were removed"
    assert await list_dead_letters(world) == before and await count_expired(world) == 0


@pytest.mark.parametrize("keeps_caches", [True, False])
@on_node(**SETTINGS)
async def test_repeated_dead_letters_survive_crashes_and_lost_caches(
    world: World, keeps_caches: bool
) -> None:
    await make_dead_letters(world, TEXTS)
    before = await list_dead_letters(world)
    await apply_retention(world)
    await crash_and_start(world, keeps_caches=keeps_caches)
    assert await list_dead_letters(world) == before
    await apply_retention(world)
    await crash_and_start(world, keeps_caches=keeps_caches)
    assert await list_dead_letters(world) == before
    await world.restart()
    assert await list_dead_letters(world) == before


@on_node(**SETTINGS)
async def test_repeated_dead_letters_can_be_resent_and_deleted(world: World) -> None:
    await make_dead_letters(world, TEXTS)
    await apply_retention(world)
    await make_dead_letters(world, [b"new"])
    letters = await list_dead_letters(world)
    chosen = [letters[1].dead_letter, letters[2].dead_letter]
    resolved = await world.broker.dead_letters.resend(GROUP, [*chosen, "0-9999"], ANONYMOUS)
    assert (resolved.rows, resolved.found) == (2, [True, True, False])
    assert sorted(bodies(await receive(world))) == sorted([letters[1].body, letters[2].body])
    again = await world.broker.dead_letters.resend(GROUP, chosen, ANONYMOUS)
    assert again.rows == 0
    remaining = [letter for letter in letters if letter.dead_letter not in chosen]
    assert await list_dead_letters(world) == remaining
    await crash_and_start(world, keeps_caches=False)
    await apply_retention(world)
    assert await list_dead_letters(world) == remaining
    assert (await world.broker.dead_letters.delete(GROUP, None, ANONYMOUS)).rows == len(remaining)
    await apply_retention(world)
    assert await list_dead_letters(world) == [] and await count_expired(world) == 0


@on_node(**SETTINGS, dead_letter_retention_ms=DAY_MS)
async def test_dead_letters_expire_after_their_own_retention_and_are_counted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await make_dead_letters(world, TEXTS)
    await apply_retention(world)
    logging.disable(logging.NOTSET)
    await apply_retention(world, DAY_MS)
    assert await list_dead_letters(world) == [] and await count_expired(world) == len(TEXTS)
    assert "dead letters expired group=g rows=" in caplog.text
    assert world.node is not None
    text = (await world.node.metrics.text(ANONYMOUS)).decode()
    assert 'timeball_expired_dead_letters_total{group="g"} 7.0' in text
    await crash_and_start(world)
    await apply_retention(world)
    assert await count_expired(world) == len(TEXTS)


@on_node(**SETTINGS, dead_letter_retention_ms=1)
async def test_expired_dead_letters_that_are_still_in_their_queue_are_counted_once(world: World) -> None:
    """The power is cut between the count and the removal of the rows."""
    await make_dead_letters(world, TEXTS)
    await world.send("filler", [None] * 6, 100_000)
    world.clock.advance(2 * HOUR_MS)
    await world.broker.dead_letters.repeat(world.broker.log.reader.next_seq)
    await crash_and_start(world)
    assert await count_expired(world) == len(TEXTS)
    await apply_retention(world)
    assert await list_dead_letters(world) == [] and await count_expired(world) == len(TEXTS)


@on_node(**SETTINGS, dead_letter_retention_ms=0)
async def test_dead_letters_without_a_retention_limit_stay(world: World) -> None:
    await make_dead_letters(world, TEXTS)
    await apply_retention(world)
    await apply_retention(world, 3_000 * DAY_MS)
    assert len(await list_dead_letters(world)) == len(TEXTS)


@on_node(**SETTINGS, kept_bytes=250_000)
async def test_the_oldest_dead_letters_expire_first_when_they_exceed_kept_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DEAD_LETTERS_REPEATED_AT_ONCE", 1)
    for text in (b"a", b"b", b"c"):
        await send(world, [text * 100_000])
        (receipt,) = (await receive(world)).receipts
        assert await engine(world).dead_letter(receipt)
        await apply_retention(world)
    assert {letter.body[:1] for letter in await list_dead_letters(world)} == {
        b"b",
        b"c",
    } and await count_expired(world) == 1
    # A second pass of retention, which moves the dead letters to new rows, removes none of them.
    await apply_retention(world)
    assert {letter.body[:1] for letter in await list_dead_letters(world)} == {
        b"b",
        b"c",
    } and await count_expired(world) == 1


@on_node(**SETTINGS)
async def test_repeated_dead_letters_of_a_deleted_topic_are_removed_and_counted(world: World) -> None:
    await make_dead_letters(world, TEXTS)
    await apply_retention(world)
    await make_dead_letters(world, [b"new"])
    deleted = await world.broker.administration.delete_topic(DEAD, ANONYMOUS)
    assert (deleted.unread, deleted.dead_letters) == (0, 8) and await count_expired(world) == 8
    await make_dead_letters(world, [b"later"])
    assert [letter.body for letter in await list_dead_letters(world)] == [b"later"]


@on_node(**SETTINGS)
async def test_a_message_with_a_repeated_dead_letter_has_the_state_dead(world: World) -> None:
    await make_dead_letters(world, TEXTS)
    await apply_retention(world)
    await make_dead_letters(world, [b"new"])
    (letter,) = [each for each in await list_dead_letters(world) if each.body == b"3"]
    places = await world.broker.find(letter.id)
    assert [place.state for place in places] in ([], ["expired"]), "a repeated dead letter is no message"
    (verdict,) = await world.broker.cancel(ids=[letter.id])
    assert verdict.verdict != "cancelled"
    await world.restart()
    assert world.broker.pending_messages == 0, "a repeated dead letter is no pending message either"


def dead_letters_after_cut(call: int | None, seed: int) -> tuple[int, list[bytes]]:
    """Cut the power at a call in two passes of retention, and restart. Return calls made, and the remaining letters."""
    files, clock = CutFiles(crash_at=call), ManualClock()
    world = World(files, clock, **SETTINGS)

    async def live() -> None:
        await world.start()
        await make_dead_letters(world, TEXTS[:3])
        first, *_ = await list_dead_letters(world)
        await world.broker.dead_letters.delete(GROUP, [first.dead_letter], ANONYMOUS)
        await apply_retention(world)
        await apply_retention(world)

    async def start_and_check(image: CrashFiles) -> list[bytes]:
        second = World(image, clock, **SETTINGS)
        await second.start()
        try:
            letters = [letter.body for letter in await list_dead_letters(second)]
            await apply_retention(second)
            assert [letter.body for letter in await list_dead_letters(second)] == letters
            # Each dead letter is resent once, wherever its row is stored.
            await second.broker.dead_letters.resend(GROUP, None, ANONYMOUS)
            assert sorted(await in_queue(second, AGAIN)) == sorted(letters)
            await second.stop()
        finally:
            await second.abandon()
        return letters

    run(until_cut(world, files, live))
    return files.calls, run(start_and_check(files.crash(seed, "random")))


@pytest.mark.slow
def test_a_power_cut_during_retention_loses_no_dead_letter() -> None:
    calls, letters = dead_letters_after_cut(None, 1)
    assert len(letters) == 2
    for call in sorted({*np.random.default_rng(2).integers(calls // 2, calls, 40).tolist()}):
        assert len(dead_letters_after_cut(call, call)[1]) == 2, f"cut at call {call} of {calls}"
