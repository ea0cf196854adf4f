"""Golden files: bytes on users' disks are always read, and written the same until a format has a new version.

`tests/golden/` has one small file of each format of version 1, and its content is written out
here, not computed. Two things are tested of each file: that it has this content, and that writing this content today
gives the same bytes. The first must never fail again. The second fails when a format has changed unnoticed.

A new version of a format gets new files beside the old ones, and a reader for both:

    1. give the format its new version, and its page in docs/formats/ a row under "Versions"
    2. add the new file's name to `WRITTEN` here, keep the old name in `READ`
    3. python -m tests.test_golden      (from the root; writes the missing files of `WRITTEN`)

A file that has once been released is never written again. If a new pyarrow gives other bytes for the same rows, and
reads the old ones, that is no new version: then `WRITTEN` gets a file of its own for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from tests.crash_files import CrashFiles

from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log import queue_index as queue_format
from timeball.log import recovery
from timeball.log.segment import FOLDER, Segment, segment_name
from timeball.model.errors import Corrupt
from timeball.model.key_hash import KeyRun, hash_keys
from timeball.model.message import LOG_SCHEMA, SCHEMA_VERSION, Kind
from timeball.node.inspect_folder import FolderDump, InspectedFrame
from timeball.table import attachment as att

GOLDEN = Path(__file__).parent / "golden"
DUE_MS = 1_767_227_400_000  # 2026-01-01T00:30:00Z
ACCEPTED_MS = 1_767_225_600_123
ATTACH = (
    b'{"change":"attach","job":"compact","job_id":"broker","epoch":7,"files":[{"path":"bucket=2026-01-01/'
    b'0123456789abcdef0123456789abcdef.parquet","bucket":"2026-01-01","rows":1,"size_bytes":4321,'
    b'"min_due_ms":1767227400000,"max_due_ms":1767227400000,"min_seq":101,"max_seq":101}],'
    b'"removes":[],"from_seq":1,"to_seq":116,"ranges":[],"digest":""}'
)

# ---- the content of the files ----------------------------------------------------------------------------

# The log: first_seq -> the rows of a frame, without the columns that are null.
PRODUCER: dict[str, Any] = {
    "born_ms": 1_767_225_599_990,
    "born_host": "10.0.0.7:51234",
    "flag": 3,
    "sys_flag": 0,
}
SCHEDULED: dict[str, Any] = {
    "topic": "orders", "queue_id": -1, "tag": "close", "keys": "order-17 änne", "unique_key": "A17",
    "body": b"close order 17", "properties": "region\x01eu\x02", "reconsume_times": 1, "due_ms": DUE_MS, **PRODUCER,
}  # fmt: skip
FRAMES: dict[int, list[dict[str, Any]]] = {
    100: [
        {
            "kind": 1, "topic": "orders", "queue_id": 2, "queue_offset": 40, "unique_key": "A16", "body": b"\x00\xff",
            "store_ms": ACCEPTED_MS, "store_host": "10.0.0.1:7400", **PRODUCER,
        },
        {"kind": 2, "store_ms": ACCEPTED_MS, "store_host": "10.0.0.1:7400", **SCHEDULED},
    ],
    102: [{"kind": 6, "body": b'{"change":"reserve","rows":10}', "store_ms": ACCEPTED_MS}],
    113: [
        {
            "kind": 4, **SCHEDULED, "queue_id": 1, "queue_offset": 7, "store_ms": DUE_MS + 1,
            "accepted_ms": ACCEPTED_MS, "source_seq": 101,
        },
        {"kind": 5, "due_ms": DUE_MS, "store_ms": DUE_MS + 1, "accepted_ms": ACCEPTED_MS, "source_seq": 105},
        {"kind": 6, "body": ATTACH, "store_ms": DUE_MS + 1},
    ],
}  # fmt: skip
# first_seq -> position, length, span, append_ms, synced_to: two commits, the first of two frames.
HEADERS = {
    100: (64, 1856, 2, ACCEPTED_MS, 64),
    102: (1920, 1664, 11, ACCEPTED_MS, 64),
    113: (3584, 2304, 3, DUE_MS + 1, 3584),
}
# Transactions, which came later: a half message and its end, and the fact that one is open.
HALF: dict[str, Any] = {
    "topic": "orders", "queue_id": 3, "unique_key": "A18", "body": b"pay order 18",
    "properties": "TRAN_MSG\x01true\x02PGROUP\x01payers\x02", "reconsume_times": 0, **PRODUCER, "sys_flag": 4,
}  # fmt: skip
TRANSACTION_FRAMES: dict[int, list[dict[str, Any]]] = {
    100: [{"kind": 2, "store_ms": ACCEPTED_MS, "store_host": "10.0.0.1:7400", **HALF}],
    101: [
        {
            "kind": 5, "topic": "orders", "queue_id": -1, "unique_key": "A18", "body": b"asked 15 times",
            "store_ms": ACCEPTED_MS + 1, "accepted_ms": ACCEPTED_MS, "source_seq": 100,
        },
    ],
}  # fmt: skip
TRANSACTION_HEADERS = {
    100: (64, 1664, 1, ACCEPTED_MS, 64),
    101: (1728, 1600, 1, ACCEPTED_MS + 1, 1728),
}
# A scheduled message of a delay level, and its release at the tenth second.
LEVELLED: dict[str, Any] = {
    "tag": "close", "keys": "order-19", "unique_key": "A19", "body": b"close order 19",
    "properties": "TAGS\x01close\x02DELAY\x013\x02REAL_TOPIC\x01orders\x02REAL_QID\x01-1\x02",
    "store_host": "10.0.0.1:7400", "reconsume_times": 0, "due_ms": ACCEPTED_MS + 10_000, **PRODUCER,
}  # fmt: skip
LEVEL_FRAMES: dict[int, list[dict[str, Any]]] = {
    100: [
        {
            "kind": 2, "topic": "SCHEDULE_TOPIC_XXXX", "queue_id": 2, "queue_offset": 5, "store_ms": ACCEPTED_MS,
            **LEVELLED,
        },
    ],
    101: [
        {
            "kind": 4, "topic": "orders", "queue_id": 1, "queue_offset": 8, "store_ms": ACCEPTED_MS + 10_000,
            "accepted_ms": ACCEPTED_MS, "source_seq": 100, **LEVELLED,
        },
    ],
}  # fmt: skip
LEVEL_HEADERS = {
    100: (64, 1664, 1, ACCEPTED_MS, 64),
    101: (1728, 1664, 1, ACCEPTED_MS + 10_000, 1728),
}
# A scheduled message that a cascade keeps, and its second row an hour later.
HOPPING: dict[str, Any] = {
    "topic": "orders", "queue_id": -1, "tag": "remind", "keys": "order-20", "unique_key": "A20",
    "body": b"remind order 20", "store_host": "10.0.0.1:7400", "reconsume_times": 0,
    "due_ms": ACCEPTED_MS + 3_910_000, **PRODUCER,
}  # fmt: skip
MOVED_FRAMES: dict[int, list[dict[str, Any]]] = {
    100: [{"kind": 2, "store_ms": ACCEPTED_MS, "properties": "TIMING-LIST\x015,3\x02", **HOPPING}],
    101: [
        {
            "kind": 3, "store_ms": ACCEPTED_MS + 3_600_000, "accepted_ms": ACCEPTED_MS, "source_seq": 100,
            "properties": "TIMING-LIST\x013\x02", **HOPPING,
        },
    ],
    102: [
        {
            "kind": 3, "store_ms": ACCEPTED_MS + 3_600_001, "accepted_ms": ACCEPTED_MS, "source_seq": 100,
            "from_due_ms": ACCEPTED_MS + 3_910_000, **HOPPING, "due_ms": ACCEPTED_MS + 3_700_000,
        },
    ],
    103: [
        {
            "kind": 4, "queue_offset": 9, "store_ms": ACCEPTED_MS + 3_700_000, "accepted_ms": ACCEPTED_MS,
            "source_seq": 100, "version_seq": 102, **HOPPING, "queue_id": 1, "due_ms": ACCEPTED_MS + 3_700_000,
        },
    ],
}  # fmt: skip
MOVED_HEADERS = {
    100: (64, 1600, 1, ACCEPTED_MS, 64),
    101: (1664, 1600, 1, ACCEPTED_MS + 3_600_000, 1664),
    102: (3264, 1600, 1, ACCEPTED_MS + 3_600_001, 3264),
    103: (4864, 1600, 1, ACCEPTED_MS + 3_700_000, 4864),
}
# State of the broker: a topic before its first message, and a value that is deleted.
META_FRAMES: dict[int, list[dict[str, Any]]] = {
    100: [
        {"kind": 7, "unique_key": "topic/orders", "body": b'{"queues":8}', "store_ms": ACCEPTED_MS},
        {
            "kind": 1,
            "topic": "orders",
            "queue_id": 1,
            "queue_offset": 0,
            "body": b"first",
            "store_ms": ACCEPTED_MS,
        },
    ],
    102: [
        {"kind": 7, "unique_key": "offsets/g@orders", "body": b'{"1":1}', "store_ms": ACCEPTED_MS + 1_000},
        {"kind": 7, "unique_key": "group/g", "body": b"", "store_ms": ACCEPTED_MS + 1_000},
    ],
    # A campaign is paused.
    104: [
        {
            "kind": 7, "unique_key": "campaign/spring", "store_ms": ACCEPTED_MS + 2_000,
            "body": b'{"state":"paused","since_ms":1795264388000,"planned_ms":1795264387000,"planned_seq":100,'
            b'"rows":3,"ranges":[[90,3]],"last_due_ms":1795264389000,"held_from_ms":1795264388500}',
        },
    ],
}  # fmt: skip
META_HEADERS = {
    100: (64, 1792, 2, ACCEPTED_MS, 64),
    102: (1856, 1792, 2, ACCEPTED_MS + 1_000, 1856),
    104: (3648, 1792, 1, ACCEPTED_MS + 2_000, 3648),
}
LOGS = {
    "commit-log-1-meta.log": (META_FRAMES, META_HEADERS),
    "commit-log-1.log": (FRAMES, HEADERS),
    "commit-log-1-transactions.log": (TRANSACTION_FRAMES, TRANSACTION_HEADERS),
    "commit-log-1-levels.log": (LEVEL_FRAMES, LEVEL_HEADERS),
    "commit-log-1-moved.log": (MOVED_FRAMES, MOVED_HEADERS),
}
ATTACHMENT = att.Attachment(
    job="compact",
    job_id="broker",
    epoch=7,
    files=[
        att.FileEntry(
            path="bucket=2026-01-01/0123456789abcdef0123456789abcdef.parquet",
            bucket="2026-01-01",
            rows=1,
            size_bytes=4321,
            min_due_ms=DUE_MS,
            max_due_ms=DUE_MS,
            min_seq=101,
            max_seq=101,
        )
    ],
    from_seq=1,
    to_seq=116,
)
KEYS = {  # hash -> numbers of the log's rows
    0x0EA45896F8E1F978: [101, 113],  # A17
    0x6E6A89487CB8BE3C: [101, 113],  # order-17
}
QUEUE = [(100, 99, 0), (113, 124, 94_756_344), (2**40, 91, -1)]  # seq, size, tag
FACTS = cp.Facts(
    seq=116,
    settled_before_ms=DUE_MS,
    settled_before_seq=116,
    late=[(103, 10)],
    watermark=116,
    epochs={"broker": 7},
    jobs={"import": cp.JobFacts(3, ACCEPTED_MS, "30 rows 0123456789abcdef")},
    reserved=[(103, 10)],
    queues={"orders": {1: (0, 8), 2: (40, 41)}},
)
TRANSACTION_FACTS = cp.Facts(seq=102, halves=[(100, 3)])
LEVEL_FACTS = cp.Facts(seq=102, levels={2: cp.LevelFacts(6), 4: cp.LevelFacts(3)})
MOVED_FACTS = cp.Facts(
    seq=102, tick=(ACCEPTED_MS // 1_000 * 1_000, 3), schedule="level_cascade", kept={"known_seq": 102}
)
META_FACTS = cp.Facts(seq=102, meta={"topic/orders": msgspec.Raw(b'{"queues":8}')})
SETTLED = [(DUE_MS + 86_400_000, 105), (DUE_MS + 1, 107)]  # due_ms, seq
MOVED = [(DUE_MS + 9, 105, 113, DUE_MS + 86_400_000), (DUE_MS, 108, 114, DUE_MS)]
WOKEN = [(115, DUE_MS + 7, 109, DUE_MS + 5)]


# ---- the writers ----------------------------------------------------------------------------------------


def frames_and_bytes(name: str = "commit-log-1.log") -> tuple[list[fmt.Frame], bytes]:
    """Return the frames of a log, and the bytes of its segment."""
    data = fmt.encode_segment_header(100, ACCEPTED_MS - 1)
    frames = []
    frames_of, headers = LOGS[name]
    for first_seq, rows in frames_of.items():
        position, _, span, append_ms, synced_to = headers[first_seq]
        frame, parts = fmt.encode_frame(
            pa.RecordBatch.from_pylist(rows, LOG_SCHEMA),
            first_seq=first_seq,
            span=span,
            append_ms=append_ms,
            epoch=1,
            position=position,
            synced_to=synced_to,
        )
        assert len(data) == position
        frames.append(frame)
        data += b"".join(bytes(part) for part in parts)
    return frames, data + bytes(64)


def commit_log() -> bytes:
    return frames_and_bytes()[1]


def transaction_log() -> bytes:
    return frames_and_bytes("commit-log-1-transactions.log")[1]


def frames() -> bytes:
    frames, data = frames_and_bytes()
    segment = Segment(1, 100, pa.py_buffer(data))
    for frame in frames:
        segment.add(frame)
    return recovery.encode(segment)


def key_run() -> bytes:
    rows = [(row.get("unique_key"), row.get("keys"), seq) for seq, row in numbered()]
    ids, keys = (pa.array([row[column] for row in rows], pa.string()) for column in (0, 1))
    hashes, indexes = hash_keys(ids, keys)
    return bytes(KeyRun.build(hashes, np.array([row[2] for row in rows])[indexes], ["a file"]).data)


def queue_file() -> bytes:
    entries = np.array(QUEUE, queue_format.ENTRY)
    return queue_format.encode(100, 2**40 + 1, [queue_format.Part("orders", 2, 40, entries)])


def checkpoint() -> bytes:
    files = CrashFiles()
    due, seq = np.array(SETTLED, np.int64).T
    columns = due, seq, *(np.array(rows, np.int64).T for rows in (MOVED, WOKEN))
    cp.save(files, cp.encode(cp.Checkpoint(FACTS, *columns)))
    return files.content(cp.NAME)


def level_log() -> bytes:
    return frames_and_bytes("commit-log-1-levels.log")[1]


def meta_log() -> bytes:
    return frames_and_bytes("commit-log-1-meta.log")[1]


def moved_log() -> bytes:
    return frames_and_bytes("commit-log-1-moved.log")[1]


WRITTEN: dict[str, Callable[[], bytes]] = {
    "commit-log-1.log": commit_log,
    "commit-log-1-transactions.log": transaction_log,
    "commit-log-1-levels.log": level_log,
    "commit-log-1-meta.log": meta_log,
    "commit-log-1-moved.log": moved_log,
    "frame-index-1.frames": frames,
    "key-run-2.keys": key_run,
    "queue-index-1.cq": queue_file,
    "checkpoint-2": checkpoint,
}
CHECKPOINTS_1 = {
    "checkpoint-1": FACTS,
    "checkpoint-1-transactions": TRANSACTION_FACTS,
    "checkpoint-1-levels": LEVEL_FACTS,
    "checkpoint-1-moved": MOVED_FACTS,
    "checkpoint-1-meta": META_FACTS,
}
READ = [*WRITTEN, *CHECKPOINTS_1, "key-sidecar-1.keys"]  # and all files of earlier versions


def numbered() -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of the first log with their numbers."""
    return [(seq, row) for first, rows in FRAMES.items() for seq, row in enumerate(rows, first)]


def rows_of_all_logs() -> list[dict[str, Any]]:
    """Return the rows of all logs."""
    return [row for frames_of, _ in LOGS.values() for rows in frames_of.values() for row in rows]


def golden(name: str) -> bytes:
    """Read a golden file."""
    return (GOLDEN / name).read_bytes()


# ---- writing is unchanged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
def test_the_same_content_is_written_as_the_same_bytes(name: str) -> None:
    written, stored = WRITTEN[name](), golden(name)
    position = next(
        (position for position, (new, old) in enumerate(zip(written, stored, strict=False)) if new != old),
        None,
    )
    assert position is None, f"{name}: other bytes from {position} on: a new version of the format, see above"
    assert len(written) == len(stored), name


def test_all_golden_files_are_read_and_they_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in GOLDEN.iterdir() if path.is_file()}
    assert sizes.keys() == set(READ)
    assert sum(sizes.values()) < 100_000


def test_every_kind_and_every_column_is_in_the_log() -> None:
    """Otherwise a change of one of them could go unnoticed."""
    rows = rows_of_all_logs()
    assert {row["kind"] for row in rows} == {int(kind) for kind in Kind if kind is not Kind.INVALID}
    assert {name for row in rows for name in row} == set(LOG_SCHEMA.names)
    assert SCHEMA_VERSION == fmt.FORMAT_VERSION == 1, "a new version has golden files of its own"


# ---- reading is unchanged -------------------------------------------------------------------------------------


def read_log(name: str) -> list[InspectedFrame]:
    """Read the frames of a folder with this one segment and its checkpoint."""
    files = CrashFiles()
    files.make_dir(FOLDER)
    files.replace(segment_name(1), golden(name))
    files.replace(cp.NAME, golden(name.replace("commit-log", "checkpoint").removesuffix(".log")))
    folder = FolderDump(files)
    assert folder.damage == []
    [segment] = folder.segments
    assert (segment.first_seq, segment.created_ms) == (100, ACCEPTED_MS - 1)
    frames = list(folder.walk(segment))
    assert all(isinstance(frame, InspectedFrame) for frame in frames), frames
    return [frame for frame in frames if isinstance(frame, InspectedFrame)]


@pytest.mark.parametrize("name", LOGS)
def test_the_log_has_its_golden_rows(name: str) -> None:
    frames = read_log(name)
    frames_of, headers_of = LOGS[name]
    headers = {
        inspected.frame.first_seq: (
            inspected.frame.position,
            inspected.frame.length,
            inspected.frame.span,
            inspected.frame.append_ms,
            inspected.frame.synced_to,
        )
        for inspected in frames
    }
    assert headers == headers_of
    assert {inspected.frame.epoch for inspected in frames} == {1}
    for inspected in frames:
        rows = [
            {name: value for name, value in row.items() if value is not None}
            for row in inspected.rows.to_pylist()
        ]
        assert rows == frames_of[inspected.frame.first_seq]


def test_an_attach_row_has_its_golden_content() -> None:
    [*_, last] = read_log("commit-log-1.log")
    body = last.rows.column("body")[2].as_py()
    assert att.decode(body) == ATTACHMENT
    assert att.encode(ATTACHMENT) == body


def test_the_frame_index_has_its_golden_content() -> None:
    files = CrashFiles()
    files.make_dir(FOLDER)
    segment = Segment(1, 100, pa.py_buffer(golden("commit-log-1.log")))
    files.replace(recovery.index_name(segment), golden("frame-index-1.frames"))
    assert recovery.load(files, segment, 116)
    assert (segment.next_seq, segment.end, segment.newest_append_ms) == (116, 5888, DUE_MS + 1)
    assert segment.frame_positions.tolist() == [64, 1920, 3584]
    assert segment.frame_seqs.tolist() == [100, 102, 113]


def test_the_key_run_has_its_golden_content() -> None:
    run = KeyRun(pa.py_buffer(golden("key-run-2.keys")))
    for key_hash, seqs in KEYS.items():
        assert run.find_numbers(np.array([key_hash], np.uint64)).tolist() == seqs
    assert sorted(run.columns()[1].tolist()) == [100, 101, 101, 101, 113, 113, 113]
    assert run.names == ("a file",)


def test_the_keys_of_version_1_are_refused_and_so_made_again() -> None:
    """It is a cache, whose content is read from the log again."""
    with pytest.raises(Corrupt):
        KeyRun(pa.py_buffer(golden("key-sidecar-1.keys")))


def test_the_queue_has_its_golden_entries() -> None:
    (part,) = queue_format.QueueFile("a.cq", golden("queue-index-1.cq")).parts()
    assert (part.topic, part.queue_id, part.first_offset) == ("orders", 2, 40)
    assert part.entries.tolist() == QUEUE


@pytest.mark.parametrize(("name", "facts"), CHECKPOINTS_1.items())
def test_a_checkpoint_of_version_1_has_its_golden_content(name: str, facts: cp.Facts) -> None:
    state = cp.parse(golden(name))
    assert state.facts == facts
    assert list(zip(state.settled_due.tolist(), state.settled_seq.tolist(), strict=True)) == SETTLED
    assert (state.moved.shape, state.woken.shape) == ((4, 0), (4, 0))


def test_the_checkpoint_has_its_golden_content() -> None:
    state = cp.parse(golden("checkpoint-2"))
    assert state.facts == FACTS
    assert list(zip(state.settled_due.tolist(), state.settled_seq.tolist(), strict=True)) == SETTLED
    assert list(map(tuple, state.moved.T.tolist())) == MOVED
    assert list(map(tuple, state.woken.T.tolist())) == WOKEN


@pytest.mark.parametrize("name", ["commit-log-1.log", "key-run-2.keys", "checkpoint-2"])
def test_a_byte_that_has_changed_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control: the tests read these files."""
    content = bytearray(golden(name))
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(bytes(content))
    monkeypatch.setattr(f"{__name__}.GOLDEN", tmp_path)
    with pytest.raises(AssertionError, match="other bytes from"):
        test_the_same_content_is_written_as_the_same_bytes(name)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for missing in (name for name in WRITTEN if not (GOLDEN / name).exists()):
        (GOLDEN / missing).write_bytes(WRITTEN[missing]())
        print(f"written: tests/golden/{missing}")
