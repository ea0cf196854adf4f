"""Members of a group hold at most N messages with the same key, in the order of the log, and other keys go on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.consuming.consumer import GROUP, MINUTE_MS, TOPIC, bodies, engine, pass_time, pop
from tests.broker.on_node import batch, column, on_node
from tests.crash.lives import run
from tests.crash.world import World
from tests.crash_files import CrashFiles

from timeball import Forbidden, OutOfRange
from timeball.broker.consuming import key_limits
from timeball.broker.consuming.requests import Received
from timeball.broker.consuming.selection import selected_rows
from timeball.broker.filters.compiler import compile_filter
from timeball.broker.registry.groups import MAX_PER_KEY
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller


class Reader(Caller):
    """A caller that has no permission to administer."""

    def check(self, *_: Any, **names: Any) -> None:
        raise Forbidden("only a reader")


async def set_limit(world: World, number: int) -> None:
    """Let members of GROUP hold at most `number` messages with the same key. 0 removes the limit."""
    await world.broker.administration.limit_keys(GROUP, number, ANONYMOUS)


async def send(world: World, keys: list[str | None], queues: int = 3, **columns: Any) -> None:
    """Send a message for each key, to the queues in turn. The body is the index of the key."""
    if TOPIC not in world.broker.topics():
        await world.broker.create_topic(TOPIC, queues)
    texts = [str(number).encode() for number in range(len(keys))]
    await world.broker.send(batch(len(keys), topic=[TOPIC] * len(keys), body=texts, keys=keys, **columns))


def keys_of(received: Received) -> list[str]:
    """The keys of these messages, in the order of the answer."""
    return column(received.rows, "keys")


async def keep_the_limit(world: World, keys: list[str], number: int, seed: int) -> None:
    """Run random consumers while rows are read with random delays, and check the limit and the order of each key."""
    chance = random.Random(seed)

    async def read_late(*args: Any, **kwargs: Any) -> Any:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        return await selected_rows(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("timeball.broker.consuming.engine.selected_rows", read_late)
        await _keep_the_limit(world, keys, number, chance)


async def _keep_the_limit(world: World, keys: list[str], number: int, chance: random.Random) -> None:
    """Consumers receive, acknowledge and disconnect until all messages are acknowledged."""
    await set_limit(world, number)
    await send(world, list(keys))
    held: list[tuple[str, int, Any]] = []  # (key, index of the message, receipt)
    done: dict[str, list[int]] = {key: [] for key in keys}  # in the order of the acknowledgements

    def take(received: Received) -> None:
        """Add messages to `held`, and check the limit."""
        for key, body, receipt in zip(keys_of(received), bodies(received), received.receipts, strict=True):
            held.append((key, int(body), receipt))
        over = {key: count for key, count in Counter(key for key, _, _ in held).items() if count > number}
        assert not over, f"more than {number} are held of {over}"

    for _ in range(100 * len(keys) + 1_000):
        if sum(map(len, done.values())) == len(keys):
            break
        match chance.randrange(4):
            case 0:
                take(await pop(world, rows=chance.randint(1, 4)))
            case 1:  # four consumers at once, and one of them disconnects before its rows are read
                waiting = [asyncio.ensure_future(pop(world, rows=chance.randint(1, 3))) for _ in range(4)]
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
                waiting[chance.randrange(4)].cancel()
                for received in await asyncio.gather(*waiting, return_exceptions=True):
                    if isinstance(received, Received):
                        take(received)
            case 2 if held:
                key, body, receipt = held.pop(chance.randrange(len(held)))
                assert await engine(world).acknowledge([receipt]) == [True]
                done[key].append(body)
            case 3 if held:  # the answer did not reach its consumer
                _, _, receipt = held.pop(chance.randrange(len(held)))
                engine(world).return_unseen([receipt])
    assert sum(map(len, done.values())) == len(keys), "a message is not handed out"
    if number == 1:
        assert all(numbers == sorted(numbers) for numbers in done.values()), "a key is out of order"
    queues = engine(world).leases.all()
    assert not any(queue.open_rows for queue in queues) and engine(world).leases.count.rows == 0
    assert not engine(world)._key_limits._groups


KEYS = st.lists(st.sampled_from("abc"), min_size=1, max_size=40)


@given(keys=KEYS, number=st.integers(1, 3), seed=st.integers(0, 1_000))
@settings(max_examples=25, deadline=None)
def test_a_group_holds_no_more_messages_of_a_key_than_its_limit_and_in_order(
    keys: list[str], number: int, seed: int
) -> None:
    on_node()(keep_the_limit)(keys, number, seed)


def test_more_than_the_limit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an engine that sees no keys."""
    monkeypatch.setattr(key_limits, "_keys_of", lambda rows: [None] * rows.num_rows)
    with pytest.raises(AssertionError, match="are held of"):
        on_node()(keep_the_limit)(["a"] * 10, 1, 1)


def test_a_read_that_overtakes_an_earlier_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: turns that do not wait for earlier ones."""

    async def at_once(turn: key_limits.Turn) -> bool:
        return True

    monkeypatch.setattr(key_limits.Turn, "wait", at_once)
    with pytest.raises(AssertionError, match="out of order"):
        for seed in range(100):
            on_node()(keep_the_limit)(["a", "b"] * 10, 1, seed)


@on_node()
async def test_other_keys_are_handed_out_and_the_end_of_a_lease_frees_its_slot(world: World) -> None:
    await set_limit(world, 2)
    await send(world, ["a"] * 50 + ["b"], queues=1)
    first = await pop(world)
    assert keys_of(first) == ["a", "a"] and bodies(first) == [b"0", b"1"]
    assert bodies(await pop(world)) == [b"50"] and bodies(await pop(world)) == []
    waiting = asyncio.ensure_future(pop(world, wait_ms=10_000))
    await asyncio.sleep(0.01)
    await engine(world).acknowledge(first.receipts[:1])
    second = await waiting
    assert bodies(second) == [b"2"]
    # A nack and the end of a lease free the slot, before the message comes again.
    await engine(world).nack(first.receipts[1], 60 * MINUTE_MS)
    assert bodies(await pop(world, invisible_ms=MINUTE_MS)) == [b"3"]
    await pass_time(world, 2 * MINUTE_MS)
    assert bodies(await pop(world)) != []
    leases = [lease for queue in engine(world).leases.all() for lease in queue.in_flight.values()]
    assert sum(lease.key == "a" for lease in leases) == 2


@on_node()
async def test_messages_without_a_key_or_with_only_a_unique_key_have_no_limit(world: World) -> None:
    await set_limit(world, 1)
    await send(world, [None] * 3 + ["unique:x"] * 3 + ["unique:x k", "unique:y k", "k j"], queues=1)
    # Message 6 takes the slot of key k. Message 7 waits for it, and so does 8, whose first key is k.
    assert bodies(await pop(world)) == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]
    slots = [lease.key for queue in engine(world).leases.all() for lease in queue.in_flight.values()]
    assert [key for key in slots if key] == ["k"]


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_a_restart_keeps_the_slots_and_the_order_of_a_key(way: str) -> None:
    async def main() -> None:
        world = World(CrashFiles(), ManualClock())
        await world.start()
        await set_limit(world, 1)
        await send(world, ["a", "a", "b", "a", "b"])
        first = await pop(world)
        assert bodies(first) == [b"0", b"2"]
        await engine(world).saver.save_and_wait()
        if way == "stop":
            await world.restart()
        else:
            await world.abandon()
            await world.start()
        assert bodies(await pop(world)) == []
        assert await engine(world).acknowledge(first.receipts) == [True, True]
        second = await pop(world)
        assert bodies(second) == [b"1", b"4"]
        await engine(world).acknowledge(second.receipts)
        third = await pop(world)
        assert bodies(third) == [b"3"]
        await engine(world).acknowledge(third.receipts)
        assert not any(queue.open_rows for queue in engine(world).leases.all())
        await world.stop()

    run(main())


@on_node()
async def test_a_message_that_the_filter_excludes_takes_no_slot(world: World) -> None:
    await set_limit(world, 1)
    await send(world, ["a", "a", "a"], queues=1, tag=["x", "y", "x"])
    received = await pop(world, wanted=compile_filter("TAGS = 'y'", "SQL92"))
    assert bodies(received) == [b"1"]


@on_node()
async def test_a_group_leases_nothing_new_while_too_many_messages_are_parked(world: World) -> None:
    await set_limit(world, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "PARKED_PER_GROUP_MAX", 10)
        await send(world, ["a"] * 100 + ["b"], queues=1)
        first = await pop(world, rows=4)
        assert bodies(first) == [b"0"] and bodies(await pop(world, rows=4)) == []
        parked = sum(len(queue.parked) for queue in engine(world).leases.all())
        assert 10 <= parked < 10 + 4
        count, receipts = 1, first.receipts
        while receipts:
            await engine(world).acknowledge(receipts)
            received = await pop(world, rows=4)
            count, receipts = count + len(received.receipts), received.receipts
        assert count == 101, "all messages were handed out in the end"


@on_node()
async def test_a_moved_offset_and_removed_rows_free_their_slots(world: World) -> None:
    await set_limit(world, 1)
    await send(world, ["a"] * 5, queues=1)
    await pop(world)
    (queue,) = [queue for queue in engine(world).leases.all() if queue.parked]
    queue.drop_before(queue.index.read(3, 1)["seq"][0])
    assert sorted(queue.parked) == [3, 4]
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 1})
    assert bodies(await pop(world)) == [b"1"]


@pytest.mark.parametrize("deleted", ["group", "topic"])
def test_a_deleted_group_or_topic_leaves_no_slots(deleted: str) -> None:
    @on_node()
    async def leaves_nothing(world: World) -> None:
        await set_limit(world, 1)
        await send(world, ["a", "a", "b"])
        assert bodies(await pop(world)) == [b"0", b"2"]
        assert list(engine(world)._key_limits._groups) == [GROUP]
        administration = world.broker.administration
        if deleted == "group":
            await administration.delete_group(GROUP, ANONYMOUS, with_offsets=True)
        else:
            await administration.delete_topic(TOPIC, ANONYMOUS)
        await engine(world).saver.save_and_wait()
        assert not engine(world)._key_limits._groups
        await world.restart()
        assert not engine(world)._key_limits._groups

    leaves_nothing()


@on_node()
async def test_only_administrators_set_the_limit_of_a_key_which_is_an_attribute_of_the_group(
    world: World,
) -> None:
    await set_limit(world, 7)
    assert world.broker.tables.groups.get(GROUP).attributes == {MAX_PER_KEY: "7"}
    assert (await world.broker.groups.one(GROUP, ANONYMOUS)).max_per_key == 7
    with pytest.raises(OutOfRange):
        await set_limit(world, 10_001)
    with pytest.raises(Forbidden):
        await world.broker.administration.limit_keys(GROUP, 1, Reader())
    await set_limit(world, 0)
    assert world.broker.tables.groups.get(GROUP).attributes == {}
