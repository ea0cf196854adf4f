"""Dead letters are browsed, resent and deleted, each once, also if the power is cut in between."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from tests.broker.consuming.subscriber import (
    AGAIN,
    DEAD,
    GROUP,
    TOPIC,
    attempts,
    bodies,
    engine,
    in_queue,
    receive,
    send,
    try_at_most,
)
from tests.broker.on_node import on_node
from tests.crash.lives import run, until_cut
from tests.crash.world import CutFiles, World
from tests.crash_files import CrashFiles

from timeball.broker.accepting.appender import Appender
from timeball.broker.consuming import dead_letters
from timeball.broker.consuming.dead_letters import Pace
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.answers import DeadLetterRow
from timeball.model.errors import GroupNotFound, InvalidFilter, InvalidMessage, OutOfRange
from timeball.model.message import encode_properties
from timeball.model.send_options import expiry_properties, unique_key, with_unique_key


async def make_dead_letters(world: World, texts: list[bytes], **columns: Any) -> None:
    """Send these messages, and let the group give them up."""
    await send(world, texts, unique_key=[f"id-{text.decode()}" for text in texts], **columns)
    remaining = set(texts)
    while remaining:
        received = await receive(world)
        for receipt in received.receipts:
            assert await engine(world).dead_letter(receipt)
        remaining -= set(bodies(received))


async def list_dead_letters(world: World, rows: int = 100) -> list[DeadLetterRow]:
    """The first page of the group's open dead letters."""
    page = await world.broker.dead_letters.page(GROUP, rows, None, ANONYMOUS)
    return page.dead_letters


@on_node()
async def test_dead_letters_are_listed_in_pages(world: World) -> None:
    await make_dead_letters(world, [b"%d" % number for number in range(7)])
    letters: list[DeadLetterRow] = []
    after: str | None = None
    while True:
        page = await world.broker.dead_letters.page(GROUP, 3, after, ANONYMOUS)
        letters += page.dead_letters
        after = page.next_page
        if after is None:
            break
    assert sorted(letter.body for letter in letters) == [b"%d" % number for number in range(7)]
    assert {letter.topic for letter in letters} == {TOPIC}
    assert {letter.id for letter in letters} == {f"id-{number}" for number in range(7)}
    assert world.broker.dead_letters.count(GROUP) == 7
    state = await world.broker.groups.one(GROUP, ANONYMOUS)
    assert state.dead_letters == 7 and state.attempts_max == 17
    # A group that exists and has no dead letters gets an empty page.
    await world.broker.administration.configure_groups([SubscriptionGroup("other")], ANONYMOUS)
    assert await world.broker.dead_letters.page("other", 3, None, ANONYMOUS) == type(page)([])


@on_node()
async def test_dead_letters_of_an_unknown_group_raise_group_not_found(world: World) -> None:
    letters = world.broker.dead_letters
    for operation in (
        letters.page("unknown", 3, None, ANONYMOUS),
        letters.resend("unknown", None, ANONYMOUS),
        letters.delete("unknown", ["0-1"], ANONYMOUS),
    ):
        with pytest.raises(GroupNotFound, match="'unknown' does not exist"):
            await operation


@on_node()
async def test_a_resend_delivers_once_and_only_to_its_group(world: World) -> None:
    await make_dead_letters(world, [b"a", b"b"])
    first, second = await list_dead_letters(world)
    resolved = await world.broker.dead_letters.resend(GROUP, [first.dead_letter, "0-99"], ANONYMOUS)
    assert (resolved.rows, resolved.found) == (1, [True, False])
    received = await receive(world)
    assert (bodies(received), attempts(received)) == ([first.body], [1])
    assert await in_queue(world, AGAIN) == [first.body]
    assert len(await in_queue(world, TOPIC)) == 2
    assert await list_dead_letters(world) == [second]
    again = await world.broker.dead_letters.resend(GROUP, [first.dead_letter], ANONYMOUS)
    assert (again.rows, again.found) == (0, [False])
    # RocketMQ's tools read the topic, which also contains resolved dead letters.
    assert len(await in_queue(world, DEAD)) == 2


@on_node()
async def test_a_resent_message_can_become_a_dead_letter_again(world: World) -> None:
    try_at_most(world, 0)
    await make_dead_letters(world, [b"a"])
    for _ in range(3):
        (letter,) = await list_dead_letters(world)
        await world.broker.dead_letters.resend(GROUP, [letter.dead_letter], ANONYMOUS)
        assert await list_dead_letters(world) == []
        (receipt,) = (await receive(world)).receipts
        assert await engine(world).dead_letter(receipt)
    assert world.broker.dead_letters.count(GROUP) == 1


@on_node()
async def test_a_resend_with_a_condition_resends_only_the_dead_letters_that_meet_it(world: World) -> None:
    regions = ["eu", "us", "eu", "us", "eu"]
    properties = [encode_properties({"region": region, "topic": "false"}) for region in regions]
    await make_dead_letters(world, [b"%d" % number for number in range(5)], properties=properties)
    letters = world.broker.dead_letters
    # `topic` in a condition is the original topic, not the property that the sender has set.
    for where in ("region = 'asia'", "topic = 'false'", "died_ms > 9e18"):
        assert (await letters.resend(GROUP, None, ANONYMOUS, where=where)).rows == 0
    with pytest.raises(InvalidFilter):
        await letters.resend(GROUP, None, ANONYMOUS, where="region = ")
    where = f"region = 'eu' AND topic = '{TOPIC}' AND attempts < 9"
    assert (await letters.resend(GROUP, None, ANONYMOUS, Pace(), where)).rows == 3
    assert sorted(bodies(await receive(world))) == [b"0", b"2", b"4"]
    assert [letter.body for letter in await list_dead_letters(world)] == [b"1", b"3"]


@on_node()
async def test_a_resend_of_named_dead_letters_with_a_condition_is_refused(world: World) -> None:
    """Otherwise the answer would report that a dead letter that does not meet the condition does not exist."""
    await make_dead_letters(world, [b"a"])
    (letter,) = await list_dead_letters(world)
    for handles in ([letter.dead_letter], []):
        with pytest.raises(InvalidMessage, match="where"):
            await world.broker.dead_letters.resend(GROUP, handles, ANONYMOUS, where="TRUE")
    assert await list_dead_letters(world) == [letter]


@on_node()
async def test_the_rate_of_a_resend_with_a_condition_counts_only_the_messages_that_it_resends(
    world: World,
) -> None:
    properties = [encode_properties({"odd": str(number % 2)}) for number in range(6)]
    await make_dead_letters(world, [b"%d" % number for number in range(6)], properties=properties)
    await world.broker.dead_letters.resend(GROUP, None, ANONYMOUS, Pace(1_000, 1.0), "odd = '1'")
    received_counts = []
    for _ in range(8):
        await world.advance(500)
        received_counts.append(len((await receive(world)).receipts))
    assert received_counts == [0, 1, 0, 1, 0, 1, 0, 0], "one in a second, beginning after a second"


@on_node()
async def test_a_resend_for_an_orderly_group_goes_to_the_original_topic(world: World) -> None:
    await make_dead_letters(world, [b"a"])
    world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    assert (await world.broker.dead_letters.resend(GROUP, None, ANONYMOUS)).rows == 1
    assert await in_queue(world, TOPIC) == [b"a", b"a"]


@on_node()
async def test_deleted_dead_letters_stay_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "CHUNK_ROWS", 2)
    await make_dead_letters(world, [b"%d" % number for number in range(5)])
    deleted = await world.broker.dead_letters.delete(GROUP, None, ANONYMOUS)
    assert (deleted.rows, deleted.found) == (5, [])
    files = world.files.crash(survival="nothing")
    await world.abandon()
    world.files = files
    await world.start()
    assert await list_dead_letters(world) == []
    await make_dead_letters(world, [b"new"])
    assert [letter.body for letter in await list_dead_letters(world)] == [b"new"]


@on_node()
async def test_deleting_the_topic_forgets_its_dead_letters(world: World) -> None:
    await make_dead_letters(world, [b"a"])
    await world.broker.dead_letters.delete(GROUP, None, ANONYMOUS)
    await world.broker.administration.delete_topic(DEAD, ANONYMOUS)
    await make_dead_letters(world, [b"b"])
    assert [letter.body for letter in await list_dead_letters(world)] == [b"b"]


@on_node()
async def test_a_long_body_of_a_dead_letter_is_cut_in_the_list(world: World) -> None:
    await send(world, [b"x" * (limits.SHOWN_BODY_BYTES_MAX + 1)])
    (receipt,) = (await receive(world)).receipts
    await engine(world).dead_letter(receipt)
    (letter,) = await list_dead_letters(world)
    assert len(letter.body) == limits.SHOWN_BODY_BYTES_MAX == letter.size_bytes - 1


@pytest.mark.parametrize("handle", ["", "0", "0-", "-1", "a-b", "٣-1", "0-" + "9" * 40])
def test_an_invalid_handle_of_a_dead_letter_is_refused(handle: str) -> None:
    with pytest.raises(InvalidMessage, match="dead letter"):
        dead_letters.position_of(handle)


# ---- power cuts ------------------------------------------------------------------------------------------------


def copies_after(call: int | None, seed: int) -> tuple[int, list[bytes]]:
    """Make two dead letters, and resend one and then the other. Cut the power at a disk call (None: do not cut).

    Then restart, and resend those that are still open. Returns the number of disk calls before the cut, and the bodies
    of the copies. Fails unless each dead letter has exactly one copy. `seed`: decides which unsynced writes survive.
    """
    files, clock = CutFiles(crash_at=call), ManualClock()
    world = World(files, clock)

    async def live() -> None:
        await world.start()
        await make_dead_letters(world, [b"a", b"b"])
        first, _ = await list_dead_letters(world)
        await world.broker.dead_letters.resend(GROUP, [first.dead_letter], ANONYMOUS)
        await world.broker.dead_letters.resend(GROUP, None, ANONYMOUS)

    async def repeat(image: CrashFiles) -> list[bytes]:
        second = World(image, clock)
        await second.start()
        try:
            with contextlib.suppress(GroupNotFound):  # the power was cut before the group's first member came
                await second.broker.dead_letters.resend(GROUP, None, ANONYMOUS)
            copies = await in_queue(second, AGAIN)
            letters = await in_queue(second, DEAD)
            assert second.broker.dead_letters.count(GROUP) == 0
            assert len(copies) == len(letters), "a copy for each dead letter"
            await second.stop()
        finally:
            await second.abandon()
        return copies

    run(until_cut(world, files, live))
    return files.calls, run(repeat(files.crash(seed, "random")))


def test_a_power_cut_during_a_resend_leaves_one_copy_for_each_dead_letter() -> None:
    calls, copies = copies_after(None, 1)
    assert sorted(copies) == [b"a", b"b"]
    last_calls = range(max(1, calls - 12), calls + 1)  # of the resends
    for call in sorted({*last_calls, *np.random.default_rng(1).integers(1, calls, 6).tolist()}):
        copies_after(call, call)


def test_a_resend_in_two_frames_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if the copy and its META row are in two commits, a cut between them leads to a second copy."""

    def in_two(self: Appender, batch, change):  # type: ignore[no-untyped-def]
        async def both() -> None:
            await self.send_again(batch)
            resolution = change(0, 0)
            self._writer.append(resolution.rows)
            resolution.apply()
            await self._writer.flushed()

        return None, both()

    monkeypatch.setattr(Appender, "send_with", in_two)
    calls, _ = copies_after(None, 1)
    with pytest.raises(AssertionError, match="a copy for each"):
        for call in range(calls, 0, -1):
            copies_after(call, call)


@on_node()
async def test_a_dead_letter_shows_its_nack_reason(world: World) -> None:
    try_at_most(world, 0)
    await send(world, [b"a", b"b", b"c"])
    received = await receive(world)
    by_body = dict(zip(bodies(received), received.receipts, strict=True))
    assert await engine(world).dead_letter(by_body[b"a"], "no such\x02order")
    assert await engine(world).nack(by_body[b"b"], 1_000, "no stock")
    assert await engine(world).dead_letter(by_body[b"c"])
    await world.advance(2_000)
    assert {(letter.body, letter.reason) for letter in await list_dead_letters(world)} == {
        (b"a", "no such order"), (b"b", "no stock"), (b"c", None),
    }  # fmt: skip
    await world.broker.dead_letters.resend(GROUP, None, ANONYMOUS)
    again = await receive(world)
    assert not [text for text in again.rows.column("properties").to_pylist() if "NACK" in text]


@on_node()
async def test_a_resend_with_a_rate_and_a_delay_delivers_one_message_after_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "CHUNK_ROWS", 2)
    await make_dead_letters(world, [b"%d" % number for number in range(5)])
    resolved = await world.broker.dead_letters.resend(GROUP, None, ANONYMOUS, Pace(10_000, 2.0))
    assert resolved.rows == 5 and world.broker.dead_letters.count(GROUP) == 0
    assert not (await receive(world)).receipts
    received_counts: list[int] = []
    await world.restart()
    for _ in range(25):
        await world.advance(500)
        received_counts.append(len((await receive(world)).receipts))
    assert received_counts == [0] * 19 + [1] * 5 + [0], "two in a second, beginning after 10 s"


@on_node()
async def test_a_resend_with_a_delay_alone_delivers_all_messages_together_after_the_delay(
    world: World,
) -> None:
    await make_dead_letters(world, [b"a", b"b"])
    await world.broker.dead_letters.resend(GROUP, None, ANONYMOUS, Pace(1_000))
    assert not (await receive(world)).receipts
    await world.advance(1_000)
    assert len((await receive(world)).receipts) == 2


@pytest.mark.parametrize("is_orderly", [False, True])
@on_node()
async def test_a_resent_message_with_a_delay_does_not_expire(world: World, is_orderly: bool) -> None:
    expires_ms = world.clock.wall + 3_600_000
    properties = encode_properties(expiry_properties(expires_ms, None, None))
    await make_dead_letters(world, [b"a"], properties=[properties])
    world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=is_orderly))
    await world.broker.dead_letters.resend(GROUP, None, ANONYMOUS, Pace(2 * 3_600_000))
    await world.advance(2 * 3_600_000)
    assert bodies(await receive(world)) == [b"a"]


@on_node()
async def test_a_cancel_by_the_unique_key_of_a_resent_message_does_not_end_it(world: World) -> None:
    unique = unique_key("a", "replace")
    await make_dead_letters(world, [b"a"], keys=[with_unique_key("k", unique)])
    world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await world.broker.dead_letters.resend(GROUP, None, ANONYMOUS, Pace(1_000))
    verdicts = await world.broker.cancel(keys=[unique.key], topic=TOPIC)
    assert [verdict.verdict for verdict in verdicts] == ["not_found"]
    await world.advance(1_000)
    received = await receive(world)
    assert bodies(received) == [b"a"] and received.rows.column("keys").to_pylist() == ["k"]


@pytest.mark.parametrize(
    "pace", [Pace(-1), Pace(limits.DELAY_MS_MAX + 1), Pace(0, 0.0), Pace(0, -1.0), Pace(0, 1e9)]
)
def test_a_pace_outside_its_limits_is_refused(pace: Pace) -> None:
    with pytest.raises(OutOfRange):
        pace.check()
