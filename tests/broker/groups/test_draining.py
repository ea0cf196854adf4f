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


def verdict_words(verdicts: list[Verdict]) -> list[str]:
    return [verdict.verdict for verdict in verdicts]


async def drain(drained: InGroup, heir_name: str = "g1") -> None:
    """Start a drain of a group, and run the periodic drain until it finds no more messages."""
    await drained.broker.drain(heir_name)
    for _ in range(5):
        await drained.broker.draining.hand_over()
        if (progress := await drained.broker.drain(heir_name)).is_done:
            return
    raise AssertionError(progress)


async def visible(*worlds: InGroup) -> Counter[str]:
    """Count how often each message is in the queues of these groups, by key."""
    return Counter([row.key for world in worlds for row in (await world.outcome()).rows])


async def send_each_kind(drained: InGroup) -> list[str]:
    """Send messages to a file of the table, to the log and to a delay level, and reschedule one. Returns their keys."""
    keys = await drained.send("orders", [HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS])
    await drained.compact()
    await drained.reschedule(keys[:1], 90 * 60_000)
    keys += await drained.send("orders", [HOUR_MS, HOUR_MS + 1, 5 * HOUR_MS], body_bytes=3_000)
    keys += await drained.send_levels("orders", [18])
    return keys


@in_two_groups
async def test_all_pending_messages_are_handed_over_and_delivered_at_their_due_times(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    keys = await send_each_kind(drained)
    soon = await drained.send("orders", [MARGIN_MS // 2])
    before = {key: (await drained.broker.find(key))[0] for key in keys}
    await drain(drained)
    assert drained.broker.pending_messages == 1 and heir.broker.pending_messages == len(keys)
    for key in keys:
        (place,) = await drained.broker.find(key)
        assert (place.state, place.due_ms) == ("waiting", before[key].due_ms)
        was, now = before[key].content, place.content
        assert was is not None and now is not None
        assert (now.body, now.tag, now.keys) == (was.body, was.tag, was.keys)
        assert not {"HANDED_TO", "REAL_TOPIC", "DELAY"} & now.properties.keys()
    for world in (heir, drained):
        await world.advance(6 * HOUR_MS)
    assert await visible(heir, drained) == Counter([*keys, *soon])
    assert {row.key for row in (await drained.outcome()).rows} == set(soon)
    due = {row.key: row.due_ms for row in (await heir.outcome()).rows}
    assert due == {key: place.due_ms for key, place in before.items()}


@in_two_groups
async def test_a_repeated_send_with_an_idempotency_key_reports_a_handed_message(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    client, rows = Client(drained), batch(delay_ms=[HOUR_MS], unique_key=["once"])
    assert await client.states("a", rows) == "created"
    await drain(drained)
    assert await client.states("a", rows) == [("handed", drained.clock.wall + HOUR_MS)]
    # The message may still be pending at the heir, so nothing is sent anew.
    assert await client.states("a", rows, "again") == [("handed", drained.clock.wall + HOUR_MS)]
    assert heir.broker.pending_messages == 1


@in_two_groups
async def test_a_drained_group_refuses_sends_and_its_queues_stay_readable(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    await drained.send("orders", [None, HOUR_MS])
    await drain(drained)
    for delay_ms in (None, HOUR_MS):
        with pytest.raises(Forbidden, match="drained to g1"):
            await drained.send("orders", [delay_ms])
    with pytest.raises(Forbidden):
        await drained.send("new", [None])
    with pytest.raises(Forbidden):
        await drained.broker.reserve(5)
    with pytest.raises(Conflict, match="id or key"):
        await drained.broker.change_campaign("spring", "plan", rows=5)
    route = (await drained.broker.answer(RouteHere(topic="orders"), ANONYMOUS)).route
    assert route is not None and (route.read_queues, route.write_queues) == (2, 0)
    assert drained.broker.policy.permission("orders", 6) == READ
    assert drained.broker.policy.permission("%RETRY%readers", 6) == 6, (
        "the consumers of a drained group still return messages"
    )
    await drained.consume()
    assert len(drained.observed.seen) == 1
    await heir.send("orders", [None])


@in_two_groups
async def test_a_cancel_finds_a_message_before_during_and_after_its_transfer(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    before, moving, after, moved = await drained.send("orders", [HOUR_MS, HOUR_MS, HOUR_MS, HOUR_MS])
    assert verdict_words(await heir.broker.cancel(ids=[before])) == ["cancelled"]
    (number,) = {place.seq for place in await drained.broker.find(after)}
    await drained.broker.drain("g1")
    neighbours.silent.add("g1")
    await drained.broker.draining.hand_over()
    assert "did not answer" in (await drained.broker.drain("g1")).problem
    neighbours.silent.clear()
    # The message has ended in the drained group and is not adopted yet: it is on its way.
    for world in (heir, drained):
        assert verdict_words(await world.broker.cancel(ids=[before, moving])) == [
            "already_cancelled",
            "unavailable",
        ]
        assert verdict_words(await world.broker.reschedule(ids=[moving], delay_ms=5)) == ["unavailable"]
        with pytest.raises(Unavailable):
            await world.broker.find(moving)
        with pytest.raises(Unavailable):
            await world.broker.recall("orders", encode_handle("orders", "g2", 1, moving))
    assert verdict_words(await drained.broker.cancel(seqs=[number])) == ["unavailable"]
    await drained.broker.draining.hand_over()
    for world in (heir, drained):
        assert verdict_words(await world.broker.cancel(ids=[before, moving])) in (
            ["already_cancelled", "cancelled"],
            ["already_cancelled", "already_cancelled"],
        )
    assert verdict_words(await drained.broker.cancel(seqs=[number])) == ["handed"]
    assert verdict_words(await drained.broker.reschedule(ids=[moved], delay_ms=2 * HOUR_MS)) == [
        "rescheduled"
    ]
    handle = encode_handle("orders", "g2", 1, after)
    for world in (drained, heir, drained):
        assert await world.broker.recall("orders", handle) == after
    for world in (heir, drained):
        await world.advance(3 * HOUR_MS)
    assert await visible(heir, drained) == Counter([moved])
    with pytest.raises(RecallRefused, match="released"):
        await drained.broker.recall("orders", encode_handle("orders", "g2", 1, moved))


@in_two_groups
async def test_a_cancel_that_finds_the_message_in_neither_group_asks_again(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    """The heir answers before it has the message, and the drained group after it has handed the message over."""
    (key,) = await drained.send("orders", [HOUR_MS])
    await drained.broker.drain("g1")
    answer_here, ask_other = heir.broker._answer, heir.broker.others.ask
    is_handed_over = asyncio.Event()

    async def answer_before_the_transfer(*arguments: object) -> object:
        answer = await answer_here(*arguments)
        if not isinstance(arguments[0], AdoptHere):
            while heir.broker.tables.drains.adopted("g2") is None or drained.broker.tables.drains.out.rows:
                await drained.broker.draining.hand_over()
            is_handed_over.set()
        return answer

    async def ask_after_the_transfer(*arguments: object) -> object:
        await is_handed_over.wait()
        return await ask_other(*arguments)

    heir.broker._answer, heir.broker.others.ask = answer_before_the_transfer, ask_after_the_transfer
    assert verdict_words(await heir.broker.cancel(ids=[key])) == ["cancelled"]


@in_two_groups
async def test_a_message_that_is_rescheduled_during_a_drain_is_handed_over(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    (key,) = await drained.send("orders", [MARGIN_MS // 2])
    await drain(drained)
    assert verdict_words(await drained.broker.reschedule(ids=[key], delay_ms=HOUR_MS)) == ["rescheduled"]
    await drain(drained)
    assert (heir.broker.pending_messages, drained.broker.pending_messages) == (1, 0)


@in_two_groups
async def test_an_invalid_drain_is_refused(neighbours: Neighbours, heir: InGroup, drained: InGroup) -> None:
    with pytest.raises(InvalidMessage):
        await drained.broker.drain("g2")
    with pytest.raises(NotFound, match="there are g1"):
        await drained.broker.drain("g3")
    neighbours.silent.add("g1")
    with pytest.raises(Unavailable):
        await drained.broker.drain("g1")
    neighbours.silent.clear()
    assert not (await drained.broker.drain("g1", dry_run=True)).is_done
    await drained.send("orders", [None])
    await heir.broker.drain("g2")
    with pytest.raises(Conflict, match="drained itself, to g2"):
        await drained.broker.drain("g1")
    await drained.send("orders", [None])


@in_two_groups
async def test_a_group_with_an_active_selection_is_not_drained(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    keys = await drained.send("orders", [HOUR_MS])
    facts = SelectionFacts(seq=0, at_ms=0, topics=["orders"])
    name = await drained.broker.selections.select(facts, ANONYMOUS)
    with pytest.raises(Conflict, match=f"selection {name} is active"):
        await drained.broker.drain("g1")
    await drained.broker.selections.undo(name, ANONYMOUS)
    await drain(drained)
    assert heir.broker.pending_messages == len(keys)
    with pytest.raises(Conflict, match="drained"):
        await drained.broker.selections.select(facts, ANONYMOUS)


@in_two_groups
async def test_a_held_campaign_is_not_handed_over(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    await drained.campaign("spring", "orders", [HOUR_MS, 2 * HOUR_MS])
    await drained.pause("spring")
    with pytest.raises(Conflict, match="spring is held"):
        await drained.broker.drain("g1")
    await drained.broker.change_campaign("spring", "resume")
    await drain(drained)
    assert heir.broker.pending_messages == 2
    with pytest.raises(Conflict):
        await drained.broker.change_campaign("spring", "cancel")
    with pytest.raises(Conflict):
        await drained.broker.cancel_ranges([(1, 1)])


@in_two_groups
async def test_many_or_large_messages_are_handed_over_in_several_transfers(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    keys = await drained.send("orders", [HOUR_MS + at for at in range(300)])
    large = await drained.send("orders", [HOUR_MS] * 3, body_bytes=3 * 1024 * 1024)
    await drain(drained)
    sent = [
        question for _, question in neighbours.asked if isinstance(question, AdoptHere) and question.transfer
    ]
    assert [question.transfer for question in sent] == list(range(1, len(sent) + 1))
    assert len(sent) >= 4, "a transfer is a request over HTTP"
    assert heir.broker.pending_messages == len(keys + large)


# -- power cuts -----------------------------------------------------------------------------------------------


class Pair:
    """Two groups before and after a power cut: their disks, one clock, the messages sent, and how often each came."""

    def __init__(self, cut: str = "", crash_at: int | None = None) -> None:
        self.clock, self.keys, self.delivered = ManualClock(), list[str](), Counter[str]()
        self.cancelled: list[str] = []
        self.files: dict[str, CrashFiles] = {
            name: CutFiles(crash_at=crash_at if name == cut else None) for name in ("g1", "g2")
        }

    async def live(self, steps: Callable[..., object]) -> None:
        """Start both groups on their disks, and run the steps until they end or the power of one group is cut."""
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
            cut_events = [asyncio.Event() for _ in worlds]
            for world, event in zip(worlds.values(), cut_events, strict=True):
                if isinstance(world.files, CutFiles):
                    world.files.on_cut = partial(loop.call_soon_threadsafe, event.set)
            life = asyncio.ensure_future(steps(worlds["g1"], worlds["g2"]))  # type: ignore[arg-type]
            ends = [asyncio.ensure_future(event.wait()) for event in cut_events]
            await asyncio.wait([life, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not any(event.is_set() for event in cut_events):
                await life
        except PowerCut:
            pass  # at the start
        finally:
            for world in worlds.values():
                if isinstance(world.files, CutFiles):
                    world.files.on_cut = None
            # Only after the loop above: abandoning the first group ends all tasks of the loop.
            for world in worlds.values():
                await world.abandon()
        self.files = {name: files.crash(survival="nothing") for name, files in self.files.items()}

    async def begin(self, heir: InGroup, drained: InGroup) -> None:
        """Send messages, and drain the group. Records the calls of each disk before and after the drain."""
        self.keys = await send_each_kind(drained)
        self.begun_at = {world.settings.group: world.files.calls for world in (heir, drained)}
        await drain(drained)
        self.ended_at = {world.settings.group: world.files.calls for world in (heir, drained)}

    async def end(self, heir: InGroup, drained: InGroup) -> None:
        """Drain again, cancel one message, and let all messages become due."""
        await drain(drained)
        assert drained.broker.pending_messages == 0, (
            "all messages are due in an hour or later, so all are handed over"
        )
        chosen = self.keys[:1]
        assert verdict_words(await drained.broker.cancel(ids=chosen)) == ["cancelled"]
        self.cancelled += chosen
        for world in (heir, drained):
            await world.advance(6 * HOUR_MS)
        self.delivered = await visible(heir, drained)
        for world in (heir, drained):
            await world.stop()


def live(cut: str = "", crash_at: int | None = None) -> Pair:
    """Drain until the power of one group is cut, then start both on their disks."""

    async def main() -> Pair:
        pair = Pair(cut, crash_at)
        await pair.live(pair.begin)
        pair.clock = replace(pair.clock)
        if pair.keys:  # otherwise the power was cut before anything was sent
            await pair.live(pair.end)
        return pair

    return run(main())


def faults(pair: Pair) -> dict[str, int]:
    """Find the messages that are not exactly once in a queue, by key: 1 for a doubled message, -1 for a lost one."""
    expected = Counter(set(pair.keys) - set(pair.cancelled))
    return {
        key: pair.delivered[key] - expected[key] for key in pair.keys if pair.delivered[key] != expected[key]
    }


@pytest.fixture
def small_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "ROWS_FIRST", 2)
    monkeypatch.setattr(draining, "ROWS_MAX", 2)


@pytest.mark.usefixtures("small_transfers")
@pytest.mark.parametrize("part", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 4))])
@pytest.mark.parametrize("cut", ["g1", "g2"])
def test_a_power_cut_at_any_call_of_either_disk_neither_loses_nor_doubles_a_message(
    cut: str, part: int
) -> None:
    whole = live()
    assert not faults(whole)
    calls = range(whole.begun_at[cut] + 1, whole.ended_at[cut] + 1)
    assert len(calls) >= 6, "a transfer takes several calls of the disk"
    for crash_at in calls[part::4]:
        assert not faults(live(cut, crash_at)), f"{cut} at call {crash_at}"


def faults_of_cuts(cut: str) -> Counter[int]:
    """Count the faults of the cuts at all calls of a disk. A cut after which the drain fails is left out."""
    whole, fault_counts = live(), Counter[int]()
    for crash_at in range(whole.begun_at[cut] + 1, whole.ended_at[cut] + 1):
        with contextlib.suppress(AssertionError):
            fault_counts.update(faults(live(cut, crash_at)).values())
    return fault_counts


@pytest.mark.slow
@pytest.mark.usefixtures("small_transfers")
def test_an_heir_that_forgets_what_it_has_taken_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drains, "adopted", lambda self, source: None)
    assert faults_of_cuts("g2")[1], "a message is doubled: the heir had adopted it, and its answer was lost"


@pytest.mark.slow
@pytest.mark.usefixtures("small_transfers")
def test_a_group_that_forgets_a_transfer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget_unconfirmed(self: Draining) -> None:
        facts = self._tables.drains.out
        if facts is not None and facts.rows:
            self._tables.drains.put(msgspec.structs.replace(facts, rows=0))

    monkeypatch.setattr(Draining, "_resend_unconfirmed", forget_unconfirmed)
    assert faults_of_cuts("g1")[-1], (
        "a message is lost: the power of the heir was cut before it had adopted it"
    )


def test_an_unconfirmed_transfer_keeps_its_rows_in_the_log() -> None:
    async def main() -> None:
        async with groups_of("g1", "g2", retention_ms=1) as (neighbours, worlds):
            heir, drained = worlds["g1"], worlds["g2"]
            keys = await drained.send("orders", [20 * HOUR_MS + at for at in range(10)], body_bytes=50_000)
            await drained.compact()
            await drained.broker.drain("g1")
            neighbours.silent.add("g1")
            await drained.broker.draining.hand_over()
            first_seq = drained.broker.tables.drains.needed_seq
            for _ in range(4):  # segments are a mebibyte
                await drained.broker.log.writer.flushed()
                await drained.broker.send_again(_filling())
            drained.clock.advance(10_000)
            await drained.apply_retention()
            assert drained.broker.log.reader.first_seq <= first_seq
            assert Kind.CANCEL in _kinds(drained, first_seq)
            neighbours.silent.clear()
            await drained.broker.draining.hand_over()
            assert heir.broker.pending_messages == len(keys)
            await drained.apply_retention()
            assert drained.broker.tables.drains.needed_seq is None
            assert drained.broker.log.reader.first_seq > first_seq

    run(main())


def _filling() -> pa.RecordBatch:
    return pa.record_batch({"topic": ["%RETRY%readers"] * 4, "body": [b"x" * 200_000] * 4})


def _kinds(world: InGroup, seq: int) -> set[int]:
    (rows,) = world.broker.log.reader.rows(seq, seq + 1)
    return set(rows.column("kind").to_pylist())


def test_a_message_handed_over_long_ago_is_not_reported_as_pending() -> None:
    """The file still has the row of the message after retention has removed the row of the log that ended it."""

    async def main() -> None:
        async with groups_of("g1", "g2", retention_ms=1) as (_, worlds):
            heir, drained = worlds["g1"], worlds["g2"]
            (key, other) = await drained.send("orders", [20 * HOUR_MS, 21 * HOUR_MS])
            await drained.compact()
            await drain(drained)
            for _ in range(4):  # segments are a mebibyte
                await drained.broker.send_again(_filling())
                await drained.broker.log.writer.flushed()
            drained.clock.advance(10_000)
            await drained.apply_retention()
            assert drained.broker.log.reader.first_seq > 10, (
                "retention has removed the rows that ended the messages"
            )
            for world in (heir, drained):
                assert [place.state for place in await world.broker.find(key)] == ["waiting"]
                assert verdict_words(await world.broker.cancel(ids=[other])) in (
                    ["cancelled"],
                    ["already_cancelled"],
                )
            assert await drained.broker.recall("orders", encode_handle("orders", "g2", 1, key)) == key
            assert verdict_words(await heir.broker.cancel(ids=[key])) == ["already_cancelled"]
            assert not heir.broker.pending_messages

    run(main())


def test_a_drain_can_continue_to_another_heir_after_the_first_one_failed() -> None:
    async def main() -> None:
        async with groups_of("g1", "g2", "g3") as (neighbours, worlds):
            heir, drained, third = (worlds[name] for name in ("g1", "g2", "g3"))
            (first, second) = await drained.send("orders", [HOUR_MS, HOUR_MS])
            await drained.broker.drain("g1")
            neighbours.silent.add("g1")
            await drained.broker.draining.hand_over()
            with pytest.raises(Conflict, match="g1 has not confirmed"):
                await drained.broker.drain("g3")
            neighbours.silent.clear()
            await drain(drained)
            await drained.reschedule([first], 2 * HOUR_MS)
            await third.send("orders", [HOUR_MS])
            await drain(drained, "g3")
            await drain(heir, "g3")
            assert third.broker.pending_messages == 3
            # Handed over twice. The first group still knows that it has handed the message over.
            assert verdict_words(await drained.broker.cancel(ids=[second])) == ["cancelled"]
            with pytest.raises(Conflict, match="drained itself, to g3"):
                await drained.broker.drain("g1")

    run(main())


@in_two_groups
async def test_the_next_leader_continues_a_drain_with_the_requesting_account(
    neighbours: Neighbours, heir: InGroup, drained: InGroup
) -> None:
    access = drained.access = Access(parse(ACCOUNTS, "access.toml"))
    await drained.send("orders", [HOUR_MS])
    with pytest.raises(Forbidden, match="may not administer"):
        await drained.broker.drain("g1", caller=access.named("shop"))
    await drained.broker.drain("g1", caller=access.named("operator"))
    await drained.restart()
    neighbours.brokers["g2"] = drained.broker
    access.replace({})
    await drained.broker.draining.hand_over()
    progress = drained.broker.draining._report_progress(drained.broker.tables.drains.out)
    assert "'operator' is not in the access file" in progress.problem and progress.moving == 1
    access.replace(parse(ACCOUNTS, "access.toml"))
    await drained.broker.draining.hand_over()
    assert (heir.broker.pending_messages, drained.broker.tables.drains.out.account) == (1, "operator")
