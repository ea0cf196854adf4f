"""The operations on schedules: their rows, refusals and permissions, and concurrent operations of several programs."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from typing import Any

import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.recurring.schedule_lives import (
    EVERY_MS,
    NAME,
    TOPIC,
    facts_of,
    id_of,
    progress,
    put,
    released,
)
from tests.broker.two_groups import InGroup, Neighbours, in_two_groups
from tests.crash.world import HOUR_MS, SECOND_MS, World

from timeball.broker.admin import schedule_changes
from timeball.broker.recurring import successors
from timeball.broker.recurring.kept_results import cached
from timeball.broker.registry.schedules import State
from timeball.broker.registry.selections import SelectionFacts
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Access, Account, Caller, Principal
from timeball.model.errors import (
    Conflict,
    Forbidden,
    InvalidDelay,
    InvalidMessage,
    InvalidName,
    NotFound,
    OutOfRange,
    OverLimit,
)
from timeball.model.message import Kind, decode_properties

DAILY = {"cron": "0 9 * * *", "zone": "Europe/Berlin"}


def account(name: str, topics: dict[str, str]) -> Caller:
    """Build a caller with the rights `topics`."""
    account = Account(access_key=name, secret_key="secret 12", topics=topics)
    return Principal(Access({name: account}), account)


def kinds_of_last_frame(world: World) -> list[int]:
    """List the kinds of the rows in the last frame of the log."""
    reader = world.broker.log.reader
    *_, (_, rows) = reader.frames(1, reader.next_seq)
    return [Kind(kind) for kind in rows.column("kind").to_pylist()]


# ---- put -----------------------------------------------------------------------------------------------------


@on_node()
async def test_an_equal_put_appends_nothing(world: World) -> None:
    assert await put(world, properties={"a": "1", "b": "2"}) == "created"
    before, next_seq = progress(world), world.broker.log.writer.next_seq
    assert await put(world, properties={"b": "2", "a": "1"}) == "unchanged"
    assert (progress(world), world.broker.log.writer.next_seq) == (before, next_seq)
    await world.restart()
    assert await put(world, properties={"a": "1", "b": "2"}) == "unchanged"
    assert progress(world) == before


@on_node()
async def test_programs_that_put_at_once_create_one_schedule(world: World) -> None:
    outcomes = await asyncio.gather(*(put(world, body=b"mine") for _ in range(20)))
    assert sorted(outcomes) == ["created", *["unchanged"] * 19]
    outcomes = await asyncio.gather(*(put(world, body=b"%d" % number) for number in range(20)))
    assert outcomes == ["replaced"] * 20
    assert world.broker.pending_messages == 1
    await world.advance(EVERY_MS)
    assert [row["body"] for row in await released(world)] == [b"19"]


@on_node()
async def test_a_new_body_keeps_the_next_time_and_a_new_rule_begins_now(world: World) -> None:
    await put(world)
    before = progress(world)
    await world.advance(before.due_ms - world.clock.wall - SECOND_MS)
    assert await put(world, body=b"new") == "replaced"
    after = progress(world)
    assert (after.due_ms, after.after_ms) == (before.due_ms, before.after_ms) and after.number > before.number
    assert kinds_of_last_frame(world) == [Kind.CANCEL, Kind.SCHEDULED, Kind.META, Kind.META]
    assert world.broker.pending_messages == 1
    await world.broker.schedules.put(NAME, facts_of({"every": "7m"}), ANONYMOUS)
    assert progress(world).due_ms == world.clock.wall // 420_000 * 420_000 + 420_000
    assert world.broker.pending_messages == 1
    await world.advance(EVERY_MS)
    assert {row["body"] for row in await released(world)} == {b"tick"}


ONCE = {"at": ["2023-11-15T09:00"], "zone": "UTC"}


@on_node()
async def test_an_ended_schedule_takes_a_new_body(world: World) -> None:
    await put(world, rule=ONCE)
    await world.advance(limits.DAY_MS)
    before = progress(world)
    assert (before.state, before.runs, world.broker.pending_messages) == (State.ENDED, 1, 0)
    assert await put(world, rule=ONCE) == "unchanged"
    shown, outcome = await world.broker.schedules.put(NAME, facts_of(ONCE, body=b"new"), ANONYMOUS)
    assert (outcome, shown.facts.body, shown.progress) == ("replaced", b"new", before)
    assert kinds_of_last_frame(world) == [Kind.META, Kind.META]
    await world.restart()
    assert await put(world, rule=ONCE, body=b"new") == "unchanged"
    assert (progress(world), world.broker.pending_messages) == (before, 0)
    assert await put(world, rule=ONCE, body=b"new", topic="news") == "replaced"
    # A new rule must have a later time. A new rule with a later time begins now.
    with pytest.raises(InvalidDelay, match="no time later"):
        await put(world, rule={"at": ["2023-11-15T10:00"], "zone": "UTC"})
    assert await put(world) == "replaced"
    assert (progress(world).state, world.broker.pending_messages) == (State.ACTIVE, 1)


@on_node()
async def test_a_paused_schedule_whose_times_have_passed_takes_a_new_body(world: World) -> None:
    facts = {"rule": ONCE, "catch_up": "none"}
    await put(world, **facts)
    await world.broker.schedules.pause(NAME, ANONYMOUS)
    await world.advance(limits.DAY_MS)
    assert await put(world, **facts, body=b"new") == "replaced"
    assert progress(world).state == State.PAUSED
    assert (await world.broker.schedules.resume(NAME, ANONYMOUS)).progress.state == State.ENDED
    assert await released(world) == []


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (InvalidMessage, {"properties": {"schedule": "x"}}), (InvalidMessage, {"properties": {"occurrence": "x"}}),
        (InvalidMessage, {"properties": {"TIMEBALL_UNIQUE_KEY": "x"}}),
        (InvalidDelay, {"properties": {"TIMEBALL_EXPIRES_AFTER_MS": "5m"}}),
        (InvalidDelay, {"properties": {"TIMEBALL_ON_EXPIRY": "move"}}),
        (InvalidMessage, {"properties": {"long": "x" * limits.PROPERTIES_BYTES_MAX}}),
        (InvalidMessage, {"tag": "x" * 300}), (OutOfRange, {"body": bytes(limits.SCHEDULE_BODY_BYTES_MAX + 1)}),
        (OutOfRange, {"catch_up_within_ms": -1}), (InvalidName, {"topic": "a b"}), (InvalidName, {"name": "a.b"}),
        (Forbidden, {"topic": "SCHEDULE_TOPIC_XXXX"}),
        (InvalidDelay, {"rule": {"at": ["2020-01-01T00:00"], "zone": "UTC"}}),
        (InvalidDelay, {"rule": {"at": ["2099-01-01T00:00"], "zone": "UTC"}}),
    ],
)  # fmt: skip
@on_node()
async def test_a_refused_put_changes_nothing(
    world: World, error: type[Exception], changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    logging.disable(logging.NOTSET)
    next_seq = world.broker.log.writer.next_seq
    with pytest.raises(error):
        await put(world, **{"name": NAME, **changes})
    assert not caplog.records, "the reason is not logged, because the caller gets it"
    assert world.broker.log.writer.next_seq == next_seq and not len(world.broker.tables.schedules)


@on_node()
async def test_the_number_and_the_bytes_of_schedules_are_limited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SCHEDULES_MAX", 2)
    await put(world, "a")
    await put(world, "b")
    with pytest.raises(OverLimit, match="2 schedules exist"):
        await put(world, "c")
    await put(world, "b", body=b"changed")
    schedules = world.broker.tables.schedules
    size_bytes = schedules.size_bytes
    await world.restart()
    assert world.broker.tables.schedules.size_bytes == size_bytes
    monkeypatch.setattr(limits, "SCHEDULES_BYTES_MAX", size_bytes)
    with pytest.raises(OverLimit, match="bytes"):
        await put(world, "b", body=b"changed again")
    await world.broker.schedules.delete("a", ANONYMOUS)
    assert world.broker.tables.schedules.size_bytes < size_bytes
    await put(world, "b", body=b"changed again")


@on_node()
async def test_a_new_schedule_skips_a_time_whose_rescheduled_occurrence_is_pending(world: World) -> None:
    await put(world)
    moved_ms, minute_ms = progress(world).due_ms, 60 * SECOND_MS
    later_ms = moved_ms + 7 * minute_ms
    await world.broker.reschedule(ids=[id_of(moved_ms)], due_ms=later_ms)
    await world.broker.schedules.delete(NAME, ANONYMOUS)
    assert await put(world) == "created"
    assert progress(world).due_ms == moved_ms + EVERY_MS, "one message for each time"
    # A changed rule begins now, too.
    await world.broker.schedules.put(NAME, facts_of({"every": "2m"}), ANONYMOUS)
    assert progress(world).due_ms < moved_ms
    await world.broker.schedules.put(NAME, facts_of(), ANONYMOUS)
    assert progress(world).due_ms == moved_ms + EVERY_MS
    await world.advance(later_ms - world.clock.wall)
    await world.advance(moved_ms + EVERY_MS - world.clock.wall)
    ids = [row["unique_key"] for row in await released(world)]
    assert ids == [id_of(moved_ms), id_of(moved_ms + EVERY_MS)]


@on_node()
async def test_a_replaced_schedule_may_take_the_time_of_its_own_occurrence(world: World) -> None:
    await put(world)
    due_ms = progress(world).due_ms
    for rule in ({"every": "20m"}, {"every": "5m"}, {"every": "10m"}):
        await world.broker.schedules.put(NAME, facts_of(rule), ANONYMOUS)
        assert progress(world).due_ms == (due_ms if rule != {"every": "5m"} else due_ms - EVERY_MS // 2)
    assert world.broker.pending_messages == 1, (
        "the replaced occurrence was cancelled, so its time has no message"
    )


@on_node(delay_ms_max=HOUR_MS)
async def test_an_occurrence_may_be_due_later_than_the_longest_delay_of_a_send(world: World) -> None:
    await world.broker.schedules.put(NAME, facts_of({"every": "1d"}), ANONYMOUS)
    await world.advance(24 * HOUR_MS)
    assert len(await released(world)) == 1 and world.broker.pending_messages == 1


# By the action of a selection: the state of the pending occurrence, and the bodies that are delivered afterwards.
SELECTED = {
    "cancel": ("cancelled", [b"new"]),
    "pause": ("waiting", [b"new"]),
    "shift": ("waiting", [b"tick", b"new"]),
    "move": ("waiting", [b"new"]),
}


@pytest.mark.parametrize("action", SELECTED)
@on_node()
async def test_a_new_body_does_not_undo_a_selection(world: World, action: str) -> None:
    await put(world)
    before, arguments = progress(world), {"shift": {"shift_ms": SECOND_MS}, "move": {"to_topic": "others"}}
    facts = SelectionFacts(seq=0, at_ms=0, topics=[TOPIC], action=action, **arguments.get(action, {}))
    await world.broker.selections.select(facts, ANONYMOUS)
    assert await put(world, body=b"new") == "replaced"
    assert progress(world) == before
    state, bodies = SELECTED[action]
    [place] = await world.broker.find(id_of(before.due_ms))
    assert place.state == state and (place.state, place.due_ms, place.topic, place.reason) != (
        "waiting", before.due_ms, TOPIC, None,
    )  # fmt: skip
    await world.restart()
    await world.advance(before.due_ms - world.clock.wall + EVERY_MS)
    assert [row["body"] for row in await released(world)] == bodies
    assert world.broker.tables.schedules.get(NAME)[0].body == b"new"


@pytest.mark.parametrize("changes", [{"topic": "elsewhere"}, {"keys": "other"}])
@on_node()
async def test_a_new_topic_or_key_replaces_a_selected_occurrence(
    world: World, changes: dict[str, str]
) -> None:
    """The rows that end a pending occurrence have the topic and the keys of its schedule."""
    await put(world)
    before = progress(world)
    facts = SelectionFacts(seq=0, at_ms=0, topics=[TOPIC], action="pause")
    await world.broker.selections.select(facts, ANONYMOUS)
    assert await put(world, **changes) == "replaced"
    after = progress(world)
    assert after.number > before.number and after.due_ms == before.due_ms
    assert world.broker.pending_messages == 1


@on_node()
async def test_a_pause_and_a_resume_do_not_undo_a_cancel_of_a_selection(world: World) -> None:
    await put(world)
    before = progress(world)
    await world.broker.selections.select(SelectionFacts(seq=0, at_ms=0, topics=[TOPIC]), ANONYMOUS)
    await world.broker.schedules.pause(NAME, ANONYMOUS)
    await world.broker.schedules.resume(NAME, ANONYMOUS)
    assert progress(world).due_ms == before.due_ms + EVERY_MS


COSTLY = {
    "cron": "0 9 * * *", "zone": "UTC", "move": "after",
    "exclude": [(date(2024, 1, 1) + timedelta(days=2 * day)).isoformat() for day in range(400)],
}  # fmt: skip


@on_node()
async def test_costly_rules_are_evaluated_in_threads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # One thread, which computes in the order of the calls.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    rules_on_loop, first = list[str](), successors.first_after.__wrapped__
    loop_thread = threading.get_ident()

    def record_and_find(rule: str, after_ms: int) -> Any:
        if threading.get_ident() == loop_thread:
            rules_on_loop.append(rule)
        return first(rule, after_ms)

    for module in (successors, schedule_changes):
        monkeypatch.setattr(module, "first_after", cached(long_results=100)(record_and_find))
    await put(world, rule=COSTLY)
    assert (await world.broker.schedules.get(NAME, ANONYMOUS)).next_local.endswith("T09:00:00")
    await world.broker.schedules.page(10, "", None, ANONYMOUS)
    for _ in range(3):
        await asyncio.to_thread(lambda: None)  # waits for the computations that were begun in the thread
        await world.advance(progress(world).due_ms - world.clock.wall)
    await world.broker.schedules.pause(NAME, ANONYMOUS)
    await world.broker.schedules.resume(NAME, ANONYMOUS)
    assert len(await released(world)) == 3 and not rules_on_loop
    await put(world)
    assert rules_on_loop, "an ordinary rule takes microseconds"


# ---- pause, resume, delete, run --------------------------------------------------------------------------------


@on_node()
async def test_a_pause_cancels_the_occurrence_and_a_resume_brings_it_back(world: World) -> None:
    await put(world)
    before = progress(world)
    shown = await world.broker.schedules.pause(NAME, ANONYMOUS)
    assert (shown.progress.state, shown.progress.number, shown.next_local) == (State.PAUSED, 0, "")
    assert kinds_of_last_frame(world) == [Kind.CANCEL, Kind.META]
    next_seq = world.broker.log.writer.next_seq
    await world.broker.schedules.pause(NAME, ANONYMOUS)
    assert world.broker.log.writer.next_seq == next_seq, "a second pause appends nothing"
    assert await put(world, body=b"new") == "replaced"
    assert progress(world).state == State.PAUSED and world.broker.pending_messages == 0
    await world.restart()
    shown = await world.broker.schedules.resume(NAME, ANONYMOUS)
    assert (shown.progress.state, shown.progress.due_ms) == (State.ACTIVE, before.due_ms)
    await world.advance(EVERY_MS)
    assert [row["body"] for row in await released(world)] == [b"new"]
    assert (await world.broker.schedules.resume(NAME, ANONYMOUS)).progress.state == State.ACTIVE
    assert world.broker.pending_messages == 1


@on_node()
async def test_a_delete_cancels_the_occurrence_in_the_same_frame(world: World) -> None:
    await put(world)
    await world.broker.schedules.delete(NAME, ANONYMOUS)
    assert kinds_of_last_frame(world) == [Kind.CANCEL, Kind.META, Kind.META]
    for again in (False, True):
        if again:
            await world.restart()
        assert world.broker.pending_messages == 0 and not len(world.broker.tables.schedules)
        for call in ("delete", "pause", "resume", "run"):
            with pytest.raises(NotFound):
                await getattr(world.broker.schedules, call)(NAME, ANONYMOUS)
    await world.advance(HOUR_MS)
    assert await released(world) == []
    assert await put(world) == "created" and progress(world).runs == 0


@on_node()
async def test_a_run_sends_the_template_now_and_changes_nothing_else(world: World) -> None:
    await put(world, tag="t", properties={"a": "1"})
    before = progress(world)
    ids = await asyncio.gather(*(world.broker.schedules.run(NAME, ANONYMOUS) for _ in range(3)))
    rows = await released(world)
    assert sorted(row["unique_key"] for row in rows) == sorted(set(ids)) and len(set(ids)) == 3
    assert {row["kind"] for row in rows} == {Kind.MESSAGE} and {row["tag"] for row in rows} == {"t"}
    assert decode_properties(rows[0]["properties"]) == {
        "a": "1", "schedule": NAME, "scheduled_ms": str(world.clock.wall),
    }  # fmt: skip
    assert progress(world) == before


@on_node()
async def test_concurrent_changes_leave_one_pending_occurrence(world: World) -> None:
    for _ in range(5):
        await asyncio.gather(
            put(world, body=b"1"), put(world, body=b"2"), world.broker.schedules.run(NAME, ANONYMOUS)
            if NAME in list(world.broker.tables.schedules.names_after("")) else put(world, body=b"3"),
        )  # fmt: skip
        world.clock.advance(EVERY_MS)
        world.broker.ticker.wake()
        await asyncio.gather(
            world.broker.schedules.pause(NAME, ANONYMOUS), world.broker.schedules.resume(NAME, ANONYMOUS)
        )
        await world.settled()
        if progress(world).state == State.PAUSED:
            await world.broker.schedules.resume(NAME, ANONYMOUS)
        await world.settled()
        assert world.broker.pending_messages == 1
    keys = [row["unique_key"] for row in await released(world) if row["kind"] == Kind.RELEASE]
    assert len(keys) == len(set(keys)) == 5


# ---- queries -------------------------------------------------------------------------------------------------


@on_node()
async def test_pages_list_each_visible_schedule_once_in_order(world: World) -> None:
    for number in range(7):
        await put(world, f"s{number}", topic="even" if number % 2 == 0 else "odd")
    schedules = world.broker.schedules
    first = await schedules.page(3, "", None, ANONYMOUS)
    assert [shown.name for shown in first.schedules] == ["s0", "s1", "s2"] and first.next_page == "s2"
    rest = await schedules.page(10, first.next_page, None, ANONYMOUS)
    assert [shown.name for shown in rest.schedules] == ["s3", "s4", "s5", "s6"] and rest.next_page is None
    odd = await schedules.page(10, "", "odd", ANONYMOUS)
    assert [shown.name for shown in odd.schedules] == ["s1", "s3", "s5"]
    await schedules.delete("s3", ANONYMOUS)
    assert [shown.name for shown in (await schedules.page(10, "s1", None, ANONYMOUS)).schedules] == [
        "s2",
        "s4",
        "s5",
        "s6",
    ]


@on_node()
async def test_a_page_has_a_bounded_number_of_schedules_and_bytes(world: World) -> None:
    schedules = world.broker.schedules
    for number in range(30):
        await put(world, f"large{number:02d}", body=bytes(limits.SCHEDULE_BODY_BYTES_MAX))
    for number in range(120):
        await put(world, f"small{number:03d}")
    after: str | None = ""
    names, pages = list[str](), 0
    while after is not None:
        page = await schedules.page(limits.LISTED_ROWS_MAX, after, None, ANONYMOUS)
        assert (
            sum(len(shown.facts.body) for shown in page.schedules) <= 1024 * 1024
            and len(page.schedules) <= 100
        )
        names += [shown.name for shown in page.schedules]
        after, pages = page.next_page, pages + 1
    assert names == sorted(names) and len(set(names)) == 150 and pages == 5
    # Schedules that the page leaves out count, too.
    assert (await schedules.page(limits.LISTED_ROWS_MAX, "", "news", ANONYMOUS)).next_page == "large07"


@on_node()
async def test_a_preview_stores_nothing(world: World) -> None:
    next_seq = world.broker.log.writer.next_seq
    times = await world.broker.schedules.preview(DAILY, None, 3, ANONYMOUS)
    assert [time.local[:16] for time in times] == ["2023-11-15T09:00", "2023-11-16T09:00", "2023-11-17T09:00"]
    [later] = await world.broker.schedules.preview(DAILY, times[-1].due_ms, 1, ANONYMOUS)
    assert later.due_ms == times[-1].due_ms + limits.DAY_MS
    assert world.broker.log.writer.next_seq == next_seq
    for count in (0, limits.SCHEDULE_PREVIEW_MAX + 1):
        with pytest.raises(OutOfRange):
            await world.broker.schedules.preview(DAILY, None, count, ANONYMOUS)
    with pytest.raises(InvalidDelay):
        await world.broker.schedules.preview({"cron": "61 * * * *", "zone": "UTC"}, None, 3, ANONYMOUS)


@on_node()
async def test_the_history_shows_the_states_of_the_last_occurrences(world: World) -> None:
    await put(world)
    await world.advance(EVERY_MS)
    await world.broker.cancel(ids=[id_of(progress(world).due_ms)])
    await world.advance(2 * EVERY_MS)
    past = await world.broker.schedules.history(NAME, ANONYMOUS)
    states = [each.places[0].state if each.places else "none" for each in past]
    # Newest first. The times before the put have no messages.
    assert states[:4] == ["visible", "cancelled", "visible", "none"]
    assert past[0].message_id == (await released(world))[-1]["unique_key"]


@on_node()
async def test_the_history_asks_the_rule_in_a_thread(world: World) -> None:
    await put(world, rule={"at": ["2030-01-31T09:00"], "zone": "UTC"})
    history = asyncio.ensure_future(world.broker.schedules.history(NAME, ANONYMOUS))
    await asyncio.sleep(0)
    assert not history.done(), "the rule is not computed on the event loop"
    assert await history == []


@on_node()
async def test_the_history_of_a_yearly_rule_has_the_last_ten_years(world: World) -> None:
    await put(world, rule={"cron": "0 0 1 1 *", "zone": "UTC"})
    for _ in range(2):
        await world.advance(progress(world).due_ms - world.clock.wall)
    past = await world.broker.schedules.history(NAME, ANONYMOUS)
    assert [each.occurrence.local[:4] for each in past] == [str(year) for year in range(2025, 2015, -1)]
    assert [each.places[0].state for each in past if each.places] == ["visible", "visible"]


@pytest.mark.parametrize(
    ("rule", "years"),
    [
        ({"cron": "0 0 29 2 *", "zone": "UTC"}, list(range(2020, 1983, -4))),
        ({"at": ["1970-01-01T00:00", "2022-05-01T00:00", "2030-05-01T00:00"], "zone": "UTC"}, [2022, 1970]),
        ({"cron": "0 0 1 1 *", "zone": "UTC", "starts_at": "2024-01-01T00:00"}, []),
    ],
)
@on_node()
async def test_the_history_has_rare_times(world: World, rule: dict[str, Any], years: list[int]) -> None:
    await put(world, rule=rule)
    past = await world.broker.schedules.history(NAME, ANONYMOUS)
    assert [int(each.occurrence.local[:4]) for each in past] == years


@on_node()
async def test_the_history_includes_messages_in_earlier_topics_of_the_schedule(world: World) -> None:
    await put(world)
    await world.advance(EVERY_MS)
    await world.broker.cancel(ids=[id_of(progress(world).due_ms)])
    await world.advance(EVERY_MS)
    await put(world, topic="news")
    selected = SelectionFacts(seq=0, at_ms=0, action="move", topics=["news"], to_topic="moved")
    await world.broker.selections.select(selected, ANONYMOUS)
    await world.advance(2 * EVERY_MS)
    past = await world.broker.schedules.history(NAME, ANONYMOUS)
    places = [each.places[0] for each in past if each.places]
    assert [(place.state, place.topic) for place in places] == [
        ("visible", "news"), ("visible", "moved"), ("cancelled", None), ("visible", TOPIC),
    ]  # fmt: skip
    # The history leaves out messages in topics at which the caller may not look.
    reader = account("reader", {"news": "SUB"})
    past = await world.broker.schedules.history(NAME, reader)
    assert [len(each.places) for each in past[:4]] == [1, 0, 0, 0]


@on_node()
async def test_the_history_has_messages_to_a_topic_of_retries(world: World) -> None:
    world.broker.tables.groups.ensure("workers")
    await put(world, topic="%RETRY%workers")
    await world.advance(EVERY_MS)
    [past, *_] = await world.broker.schedules.history(NAME, ANONYMOUS)
    assert [place.state for place in past.places] == ["visible"]


@on_node()
async def test_the_history_leaves_out_foreign_messages_with_the_id_of_an_occurrence(world: World) -> None:
    await put(world)
    due_ms = progress(world).due_ms
    await world.broker.send(batch(1, topic=["others"], unique_key=[id_of(due_ms)]))
    await world.broker.schedules.pause(NAME, ANONYMOUS)
    await world.broker.schedules.put(NAME, facts_of(body=b"later"), ANONYMOUS)
    await world.advance(EVERY_MS)
    [past, *_] = await world.broker.schedules.history(NAME, ANONYMOUS)
    assert past.message_id == id_of(due_ms)
    assert [place.state for place in past.places] == ["cancelled"]


# ---- permissions ---------------------------------------------------------------------------------------------


@on_node()
async def test_a_schedule_needs_the_right_to_send_to_its_topic(world: World) -> None:
    shop, other = account("shop", {TOPIC: "PUB"}), account("other", {"news": "PUB|SUB"})
    reader = account("reader", {TOPIC: "SUB"})
    schedules = world.broker.schedules
    for caller in (other, reader):
        with pytest.raises(Forbidden):
            await put(world, caller=caller)
    assert await put(world, caller=shop) == "created"
    with pytest.raises(Forbidden) as refused:
        await put(world, caller=other, topic="news")  # this put would end an occurrence in another topic
    assert TOPIC not in str(refused.value)
    assert [shown.name for shown in (await schedules.page(9, "", None, reader)).schedules] == [NAME]
    assert (await schedules.page(9, "", None, other)).schedules == []
    with pytest.raises(NotFound):
        await schedules.get(NAME, other)
    for call in ("pause", "resume", "run", "delete"):
        with pytest.raises(NotFound):
            await getattr(schedules, call)(NAME, other)
        with pytest.raises(Forbidden):
            await getattr(schedules, call)(NAME, reader)
    for call in ("run", "pause", "resume", "delete"):
        await getattr(schedules, call)(NAME, shop)


# ---- other operations on pending messages ----------------------------------------------------------------------


@on_node()
async def test_a_range_with_an_occurrence_is_refused(world: World) -> None:
    await put(world)
    number = progress(world).number
    with pytest.raises(OutOfRange, match="schedule"):
        await world.broker.cancel_ranges([(number - 1, 3)])
    assert world.broker.pending_messages == 1


@in_two_groups
async def test_a_group_with_active_schedules_is_not_drained(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    await two.broker.schedules.put(NAME, facts_of(), ANONYMOUS)
    with pytest.raises(Conflict, match="schedule 'tick' is active"):
        await two.broker.drain("g1")
    await two.broker.schedules.pause(NAME, ANONYMOUS)
    await two.broker.drain("g1")
    with pytest.raises(Forbidden, match="drained"):
        await two.broker.schedules.resume(NAME, ANONYMOUS)
