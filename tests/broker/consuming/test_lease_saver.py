"""The leases of groups in the log: which rows are written and deleted, when, and the leases after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.broker.consuming.subscriber import (
    AGAIN,
    DEAD,
    GROUP,
    MINUTE_MS,
    TOPIC,
    acknowledge,
    bodies,
    engine,
    in_queue,
    pass_time,
    power_cut,
    receive,
    send,
)
from tests.broker.on_node import InTurn, on_node
from tests.crash.world import World

from timeball.broker.consuming import lease_saver, leases
from timeball.broker.consuming.lease_saver import restored_queues
from timeball.broker.consuming.leases import OpenCount, QueueLeases
from timeball.broker.consuming.requests import Receipt, ReceiveRequest
from timeball.broker.registry.tables import SavedPart
from timeball.log.row_encoder import as_batch
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.message import Kind, pairs_of

PART = 4  # positions in a part


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "PART_POSITIONS", PART)
    monkeypatch.setattr(lease_saver, "PART_POSITIONS", PART)


async def send_to_one_queue(world: World, count: int) -> None:
    """Send messages to queue 0. Their bodies are their offsets in two digits."""
    await send(world, [b"%02d" % i for i in range(count)], queue_id=pa.array([0] * count, pa.int32()))


def frames(world: World, from_seq: int) -> Iterator[dict[str, SavedPart | None]]:
    """Yield for each batch of META rows its rows of leases, by `<queue>@<part>`. None for a row that deletes a part."""
    for rows in world.broker.read_log(from_seq, 1 << 60, [Kind.META]):
        yield {
            key.removeprefix(f"leases/{GROUP}@{TOPIC}@"): (
                msgspec.json.decode(value, type=SavedPart) if value else None
            )
            for key, value in pairs_of(rows)
            if key.startswith("leases/")
        }


class Written:
    """Reads the rows of leases that are written from now on."""

    def __init__(self, world: World) -> None:
        self.world, self.from_seq = world, world.broker.log.writer.next_seq

    async def parts(self) -> dict[str, SavedPart | None]:
        """The last row of each part that was written since the last call, as `frames` yields them."""
        await self.world.broker.log.writer.flushed()
        parts: dict[str, SavedPart | None] = {}
        for frame in frames(self.world, self.from_seq):
            parts |= frame
        self.from_seq = self.world.broker.log.writer.next_seq
        return parts


async def save(world: World) -> None:
    """Save the changed leases, durably."""
    await engine(world).saver.save_and_wait()


def open_offsets(part: SavedPart | None) -> list[int]:
    """The open positions that the row of a part contains. The part must not be deleted."""
    assert part is not None
    return [offset for run in part.runs for offset in range(run.offset, run.offset + run.count)]


# ---- which rows ----------------------------------------------------------------------------------------------


@on_node(ack_save_ms=1_000)
async def test_only_parts_that_have_changed_are_written(world: World, small_parts: None) -> None:
    await send_to_one_queue(world, 10)
    written = Written(world)
    receipts = (await receive(world)).receipts
    await save(world)
    parts = await written.parts()
    assert {name: open_offsets(part) for name, part in parts.items()} == {
        "0@0": [0, 1, 2, 3],
        "0@1": [4, 5, 6, 7],
        "0@2": [8, 9],
    }
    await engine(world).acknowledge([receipts[5]])
    await save(world)
    parts = await written.parts()
    assert parts.keys() == {"0@1", "0@2"}, "the last one has the newest next offset"
    assert open_offsets(parts["0@1"]) == [4, 6, 7]
    await save(world)
    assert await written.parts() == {}, "nothing has changed"


@on_node(ack_save_ms=1_000)
async def test_leases_of_one_request_take_one_run(world: World) -> None:
    await send_to_one_queue(world, 100)
    written = Written(world)
    await receive(world, 100)
    await save(world)
    (part,) = (await written.parts()).values()
    assert part is not None and len(part.runs) == 1
    assert (part.runs[0].offset, part.runs[0].count, part.next_offset) == (0, 100, 100)


@on_node(ack_save_ms=1_000)
async def test_parts_without_open_positions_are_deleted_except_the_last(
    world: World, small_parts: None
) -> None:
    await send_to_one_queue(world, 10)
    receipts = (await receive(world)).receipts
    await save(world)
    written = Written(world)
    await engine(world).acknowledge(receipts[1:])
    await save(world)
    parts = await written.parts()
    assert parts["0@1"] is None
    assert open_offsets(parts["0@0"]) == [0] and open_offsets(parts["0@2"]) == []
    assert parts["0@2"] is not None and parts["0@2"].next_offset == 10
    await engine(world).acknowledge(receipts[:1])
    await save(world)
    assert await written.parts() == {"0@0": None, "0@2": None}
    assert world.broker.tables.leases.values == {}


@on_node(ack_save_ms=1_000)
async def test_the_row_of_a_part_that_was_the_last_one_is_deleted_when_all_its_positions_are_done(
    world: World, small_parts: None
) -> None:
    await send_to_one_queue(world, 12)
    first = await receive(world, 1)
    second = await receive(world, 5)
    await engine(world).acknowledge(second.receipts)
    await save(world)
    written = Written(world)
    await receive(world, 6)
    await save(world)
    assert {name: open_offsets(part) if part else None for name, part in (await written.parts()).items()} == {
        "0@1": [6, 7],
        "0@2": [8, 9, 10, 11],
    }
    await acknowledge(world, first)
    await save(world)
    assert (await written.parts())["0@0"] is None


@on_node(ack_save_ms=1_000)
async def test_the_rows_of_a_queue_are_deleted_in_the_frame_of_its_moved_offset(
    world: World, small_parts: None
) -> None:
    await send_to_one_queue(world, 10)
    receipts = (await receive(world)).receipts
    await engine(world).acknowledge(receipts[:1])
    await save(world)
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 9})
    from_seq = world.broker.log.writer.next_seq
    assert world.node is not None
    await world.node.maintenance.save_offsets()
    (rows,) = world.broker.read_log(from_seq, 1 << 60, [Kind.META])
    values = dict(pairs_of(rows))
    assert values == {
        **{f"leases/{GROUP}@{TOPIC}@0@{part}": b"" for part in range(3)},
        f"offsets/{GROUP}@{TOPIC}": msgspec.json.encode({0: 9, 1: 0}),
    }
    assert engine(world).leases.count.rows == 0 and not engine(world).leases.orphaned_parts


@on_node(ack_save_ms=1_000)
async def test_the_rows_of_a_queue_with_a_moved_offset_are_replaced_by_its_new_leases(
    world: World, small_parts: None
) -> None:
    await send_to_one_queue(world, 10)
    receipts = (await receive(world)).receipts
    await engine(world).acknowledge(receipts[:1])
    await save(world)
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 6})
    written = Written(world)
    assert bodies(await receive(world, 2)) == [b"06", b"07"]
    await save(world)
    parts = await written.parts()
    assert parts["0@0"] is None and parts["0@2"] is None and open_offsets(parts["0@1"]) == [6, 7]
    await power_cut(world)
    assert bodies(await receive(world)) == [b"08", b"09"]


@on_node(ack_save_ms=1_000)
async def test_idle_queues_that_are_dropped_at_the_limit_leave_no_rows(
    world: World, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send_to_one_queue(world, 3)
    received = await receive(world)
    await save(world)
    await acknowledge(world, received)
    monkeypatch.setattr(limits, "POP_WINDOWS_MAX", 1)
    await world.broker.create_topic("other", 1)
    await receive(world, topic="other")
    assert engine(world).leases.get(GROUP, TOPIC, 0) is None
    assert world.node is not None
    await world.node.maintenance.save_offsets()
    assert not [name for name in world.broker.tables.leases.values if TOPIC in name]
    await power_cut(world)
    assert world.broker.offsets(GROUP, TOPIC)[0] == 3


# ---- when ----------------------------------------------------------------------------------------------------


@on_node(ack_save_ms=1_000)
async def test_a_save_joins_a_commit_of_releases_after_half_of_its_time(world: World) -> None:
    saver, statistics = engine(world).saver, world.broker.log.writer.statistics
    loop = asyncio.get_running_loop()
    await send(world, [b"first"])
    await world.send("later", [1_000, 2_000])
    await acknowledge(world, await receive(world))
    # So that only the releases save, however long this test takes.
    assert saver._timer is not None
    saver._timer.cancel()
    saver._timer, saver._changed_s = loop.call_later(limits.HOUR_MS, lambda: None), loop.time() + 1_000
    written = Written(world)
    await world.advance(1_000)
    assert not await written.parts(), "half of the time has not passed"
    saver._changed_s = loop.time() - 0.5
    commits = statistics.commits
    await world.advance(1_000)
    assert await written.parts() and statistics.commits == commits + 1
    assert saver._timer is None


@on_node(ack_save_ms=1)
async def test_changes_are_saved_by_the_timer(world: World) -> None:
    await send_to_one_queue(world, 3)
    received = await receive(world)
    table = world.broker.tables.leases.values
    await world.until(lambda: table and not engine(world).leases.count.changed, "the leases are saved")
    await acknowledge(world, received)
    await world.until(lambda: not table, "the rows are deleted")
    await world.broker.log.writer.flushed()
    await power_cut(world)
    assert bodies(await receive(world)) == [] and world.broker.offsets(GROUP, TOPIC)[0] == 3


@on_node(ack_save_ms=1)
async def test_many_queues_are_saved_in_slices(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_saver, "QUEUES_AT_ONCE", 2)
    await world.broker.create_topic(TOPIC, 7)
    await send(world, [b"%d" % i for i in range(7)], queue_id=pa.array(range(7), pa.int32()))
    received = await receive(world)
    await world.until(lambda: not engine(world).leases.count.changed, "all queues are saved")
    rows_of_leases, append = [], LogWriter.append

    def count_rows(writer: LogWriter, rows: pa.RecordBatch, *args: Any, **kwargs: Any) -> Any:
        rows_of_leases.append(sum(key.startswith("leases/") for key, _ in pairs_of(as_batch(rows))))
        return append(writer, rows, *args, **kwargs)

    monkeypatch.setattr(LogWriter, "append", count_rows)
    await acknowledge(world, received)
    await world.until(lambda: not engine(world).leases.count.changed, "all queues are saved")
    assert rows_of_leases == [2, 2, 2, 1], "in each append"
    assert world.broker.tables.leases.values == {}
    await world.broker.log.writer.flushed()
    await power_cut(world)
    assert world.broker.offsets(GROUP, TOPIC) == dict.fromkeys(range(7), 1)


@on_node(ack_save_ms=1)
async def test_leases_are_saved_when_the_disk_is_no_longer_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_saver, "AGAIN_MS", 1)
    await send_to_one_queue(world, 3)
    await receive(world, 1)
    await world.until(lambda: not engine(world).leases.count.changed, "the first lease is saved")
    with monkeypatch.context() as full:
        checks = 0

        def no_room(_: object) -> bool:
            nonlocal checks
            checks += 1
            return True

        full.setattr(type(world.broker.log.writer), "no_room", property(no_room))
        await receive(world, 1)
        await world.until(lambda: checks > 3, "the saver has tried again")
        assert engine(world).leases.count.changed
    await world.until(lambda: not engine(world).leases.count.changed, "both leases are saved")
    (part,) = world.broker.tables.leases.values.values()
    assert open_offsets(part) == [0, 1]


@on_node(failing=True, ack_save_ms=1)
async def test_an_error_of_the_timer_stops_the_broker(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await send_to_one_queue(world, 3)

    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(lease_saver.LeaseSaver, "_parts_of", broken)
    engine(world).leases.new_units.clear()
    with pytest.raises(ValueError, match="broken"):
        await receive(world)
        await world.until(lambda: False, "the node stops")


# ---- an answer and its rows: both or none ---------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["dead letter", "nack", "nack later", "expiry"])
@on_node(InTurn, ack_save_ms=1_000)
async def test_a_message_that_was_returned_before_a_power_cut_exists_once(
    world: World, small_parts: None, verb: str
) -> None:
    """The message is at offset 2, in a part that was saved before and is not the last one.

    `verb`: how message 2 returns: "nack" at once, "nack later" after a minute.
    """
    await send_to_one_queue(world, 10)
    receipts = (await receive(world)).receipts
    await save(world)
    if verb == "expiry":
        for receipt in receipts:
            if receipt.offset != 2:
                await engine(world).change_invisible_time(receipt, 10 * MINUTE_MS)
        await save(world)
        await pass_time(world, MINUTE_MS)
    elif verb == "dead letter":
        assert await engine(world).dead_letter(receipts[2])
    else:
        assert await engine(world).nack(receipts[2], MINUTE_MS if verb == "nack later" else 0)
    await power_cut(world)
    assert await engine(world).acknowledge([receipts[2]]) == [False], "its lease has ended"
    await pass_time(world, 20 * MINUTE_MS)
    others = [b"%02d" % i for i in range(10) if i != 2]
    assert sorted([*await in_queue(world, AGAIN), *await in_queue(world, DEAD)]) == sorted([*others, b"02"])
    assert len(await in_queue(world, DEAD)) == (verb == "dead letter")


# ---- what a start makes of it ----------------------------------------------------------------------------------


def state_of(queue: QueueLeases) -> dict[str, object]:
    """The attributes that a restart must restore."""
    return {
        name: getattr(queue, name)
        for name in (
            "next_offset", "stored_offset", "in_flight", "returned", "acked_ahead", "nacked", "first_open", "open_rows",
            "saved_parts",
        )
    }  # fmt: skip


def restore_queues(world: World) -> list[QueueLeases]:
    """The queues that a start would restore from the rows so far."""
    tables = world.broker.tables
    queues, orphaned_parts = restored_queues(
        tables.leases,
        tables.topics.find_topic,
        tables.offsets.find_offset,
        OpenCount(),
        world.broker.clock.now_ms(),
    )
    assert not orphaned_parts
    return queues


def check_rows_agree(world: World) -> None:
    """Check that the saved rows restore the queues as they are, and that each row has open positions or is the last."""
    current = {(queue.topic, queue.queue_id): queue for queue in engine(world).leases.all()}
    restored = {(queue.topic, queue.queue_id): queue for queue in restore_queues(world)}
    for key, queue in current.items():
        if key not in restored:
            assert queue.is_idle and queue.next_offset == queue.stored_offset, key
            continue
        assert state_of(restored[key]) == state_of(queue), key
        last = (queue.next_offset - 1) // PART
        used = {offset // PART for offset in (*queue.in_flight, *queue.returned, *queue.acked_ahead)}
        assert queue.saved_parts <= used | {last}, key
    assert restored.keys() <= current.keys()


# A step, and a number whose meaning depends on the step: rows, an index of a receipt, or seconds.
STEPS = st.tuples(
    st.sampled_from(["receive", "ack", "ack", "give back", "change", "nack", "expire", "save"]),
    st.integers(0, 30),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, max_size=25))
@example([("receive", 11), ("save", 0), ("ack", 1), ("nack", 1), ("save", 0), ("receive", 9), ("ack", 20)])
def test_a_start_restores_the_same_leases_from_the_saved_rows(steps: list[tuple[str, int]]) -> None:
    @on_node(InTurn, ack_save_ms=1_000)
    async def life(world: World) -> None:
        await send_to_one_queue(world, 40)
        held = [*(await receive(world, 1)).receipts]
        for step, n in steps:
            receipt = held[n % len(held)] if held else None
            if step == "receive":
                received = await receive(world, n + 1)
                held += [receipt for receipt in received.receipts if receipt.topic == TOPIC]
            elif step == "save":
                await save(world)
                check_rows_agree(world)
            elif receipt is None:
                continue
            elif step == "change":
                await engine(world).change_invisible_time(receipt, n * 1_000 + 2)
            else:
                held.remove(receipt)
                if step == "ack":
                    await engine(world).acknowledge([receipt])
                elif step == "give back":
                    engine(world).return_unseen([receipt])
                elif step == "nack":
                    await engine(world).nack(receipt, 0)
                else:
                    await engine(world).change_invisible_time(receipt, 1)
                    await pass_time(world, 1)
        await save(world)
        check_rows_agree(world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "PART_POSITIONS", PART)
        patch.setattr(lease_saver, "PART_POSITIONS", PART)
        life()


def is_saved(world: World, group: str, from_seq: int) -> bool:
    """True if the log has offsets of this group from `from_seq` on."""
    rows = world.broker.read_log(from_seq, 1 << 60, [Kind.META])
    return any(key == f"offsets/{group}@{TOPIC}" for batch in rows for key, _ in pairs_of(batch))


# A step, its group and queue, and a number: rows, an index of a receipt, or an offset. "saved" saves the leases, and
# "save" also all offsets. "cut" cuts the power.
MOVES = st.tuples(
    st.sampled_from(["receive", "receive", "ack", "ack", "nack", "move", "saved", "save", "cut"]),
    st.sampled_from([GROUP, "other"]),
    st.integers(0, 1),
    st.integers(0, 9),
)


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(MOVES, max_size=30))
@example(
    [
        *[("receive", group, queue_id, 5) for group in (GROUP, "other") for queue_id in (0, 1)],
        *[("ack", group, queue_id, 0) for group in (GROUP, "other") for queue_id in (0, 1)],
        ("save", GROUP, 0, 0),
        ("move", GROUP, 0, 0),
        ("move", GROUP, 1, 0),
        ("ack", GROUP, 0, 1),
        ("ack", "other", 0, 1),
        ("saved", GROUP, 0, 0),
        ("cut", GROUP, 0, 0),
    ]
)
def test_a_start_after_a_power_cut_never_combines_a_moved_offset_with_older_leases(
    steps: list[tuple[str, str, int, int]],
) -> None:
    @on_node(InTurn, ack_save_ms=1_000)
    async def life(world: World) -> None:
        await send(world, [b"%02d" % i for i in range(24)])
        held: dict[tuple[str, int], list[Receipt]] = {}  # by group and queue
        # Offsets that were stored since the group last received: the offset, and the end of the log at that time.
        moved: dict[tuple[str, int], tuple[int, int]] = {}
        for step, group, queue_id, n in [*steps, ("cut", GROUP, 0, 0)]:
            key = group, queue_id
            if step == "receive":
                request = ReceiveRequest(group, TOPIC, queue_id, rows=n + 1, invisible_ms=MINUTE_MS)
                receipts = (await engine(world).receive(request, 0)).receipts
                held.setdefault(key, []).extend(receipt for receipt in receipts if receipt.topic == TOPIC)
                moved.pop(key, None)
            elif step in ("ack", "nack") and held.get(key):
                receipt = held[key].pop(n % len(held[key]))
                if step == "ack":
                    await engine(world).acknowledge([receipt])
                else:
                    await engine(world).nack(receipt, 0)
            elif step == "move" and world.broker.tables.offsets.find_offset(group, TOPIC, queue_id) != n:
                await world.broker.commit_offsets(group, TOPIC, {queue_id: n})
                moved[key] = n, world.broker.log.writer.next_seq
                queue = engine(world).leases.get(group, TOPIC, queue_id)
                if queue is not None and queue.stored_offset == n:
                    del moved[key]  # moved back before the broker used the other offset: the leases stay
            elif step == "saved":
                await save(world)
            elif step == "save":
                assert world.node is not None
                await world.node.maintenance.save_offsets()
            elif step == "cut":
                await power_cut(world)
                for queue in engine(world).leases.all():
                    offset, from_seq = moved.get((queue.group, queue.queue_id), (-1, 0))
                    assert offset != queue.stored_offset or not is_saved(world, queue.group, from_seq), queue
                held.clear()
                moved.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "PART_POSITIONS", PART)
        patch.setattr(lease_saver, "PART_POSITIONS", PART)
        life()
