"""At most one message with a unique key is pending, and every answer is correct: `faults_in` checks both in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from tests.broker.on_node import InTurn, batch, on_node
from tests.broker.revoking.test_drain_rows import scheduled_rows
from tests.broker.two_groups import InGroup, Neighbours, in_two_groups
from tests.crash.lives import run, until_cut
from tests.crash.world import HOUR_MS, CutFiles, World
from tests.crash_files import CrashFiles
from tests.rounds import rounds

from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import Piece
from timeball.broker.registry.selections import SelectionFacts
from timeball.broker.revoking import unique_sends
from timeball.broker.revoking.drain_rows import build_drain_rows, encode_sent
from timeball.broker.revoking.group_questions import AdoptHere
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.answers import UniqueMessage
from timeball.model.errors import AlreadyPending, InvalidMessage, OverLimit
from timeball.model.message import CANCEL_REASON, Kind, decode_properties
from timeball.model.send_options import OnPending, unique_key, with_unique_key
from timeball.schedule.locations import with_column

MODES: list[OnPending] = ["reject", "keep", "replace"]


class Answer(NamedTuple):
    """The answer to a send, and the ends of the log at the send (`put_seq`) and at the answer (`end_seq`)."""

    outcome: str
    seq: int
    pending: UniqueMessage | None
    put_seq: int
    end_seq: int


class Client:
    """An edge whose sends are futures."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._futures: dict[int, asyncio.Future[Accepted]] = {}
        self.ids = 0

    async def send(
        self,
        key: str,
        on_pending: OnPending | None,
        *,
        topic: str = "orders",
        under: str = "",
        **columns: Any,
    ) -> Answer:
        """Send a message due in an hour, unless `columns` name another time. `under`: an idempotency key."""
        self.ids += 1
        unique = unique_key(key, on_pending)
        times = {} if columns.keys() & {"due_ms", "delay_ms", "delay_level"} else {"delay_ms": [HOUR_MS]}
        rows = batch(
            topic=[topic],
            unique_key=[f"m{self.ids}"],
            keys=[with_unique_key("every", unique)],
            **times,
            **columns,
        )
        piece = Piece(self, rows, 1, rows.nbytes, 0, ANONYMOUS)
        future = self._futures[id(piece)] = asyncio.get_running_loop().create_future()
        writer = self._world.broker.log.writer
        put_seq = writer.next_seq
        if under:
            self._world.broker.keyed_sends.put(piece, under, unique=unique)
        else:
            self._world.broker.unique_sends.put(piece, unique, ANONYMOUS)
        try:
            accepted = await asyncio.wait_for(future, 60)
        except AlreadyPending as error:
            pending = UniqueMessage(error.id, error.seq, error.due_ms)
            return Answer("rejected", 0, pending, put_seq, writer.next_seq)
        sent = accepted.sent
        assert sent is not None
        return Answer(sent.outcome, accepted.first_seq, sent.pending, put_seq, writer.next_seq)

    def answer(self, pieces: list[Piece], accepted: Accepted) -> None:
        for piece in pieces:
            self._futures.pop(id(piece)).set_result(accepted)

    def refuse(self, pieces: list[Piece], error: BaseException) -> None:
        for piece in pieces:
            self._futures.pop(id(piece)).set_exception(error)


# ---- check of the log and the answers --------------------------------------------------------------------------


class Life(NamedTuple):
    """The rows of the log between which a message is pending, and how it ended."""

    begin: int
    end: int  # of a pending message: the end of the log
    reason: str  # "released", "cancelled", or the reason in the CANCEL row. Empty while it is pending


def lives_in(world: World) -> dict[str, dict[int, Life]]:
    """Read the messages from the log, by unique key and number."""
    reader, lives = world.broker.log.reader, dict[str, dict[int, Life]]()
    for rows in reader.rows(reader.first_seq, reader.next_seq, [Kind.SCHEDULED, Kind.RELEASE, Kind.CANCEL]):
        for row in rows.to_pylist():
            key = (row["keys"] or "").rpartition("unique:")[2]
            if row["kind"] == Kind.SCHEDULED:
                lives.setdefault(key, {})[row["seq"]] = Life(row["seq"], reader.next_seq, "")
                continue
            reason = "released" if row["kind"] == Kind.RELEASE else "cancelled"
            reason = decode_properties(row["properties"] or "").get(CANCEL_REASON, reason)
            before = lives[key][row["source_seq"]]
            lives[key][row["source_seq"]] = Life(before.begin, row["seq"], reason)
    return lives


def faults_in(lives: dict[str, dict[int, Life]], answers: Sequence[tuple[str, Answer]]) -> list[str]:
    """List the contradictions between the log and the answers to the sends of each key."""
    faults = []
    for key, by_number in lives.items():
        ordered = sorted(by_number.values())
        for before, after in pairwise(ordered):
            # A replaced message ends in the row before its successor.
            if before.end > after.begin:
                faults.append(f"{key}: {before} and {after} are pending at once")
    for key, (outcome, seq, pending, put_seq, end_seq) in answers:
        by_number = lives.get(key, {})
        if outcome in ("created", "replaced") and by_number[seq].begin != seq:
            faults.append(f"{key}: {seq} was {outcome}, and is not in the log")
        if outcome == "replaced":
            assert pending is not None
            if by_number[pending.seq].end != seq - 1 or by_number[pending.seq].reason != "replaced":
                faults.append(
                    f"{key}: {seq} replaced {pending.seq}, but the log has {by_number[pending.seq]}"
                )
        if outcome in ("kept", "rejected"):
            assert pending is not None
            life = by_number[pending.seq]
            if life.end < put_seq or life.begin >= end_seq:
                faults.append(
                    f"{key}: {outcome} for {pending.seq}, which was pending in {life}, not in {put_seq} to {end_seq}"
                )
    return faults


async def race(world: World, seed: int, clients: int, end_s: float, sends_max: int) -> list[str]:
    """Let many clients send with three keys and all modes, while messages become due, are cancelled and are moved.

    Return the faults. Each client sends `sends_max` messages, or stops after `end_s` seconds.
    """
    client, answers, random = Client(world), list[tuple[str, Answer]](), np.random.default_rng(seed)
    last_s = monotonic() + end_s

    async def send_many(number: int) -> None:
        for turn in range(sends_max):
            if monotonic() > last_s:
                return
            key = f"k{random.integers(3)}"
            # Every eighth client sends short delays, so that releases race with the sends.
            delay_ms = int(random.integers(1, 4)) if number % 8 == 0 else HOUR_MS
            mode = MODES[int(random.integers(3))]
            answers.append((key, await client.send(key, mode, delay_ms=[delay_ms])))
            if turn % 8 == 3 and number % 8 == 1:
                await world.broker.cancel(keys=[f"unique:{key}"])
            if turn % 8 == 5 and number % 8 == 2:
                await world.broker.reschedule(keys=[f"unique:{key}"], delay_ms=2 * HOUR_MS)

    async def pass_time(senders: asyncio.Future[Any]) -> None:
        """Advance the clock by 1 ms in each turn of the loop, so that messages become due during the race."""
        while not senders.done():
            world.clock.advance(1)
            world.broker.ticker.wake()
            await asyncio.sleep(0)

    senders = asyncio.gather(*map(send_many, range(clients)))
    await pass_time(senders)
    await senders
    await world.broker.log.writer.flushed()
    outcomes = {answer.outcome for _, answer in answers}
    assert outcomes == {"created", "replaced", "kept", "rejected"}, outcomes
    return faults_in(lives_in(world), answers)


@on_node()
async def test_a_race_leaves_one_pending_message_and_correct_answers(world: World) -> None:
    assert await race(world, 1, 16, 20, 12) == []


@on_node(InTurn)
async def test_a_race_without_threads_leaves_one_pending_message(world: World) -> None:
    assert await race(world, 2, 16, 20, 12) == []


@pytest.mark.slow
@pytest.mark.siege
@on_node(segment_bytes=64 * 1024 * 1024)
async def test_a_long_race_of_sixty_four_clients_leaves_one_pending_message(world: World) -> None:
    assert await race(world, 3, 64, rounds(10, 60), 1_000_000) == []


@on_node()
async def test_a_second_pending_message_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a broker that never finds the pending message."""

    async def find_none(self: object, name: object) -> list[Any]:
        return []

    client = Client(world)
    await client.send("a", "replace")
    with monkeypatch.context() as patch:
        patch.setattr(unique_sends.UniqueSends, "_find_pending", find_none)
        answers = [("a", await client.send("a", "replace"))]
    (fault,) = faults_in(lives_in(world), answers)
    assert "are pending at once" in fault


@on_node()
async def test_a_wrong_answer_is_noticed(world: World) -> None:
    """The control: a replaced message that was cancelled by a request, and a kept one that had ended."""
    client = Client(world)
    first = await client.send("a", "reject")
    await world.broker.cancel(keys=["unique:a"])
    second = await client.send("a", "reject")
    answer = second._replace(pending=UniqueMessage("m1", first.seq, 0))
    wrong = [("a", answer._replace(outcome=outcome)) for outcome in ("replaced", "kept")]
    assert len(faults_in(lives_in(world), wrong)) == 2


# ---- each mode of `on_pending` -----------------------------------------------------------------------------------


@on_node()
async def test_each_mode_decides_about_the_second_message(world: World) -> None:
    client, due_ms = Client(world), world.clock.wall + HOUR_MS
    first = await client.send("a", "reject")
    pending = UniqueMessage("m1", first.seq, due_ms)
    assert first[:3] == ("created", first.seq, None)
    assert (await client.send("a", "reject"))[:3] == ("rejected", 0, pending)
    assert (await client.send("a", "keep"))[:3] == ("kept", first.seq, pending)
    assert (await client.send("a", None))[0] == "rejected"
    replaced = await client.send("a", "replace")
    assert replaced[:3] == ("replaced", first.seq + 2, pending)
    (place,) = await world.broker.find("m1")
    assert (place.state, place.reason) == ("cancelled", "replaced")
    assert world.broker.unique_sends.counts == {"created": 1, "kept": 1, "replaced": 1, "rejected": 2}
    # Another key, and the same key of another topic, are independent.
    assert (await client.send("b", "reject"))[0] == "created"
    assert (await client.send("a", "reject", topic="other"))[0] == "created"
    await world.advance(HOUR_MS)
    assert (await client.send("a", "reject"))[0] == "created"


@on_node()
async def test_an_immediate_message_replaces_the_pending_one(world: World) -> None:
    client = Client(world)
    await client.send("a", "replace")
    assert (await client.send("a", "replace", due_ms=[None]))[0] == "replaced"
    assert world.broker.pending_messages == 0
    assert (await client.send("a", "reject", due_ms=[None]))[0] == "created"


@on_node()
async def test_a_message_with_a_delay_level_is_replaced_by_its_unique_key(world: World) -> None:
    client = Client(world)
    first = await client.send("a", "reject", delay_level=[5])
    replaced = UniqueMessage("m1", first.seq, world.clock.wall + 60_000)
    assert (await client.send("a", "replace", delay_level=[6])).pending == replaced
    assert world.broker.pending_messages == 1


@on_node()
async def test_a_send_without_a_mode_uses_the_default_of_its_topic(world: World) -> None:
    client = Client(world)
    await world.broker.create_topic("orders", 3, on_pending="keep")
    await client.send("a", None)
    assert (await client.send("a", None))[0] == "kept"
    await world.broker.create_topic("orders", on_pending="replace")
    await world.restart()
    assert (await client.send("a", None))[0] == "replaced"
    assert len(world.broker.queues("orders")) == 3


@on_node()
async def test_the_pending_message_is_found_after_restart_compaction_and_retention(world: World) -> None:
    client = Client(world)
    first = await client.send("a", "reject")
    await world.restart()
    assert (await client.send("a", "keep")).seq == first.seq
    await world.compact()
    await world.restart()
    assert (await client.send("a", "keep")).seq == first.seq
    await world.broker.reschedule(ids=["m1"], delay_ms=3 * HOUR_MS)
    await world.apply_retention()
    await world.restart()
    kept = await client.send("a", "keep")
    assert kept.pending == UniqueMessage("m1", first.seq, world.clock.wall + 3 * HOUR_MS)
    assert kept.seq == first.seq
    assert (await client.send("a", "replace"))[0] == "replaced"
    assert world.broker.pending_messages == 1


@on_node()
async def test_a_key_that_has_left_memory_is_looked_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(world)
    monkeypatch.setattr(limits, "UNIQUE_KEYS_KNOWN_MAX", 2)
    sent = {key: await client.send(key, "reject") for key in "abcd"}
    assert len(world.broker.unique_sends._pending_by_name) == 2
    for key in "abcd":
        assert (await client.send(key, "keep")).seq == sent[key].seq


@on_node()
async def test_an_ordinary_key_with_the_same_text_is_no_unique_key(world: World) -> None:
    client = Client(world)
    await world.broker.send(batch(keys=["a"], delay_ms=[HOUR_MS]))
    assert (await client.send("a", "reject"))[0] == "created"


@on_node(InTurn)
async def test_a_send_waits_until_a_move_of_the_pending_message_is_durable(world: World) -> None:
    client = Client(world)
    await client.send("a", "reject")
    move = asyncio.ensure_future(world.broker.reschedule(ids=["m1"], delay_ms=2 * HOUR_MS))
    log = world.broker.log
    while not move.done() and log.writer.next_seq == log.reader.next_seq:
        await asyncio.sleep(0)
    # The move is in the log, and not durable.
    kept = await client.send("a", "keep")
    assert kept.outcome == "kept"
    assert kept.pending == UniqueMessage("m1", kept.seq, world.clock.wall + 2 * HOUR_MS)
    await move


@on_node()
async def test_a_repeated_send_with_an_idempotency_key_is_not_carried_out_again(world: World) -> None:
    client = Client(world)
    await client.send("a", "reject")
    client.ids = 5  # so that both sends have the same message id
    first = await client.send("a", "replace", under="x")
    client.ids = 5
    again = await client.send("a", "replace", under="x")
    assert (first.outcome, again.outcome, again.seq) == ("replaced", "exists", first.seq)
    # A send that wrote nothing has not used its key.
    assert (await client.send("a", "keep", under="y"))[0] == "kept"
    assert (await client.send("a", "reject", under="y"))[0] == "rejected"
    await world.broker.cancel(keys=["unique:a"])
    assert (await client.send("a", "reject", under="y"))[0] == "created"


@on_node()
async def test_simultaneous_sends_with_one_idempotency_key_are_carried_out_once(world: World) -> None:
    client = Client(world)

    async def send(on_pending: OnPending, under: str) -> Answer:
        client.ids = 7  # so that all sends have the same message id
        return await client.send("a", on_pending, under=under)

    answers = await asyncio.gather(*(send("reject", "x") for _ in range(3)))
    assert sorted(answer.outcome for answer in answers) == ["created", "exists", "exists"]
    kept = await asyncio.gather(*(send("keep", "y") for _ in range(2)))
    assert [answer.outcome for answer in kept] == ["kept", "kept"]


@on_node()
async def test_an_invalid_send_is_refused_and_leaves_the_pending_message(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, broker = Client(world), world.broker
    await client.send("a", "reject")
    for key in ("", "two words", "x" * 249):
        with pytest.raises(InvalidMessage):
            unique_key(key)
    with pytest.raises(InvalidMessage, match="reject, keep, replace"):
        unique_key("a", "drop")
    two = batch(2)
    with pytest.raises(InvalidMessage, match="send them one by one"):
        broker.unique_sends.put(Piece(client, two, 2, 0, 0, ANONYMOUS), unique_key("a"), ANONYMOUS)
    with pytest.raises(InvalidMessage, match="returns to a consumer"):
        await client.send("a", "reject", topic="%RETRY%readers")
    with pytest.raises(InvalidMessage):
        await client.send("a", "replace", properties=["no\x02"], body=[b""], tag=["a\x01"])
    monkeypatch.setattr(limits, "UNIQUE_SENDS_WAITING_MAX", 1)
    waiting = asyncio.ensure_future(client.send("a", "keep"))
    await asyncio.sleep(0)
    with pytest.raises(OverLimit, match="wait; send this one again later"):
        await client.send("b", "keep")
    assert (await waiting).outcome == "kept"
    assert broker.pending_messages == 1 and broker.unique_sends._held_sends == 0


@in_two_groups
async def test_a_message_from_a_drained_group_is_pending_for_its_key(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    client = Client(one)
    # From here on, the broker has an entry for the key in memory.
    await client.send("a", "reject", due_ms=[None])
    rows = scheduled_rows([None])
    rows = with_column(rows, "keys", pa.array(["unique:a"]))
    rows = with_column(rows, "due_ms", pa.array([one.clock.wall + HOUR_MS]))
    for number in (1, 2):
        sent = encode_sent(build_drain_rows(rows, "g1", 9))
        question = AdoptHere(source="g2", since_ms=5, transfer=number, rows=sent)
        await one.broker.adoption.adopt(question, ANONYMOUS)
        assert (await client.send("a", "keep")).outcome == "kept"
    assert (await client.send("a", "replace")).outcome == "replaced"
    assert one.broker.pending_messages == 1


# ---- messages of a selection -------------------------------------------------------------------------------------


async def select(world: World, where: str = "") -> str:
    """Cancel the pending messages that meet a condition, by a selection. Return its name."""
    facts = SelectionFacts(seq=0, at_ms=0, where=where)
    return str(await world.broker.selections.select(facts, ANONYMOUS))


@pytest.mark.parametrize("where", ["", "keys CONTAINS 'unique:a'"])
@pytest.mark.parametrize("on_pending", MODES)
@on_node()
async def test_a_message_that_a_selection_cancelled_does_not_count_and_no_undo_restores_it(
    world: World, where: str, on_pending: OnPending
) -> None:
    client = Client(world)
    first = await client.send("a", "reject")
    name = await select(world, where)
    second = await client.send("a", on_pending)
    assert second[:3] == ("created", second.seq, None)
    await world.broker.selections.undo(name, ANONYMOUS)
    kept = await client.send("a", "keep")
    assert (kept.outcome, kept.seq) == ("kept", second.seq)
    assert world.broker.pending_messages == 1
    assert faults_in(lives_in(world), [("a", first), ("a", second), ("a", kept)]) == []
    (place,) = await world.broker.find("m1")
    assert (place.state, place.reason) == ("cancelled", f"selection {name}")


@on_node()
async def test_a_message_that_a_selection_cancelled_does_not_count_after_a_move_and_in_the_table(
    world: World,
) -> None:
    client = Client(world)
    for key in "ab":
        await client.send(key, "reject")
    await world.broker.reschedule(keys=["unique:a"], delay_ms=2 * HOUR_MS)
    name = await select(world, "keys CONTAINS 'unique:'")
    await world.compact()
    await world.apply_retention()
    assert [(await client.send(key, "keep")).outcome for key in "ab"] == ["created", "created"]
    await world.restart()
    await world.broker.selections.undo(name, ANONYMOUS)
    assert world.broker.pending_messages == 2


@on_node()
async def test_an_undo_makes_the_message_pending_for_its_key_again(world: World) -> None:
    client = Client(world)
    first = await client.send("a", "reject")
    name = await select(world)
    # A refused send does not end the message of the selection.
    with pytest.raises(InvalidMessage):
        await client.send("a", "reject", properties=["no\x02"], body=[b""], tag=["a\x01"])
    await world.broker.selections.undo(name, ANONYMOUS)
    assert (await client.send("a", "keep")).seq == first.seq
    # A selection does not cover messages that are sent later.
    name = await select(world)
    second = await client.send("a", "reject")
    assert (await client.send("a", "keep")).seq == second.seq


# ---- power cuts --------------------------------------------------------------------------------------------------


def faults_after_cut(crash_at: int | None, seed: int) -> tuple[int, list[str]]:
    """Replace a message again and again until the power is cut.

    `crash_at`: the call of the file system at which that happens. None: never. Returns the number of calls, and the
    faults after a restart.
    """
    files = CutFiles(crash_at=crash_at)
    world, answers = World(files, ManualClock()), list[Answer]()

    async def live() -> None:
        await world.start()
        client = Client(world)
        for _ in range(4):
            answers.append(await client.send("a", "replace"))
        await world.stop()

    async def check_after_cut(image: CrashFiles) -> list[str]:
        after_cut = World(image, ManualClock(), world.observed)
        await after_cut.start()
        faults = faults_in(lives_in(after_cut), [("a", answer) for answer in answers])
        kept = await Client(after_cut).send("a", "keep") if answers else None
        if kept is not None and (kept.outcome != "kept" or kept.seq < answers[-1].seq):
            faults.append(f"{answers[-1]} was answered, and then {kept}")
        await after_cut.stop()
        return faults

    with suppress(asyncio.CancelledError):
        run(until_cut(world, files, live))
    return files.calls, run(check_after_cut(files.crash(seed, "random")))


def test_after_a_power_cut_one_message_is_pending() -> None:
    calls, faults = faults_after_cut(None, 1)
    assert faults == []
    for call in sorted(np.random.default_rng(1).choice(np.arange(1, calls + 1), 10, replace=False).tolist()):
        assert faults_after_cut(call, call)[1] == [], f"call {call} of {calls}"


@pytest.mark.slow
def test_after_any_power_cut_one_message_is_pending() -> None:
    calls, _ = faults_after_cut(None, 1)
    for call in range(1, calls + 1):
        assert faults_after_cut(call, call)[1] == [], f"call {call} of {calls}"
