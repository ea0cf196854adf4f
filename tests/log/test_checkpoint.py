"""The checkpoint file is complete or absent. The last snapshot is found by its flag, and damage to it is reported."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Sequence
from itertools import pairwise

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
    STATE_HEADER,
    STATE_MAGIC,
    Checkpoint,
    Facts,
    JobFacts,
    decode,
    encode,
    last_snapshot,
    load,
    log_bytes_from,
    parse,
    save,
    snapshot_row,
)
from timeball.model.errors import Corrupt
from timeball.model.limits import FRAME_BYTES_MAX
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
columns = st.lists(st.tuples(int64s, int64s, int64s, int64s), max_size=9)


def checkpoint(
    some_facts: Facts,
    settled: list[tuple[int, int]],
    moved: Sequence[tuple[int, ...]] = (),
    woken: Sequence[tuple[int, ...]] = (),
) -> Checkpoint:
    """Build a checkpoint from rows instead of columns. `settled` are pairs (due_ms, seq)."""
    due = np.array([due_ms for due_ms, _ in settled], np.int64)
    seq = np.array([seq for _, seq in settled], np.int64)
    moved_columns, woken_columns = (np.array(rows, np.int64).reshape(-1, 4).T for rows in (moved, woken))
    return Checkpoint(some_facts, due, seq, moved_columns, woken_columns)


def checkpoint_at(seq: int) -> Checkpoint:
    """Build a small checkpoint of row `seq`, which differs from that of any other row."""
    return checkpoint(
        Facts(seq=seq, files=[], queues={"orders": {0: (1, seq)}}),
        [(seq, number) for number in range(seq % 7)],
    )


def are_equal(one: Checkpoint | None, other: Checkpoint) -> bool:
    return (
        one is not None
        and one.facts == other.facts
        and np.array_equal(one.settled_due, other.settled_due)
        and np.array_equal(one.settled_seq, other.settled_seq)
        and np.array_equal(one.moved, other.moved)
        and np.array_equal(one.woken, other.woken)
    )


@given(facts, pairs, columns, columns, st.sampled_from([1, 3, cp.PIECE_ROWS]))
def test_saved_checkpoint_is_loaded_back(
    some_facts: Facts,
    settled: list[tuple[int, int]],
    moved: list[tuple[int, ...]],
    woken: list[tuple[int, ...]],
    piece_rows: int,
) -> None:
    files = CrashFiles()
    saved = checkpoint(some_facts, settled, moved, woken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cp, "PIECE_ROWS", piece_rows)
        save(files, encode(saved))
    assert are_equal(load(files), saved)
    assert are_equal(parse(files.content(NAME)), saved)


@given(pairs, columns, columns, st.lists(st.integers(0, 20), max_size=3), st.sampled_from([1, 3, 8]))
def test_a_table_encoded_in_parts_is_decoded_whole(
    settled: list[tuple[int, int]],
    moved: list[tuple[int, ...]],
    woken: list[tuple[int, ...]],
    cuts: list[int],
    piece_rows: int,
) -> None:
    original = checkpoint(Facts(seq=7), settled, moved, woken)
    bounds = [0, *sorted(cuts), 99]  # of the parts; no table has as many rows
    tables = ((original.settled_due, original.settled_seq), original.moved, original.woken)
    parts = [
        [tuple(column[low:high] for column in table) for low, high in pairwise(bounds)] for table in tables
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cp, "PIECE_ROWS", piece_rows)
        pieces = list(cp.encoded_pieces(original.facts, *parts))
    assert are_equal(decode(b"".join(pieces)), original)


def test_loaded_arrays_are_copies() -> None:
    """The caller changes the arrays, so they must not be views of the mapped file."""
    files = CrashFiles()
    save(files, encode(checkpoint_at(6)))
    loaded = load(files)
    assert loaded is not None
    loaded.settled_due[0] = 99
    assert are_equal(load(files), checkpoint_at(6))


def test_missing_checkpoint_loads_as_none() -> None:
    assert load(CrashFiles()) is None


def payload_of_version_1(facts: bytes, due_and_seq: Sequence[int] = ()) -> bytes:
    """Build a payload as version 1 wrote it. `due_and_seq`: due times of the settled messages, then their numbers."""
    pairs = np.array(due_and_seq, "<i8")
    return struct.pack("<QQ", len(facts), len(pairs) // 2) + facts + pairs.tobytes()


def test_columns_of_version_1_are_read() -> None:
    facts = b'{"seq":9,"moved":[[7,1,3,8],[6,2,4,6]],"woken":[[5,70,2,6]]}'
    decoded = decode(payload_of_version_1(facts, [10, 20, 3, 4]))
    settled, moved, woken = [(10, 3), (20, 4)], [(7, 1, 3, 8), (6, 2, 4, 6)], [(5, 70, 2, 6)]
    assert are_equal(decoded, checkpoint(Facts(seq=9), settled, moved, woken))


def test_two_million_settled_and_woken_messages_need_a_twentieth_of_the_largest_frame() -> None:
    rows = 2_000_000
    due_ms = np.sort(np.random.default_rng(1).integers(0, 3_600_000, rows))
    seq = np.arange(rows) * 3
    woken = np.stack([seq, due_ms, seq + 1, due_ms + 7])
    row = snapshot_row(encode(Checkpoint(Facts(seq=1), due_ms, seq, woken=woken)), 7)
    assert pa.ipc.get_record_batch_size(row) < FRAME_BYTES_MAX // 20
    decoded = decode(row.column("body")[0].as_py())
    assert np.array_equal(decoded.woken, woken) and np.array_equal(decoded.settled_due, due_ms)


def test_missing_facts_have_defaults_and_unknown_ones_are_ignored() -> None:
    payload = payload_of_version_1(b'{"seq":9,"table_attach_seq":0}')  # the second one is unknown
    parsed = parse(HEADER.pack(MAGIC, len(payload), google_crc32c.value(payload)) + payload)
    assert are_equal(parsed, checkpoint(Facts(seq=9), []))


# ---- damage ----------------------------------------------------------------------------------------------


def test_every_flipped_bit_and_every_missing_byte_is_noticed() -> None:
    files = CrashFiles()
    save(files, encode(checkpoint_at(6)))
    content = files.content(NAME)
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            with pytest.raises(Corrupt):
                parse(bytes(damaged))
        with pytest.raises(Corrupt):
            parse(content[:position])
    with pytest.raises(Corrupt):
        parse(content + b"\0")


def payload_claiming(facts_bytes: int, pairs: int, content: bytes) -> bytes:
    """Build a payload of version 1 whose header claims these lengths."""
    return struct.pack("<QQ", facts_bytes, pairs) + content


def state_claiming(facts_bytes: int, settled: int, content: bytes) -> bytes:
    """Build a payload whose header claims these lengths."""
    return STATE_HEADER.pack(STATE_MAGIC, facts_bytes, settled, 0, 0) + content


def zstd(content: bytes) -> bytes:
    compressed: bytes = pa.compress(content, "zstd", asbytes=True)
    return compressed


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="empty"),
        pytest.param(bytes(15), id="short"),
        pytest.param(payload_claiming(5, 0, b"{}"), id="cut facts"),
        pytest.param(payload_claiming(2, 0, b"[]"), id="no facts"),
        pytest.param(payload_claiming(2, 2, b"{}" + bytes(31)), id="few pairs"),
        pytest.param(payload_claiming(2, 2**63, b"{}" + bytes(32)), id="too many pairs"),
        pytest.param(payload_claiming(2**63, 0, b"{}"), id="endless facts"),
        pytest.param(payload_claiming(3_005, 0, b'{"x":' + b"[" * 3_000), id="nested facts"),
        pytest.param(state_claiming(2, 0, b"{}"), id="not compressed"),
        pytest.param(state_claiming(2, 1, zstd(b"{}" + bytes(8))), id="few rows"),
        pytest.param(state_claiming(2**62, 0, zstd(b"{}")), id="endless facts of a state"),
        pytest.param(state_claiming(2, 2**63, zstd(b"{}")), id="endless rows"),
    ],
)
def test_valid_checksum_over_invalid_payload_is_corrupt(payload: bytes) -> None:
    with pytest.raises(Corrupt):
        parse(HEADER.pack(MAGIC, len(payload), google_crc32c.value(payload)) + payload)


def test_damaged_checkpoint_loads_as_none_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    files = CrashFiles()
    save(files, encode(checkpoint_at(6)))
    files.open(NAME).write_at(HEADER.size + 16, b"?")  # in the payload
    with caplog.at_level(logging.WARNING):
        assert load(files) is None
    assert "the log is replayed from its last snapshot" in caplog.text
    caplog.clear()
    save(files, encode(checkpoint_at(7)))
    assert are_equal(load(files), checkpoint_at(7)), "and the next one is good again"
    assert not caplog.records


# ---- power cuts ------------------------------------------------------------------------------------------


OLD, NEW = checkpoint_at(5), checkpoint_at(13)


def loaded_after_power_cuts(**forgotten: bool) -> list[Checkpoint | None]:
    """Replace OLD by NEW, with a power cut at each call of the second save. Returns what is loaded after each one."""
    uncut = CrashFiles(**forgotten)
    save(uncut, encode(OLD))
    first_calls = uncut.calls
    save(uncut, encode(NEW))
    loaded: list[Checkpoint | None] = []
    for cut in range(first_calls + 1, uncut.calls + 1):
        files = CrashFiles(crash_at=cut, **forgotten)
        with pytest.raises(PowerCut):
            save(files, encode(OLD))
            save(files, encode(NEW))
        loaded += [load(files.crash(seed)) for seed in range(20)]
    return loaded


def test_power_cut_leaves_the_old_checkpoint_or_the_new_one() -> None:
    checkpoints = loaded_after_power_cuts()
    assert all(are_equal(loaded, OLD) or are_equal(loaded, NEW) for loaded in checkpoints)
    assert {loaded.facts.seq for loaded in checkpoints if loaded} == {5, 13}, "both occur"


@pytest.mark.parametrize("forgotten", ["forget_sync", "forget_sync_dir"])
def test_disk_that_ignores_fsync_is_noticed(forgotten: str) -> None:
    """The control: without syncs, a power cut leaves no valid checkpoint."""
    assert any(loaded is None for loaded in loaded_after_power_cuts(**{forgotten: True}))


def test_checkpoint_is_saved_and_loaded_in_a_real_folder(tmp_path) -> None:  # type: ignore[no-untyped-def]
    files = RealFiles(tmp_path)
    save(files, encode(OLD))
    save(files, encode(NEW))
    assert are_equal(cp.load(RealFiles(tmp_path)), NEW)
    assert files.list_dir(".") == [NAME]


# ---- snapshots -------------------------------------------------------------------------------------------

SETTLED = np.array([5, 9], dtype=np.int64)


def state(seq: int) -> Checkpoint:
    """Build a state of row `seq` with two settled messages and a secret."""
    facts = Facts(seq=seq, watermark=3, meta={"secret/receipts": msgspec.Raw(b'"c2VjcmV0"')})
    return Checkpoint(facts, SETTLED, SETTLED + 1)


async def append_snapshot(log: Log, seq: int) -> int:
    """Append a snapshot of row `seq`. Returns the number of the snapshot's row."""
    first_seq, durable = log.writer.append(snapshot_row(encode(state(seq)), 7), flags=fmt.SNAPSHOT)
    await durable
    return first_seq


async def append_commits(log: Log, commits: int) -> None:
    for _ in range(commits):
        await log.append(batch(log.writer.next_seq))


@pytest.mark.parametrize("commits_after", [0, 3, 40])
def test_last_snapshot_is_found_with_any_rows_after_it(commits_after: int) -> None:
    files = CrashFiles()

    async def main() -> None:
        async with opened(files) as log:
            assert last_snapshot(log.segments) is None
            for seq in (4, 10):
                await append_commits(log, 12)
                snapshot_seq = await append_snapshot(log, seq)
            await append_commits(log, commits_after)
            earlier = last_snapshot(log.segments, snapshot_seq)
            assert earlier is not None and earlier.facts.seq == 4, "only rows below `to_seq` count"
            assert last_snapshot(log.segments, 4) is None
            assert log_bytes_from(log.segments, log.writer.next_seq) == 0
            assert log_bytes_from(log.segments, 1) >= log_bytes_from(log.segments, snapshot_seq) > 0
        snapshot = last_snapshot(reopened(files).segments)
        assert snapshot is not None and snapshot.facts == state(10).facts
        assert (snapshot.settled_due == SETTLED).all() and (snapshot.settled_seq == SETTLED + 1).all()

    run(main())


def test_snapshot_has_a_frame_of_its_own_in_any_commit() -> None:
    files = CrashFiles()

    async def main() -> None:
        async with opened(files) as log:
            before = log.writer.append(batch(1))[1]
            await asyncio.gather(before, append_snapshot(log, 2), log.writer.append(batch(5))[1])
            last = log.segments.last
            frames = [fmt.read_frame(last.buffer, int(position)) for position in last.frame_positions]
            flagged = [(frame.rows, frame.flags) for frame in frames if frame is not None and frame.flags]
            assert flagged == [(1, fmt.SNAPSHOT)]

    run(main())


def test_value_of_a_snapshot_is_hidden_from_readers() -> None:
    row = snapshot_row(encode(state(4)), 7)
    assert row.column("body")[0].as_py()
    assert without_secrets(row).column("body")[0].as_py() is None


def test_damaged_snapshot_is_reported_with_its_file() -> None:
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


def test_unknown_flag_is_corrupt() -> None:
    row = snapshot_row(encode(state(1)), 7)
    frame, parts = fmt.encode_frame(
        row, first_seq=1, span=1, append_ms=0, epoch=1, position=64, synced_to=64, flags=fmt.SNAPSHOT
    )
    data = bytearray(bytes(64) + b"".join(bytes(part) for part in parts))

    assert fmt.read_frame(pa.py_buffer(bytes(data)), 64) == frame
    data[64 + fmt.FLAGS_OFFSET] = 2
    with pytest.raises(Corrupt, match="no frame"):
        fmt.read_frame(pa.py_buffer(bytes(data)), 64)
