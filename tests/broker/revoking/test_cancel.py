"""Cancel: one definite verdict for each named message, wherever it is and whatever happens at the same time.

A scheduled message is in one of five places: in the wheel (due within the ten seconds loaded ahead), in the log's
tail, in a file of the table, released, or cancelled. `PLACES` puts one there. The verdict must not depend on the place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import InTurn, batch, on_node
from tests.crash.checker import check
from tests.crash.lives import run
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, SECOND_MS, World
from tests.crash_files import CrashFiles
from tests.node_fixture import running_node

from timeball.broker.revoking.cancel import cancel_rows, list_verdicts
from timeball.broker.revoking.scheduled_lookup import Candidate, LookupResult
from timeball.io.clock import ManualClock
from timeball.log.row_encoder import rows_of
from timeball.model import limits
from timeball.model.answers import Verdict
from timeball.model.errors import OutOfRange
from timeball.model.message import Int64Array, Kind
from timeball.schedule.scheduler import Scheduler

SOON_MS = 2 * SECOND_MS


async def said(world: World, **named: list[object]) -> list[str]:
    """Cancel the messages with these names. Return the verdicts without numbers and times."""
    return [verdict.verdict for verdict in await world.broker.cancel(**named)]


async def delivered(world: World) -> list[str]:
    """Return the ids of all visible rows, sorted."""
    return sorted(row.key for row in (await world.outcome()).rows)


# ---- a scheduled message in each place ------------------------------------------------------------------------
# Each function puts a message there and returns its id.


async def in_wheel(world: World) -> str:
    return (await world.send("a", [SOON_MS]))[0]


async def in_tail(world: World) -> str:
    return (await world.send("a", [FAR_MS]))[0]


async def in_table(world: World) -> str:
    key = await in_tail(world)
    await world.compact()
    assert world.broker.status()["schedule"]["tail_rows"] == 0
    return key


async def in_table_and_wheel(world: World) -> str:
    """Its row is in a file, from which the wheel has loaded it."""
    key = await in_table(world)
    await world.advance(FAR_MS - SOON_MS)
    await world.until(lambda: world.broker.status()["schedule"]["wheel_rows"] == 1, "it is near")
    return key


async def in_bulk_file(world: World) -> str:
    """Its row has never been in the log."""
    return (await world.bulk("a", [FAR_MS], 1))[0]


async def in_wheel_after_restart(world: World) -> str:
    key = await in_wheel(world)
    await world.restart()
    return key


async def in_table_without_checkpoint(world: World) -> str:
    key = await in_table(world)
    await world.stop()
    world.files.remove("checkpoint")
    await world.start()
    return key


PLACES: list[Callable[[World], object]] = [
    in_wheel, in_tail, in_table, in_table_and_wheel, in_bulk_file, in_wheel_after_restart,
    in_table_without_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@on_node()
async def test_a_pending_message_is_cancelled_once_and_never_delivered(world: World, place: Callable) -> None:
    key = await place(world)
    now_ms = world.clock.wall
    first, second = await world.broker.cancel(ids=[key]), await world.broker.cancel(ids=[key])
    assert [(verdict.subject, verdict.verdict, verdict.at_ms) for verdict in first] == [
        (key, "cancelled", now_ms)
    ]
    assert second == [Verdict(key, "already_cancelled", first[0].seq, now_ms)]
    await world.advance(HOUR_MS)
    assert await delivered(world) == []
    assert await said(world, ids=[key]) == ["already_cancelled"]


@pytest.mark.parametrize("place", PLACES)
@on_node()
async def test_a_cancel_of_a_delivered_message_reports_when_it_was_released(
    world: World, place: Callable
) -> None:
    key = await place(world)
    await world.advance(FAR_MS)  # the clock jumps, so the release is at the new time
    released = await world.broker.cancel(ids=[key])
    assert [(verdict.verdict, verdict.at_ms) for verdict in released] == [("released", world.clock.wall)]
    await world.advance(HOUR_MS)
    assert await world.broker.cancel(ids=[key]) == released, "a later cancel reports the same time"
    assert await delivered(world) == [key]


@pytest.mark.parametrize("place", PLACES)
@on_node()
async def test_a_cancel_survives_a_restart_and_a_power_failure(world: World, place: Callable) -> None:
    keys = [await place(world), (await world.send("a", [SOON_MS]))[0]]
    await world.cancel(keys)
    image = world.files.crash(survival="nothing")
    await world.restart()
    assert await said(world, ids=keys) == ["already_cancelled"] * 2
    await world.abandon()
    after_cut = World(image, world.clock)
    await after_cut.start()
    assert await said(after_cut, ids=keys) == ["already_cancelled"] * 2
    await after_cut.advance(HOUR_MS)
    assert await delivered(after_cut) == []
    await after_cut.stop()


# ---- names -----------------------------------------------------------------------------------------------------


@on_node()
async def test_id_key_and_number_name_the_same_scheduled_message(world: World) -> None:
    rows = batch(3, unique_key=["one", "two", "three"], keys=["k1", "k2 x", "k3"], delay_ms=[FAR_MS] * 3)
    first_seq = (await world.broker.send(rows)).first_seq
    by_id = await world.broker.cancel(ids=["one"])
    by_key = await world.broker.cancel(keys=["x"])
    by_seq = await world.broker.cancel(seqs=[first_seq + 2])
    verdicts = [*by_id, *by_key, *by_seq]
    assert [verdict.seq for verdict in verdicts] == [first_seq, first_seq + 1, first_seq + 2]
    assert {verdict.verdict for verdict in verdicts} == {"cancelled"}
    again = await world.broker.cancel(ids=["three"], keys=["k1"], seqs=[first_seq + 1])
    assert {(verdict.subject, verdict.verdict) for verdict in again} == {
        ("three", "already_cancelled"), ("k1", "already_cancelled"), (str(first_seq + 1), "already_cancelled"),
    }  # fmt: skip


@on_node()
async def test_a_cancel_by_key_gives_each_message_the_verdict_of_its_own_place(world: World) -> None:
    released, cancelled = await in_wheel(world), await in_tail(world)
    await world.cancel([cancelled])
    await world.advance(SOON_MS)
    in_file, in_bulk = await in_table(world), await in_bulk_file(world)
    waiting = [in_file, await in_tail(world), await in_wheel(world)]
    by_key = await world.broker.cancel(keys=["every"])  # the key of all messages that `World.send` sends
    # `World.bulk` writes rows without keys, so the cancel by key does not find the message of the bulk job.
    expected = {released: "released", cancelled: "already_cancelled", **dict.fromkeys(waiting, "cancelled")}
    verdict_by_number = {verdict.seq: verdict.verdict for verdict in by_key}
    number_by_id = {key: (await world.broker.cancel(ids=[key]))[0].seq for key in expected}
    assert {key: verdict_by_number[number] for key, number in number_by_id.items()} == expected
    assert len(by_key) == len(expected)
    await world.advance(HOUR_MS)
    assert await delivered(world) == sorted([released, in_bulk])


@on_node()
async def test_only_a_whole_key_or_a_whole_id_finds_a_message(world: World) -> None:
    columns = {"unique_key": ["id1", "id2", "id3"], "keys": ["ab abc", "b", None]}
    await world.broker.send(batch(3, **columns, delay_ms=[FAR_MS] * 3))
    for name in ("a", "bc", "AB", "id1"):
        assert await said(world, keys=[name]) == ["not_found"], name
    for name in ("ab", "b", "id", "id11", "ID1", ""):
        assert await said(world, ids=[name]) == ["not_found"], name
    assert await said(world, keys=["abc"], ids=["id2", "id3"]) == ["cancelled"] * 3


@on_node()
async def test_all_messages_with_the_same_id_are_cancelled(world: World) -> None:
    """A producer that sent twice has two scheduled messages, here one in the table and one in the log."""
    for _ in range(2):
        await world.broker.send(batch(1, unique_key=["same"], delay_ms=[FAR_MS]))
        await world.compact()
    verdicts = await world.broker.cancel(ids=["same"])
    assert [verdict.verdict for verdict in verdicts] == ["cancelled", "cancelled"]
    assert len({verdict.seq for verdict in verdicts}) == 2


@on_node()
async def test_a_message_that_a_request_names_several_times_is_cancelled_once(world: World) -> None:
    seq = (await world.broker.send(batch(1, unique_key=["x"], keys=["k"], delay_ms=[FAR_MS]))).first_seq
    verdicts = await world.broker.cancel(ids=["x", "x"], keys=["k"], seqs=[seq, seq])
    assert [verdict.subject for verdict in verdicts] == ["x", "x", "k", str(seq), str(seq)]
    assert [verdict.verdict for verdict in verdicts] == ["cancelled", *["already_cancelled"] * 4]
    rows = [row for part in world.broker.read_log(1, 1 << 62, [Kind.CANCEL]) for row in part.to_pylist()]
    assert [row["source_seq"] for row in rows] == [seq]


@on_node()
async def test_names_and_numbers_of_no_scheduled_message_are_not_found(world: World) -> None:
    """An immediate message, a RELEASE row, a reserved number, and numbers and names that nothing has."""
    immediate_id = (await world.send("a", [None]))[0]
    scheduled_id = await in_wheel(world)
    reserved = await world.broker.reserve(5)
    await world.advance(SOON_MS)
    release_seqs = [row.seq for row in (await world.outcome()).rows if row.key == scheduled_id]
    assert await said(world, ids=[immediate_id, "nobody"], keys=["nothing"]) == ["not_found"] * 3
    for seq in (*release_seqs, reserved, 0, -1, 1, 1 << 50):
        assert await said(world, seqs=[seq]) == ["not_found"], seq


@on_node()
async def test_a_message_without_id_and_keys_is_cancelled_by_its_number(world: World) -> None:
    accepted = await world.broker.send(batch(2, delay_ms=[SOON_MS, SOON_MS]))
    released, cancelled = accepted.first_seq, accepted.first_seq + 1
    assert await said(world, seqs=[cancelled]) == ["cancelled"]
    assert await said(world, seqs=[cancelled]) == ["already_cancelled"]
    await world.advance(SOON_MS)
    assert await said(world, seqs=[released]) == ["released"]


@on_node()
async def test_verdicts_are_in_the_order_of_the_requested_names(world: World) -> None:
    keys = await world.send("a", [FAR_MS] * 20)
    ids = [*keys[::-1], "nobody", keys[3]]
    assert [verdict.subject for verdict in await world.broker.cancel(ids=ids)] == ids


@on_node()
async def test_a_request_with_too_many_names_cancels_nothing(world: World) -> None:
    key = await in_tail(world)
    with pytest.raises(OutOfRange, match="split it"):
        await world.broker.cancel(ids=[key, *["nobody"] * limits.CANCELS_PER_REQUEST_MAX])
    assert await said(world, ids=[key]) == ["cancelled"]
    assert await said(world) == []


# ---- retention ----------------------------------------------------------------------------------------------


async def remove_all_rows(world: World) -> None:
    """Remove all present rows from the log: fill segments, so that retention removes the old ones."""
    before = world.broker.log.reader.next_seq
    for _ in range(4):
        await world.send("filler", [None] * 6, 100_000)
    world.clock.advance(1_000)
    for _ in range(2):
        await world.compact()
        await world.checkpoint()
        await world.apply_retention()
    assert world.broker.log.reader.first_seq >= before


@on_node(retention_ms=1)
async def test_a_cancel_is_remembered_after_retention_removed_its_row(world: World) -> None:
    key = (await world.send("a", [HOUR_MS]))[0]
    await world.compact()
    assert await said(world, ids=[key]) == ["cancelled"]
    await remove_all_rows(world)
    assert await said(world, ids=[key]) == ["already_cancelled"]
    await world.restart()
    assert await world.broker.cancel(ids=[key]) == [Verdict(key, "already_cancelled", 2, None)]
    await world.advance(2 * HOUR_MS)
    assert key not in await delivered(world)


@on_node(retention_ms=1)
async def test_a_message_in_the_table_is_cancelled_without_its_log_row(world: World) -> None:
    keys = await world.send("a", [HOUR_MS, HOUR_MS])
    await world.compact()
    await remove_all_rows(world)
    assert await said(world, ids=keys[:1], seqs=[3]) == ["cancelled", "cancelled"]
    assert await said(world, ids=keys) == ["already_cancelled"] * 2


@on_node(retention_ms=1)
async def test_settled_messages_without_rows_are_not_found_by_id_and_expired_by_number(world: World) -> None:
    keys = await world.send("a", [SOON_MS, SOON_MS])
    await world.cancel(keys[:1])
    await world.advance(SOON_MS)
    await remove_all_rows(world)
    assert await said(world, ids=keys, seqs=[2, 3]) == [*["not_found"] * 2, *["expired"] * 2]


@on_node(retention_ms=1)
async def test_a_message_that_only_a_file_still_contains_is_expired(world: World) -> None:
    """One was cancelled, the other released. The log no longer shows which, so neither is claimed."""
    keys = await world.send("a", [SOON_MS, SOON_MS])
    await world.compact()
    await world.cancel(keys[:1])
    await world.advance(SOON_MS)
    await world.advance(2_000)
    await remove_all_rows(world)
    assert await world.broker.cancel(ids=keys) == [
        Verdict(keys[0], "expired", 2),
        Verdict(keys[1], "expired", 3),
    ]
    await world.restart()
    assert await said(world, ids=keys, seqs=[2, 3]) == ["expired"] * 4
    assert await said(world, keys=["every"]) == ["expired"] * 2


# ---- races --------------------------------------------------------------------------------------------------

TURNS = st.integers(0, 15)  # iterations of the event loop
# Requests: the index of a message, and the turns before the request.
MOMENTS = st.lists(st.tuples(st.integers(0, 9), TURNS), min_size=1, max_size=12)


async def wait_turns(turns: int) -> None:
    """Let the event loop run for so many turns."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def race(
    world: World, moments: list[tuple[int, int]], due_after: int, in_table: bool = False, times: int = 1
) -> None:
    """Ten scheduled messages become due after `due_after` turns. The requests `moments` cancel some of them.

    `times`: how often a request names its message. Requests with one name share a look-up (test_lone_cancels.py).
    """
    keys = await world.send("a", [SOON_MS + i // 5 for i in range(10)])
    if in_table:
        await world.compact()

    async def cancel(index: int, turns: int) -> None:
        await wait_turns(turns)
        await world.cancel([keys[index]] * times)

    async def become_due() -> None:
        await wait_turns(due_after)
        world.clock.advance(SOON_MS)
        world.broker.ticker.wake()

    await asyncio.gather(become_due(), *(cancel(index, turns) for index, turns in moments))
    await world.advance(1)


async def faults(world: World) -> list[object]:
    """Let all messages become due, and compare the log with the answers that the callers got."""
    await world.advance(HOUR_MS)
    await world.consume()
    return list(check(world.observed, await world.outcome()))


@settings(max_examples=40)
@given(MOMENTS, TURNS, st.booleans(), st.integers(1, 2))
@on_node(InTurn)
async def test_a_race_of_cancels_and_a_release_has_one_winner(
    world: World, moments: list[tuple[int, int]], due_after: int, in_table: bool, times: int
) -> None:
    """`faults` reports a cancelled message that was delivered, one that got no outcome, and a wrong verdict."""
    await race(world, moments, due_after, in_table, times)
    for verdicts in world.observed.verdicts.values():  # of one message each
        assert verdicts[0] in ("cancelled", "released", "already_cancelled"), verdicts
        assert "released" not in verdicts or set(verdicts) == {"released"}, verdicts
        assert "released" in verdicts or verdicts.count("cancelled") == 1, verdicts
    assert await faults(world) == []


def test_cancels_and_releases_both_win_some_races() -> None:
    """Otherwise the race above might always have the same winner."""
    winners: set[str] = set()

    @on_node(InTurn)
    async def run_race(world: World, due_after: int) -> None:
        await race(world, [(index, index) for index in range(10)], due_after)
        winners.update(*world.observed.verdicts.values())

    for due_after in range(15):
        run_race(due_after=due_after)
    assert winners == {"cancelled", "released"}


def test_a_schedule_that_cancels_what_it_has_handed_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the decision of `Scheduler.cancel`, the checker reports faults."""

    def cancel_any(self: Scheduler, due_ms: Int64Array, seq: Int64Array) -> np.ndarray:
        return np.ones(len(seq), dtype=np.bool_)

    monkeypatch.setattr(Scheduler, "cancel", cancel_any)
    fault_kinds: set[str] = set()

    @on_node(InTurn)
    async def run_race(world: World) -> None:
        await race(world, [(index, index) for index in range(10)] * 2, due_after=5, times=2)
        fault_kinds.update(fault.kind for fault in await faults(world))

    run_race()
    assert fault_kinds >= {"resurrected", "doubled", "misjudged"}


@settings(max_examples=25)
@given(MOMENTS)
@on_node(InTurn)
async def test_cancels_during_a_compaction_cancel_each_message_once(
    world: World, moments: list[tuple[int, int]]
) -> None:
    keys = await world.send("a", [FAR_MS] * 10)
    to_cancel = sorted({index for index, _ in moments})

    async def cancel_all(turns: int) -> None:
        await wait_turns(turns)
        await world.cancel([keys[index] for index in to_cancel])

    await asyncio.gather(world.compact(), *(cancel_all(turns) for _, turns in moments))
    for index in to_cancel:
        assert world.observed.verdicts[keys[index]].count("cancelled") == 1
    assert await faults(world) == []
    assert len(await delivered(world)) == 10 - len(to_cancel)


@pytest.mark.parametrize("cut_after", [1, 2])
def test_a_power_cut_during_a_cancel_contradicts_no_answer(cut_after: int) -> None:
    """If the caller has its verdict, the message is cancelled. If not, it is cancelled or delivered, but not both."""

    async def main() -> None:
        files = CrashFiles()
        world = World(files, ManualClock())
        await world.start()
        keys = await world.send("a", [SOON_MS, FAR_MS])
        files.crash_at = files.calls + cut_after
        cancelling = asyncio.ensure_future(world.cancel(keys))
        await world.until(lambda: files.cut or cancelling.done(), "the cut or the answer")
        await world.abandon()
        for survival in ("nothing", "everything"):
            after_cut = World(files.crash(0, survival), replace(world.clock), deepcopy(world.observed))
            await after_cut.start()
            assert await faults(after_cut) == []
            await after_cut.stop()

    run(main())


# ---- on a real disk, and the parts ----------------------------------------------------------------------------


def test_a_cancel_on_a_real_disk_survives_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    columns = {"unique_key": ["x", "y"], "delay_ms": [FAR_MS, FAR_MS]}
    with running_node(tmp_path, clock) as node:
        node.run(node.broker.send(batch(2, **columns)))
        assert [verdict.verdict for verdict in node.run(node.broker.cancel(ids=["x"]))] == ["cancelled"]
    with running_node(tmp_path, clock) as node:
        verdicts = node.run(node.broker.cancel(ids=["x", "y", "z"]))
        assert [verdict.verdict for verdict in verdicts] == ["already_cancelled", "cancelled", "not_found"]


def candidate(subject: str, seq: int) -> Candidate:
    """A message that was never moved: its version is its number. Due at 70 + seq, accepted at 5 ms."""
    return Candidate(subject, seq, seq, 70 + seq, "orders", f"id{seq}", "k", 5)


def test_cancel_rows_have_the_number_due_time_and_names_of_their_message() -> None:
    rows = rows_of(cancel_rows([candidate("a", 3), candidate("b", 9)], now_ms=50))
    wanted = {"kind": Kind.CANCEL, "topic": "orders", "keys": "k", "store_ms": 50, "accepted_ms": 5}
    assert [{name: row[name] for name in wanted} for row in rows.to_pylist()] == [wanted, wanted]
    assert rows.column("source_seq").to_pylist() == [3, 9]
    assert rows.column("due_ms").to_pylist() == [73, 79]
    assert rows.column("unique_key").to_pylist() == ["id3", "id9"]


def test_each_requested_name_gets_a_verdict_in_the_order_of_the_request() -> None:
    names = ["released", "ended", "cancelled", "expired"]
    lookup = LookupResult(
        [candidate(name, number) for number, name in enumerate(names)], expired_numbers={"6": 6}
    )
    verdicts = [
        Verdict("", "released", 0, 7), Verdict("", "already_cancelled", 1, 8), Verdict("", "cancelled", 2, 50),
        Verdict("", "expired", 3),
    ]  # fmt: skip
    requested = ["expired", "cancelled", "cancelled", "ended", "released", "unknown", "6"]
    assert list_verdicts(requested, lookup, dict(enumerate(verdicts))) == [
        Verdict("expired", "expired", 3),
        Verdict("cancelled", "cancelled", 2, 50),
        Verdict("cancelled", "already_cancelled", 2, 50),  # named the second time
        Verdict("ended", "already_cancelled", 1, 8),
        Verdict("released", "released", 0, 7),
        Verdict("unknown", "not_found"),
        Verdict("6", "expired", 6),
    ]


def test_of_one_name_the_message_settled_now_comes_first_and_then_the_newest() -> None:
    lookup = LookupResult([candidate("a", number) for number in (1, 2, 3, 4)])
    words = {1: "released", 2: "cancelled", 3: "released", 4: "already_cancelled"}
    verdicts = {number: Verdict("", word, number, 5) for number, word in words.items()}
    assert [verdict.seq for verdict in list_verdicts(["a"], lookup, verdicts)] == [2, 4, 3, 1]


def test_a_cancel_without_a_time_is_hidden_by_a_newer_message_with_the_id() -> None:
    ids = {1: "x", 2: "x", 3: "y"}  # by number
    lookup = LookupResult(
        [
            msgspec.structs.replace(candidate("a", number), unique_key=message_id)
            for number, message_id in ids.items()
        ]
    )
    times_ms = {1: None, 2: None, 3: 9}
    verdicts = {number: Verdict("", "already_cancelled", number, at_ms) for number, at_ms in times_ms.items()}
    assert [verdict.seq for verdict in list_verdicts(["a"], lookup, verdicts)] == [3, 2]
    # With a time, the log has the CANCEL row of the first message, which therefore is reported, too.
    verdicts[1] = Verdict("", "already_cancelled", 1, 7)
    assert [verdict.seq for verdict in list_verdicts(["a"], lookup, verdicts)] == [3, 2, 1]
