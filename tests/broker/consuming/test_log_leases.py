"""What a consumer says counts once, is durable when it is answered, and one append or none."""

from __future__ import annotations

import asyncio
import itertools

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
from tests.broker.on_node import column, on_node
from tests.crash.world import World

from timeball.broker.consuming.receipts import Receipt
from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.message import CANCEL_REASON, Kind, decode_properties


def reasons(world: World) -> list[str]:
    rows = world.broker.read_log(world.broker.parts.reader.first_seq, 1 << 60, [Kind.CANCEL])
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
    before = world.broker.parts.writer.statistics.commits
    answers = await asyncio.gather(*(engine(world).acknowledge([one]) for one in received.receipts))
    assert answers == [[True]] * 200
    assert world.broker.parts.writer.statistics.commits - before < 10


@on_node()
async def test_another_time_is_another_receipt(world: World) -> None:
    await send(world, [b"a"])
    (old,) = (await receive(world)).receipts
    new = await engine(world).change_invisible_time(old, 10_000)
    assert isinstance(new, Receipt) and isinstance(old, Receipt)
    assert new.due_ms == world.clock.wall + 10_000 and new.seq > old.seq
    assert await engine(world).change_invisible_time(old, 10_000) is None
    assert await engine(world).acknowledge([old, new]) == [False, True]
    assert await engine(world).change_invisible_time(new, 10_000) is None
    await world.advance(MINUTE_MS)
    assert await in_queue(world, AGAIN) == []


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
async def test_an_attempt_may_not_count_and_the_next_one_counts_again(world: World) -> None:
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
async def test_a_dead_letter_is_one_at_once_and_once(world: World) -> None:
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
async def test_answers_of_all_sorts_at_once_leave_one_winner(world: World) -> None:
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


@on_node()
async def test_what_a_consumer_leaves_behind_comes_again_by_the_groups_policy(world: World) -> None:
    policy = RetryPolicy(customized_retry_policy=CustomizedRetry([1, 2, 7_000, 9_000]))
    world.broker.parts.groups.update(SubscriptionGroup(GROUP, group_retry_policy=policy))
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
    assert await engine(world).acknowledge([one, two, three]) == [False] * 3
    assert moved is not None and await engine(world).acknowledge([moved]) == [True]
    assert await in_queue(world, DEAD) == bodies(received)[2:]
