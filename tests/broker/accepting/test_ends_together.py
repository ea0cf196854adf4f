"""One hand-out with all ends that a due message can have: each message has its own, with and without several frames."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.recurring.schedule_lives import EVERY_MS, SETTINGS, TOPIC, progress, put
from tests.crash.lives import run
from tests.crash.world import SECOND_MS, CutFiles, World

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.rates import Stat
from timeball.broker.registry.schedules import Progress
from timeball.broker.registry.selections import SelectionFacts
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.message import encode_properties
from timeball.model.send_options import expiry_properties

LATE_MS = 11 * SECOND_MS  # the hand-out is this late, so its occurrences count as missed
GROUP = "makers"
SKIP: dict[str, Any] = {"overlap": "skip", "group": GROUP}
NONE: dict[str, Any] = {"catch_up": "none"}
CANCELS = expiry_properties(None, LATE_MS - 1, None)
MOVES = expiry_properties(None, LATE_MS - 1, "move")
CHOSEN = {"chosen": "yes"}

# By the name of each schedule: its facts, the end of its second occurrence, and whether this one counts as a run.
SCHEDULES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "plain": ({}, "visible", True),
    "overlap": (SKIP, "overlap", False),
    "done": (SKIP, "visible", True),
    "missed": (NONE, "missed", False),
    "missed-overlap": (NONE | SKIP, "missed", False),
    "selected": ({"properties": CHOSEN}, "selection", False),
    "selected-missed": ({"properties": CHOSEN} | NONE, "selection", False),
    "selected-expired": ({"properties": CHOSEN | CANCELS}, "selection", False),
    "selected-overlap": ({"properties": CHOSEN} | SKIP, "selection", False),
    "expired": ({"properties": CANCELS}, "expired", False),
    "expired-overlap": ({"properties": CANCELS} | SKIP, "expired", False),
    "expired-missed": ({"properties": CANCELS} | NONE, "missed", False),
    "moved": ({"properties": MOVES}, "%EXPIRED%", False),
    "moved-overlap": ({"properties": MOVES} | SKIP, "%EXPIRED%", False),
    "moved-missed": ({"properties": MOVES} | NONE, "missed", False),
}
# By the name of each message: its properties, and its end.
MESSAGES: dict[str, tuple[dict[str, str], str]] = {
    "m-plain": ({}, "visible"),
    "m-selected": (CHOSEN, "selection"),
    "m-expired": (CANCELS, "expired"),
    "m-moved": (MOVES, "%EXPIRED%"),
    "m-selected-expired": (CHOSEN | CANCELS, "selection"),
    "m-selected-moved": (CHOSEN | MOVES, "selection"),
}


async def end_of(world: World, message_id: str) -> str:
    """Find how a message has ended: the reason of its cancel, "visible", or "%EXPIRED%" if it was moved."""
    [place] = await world.broker.find(message_id)
    if place.state == "cancelled":
        return str(place.reason).split(" ")[0]
    assert place.state == "visible"
    return "%EXPIRED%" if place.topic.startswith("%EXPIRED%") else "visible"


async def check(world: World, due_ms: int, before: dict[str, Progress]) -> None:
    """Check the ends of all messages, and the progress of all schedules since `before`."""
    for name, (_, end, is_run) in SCHEDULES.items():
        assert await end_of(world, f"{name}.{due_ms}") == end, name
        after = progress(world, name)
        assert after.runs == before[name].runs + is_run, name
        assert after.due_ms == due_ms + EVERY_MS and after.number, name
        position = before[name].last_queue, before[name].last_offset
        if not is_run:
            assert (after.last_queue, after.last_offset) == position, name
        elif name == "done":
            [place] = await world.broker.find(f"{name}.{due_ms}")
            assert (after.last_queue, after.last_offset) == (place.queue_id, place.queue_offset), name
    for name, (_, end) in MESSAGES.items():
        for number in range(4):
            assert await end_of(world, f"{name}-{number}") == end, name


@pytest.mark.parametrize("frame_bytes", [None, 6_000, 1])
@pytest.mark.parametrize("strategy", SETTINGS)
def test_each_message_of_a_hand_out_has_its_end(
    strategy: str, frame_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {key: value for key, value in SETTINGS[strategy].items() if "retention" not in key}

    async def main() -> None:
        world = World(CutFiles(), ManualClock(), **settings)
        await world.start()
        world.clock.advance(EVERY_MS - world.clock.wall % EVERY_MS)
        for name, (changes, _, _) in SCHEDULES.items():
            await put(world, name, **changes)
        first_ms = progress(world, "plain").due_ms
        await world.advance(first_ms - world.clock.wall)
        # Only the first occurrence of "done" is acknowledged.
        received = await world.broker.consuming.receive(
            ReceiveRequest(GROUP, TOPIC, invisible_ms=5 * EVERY_MS), 0
        )
        received_rows = received.rows.to_pylist()
        index = [row["unique_key"] for row in received_rows].index(f"done.{first_ms}")
        assert await world.broker.consuming.acknowledge([received.receipts[index]]) == [True]
        before = {name: progress(world, name) for name in SCHEDULES}
        due_ms = first_ms + EVERY_MS
        for number in range(4):
            for name, (properties, _) in MESSAGES.items():
                # Half of the messages are rescheduled to `due_ms`.
                first_due_ms = due_ms if number % 2 else due_ms + 7 * EVERY_MS
                await world.broker.send(
                    batch(
                        unique_key=[f"{name}-{number}"], due_ms=[first_due_ms],
                        properties=[encode_properties({"a": "b", **properties})],
                    )
                )  # fmt: skip
                if number % 2 == 0:
                    await world.broker.reschedule(due_ms=due_ms, ids=[f"{name}-{number}"])
        if world.broker.scheduling.compacts:
            await world.compact()
        facts = SelectionFacts(seq=0, at_ms=0, where="chosen = 'yes'")
        selection = await world.broker.selections.select(facts, ANONYMOUS)
        rates = world.broker.rates
        cancelled, expired = rates.totals(Stat.CANCELLED_NUMS), rates.totals(Stat.EXPIRED_NUMS)
        assert world.broker.pending_messages == len(SCHEDULES) + 4 * len(MESSAGES)
        if frame_bytes is not None:
            monkeypatch.setattr(limits, "REQUEST_BYTES_MAX", frame_bytes)
        world.clock.advance(due_ms - world.clock.wall + LATE_MS)
        world.broker.ticker.wake()
        await world.settled()
        monkeypatch.undo()
        await check(world, due_ms, before)
        # Four messages for each entry of MESSAGES, and one for each schedule.
        assert rates.totals(Stat.CANCELLED_NUMS) == {"orders": 12, TOPIC: 4}, cancelled
        assert rates.totals(Stat.EXPIRED_NUMS) == {"orders": 8, TOPIC: 4}, expired
        assert world.broker.tables.selections.ended_rows(selection) == 16
        assert world.broker.pending_messages == len(SCHEDULES)
        await world.broker.selections.count()
        state = {name: msgspec.structs.asdict(progress(world, name)) for name in SCHEDULES}
        for without_files in (False, True):
            if without_files:
                await world.stop()
                world.files.remove("checkpoint")
                await world.start()
            else:
                await world.restart()
            await check(world, due_ms, before)
            assert world.broker.pending_messages == len(SCHEDULES)
            assert state == {name: msgspec.structs.asdict(progress(world, name)) for name in SCHEDULES}
        await world.stop()

    run(main())


@on_node()
async def test_selected_messages_do_not_keep_hand_outs_small(world: World) -> None:
    """Schedules make hand-outs small until the time of a rule is known, and hand-outs without rules grow again."""
    for number in range(20):
        await put(world, f"s{number}")
    due_ms = progress(world, "s0").due_ms - SECOND_MS
    await world.broker.send(batch(2_000, due_ms=[due_ms] * 2_000))
    await world.broker.selections.select(SelectionFacts(seq=0, at_ms=0, topics=["orders"]), ANONYMOUS)
    reader = world.broker.log.reader
    first_seq = reader.next_seq
    await world.advance(due_ms - world.clock.wall)
    frames = [rows for _, rows in reader.frames(first_seq, reader.next_seq)]
    assert sum(rows.num_rows for rows in frames) == 2_000
    assert len(frames) < 10, "hand-outs grow from 16 messages, twice as many each time"
