"""A message that would be released too late is cancelled or moved, in each place. No other message is."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, column, on_node
from tests.broker.recurring.schedule_lives import NAME, TOPIC, progress, put
from tests.crash.lives import run, until_cut
from tests.crash.world import HOUR_MS, SECOND_MS, CutFiles, World
from tests.crash_files import CrashFiles

from timeball.broker.accepting import delivery
from timeball.broker.accepting.expiry import find_expired
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.recurring import successors
from timeball.broker.registry.rates import Stat
from timeball.broker.registry.schedules import State
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.message import Kind, decode_properties, encode_properties
from timeball.model.send_options import expiry_properties

LATE_MS = 10 * SECOND_MS  # the releases of these tests are this late
# The state, topic and reason. A look-up returns no topic of a cancelled message.
CANCELLED = ("cancelled", None, "expired")


def expiring(
    name: str, at_ms: int | None = None, after_ms: int | None = None, on_expiry: Any = None, **columns: Any
) -> Any:
    """Build a send of one message with an expiry, due in an hour unless `columns` have another due time."""
    properties = encode_properties({"a": "b", **expiry_properties(at_ms, after_ms, on_expiry)})
    times = {} if columns.keys() & {"due_ms", "delay_level"} else {"delay_ms": [HOUR_MS]}
    return batch(unique_key=[name], properties=[properties], **times, **columns)


async def state(world: World, name: str) -> tuple[str, str | None, str | None]:
    """Find the state, topic and reason of a message."""
    (place,) = await world.broker.find(name)
    return place.state, place.topic, place.reason


async def send_messages(world: World) -> None:
    """Send messages that expire just before the release, at the release, or never, with each kind of expiry."""
    due_ms = world.clock.wall + HOUR_MS
    for rows in (
        expiring("before", due_ms + LATE_MS - 1),
        expiring("at", due_ms + LATE_MS),
        expiring("after-before", None, LATE_MS - 1),
        expiring("after-at", None, LATE_MS),
        expiring("moved", due_ms, None, "move", queue_id=[1]),
        expiring("stays", due_ms + LATE_MS, None, "move"),
        batch(unique_key=["plain"], delay_ms=[HOUR_MS]),
        batch(unique_key=["text"], delay_ms=[HOUR_MS], properties=["TIMEBALL_EXPIRES_MS\x01soon\x02"]),
    ):
        await world.broker.send(rows)


async def check_ends(world: World) -> None:
    """Check the ends of the messages of `send_messages`, which were released LATE_MS after their due time."""
    visible = ("visible", "orders", None)
    for name in ("before", "after-before"):
        assert await state(world, name) == CANCELLED, name
    for name in ("at", "after-at", "stays", "plain", "text"):
        assert await state(world, name) == visible, name
    assert await state(world, "moved") == ("visible", "%EXPIRED%orders", None)
    assert world.broker.pending_messages == 0


STRATEGIES = [{}, {"strategy": "timer_wheel"}, {"strategy": "level_cascade"}]


@pytest.mark.parametrize("settings", STRATEGIES, ids=lambda settings: settings.get("strategy", "hour_log"))
@pytest.mark.parametrize("has_others", [True, False])
def test_late_messages_expire_in_each_strategy(settings: dict[str, str], has_others: bool) -> None:
    async def main() -> None:
        world = World(CrashFiles(), ManualClock(), **settings)
        await world.start()
        await send_messages(world)
        if has_others:  # more messages than are released row by row
            await world.broker.send(batch(200, delay_ms=[HOUR_MS] * 200))
        await world.advance(HOUR_MS + LATE_MS)
        await check_ends(world)
        assert world.broker.rates.total(Stat.EXPIRED_NUMS, "orders") == 3
        await world.stop()

    run(main())


@on_node()
async def test_messages_expire_in_the_table_and_after_a_restart(world: World) -> None:
    await send_messages(world)
    await world.compact()
    await world.stop()
    world.clock.advance(HOUR_MS + LATE_MS)
    await world.start()
    await world.settled()
    await check_ends(world)
    await world.restart()
    await check_ends(world)


@on_node()
async def test_a_message_in_a_delay_level_expires(world: World) -> None:
    await world.broker.send(expiring("level", None, 1, delay_level=[1]))
    await world.advance(SECOND_MS + LATE_MS)
    assert await state(world, "level") == CANCELLED


@on_node()
async def test_a_rescheduled_message_expires_after_its_new_due_time(world: World) -> None:
    await world.broker.send(expiring("a", None, 1))
    await world.broker.send(expiring("b", None, LATE_MS))
    await world.broker.reschedule(ids=["a", "b"], delay_ms=2 * HOUR_MS)
    await world.advance(2 * HOUR_MS + LATE_MS)
    assert await state(world, "a") == CANCELLED
    assert await state(world, "b") == ("visible", "orders", None)
    assert [verdict.verdict for verdict in await world.broker.cancel(ids=["a"])] == ["already_cancelled"]


@on_node()
async def test_a_message_that_returns_to_its_group_does_not_expire(world: World) -> None:
    await world.broker.send(
        batch(unique_key=["a"], properties=[encode_properties(expiry_properties(None, 1, None))])
    )
    broker = world.broker
    request = ReceiveRequest("workers", "orders")
    [receipt] = (await broker.consuming.receive(request, 0)).receipts
    assert await broker.consuming.nack(receipt, HOUR_MS)
    await world.advance(HOUR_MS + LATE_MS)
    again = await broker.consuming.receive(request, 0)
    assert column(again.rows, "unique_key") == ["a"]


@on_node()
async def test_an_expired_occurrence_is_followed_by_the_next_one(world: World) -> None:
    properties = expiry_properties(None, LATE_MS - 1, None)
    await put(world, rule={"every": "1h"}, properties=properties)
    first = progress(world)
    await world.advance(first.due_ms - world.clock.wall + LATE_MS)
    (place,) = await world.broker.find(f"{NAME}.{first.due_ms}")
    assert (place.state, place.reason) == ("cancelled", "expired")
    second = progress(world)
    assert second.due_ms == first.due_ms + HOUR_MS and second.runs == 0
    await world.advance(second.due_ms - world.clock.wall)
    assert progress(world).runs == 1


@on_node()
async def test_a_schedule_that_fails_after_an_expired_occurrence_logs_its_error_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(world, rule={"every": "1h"}, properties=expiry_properties(None, 1, None))
    lines: list[tuple[str, ...]] = []
    monkeypatch.setattr(successors.logger, "error", lambda *line: lines.append(line))

    def fail(*_: Any) -> None:
        raise ValueError("no zone")

    monkeypatch.setattr(successors, "choose", fail)
    await world.advance(progress(world).due_ms - world.clock.wall + LATE_MS)
    after = progress(world)
    assert (after.state, after.error, after.runs) == (State.FAILED, "no zone", 0)
    assert [line[1:] for line in lines] == [(NAME, "no zone")]


@on_node()
async def test_a_moved_message_is_found_by_its_present_topic_and_without_a_topic(world: World) -> None:
    await put(world, rule={"every": "1h"}, properties=expiry_properties(None, 1, "move"))
    first = progress(world)
    await world.advance(first.due_ms - world.clock.wall + LATE_MS)
    [past, *_] = await world.broker.schedules.history(NAME, ANONYMOUS)
    assert [(place.state, place.topic) for place in past.places] == [("visible", f"%EXPIRED%{TOPIC}")]
    assert past.places == await world.broker.find(past.message_id, f"%EXPIRED%{TOPIC}")
    assert past.places == await world.broker.find(past.message_id)
    assert await world.broker.find(past.message_id, "others") == []


@on_node()
async def test_an_expired_message_is_cancelled_if_its_topic_would_exceed_the_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.broker.send(expiring("a", None, 1, "move"))
    monkeypatch.setattr(limits, "TOPICS_MAX", 1)
    await world.advance(HOUR_MS + LATE_MS)
    assert await state(world, "a") == CANCELLED


def test_a_release_that_knows_no_expiry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the check of this module fails if each message is released."""
    monkeypatch.setattr(delivery, "find_expired", lambda rows, now_ms: None)

    async def main() -> None:
        world = World(CrashFiles(), ManualClock())
        await world.start()
        await send_messages(world)
        await world.advance(HOUR_MS + LATE_MS)
        with pytest.raises(AssertionError):
            await check_ends(world)
        await world.stop()

    run(main())


# ---- the properties as columns ------------------------------------------------------------------------------------

NAMES = ["TIMEBALL_EXPIRES_MS", "TIMEBALL_EXPIRES_AFTER_MS", "TIMEBALL_ON_EXPIRY"]
ENTRIES = st.lists(
    st.tuples(
        st.sampled_from([*NAMES, *NAMES, "A" + NAMES[0], NAMES[0] + "X", "a", ""]),
        st.sampled_from(
            ["", "7", "90", "9" * 15, "9" * 30, "-1", "1.5", "soon", "\u0661", "move", "cancel", None]
        ),
    ),
    max_size=6,
)
TOPICS = st.sampled_from(["orders", "%RETRY%g", "%DLQ%g", "%EXPIRED%orders"])


def expected_end(topic: str, text: str | None, due_ms: int, now_ms: int) -> str:
    """Find how a message must end at `now_ms`, by its decoded properties."""
    properties = decode_properties(text or "")
    expires_ms, expires_after_ms = properties.get(NAMES[0]), properties.get(NAMES[1])
    text_ms = expires_ms if expires_after_ms is None else expires_after_ms
    if text_ms is None or not (text_ms.isascii() and text_ms.isdigit() and len(text_ms) <= 15):
        return "released"
    last_ms = int(text_ms) + (0 if expires_after_ms is None else due_ms)
    if last_ms >= now_ms or topic.startswith("%"):
        return "released"
    return "moved" if properties.get(NAMES[2]) == "move" else "cancelled"


@settings(deadline=None)
@given(st.lists(st.tuples(TOPICS, st.none() | ENTRIES, st.integers(0, 50)), min_size=1, max_size=8))
def test_expiries_in_columns_equal_those_computed_message_by_message(
    rows: list[tuple[str, Any, int]],
) -> None:
    texts = [
        None
        if entries is None
        else "".join(f"{name}\x02" if value is None else f"{name}\x01{value}\x02" for name, value in entries)
        for _, entries, _ in rows
    ]
    table = pa.RecordBatch.from_pydict(
        {
            "topic": pa.array([topic for topic, _, _ in rows], pa.string()),
            "properties": pa.array(texts, pa.string()),
            "due_ms": pa.array([due_ms for _, _, due_ms in rows], pa.int64()),
        }
    )
    for now_ms in (8, 60, 95, 10**15 + 60):
        ends = [expected_end(row[0], text, row[2], now_ms) for row, text in zip(rows, texts, strict=True)]
        expired = find_expired(table, now_ms)
        if expired is None:
            assert set(ends) == {"released"}
            continue
        masks = zip(expired.cancelled.tolist(), expired.moved.tolist(), strict=True)
        assert [
            "cancelled" if is_cancelled else "moved" if is_moved else "released"
            for is_cancelled, is_moved in masks
        ] == ends


def test_finding_expired_messages_takes_less_than_one_call_per_message() -> None:
    """A hand-out may have a hundred thousand messages. Decoding each would block the event loop for a second."""
    table = pa.RecordBatch.from_pydict(
        {
            "topic": ["orders"] * 1_000, "due_ms": [0] * 1_000,
            "properties": [encode_properties(expiry_properties(None, 5, None))] * 1_000,
        }
    )  # fmt: skip
    calls = []
    sys.setprofile(lambda _, event, argument: calls.append(argument) if "call" in event else None)
    try:
        expired = find_expired(table, 6)
    finally:
        sys.setprofile(None)
    assert expired is not None and expired.cancelled.all() and len(calls) < 1_000


# ---- power cuts --------------------------------------------------------------------------------------------------


def ends_after_cut(crash_at: int | None) -> tuple[int, list[list[int]]]:
    """Cut the power at a call of the disk, before or during the release of messages that expire.

    Returns the number of calls, and for each message the kinds of the rows that end it.
    """
    files, clock = CutFiles(crash_at=crash_at), ManualClock()
    world = World(files, clock)

    async def live() -> None:
        await world.start()
        await send_messages(world)
        await world.advance(HOUR_MS + LATE_MS)
        await world.stop()

    run(until_cut(world, files, live))

    async def restart_and_read(files_after_cut: CrashFiles) -> list[list[int]]:
        second = World(files_after_cut, clock)
        await second.start()
        clock.advance(3 * HOUR_MS)
        second.broker.ticker.wake()
        await second.settled()
        ends: dict[int, list[int]] = {}
        reader = second.broker.log.reader
        for rows in reader.rows(
            reader.first_seq, reader.next_seq, [Kind.SCHEDULED, Kind.RELEASE, Kind.CANCEL]
        ):
            for kind, seq, number in zip(
                *(column(rows, name) for name in ("kind", "seq", "source_seq")), strict=True
            ):
                if kind == Kind.SCHEDULED:
                    ends[seq] = []
                else:
                    ends[number].append(kind)
        await second.stop()
        return list(ends.values())

    return files.calls, run(restart_and_read(files.crash(crash_at or 1, "random")))


@pytest.mark.parametrize("number", [8, pytest.param(10_000, marks=pytest.mark.slow)])
def test_after_a_power_cut_each_message_has_one_end(number: int) -> None:
    calls, _ = ends_after_cut(None)
    chosen = np.random.default_rng(1).permutation(np.arange(1, calls + 1))[:number]
    for call in chosen.tolist():
        assert all(len(ends) == 1 for ends in ends_after_cut(call)[1]), f"call {call} of {calls}"
