"""Snapshots: the last one is found by its flag, it says what was saved, and damage to it is told."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import Log, batch, opened, reopened, run

from timeball.errors import Corrupt
from timeball.log import format as fmt
from timeball.log.checkpoint import Checkpoint, Facts
from timeball.log.meta_rows import without_secrets
from timeball.log.snapshot import bytes_behind, last_snapshot, snapshot_row

SETTLED = np.array([5, 9], dtype=np.int64)


def state(seq: int) -> Checkpoint:
    facts = Facts(seq=seq, watermark=3, meta={"secret/receipts": msgspec.Raw(b'"c2VjcmV0"')})
    return Checkpoint(facts, SETTLED, SETTLED + 1)


async def append_snapshot(log: Log, seq: int) -> int:
    first_seq, durable = log.writer.append(snapshot_row(state(seq), 7), flags=fmt.SNAPSHOT)
    await durable
    return first_seq


async def fill(log: Log, commits: int) -> None:
    for _ in range(commits):
        await log.append(batch(log.writer.next_seq))


@pytest.mark.parametrize("commits_behind", [0, 3, 40])
def test_the_last_one_is_found_however_much_stands_behind_it(commits_behind: int) -> None:
    files = CrashFiles()

    async def main() -> None:
        async with opened(files) as log:
            assert last_snapshot(log.segments) is None
            for seq in (4, 10):
                await fill(log, 12)
                first_seq = await append_snapshot(log, seq)
            await fill(log, commits_behind)
            assert bytes_behind(log.segments, log.writer.next_seq) == 0
            assert bytes_behind(log.segments, 1) >= bytes_behind(log.segments, first_seq) > 0
        found = last_snapshot(reopened(files).segments)
        assert found is not None and found.facts == state(10).facts
        assert (found.settled_due == SETTLED).all() and (found.settled_seq == SETTLED + 1).all()

    run(main())


def test_it_has_a_frame_of_its_own_whatever_shares_its_commit() -> None:
    files = CrashFiles()

    async def main() -> None:
        async with opened(files) as log:
            one, two = log.writer.append(batch(1))[1], append_snapshot(log, 2)
            await asyncio.gather(one, two, log.writer.append(batch(5))[1])
            frames = [
                fmt.read_frame(log.segments.last.buffer, int(at)) for at in log.segments.last.frame_positions
            ]
            flagged = [(frame.rows, frame.flags) for frame in frames if frame is not None and frame.flags]
            assert flagged == [(1, fmt.SNAPSHOT)]

    run(main())


def test_its_value_is_shown_to_no_reader() -> None:
    row = snapshot_row(state(4), 7)
    assert row.column("body")[0].as_py()
    assert without_secrets(row).column("body")[0].as_py() is None


def test_damage_to_it_is_told_by_name() -> None:
    files = CrashFiles()

    async def main() -> None:
        async with opened(files) as log:
            await append_snapshot(log, 1)
            name, position = log.segments.last.name, int(log.segments.last.frame_positions[-1])
            with contextlib.closing(files.open(name)) as file:
                file.write_at(position + 200, b"??")
            with pytest.raises(Corrupt, match=name):
                last_snapshot(log.segments)

    run(main())


def test_a_flag_that_is_none_of_ours_is_damage() -> None:
    row = snapshot_row(state(1), 7)
    frame, parts = fmt.encode_frame(
        row, first_seq=1, span=1, append_ms=0, epoch=1, position=64, synced_to=64, flags=fmt.SNAPSHOT
    )
    data = bytearray(bytes(64) + b"".join(bytes(part) for part in parts))

    assert fmt.read_frame(pa.py_buffer(bytes(data)), 64) == frame
    data[64 + fmt.FLAGS_OFFSET] = 2
    with pytest.raises(Corrupt, match="no frame"):
        fmt.read_frame(pa.py_buffer(bytes(data)), 64)
