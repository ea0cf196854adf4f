"""A drain moves pending messages to another group: each once, despite power cuts, and look-ups find them meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import pyarrow as pa
import pytest
from tests.broker.accepting.test_keyed_sends import Client
from tests.broker.on_node import batch
from tests.broker.two_groups import InGroup, Neighbours, groups_of, in_two_groups
from tests.crash.lives import run
from tests.crash.world import HOUR_MS, CutFiles
from tests.crash_files import CrashFiles, PowerCut

from timeball.broker.groups import draining
from timeball.broker.groups.draining import MARGIN_MS, Draining
from timeball.broker.registry.selections import SelectionFacts
from timeball.broker.registry.tables import Drains
from timeball.broker.registry.topics import READ
from timeball.broker.revoking.cancel import RecallRefused, encode_handle
from timeball.broker.revoking.group_questions import AdoptHere, RouteHere
from timeball.io.clock import ManualClock
from timeball.model.access import ANONYMOUS, Access, parse
from timeball.model.answers import Verdict
from timeball.model.errors import Conflict, Forbidden, InvalidMessage, NotFound, Unavailable
from timeball.model.message import Kind

ACCOUNTS = b"""
[[accounts]]
access_key = "shop"
secret_key = "shop's secret"

[[accounts]]
access_key = "operator"
secret_key = "the operator's secret"
admin = true
"""


def words(verdicts: list[Verdict]) -> list[str]:
    return [verdict.verdict for verdict in verdicts]


async def drain(two: InGroup, heir: str = "g1") -> None:
    """Give the command, and run the periodic drain until it finds no more messages."""
    await two.broker.drain(heir)
    for _ in range(5):
        await two.broker.draining.hand_over()
        if (told := await two.broker.drain(heir)).is_done:
            return
    raise AssertionError(told)


async def visible(*worlds: InGroup) -> Counter[str]:
    """How often each message is in a queue of any group."""
    return Counter([row.key for world in worlds for row in (await world.outcome()).rows])


async def each_kind(two: InGroup) -> list[str]:
    """Messages in a file of the table, in the log, of a delay level, moved, and for other instants."""
    keys = await two.send("orders", [HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS])
    await two.compact()
    await two.reschedule(keys[:1], 90 * 60_000)
    keys += await two.send("orders", [HOUR_MS, HOUR_MS + 1, 5 * HOUR_MS], body_bytes=3_000)
    keys += await two.send_levels("orders", [18])
    return keys


@in_two_groups
async def test_all_pending_messages_are_handed_over_and_delivered_at_their_due_times(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    keys = await each_kind(two)
    soon = await two.send("orders", [MARGIN_MS // 2])
    before = {key: (await two.broker.find(key))[0] for key in keys}
    await drain(two)
    assert two.broker.pending_messages == 1 and one.broker.pending_messages == len(keys)
    for key in keys:
        (place,) = await two.broker.find(key)
        assert (place.state, place.due_ms) == ("waiting", before[key].due_ms)
        was, now = before[key].content, place.content
        assert was is not None and now is not None
        assert (now.body, now.tag, now.keys) == (was.body, was.tag, was.keys)
        assert not {"HANDED_TO", "REAL_TOPIC", "DELAY"} & now.properties.keys()
    for world in (one, two):
        await world.advance(6 * HOUR_MS)
    assert await visible(one, two) == Counter([*keys, *soon])
    assert {row.key for row in (await two.outcome()).rows} == set(soon)
    due = {row.key: row.due_ms for row in (await one.outcome()).rows}
    assert due == {key: place.due_ms for key, place in before.items()}


@in_two_groups
async def test_a_repeated_send_is_told_that_another_group_has_its_message(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    client, rows = Client(two), batch(delay_ms=[HOUR_MS], unique_key=["once"])
    assert await client.states("a", rows) == "created"
    await drain(two)
    assert await client.states("a", rows) == [("handed", two.clock.wall + HOUR_MS)]
    # It may still wait there, so nothing is sent anew.
    assert await client.states("a", rows, "again") == [("handed", two.clock.wall + HOUR_MS)]
    assert one.broker.pending_messages == 1


@in_two_groups
async def test_a_drained_group_accepts_nothing_and_its_queues_are_read(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    await two.send("orders", [None, HOUR_MS])
    await drain(two)
    for delay_ms in (None, HOUR_MS):
        with pytest.raises(Forbidden, match="drained to g1"):
            await two.send("orders", [delay_ms])
    with pytest.raises(Forbidden):
        await two.send("new", [None])
    with pytest.raises(Forbidden):
        await two.broker.reserve(5)
    with pytest.raises(Conflict, match="id or key"):
        await two.broker.change_campaign("spring", "plan", rows=5)
    route = (await two.broker.answer(RouteHere(topic="orders"), ANONYMOUS)).route
    assert route is not None and (route.read_queues, route.write_queues) == (2, 0)
    assert two.broker.policy.permission("orders", 6) == READ
    assert two.broker.policy.permission("%RETRY%readers", 6) == 6, "its consumers hand messages back"
    await two.consume()
    assert len(two.observed.seen) == 1
    await one.send("orders", [None])


@in_two_groups
async def test_a_cancel_finds_it_before_while_and_after(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    before, moving, after, moved = await two.send("orders", [HOUR_MS, HOUR_MS, HOUR_MS, HOUR_MS])
    assert words(await one.broker.cancel(ids=[before])) == ["cancelled"]
    (number,) = {place.seq for place in await two.broker.find(after)}
    await two.broker.drain("g1")
    neighbours.silent.add("g1")
    await two.broker.draining.hand_over()
    assert "did not answer" in (await two.broker.drain("g1")).problem
    neighbours.silent.clear()
    # Ended there and not here: it is on its way.
    for world in (one, two):
        assert words(await world.broker.cancel(ids=[before, moving])) == ["already_cancelled", "unavailable"]
        assert words(await world.broker.reschedule(ids=[moving], delay_ms=5)) == ["unavailable"]
        with pytest.raises(Unavailable):
            await world.broker.find(moving)
        with pytest.raises(Unavailable):
            await world.broker.recall("orders", encode_handle("orders", "g2", 1, moving))
    assert words(await two.broker.cancel(seqs=[number])) == ["unavailable"]
    await two.broker.draining.hand_over()
    for world in (one, two):
        assert words(await world.broker.cancel(ids=[before, moving])) in (
            ["already_cancelled", "cancelled"],
            ["already_cancelled", "already_cancelled"],
        )
    assert words(await two.broker.cancel(seqs=[number])) == ["handed"]
    assert words(await two.broker.reschedule(ids=[moved], delay_ms=2 * HOUR_MS)) == ["rescheduled"]
    handle = encode_handle("orders", "g2", 1, after)
    for world in (two, one, two):
        assert await world.broker.recall("orders", handle) == after
    for world in (one, two):
        await world.advance(3 * HOUR_MS)
    assert await visible(one, two) == Counter([moved])
    with pytest.raises(RecallRefused, match="released"):
        await two.broker.recall("orders", encode_handle("orders", "g2", 1, moved))


@in_two_groups
async def test_a_cancel_that_met_both_groups_too_early_and_too_late_asks_again(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    """The receiving group answered before the message arrived, and the source after the message had left."""
    (key,) = await two.send("orders", [HOUR_MS])
    await two.broker.drain("g1")
    looked, ask, has_gone = one.broker._answer, one.broker.others.ask, asyncio.Event()

    async def answered_before_the_drain(*asked: object) -> object:
        answer = await looked(*asked)
        if not isinstance(asked[0], AdoptHere):
            while one.broker.tables.drains.adopted("g2") is None or two.broker.tables.drains.out.rows:
                await two.broker.draining.hand_over()
            has_gone.set()
        return answer

    async def asked_behind_it(*asked: object) -> object:
        await has_gone.wait()
        return await ask(*asked)

    one.broker._answer, one.broker.others.ask = answered_before_the_drain, asked_behind_it
    assert words(await one.broker.cancel(ids=[key])) == ["cancelled"]


@in_two_groups
async def test_a_message_that_is_postponed_during_a_drain_is_handed_over(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    (key,) = await two.send("orders", [MARGIN_MS // 2])
    await drain(two)
    assert words(await two.broker.reschedule(ids=[key], delay_ms=HOUR_MS)) == ["rescheduled"]
    await drain(two)
    assert (one.broker.pending_messages, two.broker.pending_messages) == (1, 0)


@in_two_groups
async def test_an_invalid_drain_is_refused(neighbours: Neighbours, one: InGroup, two: InGroup) -> None:
    with pytest.raises(InvalidMessage):
        await two.broker.drain("g2")
    with pytest.raises(NotFound, match="there are g1"):
        await two.broker.drain("g3")
    neighbours.silent.add("g1")
    with pytest.raises(Unavailable):
        await two.broker.drain("g1")
    neighbours.silent.clear()
    assert not (await two.broker.drain("g1", dry_run=True)).is_done
    await two.send("orders", [None])
    await one.broker.drain("g2")
    with pytest.raises(Conflict, match="drained itself, to g2"):
        await two.broker.drain("g1")
    await two.send("orders", [None])


@in_two_groups
async def test_a_group_with_an_active_selection_is_not_drained(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    keys = await two.send("orders", [HOUR_MS])
    wanted = SelectionFacts(seq=0, at_ms=0, topics=["orders"])
    name = await two.broker.selections.select(wanted, ANONYMOUS)
    with pytest.raises(Conflict, match=f"selection {name} is active"):
        await two.broker.drain("g1")
    await two.broker.selections.undo(name, ANONYMOUS)
    await drain(two)
    assert one.broker.pending_messages == len(keys)
    with pytest.raises(Conflict, match="drained"):
        await two.broker.selections.select(wanted, ANONYMOUS)


@in_two_groups
async def test_a_held_campaign_is_not_handed_over(neighbours: Neighbours, one: InGroup, two: InGroup) -> None:
    await two.campaign("spring", "orders", [HOUR_MS, 2 * HOUR_MS])
    await two.pause("spring")
    with pytest.raises(Conflict, match="spring is held"):
        await two.broker.drain("g1")
    await two.broker.change_campaign("spring", "resume")
    await drain(two)
    assert one.broker.pending_messages == 2
    with pytest.raises(Conflict):
        await two.broker.change_campaign("spring", "cancel")
    with pytest.raises(Conflict):
        await two.broker.cancel_ranges([(1, 1)])


@in_two_groups
async def test_many_and_large_messages_go_in_several_transfers(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    keys = await two.send("orders", [HOUR_MS + at for at in range(300)])
    large = await two.send("orders", [HOUR_MS] * 3, body_bytes=3 * 1024 * 1024)
    await drain(two)
    sent = [q for _, q in neighbours.asked if isinstance(q, AdoptHere) and q.transfer]
    assert [question.transfer for question in sent] == list(range(1, len(sent) + 1))
    assert len(sent) >= 4, "a transfer is a request over HTTP"
    assert one.broker.pending_messages == len(keys + large)


# -- cut off ---------------------------------------------------------------------------------------------------


class Pair:
    """Both groups over their lives: the disks, one clock, and what was sent."""

    def __init__(self, cut: str = "", crash_at: int | None = None) -> None:
        self.clock, self.keys, self.found = ManualClock(), list[str](), Counter[str]()
        self.cancelled: list[str] = []
        self.files: dict[str, CrashFiles] = {
            name: CutFiles(crash_at=crash_at if name == cut else None) for name in ("g1", "g2")
        }

    async def live(self, steps: Callable[..., object]) -> None:
        neighbours, worlds = Neighbours(), {}
        try:
            for name, files in self.files.items():
                world = worlds[name] = InGroup(
                    files, self.clock, group=name, broker_name=name, strategy="hour_log"
                )
                world.others = neighbours.of(name)
                await world.start()
                neighbours.brokers[name] = world.broker
            loop = asyncio.get_running_loop()
            gone = [asyncio.Event() for _ in worlds]
            for world, event in zip(worlds.values(), gone, strict=True):
                if isinstance(world.files, CutFiles):
                    world.files.on_cut = partial(loop.call_soon_threadsafe, event.set)
            living = asyncio.ensure_future(steps(worlds["g1"], worlds["g2"]))  # type: ignore[arg-type]
            ends = [asyncio.ensure_future(event.wait()) for event in gone]
            await asyncio.wait([living, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not any(event.is_set() for event in gone):
                await living
        except PowerCut:
            pass  # at the start
        finally:
            for world in worlds.values():
                if isinstance(world.files, CutFiles):
                    world.files.on_cut = None
            # Of both, since all tasks of the loop end with the first.
            for world in worlds.values():
                await world.abandon()
        self.files = {name: files.crash(survival="nothing") for name, files in self.files.items()}

    async def begin(self, one: InGroup, two: InGroup) -> None:
        """Send, let it be durable, and drain."""
        self.keys = await each_kind(two)
        self.begun_at = {world.settings.group: world.files.calls for world in (one, two)}
        await drain(two)
        self.ended_at = {world.settings.group: world.files.calls for world in (one, two)}

    async def end(self, one: InGroup, two: InGroup) -> None:
        """Repeat the command, cancel a message wherever it is, and let all become due."""
        await drain(two)
        assert two.broker.pending_messages == 0, "all are due in an hour or later"
        chosen = self.keys[:1]
        assert words(await two.broker.cancel(ids=chosen)) == ["cancelled"]
        self.cancelled += chosen
        for world in (one, two):
            await world.advance(6 * HOUR_MS)
        self.found = await visible(one, two)
        for world in (one, two):
            await world.stop()


def life(cut: str = "", crash_at: int | None = None) -> Pair:
    """Drain until the power of one group is cut, then start both on their disks."""

    async def lived() -> Pair:
        pair = Pair(cut, crash_at)
        await pair.live(pair.begin)
        pair.clock = replace(pair.clock)
        if pair.keys:  # else the power went before anything was sent
            await pair.live(pair.end)
        return pair

    return run(lived())


def faults(pair: Pair) -> dict[str, int]:
    """Messages that are not exactly once in a queue: how often each came too much."""
    wanted = Counter(set(pair.keys) - set(pair.cancelled))
    return {key: pair.found[key] - wanted[key] for key in pair.keys if pair.found[key] != wanted[key]}


@pytest.fixture
def small_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "ROWS_FIRST", 2)
    monkeypatch.setattr(draining, "ROWS_MAX", 2)


@pytest.mark.usefixtures("small_transfers")
@pytest.mark.parametrize("part", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 4))])
@pytest.mark.parametrize("cut", ["g1", "g2"])
def test_a_cut_at_any_call_of_either_disk_loses_and_doubles_nothing(cut: str, part: int) -> None:
    whole = life()
    assert not faults(whole)
    calls = range(whole.begun_at[cut] + 1, whole.ended_at[cut] + 1)
    assert len(calls) >= 6, "a transfer is some calls of the disk"
    for crash_at in calls[part::4]:
        assert not faults(life(cut, crash_at)), f"{cut} at call {crash_at}"


def faults_of_cuts(cut: str) -> Counter[int]:
    """What all cuts of a disk bring about, those aside that break the second life."""
    whole, found = life(), Counter[int]()
    for crash_at in range(whole.begun_at[cut] + 1, whole.ended_at[cut] + 1):
        with contextlib.suppress(AssertionError):
            found.update(faults(life(cut, crash_at)).values())
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("small_transfers")
def test_an_heir_that_forgets_what_it_has_taken_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drains, "adopted", lambda self, source: None)
    assert faults_of_cuts("g2")[1], "doubled: it had it, and was not heard"


@pytest.mark.slow
@pytest.mark.usefixtures("small_transfers")
def test_a_group_that_forgets_a_transfer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgotten(self: Draining) -> None:
        facts = self._tables.drains.out
        if facts is not None and facts.rows:
            self._tables.drains.put(msgspec.structs.replace(facts, rows=0))

    monkeypatch.setattr(Draining, "_resend_unconfirmed", forgotten)
    assert faults_of_cuts("g1")[-1], "lost: the heir went before it had it"


def test_an_unconfirmed_transfer_keeps_its_rows_in_the_log() -> None:
    async def lived() -> None:
        async with groups_of("g1", "g2", retention_ms=1) as (neighbours, worlds):
            one, two = worlds["g1"], worlds["g2"]
            keys = await two.send("orders", [20 * HOUR_MS + at for at in range(10)], body_bytes=50_000)
            await two.compact()
            await two.broker.drain("g1")
            neighbours.silent.add("g1")
            await two.broker.draining.hand_over()
            first_seq = two.broker.tables.drains.needed_seq
            for _ in range(4):  # segments are a mebibyte
                await two.broker.log.writer.flushed()
                await two.broker.send_again(_filling())
            two.clock.advance(10_000)
            await two.let_go()
            assert two.broker.log.reader.first_seq <= first_seq
            assert Kind.CANCEL in _kinds(two, first_seq)
            neighbours.silent.clear()
            await two.broker.draining.hand_over()
            assert one.broker.pending_messages == len(keys)
            await two.let_go()
            assert two.broker.tables.drains.needed_seq is None
            assert two.broker.log.reader.first_seq > first_seq

    run(lived())


def _filling() -> pa.RecordBatch:
    return pa.record_batch({"topic": ["%RETRY%readers"] * 4, "body": [b"x" * 200_000] * 4})


def _kinds(world: InGroup, seq: int) -> set[int]:
    (rows,) = world.broker.log.reader.rows(seq, seq + 1)
    return set(rows.column("kind").to_pylist())


def test_a_message_that_went_long_ago_is_not_said_to_wait_here() -> None:
    """Its row in a file outlives the row of the log that ended it."""

    async def lived() -> None:
        async with groups_of("g1", "g2", retention_ms=1) as (_, worlds):
            one, two = worlds["g1"], worlds["g2"]
            (key, other) = await two.send("orders", [20 * HOUR_MS, 21 * HOUR_MS])
            await two.compact()
            await drain(two)
            for _ in range(4):  # segments are a mebibyte
                await two.broker.send_again(_filling())
                await two.broker.log.writer.flushed()
            two.clock.advance(10_000)
            await two.let_go()
            assert two.broker.log.reader.first_seq > 10, "the log has let go of the rows that say so"
            for world in (one, two):
                assert [place.state for place in await world.broker.find(key)] == ["waiting"]
                assert words(await world.broker.cancel(ids=[other])) in (["cancelled"], ["already_cancelled"])
            assert await two.broker.recall("orders", encode_handle("orders", "g2", 1, key)) == key
            assert words(await one.broker.cancel(ids=[key])) == ["already_cancelled"]
            assert not one.broker.pending_messages

    run(lived())


def test_a_group_is_drained_to_another_heir_where_the_first_one_fails() -> None:
    async def lived() -> None:
        async with groups_of("g1", "g2", "g3") as (neighbours, worlds):
            one, two, three = (worlds[name] for name in ("g1", "g2", "g3"))
            (first, second) = await two.send("orders", [HOUR_MS, HOUR_MS])
            await two.broker.drain("g1")
            neighbours.silent.add("g1")
            await two.broker.draining.hand_over()
            with pytest.raises(Conflict, match="g1 has not confirmed"):
                await two.broker.drain("g3")
            neighbours.silent.clear()
            await drain(two)
            await two.reschedule([first], 2 * HOUR_MS)
            await three.send("orders", [HOUR_MS])
            await drain(two, "g3")
            await drain(one, "g3")
            assert three.broker.pending_messages == 3
            # Through two hands: the first group still knows that it has given it away.
            assert words(await two.broker.cancel(ids=[second])) == ["cancelled"]
            with pytest.raises(Conflict, match="drained itself, to g3"):
                await two.broker.drain("g1")

    run(lived())


@in_two_groups
async def test_the_next_leader_goes_on_as_the_account_that_asked(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    access = two.access = Access(parse(ACCOUNTS, "access.toml"))
    await two.send("orders", [HOUR_MS])
    with pytest.raises(Forbidden, match="may not administer"):
        await two.broker.drain("g1", caller=access.named("shop"))
    await two.broker.drain("g1", caller=access.named("operator"))
    await two.restart()
    neighbours.brokers["g2"] = two.broker
    access.replace({})
    await two.broker.draining.hand_over()
    told = two.broker.draining._report_progress(two.broker.tables.drains.out)
    assert "'operator' is not in the access file" in told.problem and told.moving == 1
    access.replace(parse(ACCOUNTS, "access.toml"))
    await two.broker.draining.hand_over()
    assert (one.broker.pending_messages, two.broker.tables.drains.out.account) == (1, "operator")
