"""The checkpoint: whole or not at all; and the last snapshot is found by its flag, and damage to it is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_files import CrashFiles, PowerCut
from tests.log.small_log import Log, batch, opened, reopened, run

from timeball.io.files import RealFiles
from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log.checkpoint import (
    HEADER,
    MAGIC,
    NAME,
    Checkpoint,
    Facts,
    JobFacts,
    bytes_behind,
    last_snapshot,
    load,
    parse,
    save,
    snapshot_row,
)
from timeball.model.errors import Corrupt
from timeball.model.message import without_secrets

int64s = st.integers(-(2**63), 2**63 - 1)
ranges = st.lists(st.tuples(st.integers(1, 2**40), st.integers(1, 10**6)), max_size=4)
facts = st.builds(
    Facts,
    seq=st.integers(0, 2**62),
    settled_before_ms=int64s,
    settled_before_seq=int64s,
    late=ranges,
    files=st.just([]),
    watermark=st.integers(1, 2**62),
    epochs=st.dictionaries(st.text(max_size=8), st.integers(0, 2**40), max_size=3),
    jobs=st.dictionaries(
        st.text(max_size=8),
        st.builds(JobFacts, st.integers(0, 2**40), st.integers(0, 2**40), st.text(max_size=4)),
        max_size=3,
    ),
    reserved=ranges,
    queues=st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.dictionaries(
            st.integers(0, 1023), st.tuples(st.integers(0, 9), st.integers(9, 2**40)), max_size=3
        ),
        max_size=3,
    ),
)
pairs = st.lists(st.tuples(int64s, int64s), max_size=20)


def checkpoint(known: Facts, settled: list[tuple[int, int]]) -> Checkpoint:
    due, seq = (np.array([pair[at] for pair in settled], np.int64) for at in (0, 1))
    return Checkpoint(known, due, seq)


def numbered(seq: int) -> Checkpoint:
    return checkpoint(
        Facts(seq=seq, files=[], queues={"orders": {0: (1, seq)}}), [(seq, n) for n in range(seq % 7)]
    )


def same(one: Checkpoint | None, other: Checkpoint) -> bool:
    return (
        one is not None
        and one.facts == other.facts
        and np.array_equal(one.settled_due, other.settled_due)
        and np.array_equal(one.settled_seq, other.settled_seq)
    )


@given(facts, pairs)
def test_it_comes_back_as_it_was_saved(known: Facts, settled: list[tuple[int, int]]) -> None:
    files = CrashFiles()
    saved = checkpoint(known, settled)
    save(files, saved)
    assert same(load(files), saved)
    assert same(parse(files.content(NAME)), saved)


def test_its_arrays_belong_to_the_reader() -> None:
    """The caller changes them; a mapping of the file must not be behind them."""
    files = CrashFiles()
    save(files, numbered(6))
    found = load(files)
    assert found is not None
    found.settled_due[0] = 99
    assert same(load(files), numbered(6))


def test_a_folder_without_one_is_a_new_folder() -> None:
    assert load(CrashFiles()) is None


def test_facts_that_a_later_version_may_drop_have_defaults_and_unknown_ones_are_ignored() -> None:
    payload = b'{"seq":9,"table_attach_seq":0}'
    payload = len(payload).to_bytes(8, "little") + bytes(8) + payload
    found = parse(HEADER.pack(MAGIC, len(payload), google_crc32c.value(payload)) + payload)
    assert same(found, checkpoint(Facts(seq=9), []))


# ---- damage ----------------------------------------------------------------------------------------------


def test_every_flipped_bit_and_every_missing_byte_is_noticed() -> None:
    files = CrashFiles()
    save(files, numbered(6))
    content = files.content(NAME)
    for at in range(len(content)):
        for damaged in (bytearray(content), bytearray(content)):
            damaged[at] ^= 1 << at % 8
            with pytest.raises(Corrupt):
                parse(bytes(damaged))
        with pytest.raises(Corrupt):
            parse(content[:at])
    with pytest.raises(Corrupt):
        parse(content + b"\0")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        bytes(15),
        (5).to_bytes(8, "little") + bytes(8) + b"{}",
        (2).to_bytes(8, "little") + bytes(8) + b"[]",
        (2).to_bytes(8, "little") + (2).to_bytes(8, "little") + b"{}" + bytes(31),
        (2).to_bytes(8, "little") + (2**63).to_bytes(8, "little") + b"{}" + bytes(32),
        (2**63).to_bytes(8, "little") + bytes(8) + b"{}",
    ],
    ids=["empty", "short", "cut facts", "no facts", "few pairs", "too many pairs", "endless facts"],
)
def test_a_right_checksum_over_nonsense_is_nonsense(payload: bytes) -> None:
    with pytest.raises(Corrupt):
        parse(HEADER.pack(MAGIC, len(payload), google_crc32c.value(payload)) + payload)


def test_one_that_cannot_be_trusted_is_none_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    files = CrashFiles()
    save(files, numbered(6))
    files.open(NAME).write_at(40, b"?")
    with caplog.at_level(logging.WARNING):
        assert load(files) is None
    assert "the log is replayed from its last snapshot" in caplog.text
    caplog.clear()
    save(files, numbered(7))
    assert same(load(files), numbered(7)), "and the next one is good again"
    assert not caplog.records


# ---- power cuts ------------------------------------------------------------------------------------------


def after_cuts(**forgotten: bool) -> list[Checkpoint | None]:
    """What is there after a cut at each call of a replacement."""
    whole = CrashFiles(**forgotten)
    save(whole, numbered(5))
    begun = whole.calls
    save(whole, numbered(13))
    found: list[Checkpoint | None] = []
    for cut in range(begun + 1, whole.calls + 1):
        files = CrashFiles(crash_at=cut, **forgotten)
        with pytest.raises(PowerCut):
            save(files, numbered(5))
            save(files, numbered(13))
        found += [load(files.crash(seed)) for seed in range(20)]
    return found


def test_whenever_the_power_goes_there_is_the_old_one_or_the_new_one() -> None:
    found = after_cuts()
    assert all(same(each, numbered(5)) or same(each, numbered(13)) for each in found)
    assert {each.facts.seq for each in found if each} == {5, 13}


@pytest.mark.parametrize("forgotten", ["forget_sync", "forget_sync_dir"])
def test_a_disk_that_forgets_would_be_noticed(forgotten: str) -> None:
    assert any(each is None for each in after_cuts(**{forgotten: True}))


def test_on_a_real_folder_too(tmp_path) -> None:  # type: ignore[no-untyped-def]
    files = RealFiles(tmp_path)
    save(files, numbered(5))
    save(files, numbered(13))
    assert same(cp.load(RealFiles(tmp_path)), numbered(13))
    assert files.list_dir(".") == [NAME]


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
            committed = last_snapshot(log.segments, first_seq)
            assert committed is not None and committed.facts.seq == 4
            assert last_snapshot(log.segments, 4) is None
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
