"""What a consumer says counts once, is durable when it is answered, and one append or none."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from unittest.mock import Mock

import pytest
from tests.broker.consuming.subscriber import (
    AGAIN,
    DEAD,
    GROUP,
    MINUTE_MS,
    TOPIC,
    acknowledge,
    attempts,
    bodies,
    engine,
    in_queue,
    receive,
    send,
    try_at_most,
)
from tests.broker.on_node import InTurn, column, on_node
from tests.crash.world import World

from timeball.broker.consuming.requests import Receipt
from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.model.errors import OverLimit
from timeball.model.message import CANCEL_REASON, Kind, decode_properties
from timeball.schedule.outcomes import Moved


def reasons(world: World) -> list[str]:
    rows = world.broker.read_log(world.broker.log.reader.first_seq, 1 << 60, [Kind.CANCEL])
    return [decode_properties(text)[CANCEL_REASON] for batch in rows for text in column(batch, "properties")]


@on_node()
async def test_an_acknowledgement_counts_once(world: World) -> None:
    await send(world, [b"%d" % i for i in range(10)])
    received = await receive(world)
    twice = [*received.receipts[:3], received.receipts[0]]
    assert await engine(world).acknowledge(twice) == [True, True, True, False]
    verdicts = await asyncio.gather(*(acknowledge(world, received) for _ in range(5)))
    assert [sum(one) for one in zip(*verdicts, strict=True)] == [0, 0, 0] + [1] * 7
    assert reasons(world) == ["acknowledged"] * 10
    await world.advance(MINUTE_MS)
    assert await in_queue(world, AGAIN) == []
    assert await engine(world).acknowledge([]) == []


@on_node()
async def test_many_consumers_share_a_commit(world: World) -> None:
    await send(world, [b"%d" % i for i in range(200)])
    received = await receive(world, 200)
    before = world.broker.log.writer.statistics.commits
    answers = await asyncio.gather(*(engine(world).acknowledge([one]) for one in received.receipts))
    assert answers == [[True]] * 200
    assert world.broker.log.writer.statistics.commits - before < 10


@on_node()
async def test_a_receipt_stays_valid_when_its_time_is_changed(world: World) -> None:
    await send(world, [b"a", b"b"])
    one, other = (await receive(world)).receipts
    for ms in (10_000, 3 * MINUTE_MS, 20_000, 3 * MINUTE_MS):
        assert await engine(world).change_invisible_time(one, ms) == one
    assert await engine(world).change_invisible_time(other, 30_000) == other
    assert await engine(world).acknowledge([one, one]) == [True, False]
    assert await engine(world).change_invisible_time(one, 10_000) is None
    await world.advance(30_000)
    assert await in_queue(world, AGAIN) == [b"b"]
    assert await engine(world).acknowledge([one, other]) == [False, False]
    await world.advance(4 * MINUTE_MS)
    assert await in_queue(world, AGAIN) == [b"b"], "once"
    assert reasons(world) == ["acknowledged"]


@pytest.mark.parametrize("cached", [False, True])
@on_node()
async def test_a_receipt_stays_valid_through_moves_and_starts(world: World, cached: bool) -> None:
    """Its scheduled message is taken to the table, moved from there, and found again by the log alone."""
    await send(world, [b"a", b"b"])
    received = await receive(world)
    one, other = received.receipts
    for ms in (5 * MINUTE_MS, MINUTE_MS, 5 * MINUTE_MS):
        for receipt in (one, other):
            assert await engine(world).change_invisible_time(receipt, ms) == receipt
        await world.compact()
        await world.stop()
        if not cached:
            world.files.remove("checkpoint")
        await world.start()
    await world.advance(4 * MINUTE_MS)
    assert await in_queue(world, AGAIN) == []
    assert await engine(world).acknowledge([one]) == [True]
    assert await engine(world).change_invisible_time(other, 0, counts=False) == other
    await world.settled()
    again = await receive(world)
    assert bodies(again) == bodies(received)[1:] and attempts(again) == [1]


@on_node()
async def test_a_start_that_forgets_moves_is_noticed(world: World) -> None:
    """Or the test above could not tell what it is there for."""
    await send(world, [b"a"])
    (one,) = (await receive(world)).receipts
    await engine(world).change_invisible_time(one, 5 * MINUTE_MS)
    world.broker.scheduling.outcomes.moved = Moved()
    assert await engine(world).acknowledge([one]) == [False]


@on_node()
async def test_more_and_less_time_and_the_message_comes_once(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world)
    for receipt, ms in zip(received.receipts, (2 * MINUTE_MS, 0), strict=True):
        await engine(world).change_invisible_time(receipt, ms)
    await world.settled()
    soon = await receive(world, wait_ms=30_000)
    assert bodies(soon) == bodies(received)[1:] and attempts(soon) == [2]
    await acknowledge(world, soon)
    await world.advance(MINUTE_MS)
    assert bodies(await receive(world)) == []
    await world.advance(MINUTE_MS)
    late = await receive(world)
    assert bodies(late) == bodies(received)[:1] and attempts(late) == [2]


@on_node()
async def test_a_change_without_counting_is_no_attempt(world: World) -> None:
    try_at_most(world, 1)
    await send(world, [b"a"])
    for counts, attempt in ((False, 1), (False, 1), (True, 1)):
        received = await receive(world)
        assert attempts(received) == [attempt]
        receipt = received.receipts[0]
        for change in itertools.chain([not counts, counts]):
            receipt = await engine(world).change_invisible_time(receipt, 1_000, counts=change)  # type: ignore[assignment]
        await world.advance(1_000)
    received = await receive(world)
    assert attempts(received) == [2], "the last one"
    (receipt,) = received.receipts
    again = await engine(world).change_invisible_time(receipt, 1_000, counts=False)
    await world.advance(1_000)
    assert again is not None and attempts(await receive(world)) == [2]
    await world.advance(MINUTE_MS)
    assert await in_queue(world, DEAD) == [b"a"]


@on_node()
async def test_a_dead_letter_is_written_at_once_and_only_once(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world)
    first, second = received.receipts
    assert await engine(world).dead_letter(first)
    assert not await engine(world).dead_letter(first)
    assert await engine(world).acknowledge([first, second]) == [False, True]
    assert not await engine(world).dead_letter(second)
    await world.advance(MINUTE_MS)
    assert await in_queue(world, DEAD) == bodies(received)[:1] and await in_queue(world, AGAIN) == []
    assert reasons(world) == ["dead letter", "acknowledged"]


@on_node()
async def test_concurrent_answers_to_a_lease_have_one_winner(world: World) -> None:
    await send(world, [b"%d" % i for i in range(40)])
    received = await receive(world, 40)
    verbs = engine(world)
    answers = await asyncio.gather(
        *(verbs.acknowledge([one]) for one in received.receipts),
        *(verbs.change_invisible_time(one, 5_000) for one in received.receipts),
        *(verbs.dead_letter(one) for one in received.receipts),
    )
    won = [[bool(one[0]) if isinstance(one, list) else bool(one)] for one in answers]
    assert [sum(one[0] for one in won[i::40]) for i in range(40)] == [1] * 40
    await world.advance(5_000)
    dead, again = await in_queue(world, DEAD), await in_queue(world, AGAIN)
    assert len(dead) == sum(won[i][0] for i in range(80, 120))
    assert len(again) == sum(won[i][0] for i in range(40, 80))


@pytest.mark.parametrize("verb", ["acknowledge", "change", "dead letter"])
@on_node(InTurn)
async def test_an_answer_at_any_turn_of_a_change_is_accepted(world: World, verb: str) -> None:
    """A change of the same receipt is on its way to the disk: the answer waits for it, and counts."""
    turns, last = 0, False
    while not last:
        turns += 1
        await send(world, [b"%d" % turns])
        (receipt,) = (await receive(world)).receipts
        change = asyncio.create_task(engine(world).change_invisible_time(receipt, 5 * MINUTE_MS))
        for _ in range(turns):
            await asyncio.sleep(0)
        last = change.done()
        if verb == "acknowledge":
            assert await engine(world).acknowledge([receipt]) == [True], turns
        elif verb == "change":
            assert await engine(world).change_invisible_time(receipt, 4 * MINUTE_MS) == receipt, turns
        else:
            assert await engine(world).dead_letter(receipt), turns
        await change
    assert turns > 5, "or a change took no turn"
    await world.advance(4 * MINUTE_MS)
    assert len(await in_queue(world, AGAIN)) == (turns if verb == "change" else 0)
    assert len(await in_queue(world, DEAD)) == (turns if verb == "dead letter" else 0)
    await world.advance(MINUTE_MS)
    assert len(await in_queue(world, AGAIN)) == (turns if verb == "change" else 0)


@on_node(InTurn)
async def test_what_was_settled_is_not_begun_again_when_the_disk_is_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two dead letters, of which one waits for a change: the disk is full when that one is looked at again."""
    writer, lost = world.broker.log.writer, 0
    for turns in range(1, 12):
        await send(world, [b"a", b"b"])
        first, second = (await receive(world)).receipts
        change = asyncio.create_task(engine(world).change_invisible_time(second, 5 * MINUTE_MS))
        for _ in range(turns):
            await asyncio.sleep(0)
        with monkeypatch.context() as patch:

            async def flushed(wait: Callable[[], Awaitable[None]] = writer.flushed) -> None:
                await wait()
                patch.setattr(writer, "check_admission", Mock(side_effect=OverLimit("the disk is full")))

            patch.setattr(writer, "flushed", flushed)
            verbs = engine(world).dead_letter(first), engine(world).dead_letter(second)
            answers = await asyncio.gather(*verbs, return_exceptions=True)
        await change
        lost += answers == [True, False]
        refused = [isinstance(answer, OverLimit) for answer in answers]
        # Of a batch that was refused before its first round nothing has been done.
        assert answers[0] is True or all(refused), turns
    assert lost, "or no dead letter has met a change"
    assert len(await in_queue(world, DEAD)) > lost


@on_node()
async def test_what_a_consumer_leaves_behind_comes_again_by_the_groups_policy(world: World) -> None:
    policy = RetryPolicy(customized_retry_policy=CustomizedRetry([1, 2, 7_000, 9_000]))
    world.broker.tables.groups.update(SubscriptionGroup(GROUP, group_retry_policy=policy))
    await send(world, [b"a"])
    for wait_ms in (7_000, 9_000):
        received = await receive(world)
        await engine(world).give_back(received.receipts)
        await world.advance(wait_ms - 1)
        assert bodies(await receive(world)) == []
        await world.advance(1)
    assert attempts(await receive(world)) == [3]


@on_node()
async def test_a_receipt_whose_rows_nobody_keeps_is_not_valid(world: World) -> None:
    await send(world, [b"a"])
    await receive(world)
    stranger = Receipt(GROUP, TOPIC, 0, 5)
    assert await engine(world).change_invisible_time(stranger, 5_000) is None
    assert not await engine(world).dead_letter(stranger)


@on_node()
async def test_a_broker_that_was_killed_remembers_every_answer(world: World) -> None:
    await send(world, [b"a", b"b", b"c"])
    received = await receive(world)
    one, two, three = received.receipts
    assert await engine(world).acknowledge([one]) == [True]
    moved = await engine(world).change_invisible_time(two, 2 * MINUTE_MS)
    assert await engine(world).dead_letter(three)
    files = world.files
    await world.abandon()
    world.files = files.crash(survival="nothing")
    await world.start()
    assert moved == two
    assert await engine(world).acknowledge([one, two, three]) == [False, True, False]
    assert await in_queue(world, DEAD) == bodies(received)[2:]
