"""An answer of a consumer counts once, and a returned message is written once, in one append or in none."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

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
    pass_time,
    power_cut,
    receive,
    send,
    try_at_most,
)
from tests.broker.on_node import InTurn, on_node
from tests.crash.world import World

from timeball.broker.consuming.requests import Receipt
from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.log.writer import LogWriter
from timeball.model.errors import OverLimit


@on_node()
async def test_an_acknowledgement_counts_once(world: World) -> None:
    await send(world, [b"%d" % i for i in range(10)])
    received = await receive(world)
    twice = [*received.receipts[:3], received.receipts[0]]
    assert await engine(world).acknowledge(twice) == [True, True, True, False]
    # Each message is acknowledged five times, and once before if it is one of the first three.
    answers = await asyncio.gather(*(acknowledge(world, received) for _ in range(5)))
    assert [sum(is_valid) for is_valid in zip(*answers, strict=True)] == [0, 0, 0] + [1] * 7
    assert engine(world).leases.count.rows == 0
    assert world.broker.offsets(GROUP, TOPIC) == {0: 5, 1: 5}
    await pass_time(world, MINUTE_MS)
    assert await in_queue(world, AGAIN) == []
    assert await engine(world).acknowledge([]) == []


@pytest.mark.parametrize("save_ms", [0, 50])
def test_acknowledgements_of_many_consumers_share_a_few_commits(save_ms: int) -> None:
    @on_node(ack_save_ms=save_ms)
    async def life(world: World) -> None:
        await send(world, [b"%d" % i for i in range(200)])
        received = await receive(world, 200)
        before = world.broker.log.writer.statistics.commits
        answers = await asyncio.gather(
            *(engine(world).acknowledge([receipt]) for receipt in received.receipts)
        )
        assert answers == [[True]] * 200
        commits = world.broker.log.writer.statistics.commits - before
        assert commits < 10
        assert commits or save_ms, "an answer that waits for the disk has a commit"

    life()


@on_node()
async def test_a_change_of_the_invisible_time_keeps_the_receipt_valid(world: World) -> None:
    await send(world, [b"a", b"b"])
    one, other = (await receive(world)).receipts
    for ms in (10_000, 3 * MINUTE_MS, 20_000, 3 * MINUTE_MS):
        assert await engine(world).change_invisible_time(one, ms) == one
    assert await engine(world).change_invisible_time(other, 30_000) == other
    assert await engine(world).acknowledge([one, one]) == [True, False]
    assert await engine(world).change_invisible_time(one, 10_000) is None
    await pass_time(world, 30_000)
    assert await in_queue(world, AGAIN) == [b"b"]
    assert await engine(world).acknowledge([one, other]) == [False, False]
    await pass_time(world, 4 * MINUTE_MS)
    assert await in_queue(world, AGAIN) == [b"b"], "the message came back once"


@pytest.mark.parametrize("cached", [False, True])
@on_node()
async def test_a_receipt_with_a_changed_invisible_time_stays_valid_after_a_restart(
    world: World, cached: bool
) -> None:
    """Its lease is restored from a checkpoint, or from the log alone."""
    await send(world, [b"a", b"b"])
    received = await receive(world)
    one, other = received.receipts
    for ms in (5 * MINUTE_MS, MINUTE_MS, 5 * MINUTE_MS):
        for receipt in (one, other):
            assert await engine(world).change_invisible_time(receipt, ms) == receipt
        await world.stop()
        if not cached:
            world.files.remove("checkpoint")
        await world.start()
    await pass_time(world, 4 * MINUTE_MS)
    assert await in_queue(world, AGAIN) == []
    assert await engine(world).acknowledge([one]) == [True]
    assert await engine(world).change_invisible_time(other, 0, counts=False) == other
    again = await receive(world)
    assert bodies(again) == bodies(received)[1:] and attempts(again) == [1]


@on_node()
async def test_a_message_comes_back_once_when_its_changed_invisible_time_ends(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world)
    for receipt, ms in zip(received.receipts, (2 * MINUTE_MS, 0), strict=True):
        await engine(world).change_invisible_time(receipt, ms)
    await pass_time(world, 0)
    soon = await receive(world, wait_ms=30_000)
    assert bodies(soon) == bodies(received)[1:] and attempts(soon) == [2]
    await acknowledge(world, soon)
    await pass_time(world, MINUTE_MS)
    assert bodies(await receive(world)) == []
    await pass_time(world, MINUTE_MS)
    late = await receive(world)
    assert bodies(late) == bodies(received)[:1] and attempts(late) == [2]


@on_node()
async def test_a_lease_that_is_changed_without_counting_is_no_attempt(world: World) -> None:
    try_at_most(world, 1)
    await send(world, [b"a"])
    for last_counts in (False, False, True):
        received = await receive(world)
        assert attempts(received) == [1]
        receipt = received.receipts[0]
        for counts in (not last_counts, last_counts):  # the last change of a lease decides
            receipt = await engine(world).change_invisible_time(receipt, 1_000, counts=counts)  # type: ignore[assignment]
        await pass_time(world, 1_000)
    received = await receive(world)
    assert attempts(received) == [2], "the third lease counted"
    (receipt,) = received.receipts
    prolonged = await engine(world).change_invisible_time(receipt, 1_000, counts=False)
    await pass_time(world, 1_000)
    assert prolonged is not None and attempts(await receive(world)) == [2]
    await pass_time(world, MINUTE_MS)
    assert await in_queue(world, DEAD) == [b"a"]


@on_node()
async def test_a_change_to_zero_without_counting_returns_the_message_next_and_writes_no_row(
    world: World,
) -> None:
    await send(world, [b"a"])
    (receipt,) = (await receive(world)).receipts
    assert await engine(world).change_invisible_time(receipt, 0, counts=False) == receipt
    assert await engine(world).acknowledge([receipt]) == [False]
    again = await receive(world)
    assert bodies(again) == [b"a"] and attempts(again) == [1]
    assert await in_queue(world, AGAIN) == []


@on_node()
async def test_a_dead_letter_is_written_at_once_and_only_once(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world)
    first, second = received.receipts
    assert await engine(world).dead_letter(first)
    assert not await engine(world).dead_letter(first)
    assert await engine(world).acknowledge([first, second]) == [False, True]
    assert not await engine(world).dead_letter(second)
    await pass_time(world, MINUTE_MS)
    assert await in_queue(world, DEAD) == bodies(received)[:1] and await in_queue(world, AGAIN) == []


@on_node()
async def test_a_nack_of_the_last_attempt_writes_the_dead_letter_at_once(world: World) -> None:
    try_at_most(world, 0)
    await send(world, [b"a"])
    (receipt,) = (await receive(world)).receipts
    assert await engine(world).nack(receipt, MINUTE_MS, "no stock") == receipt
    assert await in_queue(world, DEAD) == [b"a"]
    assert world.broker.redeliveries.waiting_rows == 0
    await pass_time(world, MINUTE_MS)
    assert await in_queue(world, DEAD) == [b"a"] and await in_queue(world, AGAIN) == []


@on_node()
async def test_concurrent_answers_to_a_lease_have_one_winner(world: World) -> None:
    await send(world, [b"%d" % i for i in range(40)])
    received = await receive(world, 40)

    # Each returns whether the broker accepted the answer.
    async def acks(receipt: Receipt) -> bool:
        return (await engine(world).acknowledge([receipt]))[0]

    async def nacks(receipt: Receipt) -> bool:
        return await engine(world).nack(receipt, 5_000) is not None

    async def dead_letters(receipt: Receipt) -> bool:
        return await engine(world).dead_letter(receipt)

    # An acknowledgement waits for nothing, so it wins in every order.
    verbs = [(nacks, dead_letters), (dead_letters, nacks), (dead_letters, acks, nacks)]
    calls = [
        (verb, receipt)
        for number, receipt in enumerate(received.receipts)
        for verb in verbs[number % len(verbs)]
    ]
    accepted = await asyncio.gather(*(verb(receipt) for verb, receipt in calls))
    winners = [call for call, is_accepted in zip(calls, accepted, strict=True) if is_accepted]
    assert sorted(receipt for _, receipt in winners) == sorted(received.receipts)
    count = Counter(verb.__name__ for verb, _ in winners)
    assert min(count["acks"], count["nacks"], count["dead_letters"]) > 0, "each verb has won"
    await pass_time(world, 5_000)
    assert len(await in_queue(world, DEAD)) == count["dead_letters"]
    assert len(await in_queue(world, AGAIN)) == count["nacks"]
    assert engine(world).leases.count.rows == 0


# The ways to answer, each called with the receipt of a message.
ANSWERS: dict[str, Callable[[World, Receipt], Awaitable[Any]]] = {
    "acknowledge": lambda world, receipt: engine(world).acknowledge([receipt]),
    "change": lambda world, receipt: engine(world).change_invisible_time(receipt, 4 * MINUTE_MS),
    "nack": lambda world, receipt: engine(world).nack(receipt, 4 * MINUTE_MS),
    "dead letter": lambda world, receipt: engine(world).dead_letter(receipt),
}


@pytest.mark.parametrize("verb", ["acknowledge", "change", "dead letter"])
@on_node(InTurn, ack_save_ms=0)
async def test_an_answer_during_a_change_of_the_invisible_time_is_accepted(world: World, verb: str) -> None:
    """The answer comes after each number of turns of the event loop that the change takes."""
    turns, last = 0, False
    while not last:
        turns += 1
        await send(world, [b"%d" % turns])
        (receipt,) = (await receive(world)).receipts
        change = asyncio.create_task(engine(world).change_invisible_time(receipt, 5 * MINUTE_MS))
        for _ in range(turns):
            await asyncio.sleep(0)
        last = change.done()
        answer = await ANSWERS[verb](world, receipt)
        assert answer in ([True], receipt, True), turns  # each of these means: accepted
        await change
    assert turns > 2, "otherwise no answer came during a change"
    await pass_time(world, 4 * MINUTE_MS)
    assert len(await in_queue(world, AGAIN)) == (turns if verb == "change" else 0)
    assert len(await in_queue(world, DEAD)) == (turns if verb == "dead letter" else 0)
    await pass_time(world, MINUTE_MS)
    assert len(await in_queue(world, AGAIN)) == (turns if verb == "change" else 0)


@pytest.mark.parametrize("verb", list(ANSWERS))
@on_node(InTurn)
async def test_either_a_nack_or_an_answer_during_it_is_accepted_unless_it_is_a_change(
    world: World, verb: str
) -> None:
    """The answer comes after each number of turns of the event loop that the nack takes."""
    turns, last, nacked = 0, False, 0
    while not last:
        turns += 1
        await send(world, [b"%d" % turns])
        (receipt,) = (await receive(world)).receipts
        nack = asyncio.create_task(engine(world).nack(receipt, MINUTE_MS))
        for _ in range(turns):
            await asyncio.sleep(0)
        last = nack.done()
        answer = await ANSWERS[verb](world, receipt)
        is_answered = answer in ([True], receipt, True)
        is_nacked = await nack is not None
        nacked += is_nacked
        # A change keeps the lease, so a nack after it counts too.
        assert is_nacked or is_answered, turns
        assert not (is_nacked and is_answered) or verb == "change", turns
    assert nacked and turns > 2, "otherwise no answer came during a nack"
    await pass_time(world, MINUTE_MS)
    assert len(await in_queue(world, AGAIN)) == nacked
    await pass_time(world, 4 * MINUTE_MS)
    # Also the messages of the second answers, where these bring a message back or end it.
    counts = {"nack": (turns, 0), "dead letter": (nacked, turns - nacked)}
    again, dead = counts.get(verb, (nacked, 0))
    assert (len(await in_queue(world, AGAIN)), len(await in_queue(world, DEAD))) == (again, dead)


@on_node(InTurn)
async def test_dead_letters_refused_by_a_full_disk_are_written_once_when_they_are_requested_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two dead letters are written in two chunks, and the disk is full before the second one."""
    monkeypatch.setattr("timeball.broker.consuming.redelivery.PART_ROWS", 1)
    await send(world, [b"a", b"b"])
    first, second = (await receive(world)).receipts
    checks = itertools.count()

    def check(_: LogWriter) -> None:
        if next(checks):  # the disk is not full at the first check, which is for the first chunk
            raise OverLimit("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "check_admission", check)
        verbs = engine(world).dead_letter(first), engine(world).dead_letter(second)
        written, refused = await asyncio.gather(*verbs, return_exceptions=True)
    assert written is True and isinstance(refused, OverLimit)
    assert len(await in_queue(world, DEAD)) == 1
    assert [await engine(world).dead_letter(receipt) for receipt in (first, second)] == [False, True]
    assert sorted(await in_queue(world, DEAD)) == [b"a", b"b"]


@on_node()
async def test_messages_of_a_disconnected_consumer_return_after_the_delays_of_the_retry_policy(
    world: World,
) -> None:
    # RocketMQ's first two delays are not for retries.
    policy = RetryPolicy(customized_retry_policy=CustomizedRetry([1, 2, 7_000, 9_000]))
    world.broker.tables.groups.update(SubscriptionGroup(GROUP, group_retry_policy=policy))
    await send(world, [b"a"])
    for wait_ms in (7_000, 9_000):
        received = await receive(world)
        await engine(world).give_back(received.receipts)
        await pass_time(world, wait_ms - 1)
        assert bodies(await receive(world)) == []
        await pass_time(world, 1)
    assert attempts(await receive(world)) == [3]


@on_node()
async def test_a_receipt_of_another_position_topic_or_time_is_not_valid(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await receive(world)).receipts
    for change in ({"pop_ms": 5}, {"offset": 7}, {"queue_id": 9}, {"topic": AGAIN}):
        other_receipt = receipt._replace(**change)  # type: ignore[arg-type]
        assert await engine(world).change_invisible_time(other_receipt, 5_000) is None
        assert await engine(world).nack(other_receipt, 5_000) is None
        assert not await engine(world).dead_letter(other_receipt)
    assert await engine(world).acknowledge([receipt]) == [True]


@on_node(ack_save_ms=0)
async def test_with_ack_save_ms_0_every_answer_stays_in_effect_after_a_power_cut(world: World) -> None:
    await send(world, [b"a", b"b", b"c", b"d"])
    received = await receive(world)
    one, two, three, four = received.receipts
    assert await engine(world).acknowledge([one]) == [True]
    assert await engine(world).change_invisible_time(two, 2 * MINUTE_MS) == two
    assert await engine(world).dead_letter(three)
    assert await engine(world).nack(four, MINUTE_MS) == four
    await power_cut(world)
    assert await engine(world).acknowledge(received.receipts) == [False, True, False, False]
    assert await in_queue(world, DEAD) == bodies(received)[2:3]
    await pass_time(world, 3 * MINUTE_MS)
    assert await in_queue(world, AGAIN) == bodies(received)[3:]


@on_node()
async def test_a_nack_or_dead_letter_stays_in_effect_after_a_power_cut(world: World) -> None:
    """The leases are saved only after 50 ms, but these answers wait for the disk."""
    await send(world, [b"a", b"b", b"c"])
    received = await receive(world)
    one, two, three = received.receipts
    assert await engine(world).dead_letter(one)
    assert await engine(world).nack(two, MINUTE_MS) == two
    assert await engine(world).nack(three, 0) == three
    await power_cut(world)
    assert await engine(world).acknowledge(received.receipts) == [False] * 3
    again = await receive(world)
    assert bodies(again) == bodies(received)[2:] and attempts(again) == [2]
    assert await in_queue(world, DEAD) == bodies(received)[:1]
    await pass_time(world, MINUTE_MS)
    assert sorted(await in_queue(world, AGAIN)) == sorted([*bodies(received)[1:], *bodies(again)])
