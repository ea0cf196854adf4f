"""Selections agree with their model, in each place where a message can be, and through crashes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.broker.admin.test_campaign_changes import without_caches
from tests.broker.admin.test_push_changes import principal
from tests.broker.on_node import on_node
from tests.broker.selection_model import DELAYS_MS, HOUR_MS, MINUTE_MS, SECOND_MS, Model, conditions
from tests.crash.world import World

from timeball.broker.admin.selection_changes import SelectionChanges
from timeball.broker.pending import forecast
from timeball.broker.pending.snapshot import Snapshot
from timeball.broker.registry.selections import Selected, SelectionFacts
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.errors import (
    Corrupt,
    Forbidden,
    InvalidFilter,
    InvalidMessage,
    NotFound,
    OverLimit,
    Unavailable,
)
from timeball.model.message import CANCEL_REASON, Kind, decode_properties

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


async def select(world: World, **wanted: Any) -> str:
    return str(await world.broker.selections.select(SelectionFacts(seq=0, at_ms=0, **wanted), ANONYMOUS))


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
            await follow(Model(world), [("send", "a", [(4, 1)]), ("select", 1)])

    disagrees()


# ---- where a message can be -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_messages_are_covered_in_each_place(strategy: str) -> None:
    @on_node(strategy=strategy)
    async def are_covered(world: World) -> None:
        model = Model(world)
        shapes = [(delay, region) for delay in range(len(DELAYS_MS)) for region in range(3)]
        await model.send("a", shapes)  # near ones are in the wheel
        await model.compact()
        await model.send("a", shapes)
        await model.bulk("b", shapes)
        await model.check()
        await model.select(2)
        await model.select(5)
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
async def test_one_row_is_written_and_the_messages_end_when_they_are_due(world: World) -> None:
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
    world.broker.reserve = _answer(first_seq)  # the job goes on with its numbers
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
async def test_a_selected_occurrence_ends_and_its_schedule_goes_on(world: World) -> None:
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
async def test_a_count_that_could_be_reused_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "FRESH_S", 3_600.0)
    await world.send("a", [MINUTE_MS] * 3)
    assert (await world.broker.forecast.counted("hour")).topics == {"a": 3}
    name = await select(world, topics=["a"])
    assert (await world.broker.forecast.counted("hour")).topics == {}
    await world.broker.selections.undo(name, ANONYMOUS)
    assert (await world.broker.forecast.counted("hour")).topics == {"a": 3}


# ---- crashes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_accepted_selection_and_its_undo_survive_a_crash(strategy: str) -> None:
    @on_node(strategy=strategy)
    async def survive(world: World) -> None:
        model = Model(world)
        await model.send("a", [(2, 1), (4, 1), (5, 2)])
        for step in (lambda: model.select(2), lambda: model.select(1), lambda: model.undo(0)):
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
    async def select_hastily(self: SelectionChanges, wanted: SelectionFacts, caller: Any) -> str:
        seq = self._writer.next_seq
        self._selections.put(str(seq), self._completed(wanted, seq, caller))
        return str(seq)

    monkeypatch.setattr(SelectionChanges, "select", select_hastily)

    @on_node()
    async def forgets(world: World) -> None:
        model = Model(world)
        await model.send("a", [(4, 1)])
        await model.select(1)
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
async def test_only_who_may_cancel_all_topics_of_a_selection_may_make_see_and_undo_it(world: World) -> None:
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
    with pytest.raises(Forbidden):
        await selections.undo(both, sender)
    assert await selections.undo(name, sender)
    assert not await selections.undo(name, sender)


@on_node()
async def test_invalid_selections_change_nothing(world: World) -> None:
    end = world.broker.log.writer.next_seq
    with pytest.raises(InvalidFilter):
        await select(world, where="region =")
    with pytest.raises(InvalidMessage, match="earlier than to"):
        await select(world, from_ms=5, to_ms=5)
    with pytest.raises(NotFound):
        await world.broker.selections.undo("7", ANONYMOUS)
    assert world.broker.log.writer.next_seq == end


@on_node()
async def test_changes_wait_for_requests_under_way_and_are_refused_beside_long_ones(world: World) -> None:
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
async def test_a_count_that_fails_is_tried_again_or_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.send("a", [MINUTE_MS])
    name, selections = await select(world, topics=["a"]), world.broker.selections
    survey, failures = selections._survey, [Unavailable("rows were removed"), Corrupt("a file is damaged")]

    async def fail(*arguments: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return await survey(*arguments)

    monkeypatch.setattr(selections, "_survey", fail)
    for _ in range(4):
        await selections.count()
    assert not failures and selections.get(name, ANONYMOUS).count is None
    selections._uncountable.clear()
    await selections.count()
    assert selections.get(name, ANONYMOUS).count == 1
