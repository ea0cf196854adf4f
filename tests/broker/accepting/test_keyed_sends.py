"""Sends with an idempotency key are in the log once, however often they are repeated, also after a crash."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.broker.on_node import InTurn, batch, on_node
from tests.crash.lives import run, until_cut
from tests.crash.world import HOUR_MS, CutFiles, World
from tests.crash_files import CrashFiles

from timeball.broker.accepting import keyed_sends
from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import Piece
from timeball.broker.registry import idempotency
from timeball.broker.registry.selections import SelectionFacts
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import Conflict, InvalidMessage, InvalidName, OverLimit
from timeball.model.message import Kind
from timeball.model.time_parsing import LOCAL_TIME, local_due_ms


class NamedCaller(Caller):
    """A caller with an account, which may do everything."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        return self._name


class Client:
    """An edge whose `put` returns a future for the answer: first_seq, store_ms and `Accepted.sent`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._futures: dict[int, asyncio.Future[tuple[int, int, Any]]] = {}

    def put(
        self,
        key: str,
        rows: pa.RecordBatch,
        caller: Any = ANONYMOUS,
        attempt: str = "",
        *,
        anew: bool = False,
    ) -> asyncio.Future[tuple[int, int, Any]]:
        piece = Piece(self, rows, rows.num_rows, rows.nbytes, 0, caller)
        future = self._futures[id(piece)] = asyncio.get_running_loop().create_future()
        self._world.broker.keyed_sends.put(piece, key, attempt, anew=anew)
        return future

    async def send(self, key: str, rows: pa.RecordBatch, caller: Any = ANONYMOUS) -> tuple[int, int]:
        """Return first_seq and store_ms."""
        return (await asyncio.wait_for(self.put(key, rows, caller), 60))[:2]

    async def states(self, key: str, rows: pa.RecordBatch, attempt: str = "") -> Any:
        """Return (state, due_ms) of each message of the earlier send, or "created" if this send is the first.

        With `attempt`, settled messages are sent again. For a repeated attempt, its outcome precedes the states.
        """
        sent = (await asyncio.wait_for(self.put(key, rows, attempt=attempt, anew=bool(attempt)), 60))[2]
        if sent is None:
            return "created"
        states = [(message.state, message.due_ms) for message in sent.states]
        return states if sent.outcome == "exists" else [sent.outcome, *states]

    def answer(self, pieces: list[Piece], accepted: Accepted) -> None:
        for piece in pieces:
            answer = accepted.first_seq + piece.first_row, accepted.store_ms, accepted.sent
            self._futures.pop(id(piece)).set_result(answer)

    def refuse(self, pieces: list[Piece], error: BaseException) -> None:
        for piece in pieces:
            self._futures.pop(id(piece)).set_exception(error)


def bodies(world: World) -> list[bytes]:
    """The bodies of all messages in the log, also of scheduled messages."""
    reader = world.broker.log.reader
    kinds = [Kind.MESSAGE, Kind.SCHEDULED]
    return [
        body
        for rows in reader.rows(reader.first_seq, reader.next_seq, kinds)
        for body in rows.column("body").to_pylist()
    ]


@on_node()
async def test_a_repeated_send_gets_the_answer_of_the_first_send(world: World) -> None:
    client = Client(world)
    first = await client.send("a", batch(2, delay_ms=[None, 10 * HOUR_MS]))
    other = await client.send("b", batch(2))
    world.clock.advance(5_000)
    assert await client.send("a", batch(2, delay_ms=[None, 10 * HOUR_MS])) == first != other
    assert len(bodies(world)) == 4


@on_node()
async def test_a_key_refers_to_its_message_although_the_row_of_a_new_zone_comes_before_it(
    world: World,
) -> None:
    client = Client(world)
    # Creates the topic, so that the next send may be written row by row, behind the META row of its zone.
    await client.send("a", batch())
    due_ms, stored = local_due_ms(
        f"{datetime.fromtimestamp(world.clock.wall / 1_000, UTC).year + 1}-01-31T09:00", "Europe/Berlin"
    )
    message = batch(due_ms=[due_ms], properties=[f"{LOCAL_TIME}\x01{stored}\x02"])
    first = await client.send("b", message)
    assert await client.send("b", message) == first
    assert await client.states("b", message) == [("waiting", due_ms)]


@on_node()
async def test_a_key_belongs_to_one_caller_and_to_the_content_of_its_messages(world: World) -> None:
    client, one, two = Client(world), NamedCaller("one"), NamedCaller("two")
    assert await client.send("a", batch(), one) != await client.send("a", batch(), two)
    with pytest.raises(Conflict, match="use a new key for each send"):
        await client.send("a", batch(body=[b"other"]), one)
    # The time at which the client created its message does not matter, because a repeated send is created later.
    assert await client.send("a", batch(born_ms=[7]), one) == await client.send("a", batch(), one)
    for key in ("", "x" * (limits.IDEMPOTENCY_KEY_BYTES_MAX + 1)):
        with pytest.raises(InvalidMessage, match="an idempotency key has 1 to 512 bytes"):
            client.put(key, batch())
    with pytest.raises(InvalidMessage, match="messages under one idempotency key"):
        client.put("many", batch(limits.ROWS_PER_REQUEST_MAX))


@on_node(InTurn)
async def test_a_repetition_during_the_first_send_appends_nothing(world: World) -> None:
    client = Client(world)
    sends = [client.put(key, batch(body=[key.encode()])) for key in ("a", "b", "a", "a", "b", "c")]
    with pytest.raises(Conflict):
        client.put("a", batch(body=[b"other"]))
    first_a, first_b, second_a, third_a, second_b, only_c = [
        answer[:2] for answer in await asyncio.gather(*sends)
    ]
    assert first_a == second_a == third_a and first_b == second_b and len({first_a, first_b, only_c}) == 3
    assert sorted(bodies(world)) == [b"a", b"b", b"c"]
    assert world.broker.keyed_sends._under_way == {}


@on_node()
async def test_a_refused_send_leaves_its_key_unused(world: World) -> None:
    client = Client(world)
    invalid, valid = batch(topic=["no topic!"]), batch()
    answers = await asyncio.gather(
        client.send("a", invalid), client.send("b", valid), client.send("a", invalid), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [InvalidName, tuple, InvalidName]
    await client.send("a", valid)
    assert len(bodies(world)) == 2


@on_node()
async def test_a_send_that_a_full_disk_refuses_leaves_its_key_unused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, writer = Client(world), world.broker.log.writer
    await client.send("before", batch())

    def refuse(*_: object, **__: object) -> None:
        raise OverLimit("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "append", refuse)
        with pytest.raises(OverLimit):
            await client.send("a", batch())
    assert len(world.broker.tables.idempotency_keys) == 1
    assert (await client.send("a", batch()))[0] == writer.next_seq - 2


@on_node(idempotency_ms=60_000)
async def test_keys_expire_and_the_oldest_are_dropped_at_the_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = Client(world), world.broker.tables.idempotency_keys
    monkeypatch.setattr(limits, "IDEMPOTENCY_KEYS_MAX", 3)
    sent = {key: await client.send(key, batch()) for key in "abcd"}
    assert len(keys) == 3
    assert await client.send("b", batch()) == sent["b"]
    assert await client.send("a", batch()) != sent["a"]
    world.clock.advance(60_000)
    again = await client.send("c", batch())
    assert again != sent["c"] and await client.send("c", batch()) == again
    await world.node.maintenance.drop_idempotency_keys()  # type: ignore[union-attr]
    assert len(keys) == 1
    await world.restart()
    assert await client.send("c", batch()) == again


# ---- the states of the messages -------------------------------------------------------------------------------


@on_node()
async def test_the_answer_to_a_repeated_send_contains_the_current_states_and_due_times(world: World) -> None:
    client, now_ms = Client(world), world.clock.wall
    rows = batch(4, delay_ms=[None, HOUR_MS, HOUR_MS, HOUR_MS], unique_key=["a", "b", "c", None])
    assert await client.states("a", rows) == "created"
    first_seq = (await client.send("a", rows))[0]
    await world.broker.cancel(ids=["b"])
    await world.broker.reschedule(seqs=[first_seq + 3], due_ms=now_ms + 7 * HOUR_MS)
    due_ms = now_ms + HOUR_MS
    expected = [
        ("visible", None), ("cancelled", due_ms), ("waiting", due_ms), ("waiting", now_ms + 7 * HOUR_MS),
    ]  # fmt: skip
    assert await client.states("a", rows) == expected
    await world.restart()
    assert await client.states("a", rows) == expected
    await world.advance(HOUR_MS)
    assert await client.states("a", rows) == [*expected[:2], ("visible", due_ms), expected[3]]
    assert await client.states("now", batch()) == "created"
    assert await client.states("now", batch()) == [("visible", None)]


@on_node()
async def test_a_send_with_an_attempt_is_appended_if_no_earlier_message_is_pending(world: World) -> None:
    client = Client(world)
    rows, other_rows = batch(2, delay_ms=[HOUR_MS] * 2), batch(1, body=[b"other"], delay_ms=[2 * HOUR_MS])
    first_seq = (await client.send("a", rows))[0]
    waiting = await client.states("a", rows)
    assert await client.states("a", rows, "r1") == waiting
    await world.broker.cancel(seqs=[first_seq])
    with pytest.raises(
        Conflict, match=f"1 messages of an earlier send .* from number {first_seq} on, still wait"
    ):
        await client.put("a", other_rows, attempt="r1", anew=True)
    await world.broker.cancel(seqs=[first_seq + 1])
    # Other messages may replace settled messages, but only if the client asks for it.
    with pytest.raises(Conflict, match="ask to send again"):
        client.put("a", other_rows)
    assert await client.states("a", other_rows, "r1") == "created"
    new_seq = (await client.send("a", other_rows))[0]
    assert new_seq > first_seq + 1
    await world.broker.cancel(seqs=[new_seq])
    # The answer was lost and the same attempt is repeated, also when the new message is already settled.
    due_ms = world.clock.wall + 2 * HOUR_MS
    assert await client.states("a", other_rows, "r1") == ["created", ("cancelled", due_ms)]
    await world.restart()
    due_ms = world.clock.wall + 2 * HOUR_MS
    assert await client.states("a", other_rows, "r1") == ["created", ("cancelled", due_ms)]
    assert await client.states("a", other_rows, "r2") == "created"
    assert bodies(world) == [b"body", b"body", b"other", b"other"]


@on_node()
async def test_a_send_with_an_attempt_cancels_earlier_messages_that_a_selection_has_cancelled(
    world: World,
) -> None:
    client, rows = Client(world), batch(2, delay_ms=[HOUR_MS, 2 * HOUR_MS])
    first_seq, _ = await client.send("a", rows)
    selections = world.broker.selections
    name = await selections.select(SelectionFacts(seq=0, at_ms=0), ANONYMOUS)
    assert await client.states("a", rows, "r1") == "created"
    await selections.undo(name, ANONYMOUS)
    # Otherwise the messages of both sends would be pending.
    assert world.broker.pending_messages == 2
    again = await world.broker.cancel(seqs=[first_seq, first_seq + 1])
    assert [verdict.verdict for verdict in again] == ["already_cancelled"] * 2


@on_node(InTurn)
async def test_one_of_several_concurrent_attempts_is_appended(world: World) -> None:
    client, rows = Client(world), batch(delay_ms=[HOUR_MS])
    await world.broker.cancel(seqs=[(await client.send("a", rows))[0]])
    sends = [client.put("a", rows, attempt=attempt, anew=bool(attempt)) for attempt in ("r1", "r2", "r1", "")]
    answers = await asyncio.gather(*sends)
    assert sum(sent is None for *_, sent in answers) == 1
    assert len({seq for seq, *_ in answers[:3]}) == 1
    # The look-up that ends first wins. A repeat of its attempt is told that it created the messages.
    outcomes = ["new" if sent is None else sent.outcome for *_, sent in answers]
    assert sorted(outcomes[:3:2]) in (["created", "new"], ["exists", "exists"])
    assert outcomes[3] == "exists"
    assert bodies(world) == [b"body", b"body"]
    # A request without `attempt` repeats the send that it finds, the earlier or the newer send.
    assert answers[3][2].states[0].state in ("cancelled", "waiting")


@on_node()
async def test_an_attempt_is_limited_in_size_and_required_to_send_again(world: World) -> None:
    client = Client(world)
    await client.send("a", batch(delay_ms=[HOUR_MS]))
    for attempt in ("x" * 513, "é" * 257):
        with pytest.raises(InvalidMessage, match="the name of an attempt has at most 512 bytes"):
            client.put("a", batch(), attempt=attempt)
    with pytest.raises(InvalidMessage, match="to send again, give the attempt a name"):
        client.put("a", batch(), anew=True)


@on_node(idempotency_ms=60_000)
async def test_a_key_is_kept_while_its_message_is_pending(world: World) -> None:
    client, keys, now_ms = Client(world), world.broker.tables.idempotency_keys, world.clock.wall
    rows, moved = batch(delay_ms=[HOUR_MS], unique_key=["a"]), batch(delay_ms=[HOUR_MS], unique_key=["b"])
    await client.send("a", rows)
    await client.send("b", moved)
    await client.send("now", batch())
    await world.broker.reschedule(ids=["b"], due_ms=now_ms + 2 * HOUR_MS)
    await world.restart()
    client, keys = Client(world), world.broker.tables.idempotency_keys
    world.clock.advance(HOUR_MS - 1_000)
    await world.node.maintenance.drop_idempotency_keys()  # type: ignore[union-attr]
    assert len(keys) == 2
    assert await client.states("a", rows) == [("waiting", now_ms + HOUR_MS)]
    await world.advance(61_000)
    await world.node.maintenance.drop_idempotency_keys()  # type: ignore[union-attr]
    assert len(keys) == 1
    assert await client.states("b", moved) == [("waiting", now_ms + 2 * HOUR_MS)]
    assert await client.states("a", rows) == "created"


@on_node()
async def test_a_snapshot_contains_the_keys(world: World) -> None:
    client = Client(world)
    sent = await client.send("a", batch())
    assert await world.node.maintenance.snapshot()  # type: ignore[union-attr]
    await world.stop()
    for name in [name for name in world.files.list_dir("") if name == "checkpoint"]:
        world.files.remove(name)
    await world.start()
    assert await client.send("a", batch()) == sent


# ---- power cuts ------------------------------------------------------------------------------------------------


async def send_three(world: World, answers: dict[str, tuple[int, int]]) -> None:
    """Send two immediate messages and a message that is due later, and add the answers to `answers`."""
    client = Client(world)
    for key, delay_ms in (("a", None), ("b", HOUR_MS), ("c", None)):
        answers[key] = await client.send(key, batch(body=[key.encode()], delay_ms=[delay_ms]))


async def send_cancel_and_send_again(world: World, answers: dict[str, tuple[int, int]]) -> None:
    """Send, cancel, and send again under the same key. Add the answer to the last send to `answers`."""
    client = Client(world)
    with suppress(Conflict):  # after the restart, if the key already refers to the newer send
        await client.send("a", batch(body=[b"1"], delay_ms=[HOUR_MS], unique_key=["one"]))
    await world.broker.cancel(ids=["one"])
    second = client.put(
        "a", batch(body=[b"2"], delay_ms=[HOUR_MS], unique_key=["two"]), attempt="r", anew=True
    )
    answers["a"] = (await asyncio.wait_for(second, 60))[:2]


def repeat_after_cut(
    call: int | None, seed: int, *, sends: Any = send_three
) -> tuple[int, list[bytes], bool]:
    """Cut the power at a call of the disk, restart, and send all again.

    Returns the number of calls, the bodies in the log, and whether each answer is the same as before.
    """
    files, clock, answers = CutFiles(crash_at=call), ManualClock(), dict[str, tuple[int, int]]()
    world = World(files, clock)

    async def live() -> None:
        await world.start()
        await sends(world, answers)

    async def repeat(image: CrashFiles) -> tuple[list[bytes], bool]:
        later: dict[str, tuple[int, int]] = {}
        second = World(image, clock)
        await second.start()
        try:
            await sends(second, later)
            logged = bodies(second)
            await second.stop()
        finally:
            await second.abandon()
        return logged, all(later.get(key) == answer for key, answer in answers.items())

    run(until_cut(world, files, live))
    return files.calls, *run(repeat(files.crash(seed, "random")))


def test_after_a_power_cut_a_repeated_send_is_in_the_log_once() -> None:
    calls, logged, answers_stayed = repeat_after_cut(None, 1)
    assert sorted(logged) == [b"a", b"b", b"c"] and answers_stayed
    for call in sorted(np.random.default_rng(1).choice(np.arange(1, calls + 1), 12, replace=False).tolist()):
        _, logged, answers_stayed = repeat_after_cut(call, call)
        assert sorted(logged) == [b"a", b"b", b"c"] and answers_stayed, f"call {call} of {calls}"


@pytest.mark.slow
def test_after_any_power_cut_a_repeated_send_is_in_the_log_once() -> None:
    calls, *_ = repeat_after_cut(None, 1)
    for call in range(1, calls + 1):
        for seed in range(3):
            _, logged, answers_stayed = repeat_after_cut(call, seed)
            assert sorted(logged) == [b"a", b"b", b"c"] and answers_stayed, (
                f"call {call} of {calls}, seed {seed}"
            )


def test_after_a_power_cut_a_send_with_an_attempt_is_in_the_log_once() -> None:
    calls, logged, answers_stayed = repeat_after_cut(None, 1, sends=send_cancel_and_send_again)
    assert logged == [b"1", b"2"] and answers_stayed
    for call in sorted(np.random.default_rng(2).choice(np.arange(1, calls + 1), 12, replace=False).tolist()):
        _, logged, answers_stayed = repeat_after_cut(call, call, sends=send_cancel_and_send_again)
        assert logged == [b"1", b"2"] and answers_stayed, f"call {call} of {calls}"


def test_keys_that_are_forgotten_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the look-up of keys, a repeated send is in the log twice."""
    monkeypatch.setattr(idempotency.IdempotencyKeys, "get", lambda *_: None)
    _, logged, answers_stayed = repeat_after_cut(None, 1)
    assert len(logged) == 6 and not answers_stayed
    assert keyed_sends.key_use is idempotency.key_use
