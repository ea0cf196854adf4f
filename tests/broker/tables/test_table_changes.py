"""Changes of the pending table: one at a time, complete or absent, and the same change only once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import InTurn, batch, on_node
from tests.broker.tables.test_compact import in_table
from tests.crash.checker import check
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, World
from tests.starving import no_descriptors, no_room
from tests.table.small_table import attachment, table_rows, write
from tests.table.test_catalog import seqs

from timeball.cli.output import ExitCode, explain
from timeball.model import limits
from timeball.model.errors import (
    Corrupt,
    DiskFailed,
    InvalidMessage,
    NotFound,
    OutOfRange,
    OverLimit,
    Unavailable,
)
from timeball.model.message import Kind, lateness_ms
from timeball.table.attachment import Attachment, FileEntry, decode_change


def write_files(world: World, first_seq: int, rows: int) -> list[FileEntry]:
    """Write data files with scheduled messages due in an hour."""
    now_ms = world.clock.wall
    return write(world.files, table_rows([now_ms + HOUR_MS] * rows, first_seq=first_seq), now_ms)


async def prepare_bulk(world: World, rows: int, **fields: Any) -> Attachment:
    """Reserve numbers and write the files of a bulk attach, which the caller attaches."""
    first_seq = await world.broker.reserve(rows)
    files = write_files(world, first_seq, rows)
    return attachment(files, **{"job": "bulk", "ranges": [(first_seq, rows)], **fields})


def delta_seqs(world: World) -> list[int]:
    """The numbers of the rows that another program reads from the table."""
    return seqs(DeltaTable(world.broker.status()["table"]["uri"]))


# ---- reserve ------------------------------------------------------------------------------------------------


@on_node()
async def test_reserved_numbers_are_not_reused_even_after_a_restart(world: World) -> None:
    await world.send("a", [None])
    first, second = await asyncio.gather(world.broker.reserve(10), world.broker.reserve(5))
    # Rows 1 and 2 are topic "a" and its message. Rows 3 and 14 are the reservations.
    assert (first, second) == (4, 15)
    assert (await world.broker.send(batch(1))).first_seq == 21  # row 20 is its topic
    await world.restart()
    assert world.broker.attach_state.reserved == {4: 10, 15: 5}
    assert (await world.broker.send(batch(1))).first_seq == 22
    with pytest.raises(InvalidMessage):
        await world.broker.reserve(0)


# ---- attach -------------------------------------------------------------------------------------------------


@on_node()
async def test_rows_that_were_due_before_their_attach_are_not_late(world: World) -> None:
    bulk = await prepare_bulk(world, 3)  # due in an hour
    await world.advance(25 * HOUR_MS)
    await world.broker.attach(bulk)
    await world.until(lambda: world.broker.lateness.released == 3, "all are released")
    assert world.broker.lateness.max_ms == 0
    end_seq = world.broker.log.reader.next_seq
    rows = [row for part in world.broker.read_log(1, end_seq, [Kind.RELEASE]) for row in part.to_pylist()]
    assert {lateness_ms(row["due_ms"], row["accepted_ms"], row["store_ms"]) for row in rows} == {0}


@on_node()
async def test_the_lateness_of_rows_due_after_their_attach_counts_from_their_due_time(
    world: World,
) -> None:
    await world.broker.attach(await prepare_bulk(world, 3))
    world.clock.advance(2 * HOUR_MS)  # in one step, as if the broker had not run for an hour
    world.broker.ticker.wake()
    await world.until(lambda: world.broker.lateness.released == 3, "all are released")
    assert world.broker.lateness.max_ms == HOUR_MS


@on_node()
async def test_messages_of_a_bulk_attach_are_in_the_table_and_released_when_due(world: World) -> None:
    keys = await world.bulk("a", [FAR_MS, HOUR_MS, 5], 1)
    assert len(delta_seqs(world)) == 3
    await world.advance(HOUR_MS)
    await world.consume()
    assert sorted(row.key for row in (await world.outcome()).rows) == sorted(keys)
    assert check(world.observed, await world.outcome()) == []


@on_node()
async def test_a_repeated_attach_changes_nothing(world: World) -> None:
    """A job may repeat an attach at the same time, or after a restart."""
    change = await prepare_bulk(world, 3)
    answers = await asyncio.gather(*(world.broker.attach(change) for _ in range(3)))
    assert [answer.repeated for answer in answers] == [False, True, True]
    assert {answer.version for answer in answers} == {1}
    await world.restart()
    assert (await world.broker.attach(change)).repeated
    assert len(in_table(world)) == len(delta_seqs(world)) == 3
    older = attachment([], job="bulk", job_id=change.job_id, epoch=change.epoch - 1)
    assert (await world.broker.attach(older)).repeated


@on_node()
async def test_a_refused_attach_changes_nothing_and_may_be_repeated_with_valid_fields(world: World) -> None:
    valid = await prepare_bulk(world, 3)
    await world.send("a", [FAR_MS])
    compact = {"job": "compact", "from_seq": 2, "to_seq": 3}
    invalid: list[tuple[type[Exception], dict[str, Any]]] = [
        (OutOfRange, {"ranges": [(valid.ranges[0][0], 2)]}),
        (OutOfRange, {**compact, "files": [], "ranges": []}),
        (NotFound, {"job": "rewrite", "ranges": [], "removes": ["bucket=2026-11/none.parquet"]}),
        (OverLimit, {"files": valid.files * (limits.ATTACH_FILES_MAX + 1)}),
    ]
    for error, fields in invalid:
        with pytest.raises(error):
            arguments = {"files": valid.files, "job": "bulk", "ranges": valid.ranges, **fields}
            await world.broker.attach(attachment(**arguments))
    world.files.replace(f"pending/{valid.files[0].path}", b"PAR1 no footer")
    with pytest.raises(Corrupt, match="restore this file"):
        await world.broker.attach(valid)
    assert (in_table(world), world.broker.status()["table"]["version"]) == ([], 0)
    rewritten = write_files(world, valid.ranges[0][0], 3)
    complete = attachment(rewritten, job="bulk", ranges=valid.ranges)
    assert not (await world.broker.attach(complete)).repeated
    assert len(in_table(world)) == 3


@on_node()
async def test_a_compact_with_a_wrong_begin_is_refused_with_the_watermark(world: World) -> None:
    await world.send("a", [FAR_MS] * 4)
    await world.compact()
    with pytest.raises(OutOfRange, match="the watermark is 6"):
        await world.broker.attach(attachment([], job="compact", from_seq=1, to_seq=7, job_id="another"))


@on_node()
async def test_an_attach_is_completed_when_its_caller_disconnects(world: World) -> None:
    change = await prepare_bulk(world, 3)
    caller = asyncio.ensure_future(world.broker.attach(change))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert (await world.broker.attach(change)).repeated
    assert len(in_table(world)) == len(delta_seqs(world)) == 3


@pytest.mark.parametrize("call", range(1, 12))
@on_node(failing=True)
async def test_a_disk_failure_during_an_attach_stops_the_broker_or_refuses_the_attach(
    world: World, call: int
) -> None:
    """A broker never continues with a log and a table that differ. `call`: the call to the disk that fails."""
    change = await prepare_bulk(world, 3)
    before = world.files.calls
    world.files.fail_at(before + call, DiskFailed("the disk is gone"))
    try:
        await world.broker.attach(change)
        # The attach makes fewer calls, so no call has failed.
        assert world.files.calls - before < call
        return
    except Exception as error:
        assert "disk is gone" in str(error) or "has stopped" in str(error)
    changes = [
        decode_change(body)
        for part in world.broker.read_log(1, 1 << 60, [Kind.TABLE])
        for body in part.column("body").to_pylist()
    ]
    logged_attaches = [change for change in changes if isinstance(change, Attachment)]
    assert world.failure is not None or not logged_attaches
    after_failure = World(world.files.crash(survival="everything"), world.clock)
    await after_failure.start()
    repeated = (await after_failure.broker.attach(change)).repeated
    # Without a row that the reader shows, the row may be on the disk all the same.
    assert repeated or not logged_attaches
    assert len(in_table(after_failure)) == len(delta_seqs(after_failure)) == 3
    await after_failure.stop()


def fails_in_delta(world: World, failing: Callable[[], AbstractContextManager[None]]) -> ExitStack:
    """From the next commit of the Delta table on, the library's system calls fail, until this is closed."""
    stack, external = ExitStack(), world.files.external

    def external_that_fails(name: str) -> str:
        path = external(name)
        stack.enter_context(failing())
        return path

    world.files.external = external_that_fails  # type: ignore[method-assign]
    stack.callback(setattr, world.files, "external", external)
    return stack


@pytest.mark.parametrize("failing", [no_descriptors, no_room])
@on_node(failing=True)
async def test_a_delta_commit_that_fails_loses_nothing_at_the_next_start(
    world: World, failing: Callable[[], AbstractContextManager[None]]
) -> None:
    """The log contains the attach, and the table does not. A checkpoint must not count the attach as done."""
    await world.send("a", [FAR_MS, FAR_MS, HOUR_MS])
    with fails_in_delta(world, failing), pytest.raises(DiskFailed, match="pending/_delta_log") as raised:
        await world.compact()
    assert world.failure is raised.value
    assert explain(raised.value)[1] == ExitCode.STORAGE and "os error" in explain(raised.value)[0]
    with pytest.raises(Unavailable, match="in the middle"):
        await world.broker.mover.compact(even_without_rows=True)
    await world.checkpoint()
    await world.stop()
    await world.start()
    await world.advance(HOUR_MS)
    await world.consume()
    assert check(world.observed, await world.outcome()) == []
    assert len(delta_seqs(world)) == 3


# ---- compact ------------------------------------------------------------------------------------------------


def data_files(world: World) -> list[str]:
    """The paths of all data files on the disk, also of those that are not part of the table."""
    buckets = [name for name in world.files.list_dir("pending") if name.startswith("bucket=")]
    return [f"{bucket}/{name}" for bucket in buckets for name in world.files.list_dir(f"pending/{bucket}")]


@on_node()
async def test_a_lower_maximum_delay_does_not_end_compaction(world: World) -> None:
    """Messages that were accepted under the old limit are moved to the table, and rewritten there."""
    await world.send("a", [2 * HOUR_MS] * 3)
    await world.restart(delay_ms_max=HOUR_MS)
    assert (await world.broker.compact()).watermark == world.broker.status()["watermark"]
    await world.rewrite(1)
    assert len(in_table(world)) == len(delta_seqs(world)) == 3


@on_node()
async def test_files_of_a_compaction_that_is_refused_are_deleted(world: World) -> None:
    """Another compactor moves the watermark while the broker writes the same rows."""
    await world.send("a", [FAR_MS] * 2)
    await world.send("a", [None])
    other = write_files(world, 2, 2)
    change = attachment(other, job="compact", job_id="another", from_seq=1, to_seq=4)
    async with world.broker.mover.lock:
        attaching = asyncio.ensure_future(world.broker.attach(change))
        await asyncio.sleep(0)
        compacting = asyncio.ensure_future(world.broker.compact())
        await world.until(lambda: len(data_files(world)) == 2, "the broker has written its file")
    await attaching
    with pytest.raises(OutOfRange, match="the watermark is"):
        await compacting
    assert data_files(world) == [entry.path for entry in other]


@on_node()
async def test_a_compaction_without_rows_attaches_nothing(world: World) -> None:
    assert await world.broker.compact() is None
    await world.send("a", [None] * 3)
    assert await world.broker.compact() is None
    assert world.broker.status()["watermark"] == 1
    assert (await world.broker.mover.compact(even_without_rows=True)).watermark == 5
    assert world.broker.status()["log"]["next_seq"] == 6


VERBS = st.lists(
    st.sampled_from(["send", "compact", "bulk", "merge", "checkpoint", "cancel"]), min_size=2, max_size=8
)


@settings(max_examples=30)
@given(VERBS, st.integers(0, 3))
@on_node(InTurn)
async def test_overlapping_changes_of_the_table_lose_and_double_no_message(
    world: World, verbs: list[str], loop_turns: int
) -> None:
    """The changes begin `loop_turns` iterations of the loop apart, without waiting for each other."""
    first = await world.send("a", [FAR_MS, HOUR_MS, 5])

    async def later(number: int, verb: str) -> None:
        for _ in range(number * loop_turns):
            await asyncio.sleep(0)
        if verb == "send":
            await world.send("a", [FAR_MS, None])
        elif verb == "bulk":
            await world.bulk("a", [FAR_MS, HOUR_MS], number + 1)
        elif verb == "cancel":
            await world.cancel(first[:1])
        else:
            await getattr(world, verb)()

    # The attaches of one bulk job must have ascending epochs, so each has the number of its step.
    await asyncio.gather(*(later(number, verb) for number, verb in enumerate(verbs)))
    assert sorted(row["seq"] for row in in_table(world)) == delta_seqs(world)
    await world.restart()
    await world.advance(2 * HOUR_MS)
    await world.consume()
    assert check(world.observed, await world.outcome()) == []
