"""Half messages: invisible until committed, ended once, never forgotten, and checked with the producer in time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.lives import run, until_cut
from tests.crash.world import HOUR_MS, CutFiles, World

from timeball.broker.accepting import transacting
from timeball.broker.accepting.transacting import Half, Outcome
from timeball.io.clock import ManualClock
from timeball.log import checkpoint
from timeball.model import limits
from timeball.model.errors import InvalidMessage, OverLimit
from timeball.model.message import NO_DUE_TIME_MS, Kind, encode_properties

FIRST_MS, EACH_MS = limits.TRANSACTION_FIRST_CHECK_MS, limits.TRANSACTION_CHECK_INTERVAL_MS
GROUP = "payers"


def halves(rows: int = 1, more: dict[str, str] | None = None, **columns: Any) -> pa.RecordBatch:
    """Build half messages with the ids A0, A1, …. `more`: further properties."""
    properties = encode_properties({"TRAN_MSG": "true", "PGROUP": GROUP, **(more or {})})
    ids = [f"A{number}" for number in range(rows)]
    all_columns = {"properties": [properties] * rows, "unique_key": ids, "sys_flag": [5] * rows, **columns}
    return batch(rows, **all_columns)


async def prepare(world: World, rows: int = 1, more: dict[str, str] | None = None, **columns: Any) -> int:
    """Send half messages. Returns the number of the first half message."""
    accepted, durable = world.broker.prepare_nowait(halves(rows, more, **columns))
    await durable
    return int(accepted.first_seq)


async def commit(world: World, seq: int, **delay: int) -> Outcome:
    return await world.broker.transactions.end(seq, GROUP, commit=True, delay=lambda _: delay)


async def roll_back(world: World, seq: int) -> Outcome:
    return await world.broker.transactions.end(seq, GROUP, commit=False)


async def visible(world: World) -> list[Any]:
    """List the keys of the visible messages."""
    return sorted(row.key for row in (await world.outcome()).rows)


def log(world: World, *kinds: Kind) -> list[dict[str, Any]]:
    """Read the rows of these kinds from the log."""
    reader = world.broker.log.reader
    return [row for rows in reader.rows(1, reader.next_seq, kinds) for row in rows.to_pylist()]


def halves_in_log(world: World) -> list[dict[str, Any]]:
    """Read the rows of all half messages from the log."""
    return [row for row in log(world, Kind.SCHEDULED) if row["due_ms"] is None]


def due_checks(world: World) -> list[int]:
    """Take all half messages whose check is due now. Returns their numbers."""
    due_seqs = []
    while (half := world.broker.transactions.take_due(world.clock.wall)) is not None:
        due_seqs.append(half.seq)
    return due_seqs


async def start_after_cut(world: World) -> World:
    after_cut = World(
        world.files.crash(survival="nothing"), world.clock, retention_ms=world.settings.retention_ms
    )
    await after_cut.start()
    return after_cut


# ---- commits and rollbacks --------------------------------------------------------------------------------


@on_node()
async def test_a_half_message_is_invisible(world: World) -> None:
    seq = await prepare(world, 2)
    assert [(row["kind"], row["topic"], row["queue_offset"]) for row in halves_in_log(world)] == [
        (Kind.SCHEDULED, "orders", None)
    ] * 2
    assert "orders" in world.broker.topics()
    assert (await visible(world)) == []
    assert world.broker.transactions.open() == [(seq, 0), (seq + 1, 0)]
    assert world.broker.status()["transactions"] == {"open": 2, "oldest_seq": seq}


@on_node()
async def test_a_committed_message_becomes_visible_unchanged(world: World) -> None:
    columns = {
        "tag": ["t"],
        "keys": ["k"],
        "queue_id": [1],
        "born_ms": [7],
        "flag": [3],
        "reconsume_times": [2],
    }
    seq = await prepare(world, **columns)
    world.clock.advance(10)
    assert await commit(world, seq) is Outcome.COMMITTED
    [half], [row] = halves_in_log(world), log(world, Kind.RELEASE)
    changed = {name for name in half if half[name] != row[name]}
    assert changed == {"seq", "kind", "queue_offset", "store_ms", "sys_flag", "accepted_ms", "source_seq"}
    assert (row["source_seq"], row["queue_id"], row["queue_offset"]) == (seq, 1, 0)
    assert row["sys_flag"] == 9  # compressed, and committed instead of prepared
    assert world.broker.transactions.open() == []
    assert await visible(world) == ["A0"]


@on_node()
async def test_a_rolled_back_message_stays_invisible(world: World) -> None:
    seq = await prepare(world)
    assert await roll_back(world, seq) is Outcome.ROLLED_BACK
    assert (await visible(world)) == world.broker.transactions.open() == []
    [row] = log(world, Kind.CANCEL)
    assert (row["source_seq"], row["unique_key"], row["body"]) == (seq, "A0", None)


@on_node()
async def test_a_delay_begins_with_the_commit(world: World) -> None:
    seq = await prepare(world, delay_ms=[5])
    # The delay of a half message has no effect before its commit.
    assert [half["unique_key"] for half in halves_in_log(world)] == ["A0"]
    await world.advance(HOUR_MS)
    assert await commit(world, seq, delay_ms=1_000) is Outcome.COMMITTED
    [moved] = log(world, Kind.MOVED)
    assert (moved["due_ms"], moved["source_seq"]) == (world.clock.wall + 1_000, seq)
    assert (moved["accepted_ms"], moved["from_due_ms"]) == (world.clock.wall, NO_DUE_TIME_MS)
    assert await visible(world) == []
    await world.advance(1_000)
    assert await visible(world) == ["A0"]


@pytest.mark.parametrize("strategy", ["hour_log", "timer_wheel", "level_cascade"])
@pytest.mark.parametrize("delay", [{"delay_ms": HOUR_MS}, {"delay_level": 17}], ids=["instant", "level"])
@pytest.mark.parametrize("after", ["nothing", "restart", "without caches", "compaction"])
def test_a_half_message_committed_with_a_delay_keeps_its_number(
    strategy: str, delay: dict[str, int], after: str
) -> None:
    """Cancels and reschedules by its id and by its number find it, and each message ends once."""

    @on_node()
    async def live(world: World) -> None:
        await world.restart(strategy=strategy, timer_wheel_ms=60_000)
        halves = [await prepare(world, unique_key=[f"A{n}"]) for n in range(3)]
        for seq in halves:
            assert await commit(world, seq, **delay) is Outcome.COMMITTED
        if after == "compaction" and strategy == "hour_log":
            await world.compact()
        elif after != "nothing":
            await world.stop()
            if after == "without caches":
                world.files.remove("checkpoint")
            await world.start()
        assert world.broker.transactions.open() == []
        kept, cancelled, moved = halves
        answers = await world.broker.cancel(ids=["A1"])
        answers += await world.broker.cancel(seqs=[cancelled])
        answers += await world.broker.reschedule(seqs=[moved], delay_ms=2 * HOUR_MS)
        assert [(verdict.verdict, verdict.seq) for verdict in answers] == [
            ("cancelled", cancelled), ("already_cancelled", cancelled), ("rescheduled", moved),
        ]  # fmt: skip
        for seq in halves:  # the producer asks again
            assert await commit(world, seq) is Outcome.COMMITTED
        await world.advance(HOUR_MS)
        assert await visible(world) == ["A0"]
        await world.advance(HOUR_MS)
        assert await visible(world) == ["A0", "A2"]
        answers = [verdict for seq in halves for verdict in await world.broker.cancel(seqs=[seq])]
        assert [verdict.verdict for verdict in answers] == ["released", "already_cancelled", "released"]
        ends = [(row["source_seq"], row["kind"]) for row in log(world, Kind.RELEASE, Kind.CANCEL)]
        assert sorted(ends) == [(kept, Kind.RELEASE), (cancelled, Kind.CANCEL), (moved, Kind.RELEASE)]

    live()


@on_node()
async def test_a_repeated_end_has_the_first_outcome(world: World) -> None:
    first = await prepare(world, 2)
    second = first + 1
    outcomes = await asyncio.gather(*[commit(world, first) for _ in range(5)], roll_back(world, second))
    assert outcomes == [Outcome.COMMITTED] * 5 + [Outcome.ROLLED_BACK]
    assert await commit(world, first) is await roll_back(world, first) is Outcome.COMMITTED
    assert await commit(world, second) is await roll_back(world, second) is Outcome.ROLLED_BACK
    assert len(log(world, Kind.RELEASE)) == len(log(world, Kind.CANCEL)) == 1


@on_node()
async def test_of_concurrent_ends_the_first_decides(world: World) -> None:
    seq = await prepare(world)
    assert await asyncio.gather(roll_back(world, seq), commit(world, seq)) == [Outcome.ROLLED_BACK] * 2
    assert log(world, Kind.MESSAGE, Kind.RELEASE) == []


@on_node()
async def test_a_half_message_of_another_group_is_not_found(world: World) -> None:
    seq = await prepare(world)
    other = (await world.broker.send(batch())).first_seq
    end = world.broker.transactions.end
    assert await end(seq, "others", commit=True) is Outcome.NOT_FOUND
    for number in (other, 0, -5, 10**9):
        assert await end(number, GROUP, commit=True) is Outcome.NOT_FOUND
    await roll_back(world, seq)
    assert await end(seq, "others", commit=True) is Outcome.NOT_FOUND
    assert world.broker.transactions.open() == []


@on_node()
async def test_without_an_id_the_outcome_is_ended(world: World) -> None:
    seq = await prepare(world, unique_key=[None])
    await commit(world, seq)
    assert await commit(world, seq) is Outcome.ENDED
    assert len(log(world, Kind.RELEASE)) == 1


@on_node()
async def test_a_refused_commit_leaves_the_half_message_open(world: World) -> None:
    seq = await prepare(world)

    def refuse(properties: dict[str, str]) -> dict[str, int]:
        raise InvalidMessage(properties["PGROUP"])

    with pytest.raises(InvalidMessage, match=GROUP):
        await world.broker.transactions.end(seq, GROUP, commit=True, delay=refuse)
    assert await commit(world, seq) is Outcome.COMMITTED


@on_node()
async def test_concurrent_commits_share_an_append_and_one_error_refuses_no_other(world: World) -> None:
    first = await prepare(world, 4)
    commits = world.broker.log.writer.statistics.commits

    def delay_of(seq: int) -> dict[str, int]:
        if seq == first + 1:
            raise OverLimit("not this one")
        return {"delay_ms": 1_000} if seq == first + 3 else {}

    outcomes = await asyncio.gather(
        *[
            world.broker.transactions.end(seq, GROUP, commit=True, delay=lambda _, seq=seq: delay_of(seq))
            for seq in range(first, first + 4)
        ],
        return_exceptions=True,
    )
    assert [str(outcome) for outcome in outcomes] == [
        "Outcome.COMMITTED", "not this one", "Outcome.COMMITTED", "Outcome.COMMITTED",
    ]  # fmt: skip
    assert world.broker.log.writer.statistics.commits == commits + 1
    published = log(world, Kind.RELEASE, Kind.MOVED)
    assert [(row["unique_key"], row["source_seq"], row["kind"]) for row in published] == [
        ("A0", first, Kind.RELEASE), ("A2", first + 2, Kind.RELEASE), ("A3", first + 3, Kind.MOVED),
    ]  # fmt: skip
    assert world.broker.transactions.open() == [(first + 1, 0)]


@on_node()
async def test_a_commit_completes_although_its_caller_is_cancelled(world: World) -> None:
    seq = await prepare(world)
    task = asyncio.ensure_future(commit(world, seq))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await roll_back(world, seq) is Outcome.COMMITTED


@on_node()
async def test_too_many_open_half_messages_raise_over_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HALVES_OPEN_MAX", 3)
    seq = await prepare(world, 2)
    with pytest.raises(OverLimit, match="3 transactions are open"):
        world.broker.prepare_nowait(halves(2))
    pending = [world.broker.prepare_nowait(halves(1))[1]]
    with pytest.raises(OverLimit):  # half messages that are not durable yet count
        world.broker.prepare_nowait(halves(1))
    await asyncio.gather(*pending)
    await commit(world, seq)
    await prepare(world)


# ---- checks -----------------------------------------------------------------------------------------------


@on_node()
async def test_the_first_check_is_after_6_s_and_each_further_one_after_30_s(world: World) -> None:
    seq = await prepare(world)
    world.clock.advance(FIRST_MS - 1)
    assert due_checks(world) == []
    world.clock.advance(1)
    assert due_checks(world) == [seq] and due_checks(world) == []
    world.clock.advance(EACH_MS - 1)
    assert due_checks(world) == []
    world.clock.advance(1)
    assert due_checks(world) == [seq]


@pytest.mark.parametrize(
    ("text", "first_ms"),
    [("1", 1_000), ("0", 0), ("90", 90_000), ("999999999", limits.DAY_MS)]
    + [(text, FIRST_MS) for text in ("-1", "", "x", "9" * 10, "٣")],
)
@on_node()
async def test_the_immunity_time_of_a_half_message_delays_its_first_check(
    world: World, text: str, first_ms: int
) -> None:
    seq = await prepare(world, more={"CHECK_IMMUNITY_TIME_IN_SECONDS": text})
    if first_ms:
        world.clock.advance(first_ms - 1)
        assert due_checks(world) == []
        world.clock.advance(1)
    assert due_checks(world) == [seq]


@on_node()
async def test_ended_half_messages_are_not_checked(world: World) -> None:
    first = await prepare(world, 3)
    kept = first + 2
    await commit(world, first)
    await roll_back(world, first + 1)
    world.clock.advance(FIRST_MS)
    assert due_checks(world) == [kept]


@on_node()
async def test_the_heap_of_checks_is_swept_of_ended_half_messages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transacting, "SWEEP_ENTRIES_MIN", 3)
    staying = await prepare(world)
    for _ in range(20):
        await roll_back(world, await prepare(world, more={"CHECK_IMMUNITY_TIME_IN_SECONDS": "86400"}))
    assert len(world.broker.transactions._due) <= 3 + 2 * 2
    world.clock.advance(FIRST_MS)
    assert due_checks(world) == [staying]


@on_node()
async def test_a_half_message_whose_end_is_under_way_is_not_checked(world: World) -> None:
    seq = await prepare(world)
    world.clock.advance(FIRST_MS)
    ending = asyncio.ensure_future(commit(world, seq))
    await asyncio.sleep(0)
    assert world.broker.transactions.open() == [(seq, 0)] and due_checks(world) == []
    assert await ending is Outcome.COMMITTED


@on_node()
async def test_a_postponed_check_is_not_due_before_its_time(world: World) -> None:
    seq = await prepare(world)
    world.clock.advance(FIRST_MS)
    half = world.broker.transactions.take_due(world.clock.wall)
    world.broker.transactions.postpone(half, world.clock.wall + 1)
    assert due_checks(world) == []
    world.clock.advance(1)
    assert due_checks(world) == [seq]
    world.clock.advance(EACH_MS - 1)
    assert due_checks(world) == []  # the time of the check before it was postponed
    world.clock.advance(1)
    assert due_checks(world) == [seq]


@pytest.mark.parametrize("step_ms", [-HOUR_MS, 30 * 24 * HOUR_MS])
@on_node()
async def test_checks_follow_elapsed_time_when_the_wall_clock_is_set(world: World, step_ms: int) -> None:
    first, clock = await prepare(world), world.broker.clock
    world.clock.step_wall(step_ms)
    clock.now_ms()
    world.clock.advance(FIRST_MS - 1)
    assert clock.now_ms() == world.clock.wall, "the step is believed"
    second = await prepare(world)
    transacting = world.broker.transactions
    assert transacting.take_due(clock.elapsed_ms()) is None
    world.clock.advance(1)
    half = transacting.take_due(clock.elapsed_ms())
    assert half.seq == first and transacting.reason_to_give_up(half, clock.elapsed_ms()) is None
    world.clock.advance(FIRST_MS - 1)
    assert transacting.take_due(clock.elapsed_ms()).seq == second


@on_node()
async def test_checks_continue_after_a_restart_with_the_clock_set_back(world: World) -> None:
    seq = await prepare(world)
    await world.stop()
    world.clock.step_wall(-HOUR_MS)
    await world.start()
    assert due_checks(world) == []
    world.clock.advance(FIRST_MS)
    assert due_checks(world) == [seq]


@on_node()
async def test_a_half_message_is_given_up_after_fifteen_checks_or_the_retention_time(world: World) -> None:
    half = Half(1, GROUP, "orders", None, store_ms=0, check_ms=0, checks=14)
    give_up, retention_ms = world.broker.transactions.reason_to_give_up, world.settings.retention_ms
    assert give_up(half, retention_ms) is None
    assert give_up(half, retention_ms + 1) == "it is older than the retention time"
    half.checks = 15
    assert give_up(half, 0) == "its producer was asked 15 times"


@on_node()
async def test_discard_rolls_back_a_half_message_and_logs_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    seq = await prepare(world)
    world.clock.advance(FIRST_MS)
    half = world.broker.transactions.take_due(world.clock.wall)
    logging.disable(logging.NOTSET)
    await world.broker.transactions.discard(half, "its producer was asked 15 times")
    await world.broker.transactions.discard(half, "and again")
    assert f"half message rolled back seq={seq} group=payers topic=orders unique_key=A0 " in caplog.text
    [row] = log(world, Kind.CANCEL)
    assert row["body"] == b"its producer was asked 15 times"
    assert await commit(world, seq) is Outcome.ROLLED_BACK


# ---- restarts and power cuts --------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [(), (0,), (1,), (0, 1), (0, 1, 2)])
@on_node()
async def test_open_half_messages_survive_a_restart(world: World, saved: tuple[int, ...]) -> None:
    """Also with a checkpoint from before the half messages, from before their ends, or from after their ends."""

    async def save(at: int) -> None:
        if at in saved:
            await world.checkpoint()

    await world.send("a", [None])
    await save(0)
    first = await prepare(world, 4)
    world.broker.transactions.take_due(world.clock.wall + FIRST_MS).checks += 1
    await save(1)
    await commit(world, first + 1)
    await roll_back(world, first + 2)
    await commit(world, first + 3, delay_ms=HOUR_MS)
    await save(2)
    after_cut = await start_after_cut(world)
    checks = 1 if saved and saved[-1] else 0
    assert after_cut.broker.transactions.open() == [(first, checks)]
    assert await commit(after_cut, first + 1) is Outcome.COMMITTED
    assert await commit(after_cut, first + 2) is Outcome.ROLLED_BACK
    after_cut.clock.advance(FIRST_MS)
    assert due_checks(after_cut) == [first]
    assert await commit(after_cut, first) is Outcome.COMMITTED
    await after_cut.advance(HOUR_MS)
    assert await visible(after_cut) == ["A0", "A1", "A3", "k00000"]
    await after_cut.stop()


@on_node()
async def test_a_late_check_is_due_at_the_start(world: World) -> None:
    seq = await prepare(world)
    after_cut = await start_after_cut(world)
    after_cut.clock.advance(24 * HOUR_MS)
    assert due_checks(after_cut) == [seq] and due_checks(after_cut) == []
    await after_cut.stop()


async def send_two_halves(world: World, answers: list[str], delay: dict[str, int]) -> None:
    """Commit one transaction and roll back another one. Each answer is added to `answers`."""
    await world.start()
    first = await prepare(world, 2)
    answers.append("prepared")
    await world.checkpoint()
    assert await commit(world, first, **delay) is Outcome.COMMITTED
    answers.append("committed")
    await world.checkpoint()
    assert await roll_back(world, first + 1) is Outcome.ROLLED_BACK
    answers.append("rolled back")
    await world.stop()


def live_until_cut(crash_at: int | None, delay: dict[str, int]) -> tuple[World, list[str]]:
    """Run `send_two_halves` until the power is cut at a call of the disk. Returns the world and the answers."""
    files, answers = CutFiles(crash_at=crash_at), []  # type: ignore[var-annotated]
    world = World(files, ManualClock())
    run(until_cut(world, files, lambda: send_two_halves(world, answers, delay)))
    return world, answers


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "delay", [{}, {"delay_ms": 5_000}, {"delay_level": 2}], ids=["now", "later", "level"]
)
def test_a_power_cut_at_any_disk_call_ends_a_half_message_at_most_once(
    step: int, delay: dict[str, int]
) -> None:
    whole, answers = live_until_cut(None, delay)
    assert answers == ["prepared", "committed", "rolled back"]
    halves_after_cuts = 0
    for crash_at in range(1, whole.files.calls + 1, step):
        world, answers = live_until_cut(crash_at, delay)
        for survival in ("nothing", "everything"):
            after_cut = World(world.files.crash(survival=survival), world.clock)
            halves_after_cuts += run(count_ended(after_cut, answers, delay))
    assert halves_after_cuts > 20 // step  # otherwise the cuts came before any half message was in the log


async def count_ended(after_cut: World, answers: list[str], delay: dict[str, int]) -> int:
    """Start after a cut, end the half messages, and check their outcomes. Returns the number of half messages."""
    await after_cut.start()
    seq_by_id = {row["unique_key"]: row["seq"] for row in halves_in_log(after_cut)}
    assert not answers or len(seq_by_id) == 2
    open_seqs = [seq for seq, _ in after_cut.broker.transactions.open()]
    if seq_by_id:
        assert ("committed" in answers) <= (seq_by_id["A0"] not in open_seqs)
        assert ("rolled back" in answers) <= (seq_by_id["A1"] not in open_seqs)
        assert await commit(after_cut, seq_by_id["A0"], **delay) is Outcome.COMMITTED
        assert await roll_back(after_cut, seq_by_id["A1"]) is Outcome.ROLLED_BACK
    if delay:
        await after_cut.advance(5_000)
    assert await visible(after_cut) == ["A0"] * bool(seq_by_id)
    released = log(after_cut, Kind.RELEASE)
    assert [row["source_seq"] for row in released] == [seq_by_id[key] for key in ("A0",) if seq_by_id]
    assert all(row["store_ms"] >= (row["due_ms"] or 0) for row in released)
    assert len(log(after_cut, Kind.CANCEL)) == bool(seq_by_id)
    await after_cut.stop()
    await after_cut.abandon()
    return len(seq_by_id)


# ---- retention ------------------------------------------------------------------------------------------------


@on_node(retention_ms=HOUR_MS)
async def test_retention_keeps_the_row_of_a_half_message_until_it_has_ended(world: World) -> None:
    seq = await prepare(world)
    for _ in range(3):  # segments of 1 MiB
        await world.broker.send(batch(8, body=[bytes(100_000)] * 8))
    world.clock.advance(2 * HOUR_MS)
    await world.broker.send(batch(1))
    await world.checkpoint()
    await world.apply_retention()
    assert world.broker.log.reader.first_seq == 1
    after_cut = await start_after_cut(world)
    assert after_cut.broker.transactions.open() == [(seq, 0)]
    await after_cut.stop()
    assert await commit(world, seq) is Outcome.COMMITTED
    await world.checkpoint()
    await world.apply_retention()
    assert world.broker.log.reader.first_seq > seq
    assert await commit(world, seq) is Outcome.NOT_FOUND


@on_node()
async def test_a_checkpoint_lists_only_open_half_messages(world: World) -> None:
    await world.send("a", [None])
    await world.checkpoint()
    saved = checkpoint.load(world.files)
    assert saved is not None and saved.facts.halves == []
    await prepare(world)
    await world.checkpoint()
    saved = checkpoint.load(world.files)
    assert saved is not None and len(saved.facts.halves) == 1
