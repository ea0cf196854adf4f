"""Selections agree with their model, in each place where a message can be, and through crashes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.broker.admin.test_campaign_changes import without_caches
from tests.broker.admin.test_push_changes import principal
from tests.broker.on_node import on_node
from tests.broker.selection_model import (
    ACTIONS,
    ALL,
    DELAYS_MS,
    DUE_LATER,
    HOUR_MS,
    MINUTE_MS,
    PAUSE,
    REGION_EU,
    RELEASE,
    SECOND_MS,
    SHIFT_LATER,
    TOPIC_A,
    Model,
    conditions,
)
from tests.crash.world import World

from timeball.broker.admin.selection_changes import SelectionChanges
from timeball.broker.pending import forecast, wakers
from timeball.broker.pending.snapshot import Snapshot
from timeball.broker.recurring import successors
from timeball.broker.registry.selections import Selected, SelectionFacts, Woken
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.answers import PageRequest
from timeball.model.errors import (
    Corrupt,
    Forbidden,
    InvalidFilter,
    InvalidMessage,
    InvalidName,
    NotFound,
    OutOfRange,
    OverLimit,
    Unavailable,
)
from timeball.model.message import BASE, CANCEL_REASON, Kind, decode_properties, encode_properties
from timeball.model.send_options import EXPIRES_AFTER_MS

STRATEGIES = ["hour_log", "timer_wheel", "level_cascade"]

_shapes = st.lists(st.tuples(st.integers(0, len(DELAYS_MS) - 1), st.integers(0, 2)), min_size=1, max_size=6)
_topic, _index = st.sampled_from("ab"), st.integers(0, 40)
_steps = st.one_of(
    st.tuples(st.just("send"), _topic, _shapes),
    st.tuples(st.just("bulk"), _topic, _shapes),
    st.tuples(st.just("select"), st.integers(0, len(conditions(0)) - 1)),
    st.tuples(st.just("select"), st.integers(0, len(conditions(0)) - 1)),
    st.tuples(st.just("undo"), _index),
    st.tuples(st.just("cancel"), _index),
    st.tuples(st.just("reschedule"), _index, st.integers(0, len(DELAYS_MS) - 1)),
    st.tuples(st.just("pause"), _index),
    st.tuples(st.just("resume"), _index, st.booleans()),
    st.tuples(st.just("end_campaign"), _index),
    st.tuples(st.just("advance"), st.sampled_from([SECOND_MS, 5 * SECOND_MS, MINUTE_MS, HOUR_MS])),
    st.tuples(st.just("compact")),
    st.tuples(st.just("merge")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("keep_house")),
)


@pytest.fixture(autouse=True)
def no_count_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "FRESH_S", 0.0)
    monkeypatch.setattr(forecast, "TIMES_ITS_COST", 0.0)


async def follow(model: Model, steps: list[tuple[Any, ...]]) -> None:
    """Take the steps with the broker and the model, and compare them after each step."""
    for name, *arguments in steps:
        await getattr(model, name)(*arguments)
        await model.check()
    await model.check_deliveries()


@settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.sampled_from(STRATEGIES), st.lists(_steps, min_size=3, max_size=14))
def test_a_broker_agrees_with_the_model(strategy: str, steps: list[tuple[Any, ...]]) -> None:
    @on_node(strategy=strategy)
    async def agrees(world: World) -> None:
        await follow(Model(world), [("send", "a", [(2, 1), (4, 0)]), ("send", "b", [(5, 2)]), *steps])

    agrees()


_any_selection = st.tuples(
    st.just("select"), st.integers(0, len(conditions(0)) - 1), st.integers(0, len(ACTIONS) - 1)
)
# Without changes of campaigns: see docs/bulk-operations.md about these.
_more_steps = st.one_of(
    _any_selection,
    _any_selection,
    _any_selection,
    st.tuples(st.just("send"), _topic, _shapes),
    st.tuples(st.just("bulk"), _topic, _shapes),
    st.tuples(st.just("undo"), _index),
    st.tuples(st.just("undo"), _index),
    st.tuples(st.just("cancel"), _index),
    st.tuples(st.just("reschedule"), _index, st.integers(0, len(DELAYS_MS) - 1)),
    st.tuples(st.just("advance"), st.sampled_from([SECOND_MS, 5 * SECOND_MS, MINUTE_MS, HOUR_MS])),
    st.tuples(st.just("compact")),
    st.tuples(st.just("merge")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("keep_house")),
)


@settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.sampled_from(STRATEGIES), st.lists(_more_steps, min_size=3, max_size=14))
def test_all_operations_agree_with_the_model(strategy: str, steps: list[tuple[Any, ...]]) -> None:
    @on_node(strategy=strategy)
    async def agrees(world: World) -> None:
        await follow(Model(world), [("send", "a", [(2, 1), (4, 0)]), ("send", "b", [(5, 2)]), *steps])

    agrees()


async def select(world: World, **facts: Any) -> str:
    """Accept a selection with these facts. Returns its id."""
    return str(await world.broker.selections.select(SelectionFacts(seq=0, at_ms=0, **facts), ANONYMOUS))


# ---- controls ---------------------------------------------------------------------------------------------------


def test_a_page_that_does_not_know_selections_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshot, "selected", Selected({}), raising=False)
    init = Snapshot.__init__

    def without(self: Snapshot, *arguments: Any) -> None:
        init(self, *arguments[:-1])

    monkeypatch.setattr(Snapshot, "__init__", without)

    @on_node()
    async def disagrees(world: World) -> None:
        with pytest.raises(AssertionError):
            await follow(Model(world), [("send", "a", [(4, 1)]), ("select", ALL)])

    disagrees()


def test_a_wake_up_without_its_base_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Woken, "add", lambda self, *columns: None)

    @on_node()
    async def disagrees(world: World) -> None:
        shift = ("select", TOPIC_A, SHIFT_LATER)
        steps = [("send", "a", [(2, 1)]), shift, ("advance", HOUR_MS), ("undo", 0)]
        with pytest.raises(AssertionError):
            await follow(Model(world), [*steps, ("select", TOPIC_A, RELEASE)])

    disagrees()


# ---- where a message can be -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_selection_covers_messages_in_each_place(strategy: str) -> None:
    @on_node(strategy=strategy)
    async def are_covered(world: World) -> None:
        model = Model(world)
        shapes = [(delay, region) for delay in range(len(DELAYS_MS)) for region in range(3)]
        await model.send("a", shapes)  # messages that are due soon are in the wheel
        await model.compact()
        await model.send("a", shapes)
        await model.bulk("b", shapes)
        await model.check()
        await model.select(REGION_EU)
        await model.select(DUE_LATER)
        await model.check()
        await model.advance(MINUTE_MS)
        await model.undo(0)
        await model.check()
        await model.keep_house()
        await model.check_deliveries()

    are_covered()


@on_node()
async def test_messages_of_delay_levels_are_covered_by_their_real_topic(world: World) -> None:
    keys = await world.send_levels("a", [5, 14])
    name = await select(world, where="topic = 'a'")
    assert [place.state for place in await world.broker.find(keys[0])] == ["cancelled"]
    assert (await world.broker.listing.page(page_request())).messages == []
    await world.advance(2 * MINUTE_MS)
    await world.broker.selections.undo(name, ANONYMOUS)
    await world.advance(HOUR_MS)
    assert [row.key for row in (await world.outcome()).rows] == keys[1:]


def page_request(**wanted: Any) -> Any:
    from timeball.model.answers import PageRequest

    return PageRequest(100, **wanted)


@on_node()
async def test_a_cancel_selection_writes_one_row_and_its_messages_end_at_their_due_times(
    world: World,
) -> None:
    keys = await world.send("a", [MINUTE_MS] * 3 + [HOUR_MS])
    end = world.broker.log.writer.next_seq
    name = await select(world, topics=["a"])
    assert world.broker.log.writer.next_seq == end + 1
    await world.advance(MINUTE_MS)
    rows = [
        row
        for batch in world.broker.log.reader.rows(end, world.broker.log.reader.next_seq, [Kind.CANCEL])
        for row in batch.to_pylist()
    ]
    reasons = [decode_properties(row["properties"])[CANCEL_REASON] for row in rows]
    assert reasons == [f"selection {name}"] * 3
    await world.broker.selections.undo(name, ANONYMOUS)
    await world.advance(HOUR_MS)
    assert [row.key for row in (await world.outcome()).rows] == keys[3:]


@on_node()
async def test_numbers_reserved_before_and_attached_later_are_not_covered(world: World) -> None:
    first_seq = await world.broker.reserve(2)
    await select(world, where="TRUE")
    world.broker.reserve = _answer(first_seq)  # the job continues with the numbers that it has reserved
    keys = await world.bulk("a", [MINUTE_MS, HOUR_MS], 1)
    await world.advance(2 * HOUR_MS)
    assert sorted(row.key for row in (await world.outcome()).rows) == sorted(keys)


def _answer(value: int) -> Any:
    async def reserve(rows: int) -> int:
        return value

    return reserve


@on_node()
async def test_a_redelivery_is_not_covered(world: World) -> None:
    world.broker.policy.register("readers", ANONYMOUS)
    batch_keys = await world.send("%RETRY%readers", [MINUTE_MS])
    await select(world, where="TRUE")
    await world.advance(HOUR_MS)
    assert [row.key for row in (await world.outcome()).rows] == batch_keys


@on_node()
async def test_a_cancelled_occurrence_ends_and_its_schedule_continues(world: World) -> None:
    from tests.broker.recurring.schedule_lives import NAME, TOPIC, facts_of, progress

    await world.broker.schedules.put(NAME, facts_of(), ANONYMOUS)
    first = progress(world)
    await select(world, where=f"schedule = '{NAME}'", topics=[TOPIC])
    await world.advance(first.due_ms - world.clock.wall)
    assert progress(world).runs == 0
    assert progress(world).due_ms > first.due_ms
    await world.advance(progress(world).due_ms - world.clock.wall)
    assert progress(world).runs == 1


@on_node()
async def test_a_cached_forecast_is_not_reused_after_a_selection_or_its_undo(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "FRESH_S", 3_600.0)
    await world.send("a", [MINUTE_MS] * 3)
    assert (await world.broker.forecast.counted("hour")).topics == {"a": 3}
    name = await select(world, topics=["a"])
    assert (await world.broker.forecast.counted("hour")).topics == {}
    await world.broker.selections.undo(name, ANONYMOUS)
    assert (await world.broker.forecast.counted("hour")).topics == {"a": 3}


@pytest.mark.parametrize("action", range(1, len(ACTIONS)))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_operation_changes_messages_in_each_place_through_crashes(strategy: str, action: int) -> None:
    @on_node(strategy=strategy)
    async def are_changed(world: World) -> None:
        model = Model(world)
        shapes = [(delay, delay % 3) for delay in range(len(DELAYS_MS))]
        await model.send("a", shapes)
        await model.bulk("a", shapes)
        await model.compact()
        await model.send("a", shapes)
        if ACTIONS[action]["action"] == "resume":
            await model.select(TOPIC_A, PAUSE)
            await model.advance(MINUTE_MS)
        await model.select(TOPIC_A, action)
        await model.check()
        await without_caches(world)
        await model.advance(0)
        await model.check()
        await model.advance(MINUTE_MS)
        await model.compact()
        await model.keep_house()
        files = world.files.crash(survival="nothing")
        await world.abandon()
        world.files = files
        await world.start()
        await model.advance(0)
        await model.check()
        await model.undo(0)
        await model.check()
        await model.keep_house()
        await model.check_deliveries()

    are_changed()


@on_node()
async def test_messages_of_delay_levels_are_shifted_and_released(world: World) -> None:
    keys = await world.send_levels("a", [5, 14, 15])  # 1, 10 and 20 minutes
    name = await select(world, topics=["a"], action="shift", shift_ms=HOUR_MS)
    await world.advance(2 * MINUTE_MS)
    assert not (await world.outcome()).rows
    await world.broker.selections.undo(name, ANONYMOUS)
    await world.broker.wakers.wake()
    await world.settled()
    assert [row.key for row in (await world.outcome()).rows] == keys[:1]
    await select(world, topics=["a"], action="release")
    await world.broker.wakers.wake()
    await world.settled()
    assert sorted(row.key for row in (await world.outcome()).rows) == sorted(keys)


@on_node()
async def test_resumed_messages_come_in_the_order_of_their_due_times(world: World) -> None:
    delays_ms = [50_000, 10_000, 40_000, 30_000, 20_000, HOUR_MS]
    keys = await world.send("a", delays_ms)
    await world.compact()
    keys += await world.send("a", [delay + 5_000 for delay in delays_ms])
    await select(world, topics=["a"], action="pause")
    for _ in range(7):
        await world.advance(10_000)
    await select(world, topics=["a"], action="resume")
    await world.broker.wakers.wake()
    await world.settled()
    rows = sorted((await world.outcome()).rows, key=lambda row: row.seq)
    dues = {key: world.observed.sent[key].due_ms for key in keys}
    assert len(rows) == 10 and [dues[row.key] for row in rows] == sorted(dues.values())[:10]


@on_node()
async def test_a_held_occurrence_is_replaced_by_the_next_one_of_its_schedule(world: World) -> None:
    from tests.broker.recurring.schedule_lives import NAME, TOPIC, facts_of, progress

    await world.broker.schedules.put(NAME, facts_of(), ANONYMOUS)
    first = progress(world)
    name = await select(world, topics=[TOPIC], action="pause")
    await world.advance(first.due_ms - world.clock.wall)
    second = progress(world)
    assert (second.runs, second.due_ms > first.due_ms) == (0, True)
    await world.advance(second.due_ms - world.clock.wall)
    assert progress(world).runs == 1
    await world.broker.selections.undo(name, ANONYMOUS)
    await world.broker.wakers.wake()
    await world.settled()
    assert len((await world.outcome()).rows) == 2


@on_node()
async def test_an_occurrence_that_is_released_early_is_followed_by_the_next_one(world: World) -> None:
    from tests.broker.recurring.schedule_lives import NAME, TOPIC, facts_of, progress

    await world.broker.schedules.put(NAME, facts_of(), ANONYMOUS)
    first = progress(world)
    await select(world, topics=[TOPIC], action="release")
    await world.broker.wakers.wake()
    await world.settled()
    assert len((await world.outcome()).rows) == 1
    assert progress(world).due_ms > first.due_ms


@on_node()
async def test_many_early_occurrences_are_released_in_small_batches(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.broker.recurring.schedule_lives import TOPIC, facts_of

    monkeypatch.setattr(successors, "OCCURRENCES_AT_ONCE", 10)
    wake, batch_sizes = wakers.Wakers._wake, list[int]()

    def count_and_wake(self: wakers.Wakers, rows: pa.RecordBatch, due_ms: Any) -> Any:
        batch_sizes.append(rows.num_rows)
        return wake(self, rows, due_ms)

    monkeypatch.setattr(wakers.Wakers, "_wake", count_and_wake)
    for number in range(45):
        await world.broker.schedules.put(f"s{number}", facts_of(), ANONYMOUS)
    await select(world, topics=[TOPIC], action="release")
    await world.broker.wakers.wake()
    await world.settled()
    assert sum(batch_sizes) == 45 and max(batch_sizes) <= 10
    assert len((await world.outcome()).rows) == 45
    await world.send("plain", [HOUR_MS] * 45)
    batch_sizes.clear()
    await select(world, topics=["plain"], action="release")
    await world.broker.wakers.wake()
    assert batch_sizes == [45]


@on_node()
async def test_a_held_message_expires_by_its_own_due_time(world: World) -> None:
    batch = pa.RecordBatch.from_pylist(
        [
            {
                "topic": "a", "body": b"x", "unique_key": key, "due_ms": world.clock.wall + MINUTE_MS,
                "properties": encode_properties({EXPIRES_AFTER_MS: str(after_ms)}),
            }
            for key, after_ms in (("short", HOUR_MS), ("long", 5 * HOUR_MS))
        ]
    )  # fmt: skip
    await world.broker.send(batch)
    await select(world, topics=["a"], action="pause")
    await world.advance(2 * HOUR_MS)
    await select(world, topics=["a"], action="resume")
    await world.broker.wakers.wake()
    await world.settled()
    assert [place.state for key in ("short", "long") for place in await world.broker.find(key)] == [
        "cancelled", "visible",
    ]  # fmt: skip


@on_node()
async def test_the_property_of_a_wake_up_is_not_delivered(world: World) -> None:
    (key,) = await world.send("a", [MINUTE_MS])
    await select(world, topics=["a"], action="shift", shift_ms=HOUR_MS)
    await world.advance(2 * MINUTE_MS)
    (place,) = await world.broker.find(key)
    assert place.state == "waiting" and place.content is not None and BASE not in place.content.properties
    await world.advance(2 * HOUR_MS)
    (place,) = await world.broker.find(key)
    assert place.state == "visible" and place.content is not None and BASE not in place.content.properties


@on_node()
async def test_the_resume_of_a_campaign_ends_the_effect_of_selections(world: World) -> None:
    keys = await world.campaign("spring", "a", [2 * HOUR_MS, 3 * HOUR_MS])
    await select(world, topics=["a"], action="shift", shift_ms=12 * HOUR_MS)
    await world.broker.change_campaign("spring", "pause")
    await select(world, topics=["a"], action="move", to_topic="b")
    await world.advance(HOUR_MS)
    await world.broker.change_campaign("spring", "resume", shift=False)
    await world.advance(3 * HOUR_MS)
    rows = (await world.outcome()).rows
    assert sorted((row.key, row.place.topic) for row in rows) == sorted((key, "a") for key in keys)


@on_node()
async def test_a_move_needs_the_permission_for_both_topics(world: World) -> None:
    selections = world.broker.selections
    sender = principal(topics={"a": "PUB"})
    facts = SelectionFacts(seq=0, at_ms=0, topics=["a"], action="move", to_topic="b")
    for operation in (selections.select, selections.dry_run):
        with pytest.raises(Forbidden):
            await operation(facts, sender)
    assert world.broker.tables.topics.find_topic("b") is None
    both = principal(topics={"a": "PUB", "b": "PUB"})
    name = await selections.select(facts, both)
    assert selections.get(name, both).to_topic == "b"


@on_node()
async def test_a_moved_message_is_found_with_rights_for_its_new_topic(world: World) -> None:
    broker, other = world.broker, principal(topics={"b": "PUB"})
    (key,) = await world.send("a", [MINUTE_MS])
    assert await broker.find(key, None, other) == []
    moved = await select(world, topics=["a"], action="move", to_topic="b")
    for topic in (None, "b"):
        assert [place.topic for place in await broker.find(key, topic, other)] == ["b"]
    assert await broker.find(key, "a", other) == []
    page = await broker.listing.page(PageRequest(5, key="every"), other)
    assert [message.topic for message in page.messages] == ["b"]
    await broker.selections.undo(moved, ANONYMOUS)
    assert [verdict.verdict for verdict in await broker.cancel(ids=[key], caller=other)] == ["not_found"]
    await select(world, topics=["a"], action="move", to_topic="b")
    assert [verdict.verdict for verdict in await broker.cancel(ids=[key], caller=other)] == ["cancelled"]


@on_node()
async def test_a_selection_with_arguments_of_another_action_is_refused(world: World) -> None:
    invalid: list[dict[str, Any]] = [
        {"action": "shift"}, {"action": "pause", "shift_ms": 1}, {"action": "move"}, {"to_topic": "b"},
    ]  # fmt: skip
    for arguments in invalid:
        with pytest.raises(InvalidMessage, match="a shift needs a duration"):
            await select(world, topics=["a"], **arguments)
    with pytest.raises(OutOfRange, match="at most"):
        await select(world, topics=["a"], action="shift", shift_ms=-(1 << 50))
    with pytest.raises(InvalidName):
        await select(world, topics=["a"], action="move", to_topic="no blanks")
    with pytest.raises(OutOfRange, match="1001 topics"):  # counted before their names are checked
        await select(world, topics=["no blanks"] * (limits.SELECTION_TOPICS_MAX + 1))


@on_node(delay_ms_max=10 * HOUR_MS)
async def test_the_sum_of_active_shifts_is_limited(world: World) -> None:
    (key,) = await world.send("a", [10 * HOUR_MS])
    first = await select(world, topics=["a"], action="shift", shift_ms=6 * HOUR_MS)
    await select(world, topics=["a"], action="shift", shift_ms=-HOUR_MS)
    later = SelectionFacts(seq=0, at_ms=0, topics=["a"], action="shift", shift_ms=4 * HOUR_MS + 1)
    selections = world.broker.selections
    for call in (selections.select, selections.dry_run):
        with pytest.raises(OutOfRange, match=r"active shifts add up to 36000001 ms: at most 36000000; undo"):
            await call(later, ANONYMOUS)
    # Two requests at once count, too.
    longest = msgspec.structs.replace(later, shift_ms=4 * HOUR_MS)
    outcomes = await asyncio.gather(
        *(selections.select(longest, ANONYMOUS) for _ in range(2)), return_exceptions=True
    )
    assert [isinstance(outcome, OutOfRange) for outcome in outcomes] == [False, True]
    (place,) = await world.broker.find(key)
    assert place.due_ms == world.clock.wall + 19 * HOUR_MS
    await selections.undo(first, ANONYMOUS)
    await selections.select(later, ANONYMOUS)


@on_node()
async def test_a_selection_is_over_when_its_messages_have_ended(world: World) -> None:
    await world.send("a", [MINUTE_MS])
    names = [
        await select(world, topics=["a"], action="shift", shift_ms=2 * HOUR_MS),
        await select(world, topics=["a"], action="pause"),
    ]
    broker = world.broker

    async def states() -> list[str]:
        await broker.wakers.wake()
        await world.settled()
        await broker.selections.count()
        await broker.selections.count()
        return [broker.selections.state(name) for name in names]

    await world.advance(5 * HOUR_MS)
    assert await states() == ["active", "active"]
    assert broker.selections.get(names[1], ANONYMOUS).count == 1
    names.append(await select(world, topics=["a"], action="resume"))
    await world.advance(HOUR_MS)
    assert await states() == ["over"] * 3
    await world.restart()
    broker = world.broker
    assert await states() == ["over"] * 3
    assert broker.tables.selections.selected.names == []


# ---- crashes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_accepted_selection_and_its_undo_survive_a_crash(strategy: str) -> None:
    @on_node(strategy=strategy)
    async def survive(world: World) -> None:
        model = Model(world)
        await model.send("a", [(2, 1), (4, 1), (5, 2)])
        for step in (lambda: model.select(REGION_EU), lambda: model.select(ALL), lambda: model.undo(0)):
            await step()
            files = world.files.crash(survival="nothing")
            await world.abandon()
            world.files = files
            await world.start()
            await model.check()
        await without_caches(world)
        await model.check()
        await model.advance(MINUTE_MS)
        await without_caches(world)
        await model.check()
        await model.check_deliveries()

    survive()


def test_an_answer_before_the_row_is_on_disk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def select_hastily(self: SelectionChanges, facts: SelectionFacts, caller: Any) -> str:
        seq = self._writer.next_seq
        self._selections.put(str(seq), self._complete(facts, seq, caller))
        return str(seq)

    monkeypatch.setattr(SelectionChanges, "select", select_hastily)

    @on_node()
    async def forgets(world: World) -> None:
        model = Model(world)
        await model.send("a", [(4, 1)])
        await model.select(ALL)
        files = world.files.crash(survival="nothing")
        await world.abandon()
        world.files = files
        await world.start()
        with pytest.raises(AssertionError):
            await model.check()

    forgets()


# ---- limits, errors, permissions --------------------------------------------------------------------------------


@on_node()
async def test_selections_that_are_over_make_room_for_new_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SELECTIONS_MAX", 2)
    await world.send("a", [MINUTE_MS])
    first = await select(world, topics=["a"])
    second = await select(world, topics=["b"])
    with pytest.raises(OverLimit, match="2 selections"):
        await select(world, topics=["c"])
    await world.advance(HOUR_MS)
    await world.broker.selections.count()
    await world.broker.selections.count()
    assert world.broker.selections.state(first) == "over"
    assert world.broker.tables.selections.selected.is_empty
    third = await select(world, topics=["c"])
    assert list(world.broker.selections.all(ANONYMOUS)) == [second, third]
    with pytest.raises(NotFound):
        world.broker.selections.get(first, ANONYMOUS)


@on_node()
async def test_a_selection_needs_the_cancel_permission_for_all_of_its_topics(world: World) -> None:
    selections = world.broker.selections
    sender, admin = principal(topics={"a": "PUB"}), principal(admin=True)
    facts = SelectionFacts(seq=0, at_ms=0, topics=["a"])
    name = await selections.select(facts, sender)
    assert selections.get(name, sender).by == "a"
    both = await selections.select(SelectionFacts(seq=0, at_ms=0, topics=["a", "b"]), admin)
    assert list(selections.all(sender)) == [name]
    for wanted in ({"topics": ["a", "b"]}, {"where": "topic = 'a'"}):
        with pytest.raises(Forbidden):
            await selections.select(SelectionFacts(seq=0, at_ms=0, **wanted), sender)
        with pytest.raises(Forbidden):
            await selections.dry_run(SelectionFacts(seq=0, at_ms=0, **wanted), sender)
    with pytest.raises(Forbidden) as refused:
        await selections.undo(both, sender)
    assert "'b'" not in str(refused.value)
    assert await selections.undo(name, sender)
    assert not await selections.undo(name, sender)


@on_node()
async def test_invalid_selections_change_nothing(world: World) -> None:
    end = world.broker.log.writer.next_seq
    with pytest.raises(InvalidFilter):
        await select(world, where="region =")
    with pytest.raises(InvalidMessage, match="window of due times is empty"):
        await select(world, from_ms=5, to_ms=5)
    with pytest.raises(NotFound):
        await world.broker.selections.undo("7", ANONYMOUS)
    assert world.broker.log.writer.next_seq == end


@on_node()
async def test_a_selection_waits_for_short_requests_and_is_refused_beside_long_ones(world: World) -> None:
    broker = world.broker
    name = await select(world, topics=["a"])
    async with broker.gate.passing():
        waiting = [asyncio.ensure_future(each) for each in (select(world, topics=["b"]), undo(world, name))]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        assert broker.selections.state(name) == "active"
    await asyncio.gather(*waiting)
    assert broker.selections.state(name) == "undone"
    broker.campaign_changes.is_resuming = True
    for refused in (select(world, topics=["c"]), undo(world, name)):
        with pytest.raises(Unavailable, match="a campaign is being resumed"):
            await refused
    assert len(broker.selections.all(ANONYMOUS)) == 2


async def undo(world: World, name: str) -> bool:
    return bool(await world.broker.selections.undo(name, ANONYMOUS))


@on_node()
async def test_a_count_is_retried_after_unavailable_and_not_after_a_damaged_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.send("a", [MINUTE_MS])
    name, selections = await select(world, topics=["a"]), world.broker.selections
    survey, failures = (
        selections._count_messages,
        [Unavailable("rows were removed"), Corrupt("a file is damaged")],
    )

    async def fail(*arguments: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return await survey(*arguments)

    monkeypatch.setattr(selections, "_count_messages", fail)
    for _ in range(4):
        await selections.count()
    assert not failures and selections.get(name, ANONYMOUS).count is None
    selections._uncountable.clear()
    await selections.count()
    assert selections.get(name, ANONYMOUS).count == 1


@on_node()
async def test_a_page_after_an_undo_contains_messages_with_early_wake_ups(world: World) -> None:
    (key,) = await world.send("a", [HOUR_MS + 50 * SECOND_MS])
    name = await select(world, topics=["a"], action="shift", shift_ms=-HOUR_MS)
    await world.wake()
    await world.broker.selections.undo(name, ANONYMOUS)
    (place,) = await world.broker.find(key)
    assert place.state == "waiting" and place.due_ms == world.clock.wall + HOUR_MS + 50 * SECOND_MS
    page = await world.broker.listing.page(page_request(from_ms=place.due_ms))
    assert [message.unique_key for message in page.messages] == [key]
