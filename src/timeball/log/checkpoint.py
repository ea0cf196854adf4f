"""The checkpoint: the state of the caches at one row of the log, so that recovery replays only the rows after it.

    byte  0           8        16        24         32  40  48  56  64
          +-----------+--------+---------+----------+---+---+---+---+------------ … ------------+
          | "TBCHECK1"| length | crc32c  |"TBSTATE2"| f | s | m | w | zstd: JSON facts, columns |
          +-----------+--------+---------+----------+---+---+---+---+------------ … ------------+

f is the number of bytes of the facts. s, m and w are the numbers of rows of settled, moved and woken.

The file is written whole with `Files.replace`, after all files that it relies on have been synced. It is a cache:
without it, a start reads the log from the last snapshot on and computes the same state.

A snapshot stores the same state in the log, so that retention may remove the rows before it. It is a META row with the
key `snapshot`. Its frame contains nothing else and has the flag SNAPSHOT. So a backward search through the frame
headers finds the last snapshot, and no other frame is decoded. The value of the row is the payload of the checkpoint
file, without the state that is stored only in files. The value also contains secrets, so it is never given to a reader
outside the broker. A snapshot is one row, because a row is either complete or absent, and half a snapshot would be
useless.

A message is *settled* when it is durably released or cancelled.

A row has a limit, and there may be ten million settled messages. So the payload is compressed, in one or more frames
of zstd, and the columns are stored as differences from row to row: int64, little-endian, column after column. Former
versions stored the facts and the settled pairs uncompressed: f, number of pairs, facts, due times, numbers.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa

from timeball.io.files import Files, check_readable
from timeball.log import format as fmt
from timeball.log.frame_scan import FrameScan
from timeball.log.segment import Segment, Segments
from timeball.model.errors import UNDECODABLE, Corrupt
from timeball.model.message import SNAPSHOT_KEY, Int64Array, meta_rows

logger = logging.getLogger(__name__)

NAME = "checkpoint"
MAGIC = b"TBCHECK1"
HEADER = struct.Struct("<8sQQ")  # magic, bytes of the payload, crc32c of the payload
STATE_MAGIC = b"TBSTATE2"
PIECE_ROWS = 131_072  # values of a column that are encoded at once
STATE_HEADER = struct.Struct("<8s4Q")  # magic, bytes of the facts, rows: settled, moved, woken
WIDTHS = (2, 4, 4)  # columns of settled, moved and woken


class LevelFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of one queue of the schedule topic: all its messages before `offset` are settled."""

    offset: int


class JobFacts(msgspec.Struct, frozen=True):
    """The last attach of a job that supplied a digest of its rows. The digest identifies a repeated attach."""

    epoch: int
    at_ms: int
    digest: str


class RedeliveryFacts(msgspec.Struct, frozen=True, array_like=True):
    """Messages that wait for their next delivery to a group, as ranges (first, count) of scheduled message numbers."""

    group: str
    topic: str
    waiting: list[tuple[int, int]]


class Facts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The broker's state at `seq`: all rows below it have been applied, and no row at or above it."""

    # Each default means "nothing yet" and is left out of the JSON. So an old file without a field decodes as that
    # default, as in a new broker.
    seq: int = 0
    # These two numbers are the *mark*: messages due before the time with lower sequence numbers are settled. Settled
    # messages that the mark does not cover are listed as pairs in the columns.
    settled_before_ms: int = -(1 << 62)
    settled_before_seq: int = 1 << 62  # see Settled in schedule/outcomes.py
    # Ranges (first_seq, rows) that the mark does not cover: numbers reserved before it whose messages were attached
    # later.
    late: list[tuple[int, int]] = []
    # The last `settled_released` of these pairs were released, the others cancelled or moved.
    settled_released: int = 0
    # Every pending message with a lower number is in the pending table.
    watermark: int = 1
    epochs: dict[str, int] = {}  # job id -> last attached epoch, for jobs without a digest
    jobs: dict[str, JobFacts] = {}  # job id -> last attach, for jobs with a digest
    reserved: list[tuple[int, int]] = []  # (first_seq, rows) reserved but not attached yet
    queues: dict[str, dict[int, tuple[int, int]]] = {}  # topic -> queue -> (min_offset, max_offset)
    waiting_rows: int = 0  # pending messages with a due time, wherever they are stored
    redeliveries: list[RedeliveryFacts] = []
    halves: list[tuple[int, int]] = []  # open half messages: (seq, number of checks sent)
    # Key: queue of the schedule topic, which is the delay level minus one.
    levels: dict[int, LevelFacts] = {}
    # ReleaseCursor (schedule/outcomes.py): start (ms) of the newest second with a release, and its durable releases.
    tick: tuple[int, int] = (0, 0)
    schedule: str = "hour_log"  # the strategy that stored scheduled messages
    kept: dict[str, Any] | None = None  # state of that strategy outside its files
    # Live data files (table/attachment.py): the result of all TABLE rows below `seq`.
    files: list[Any] = []
    attach_seq: int = 0  # the last of those TABLE rows
    log_from_seq: int = 1  # retention may have removed rows below it, but no others
    snapshot_seq: int = 1  # row of the last snapshot, or the first row of the log
    meta: dict[str, msgspec.Raw] = {}  # key -> value: the result of all META rows below `seq`


NO_ROWS = np.empty((4, 0), np.int64)


class _FormerColumns(msgspec.Struct):
    """The columns that former versions stored in the JSON."""

    moved: list[tuple[int, int, int, int]] = []
    woken: list[tuple[int, int, int, int]] = []


class Checkpoint(msgspec.Struct, frozen=True):
    """The facts and the columns of a state.

    `settled_due` and `settled_seq`: (due_ms, seq) of each settled message that `settled_before_*` does not cover.
    `moved`: due_ms, number, version and until_ms, by number (schedule/outcomes.py). `woken`: version, due_ms and
    version of the base, due_ms (broker/registry/selections.py). The shape of both is (4, rows).
    """

    facts: Facts
    settled_due: Int64Array
    settled_seq: Int64Array
    moved: Int64Array = NO_ROWS
    woken: Int64Array = NO_ROWS


def encode(checkpoint: Checkpoint) -> bytes:
    """Encode the payload: the part of the file after its header, which is also the value of a snapshot row."""
    settled = checkpoint.settled_due, checkpoint.settled_seq
    return b"".join(encoded_pieces(checkpoint.facts, [settled], [checkpoint.moved], [checkpoint.woken]))


# All rows of settled, moved or woken, in consecutive ranges. A range is a (columns, rows) array, or a tuple with one
# array per column.
Parts = Sequence[Int64Array | tuple[Int64Array, ...]]


def encoded_pieces(facts: Facts, settled: Parts, moved: Parts, woken: Parts) -> Iterator[bytes]:
    """Yield the payload in pieces, each of some milliseconds of work. Each piece is a zstd frame.

    The first piece has the header before its frame. Together the frames contain the JSON facts, then each column in
    turn, as differences from row to row.
    """
    encoded_facts, tables = msgspec.json.encode(facts), (settled, moved, woken)
    rows = (sum(len(part[0]) for part in parts) for parts in tables)
    head = STATE_HEADER.pack(STATE_MAGIC, len(encoded_facts), *rows)
    buffered, buffered_bytes = [encoded_facts], len(encoded_facts)
    for parts, width in zip(tables, WIDTHS, strict=True):
        for column in range(width):
            previous = 0  # the last value of the column that was encoded
            for values in _split_column(parts, column):
                if buffered_bytes >= 8 * PIECE_ROWS:
                    yield head + _compressed(buffered)
                    head, buffered, buffered_bytes = b"", [], 0
                buffered.append(np.diff(values, prepend=previous).astype("<i8").tobytes())
                previous, buffered_bytes = values[-1], buffered_bytes + 8 * len(values)
    yield head + _compressed(buffered)


def _split_column(parts: Parts, index: int) -> Iterator[Int64Array]:
    """Split column `index` of a table into arrays of at most PIECE_ROWS values."""
    for part in parts:
        for begin in range(0, len(part[index]), PIECE_ROWS):
            yield part[index][begin : begin + PIECE_ROWS]


def _compressed(parts: list[bytes]) -> bytes:
    compressed: bytes = pa.compress(b"".join(parts), "zstd", asbytes=True)
    return compressed


def decode(payload: bytes) -> Checkpoint:
    """Decode a payload made by `encode`, or by a former version. Raises Corrupt."""
    try:
        return _decode(payload) if payload[:8] == STATE_MAGIC else _decode_former(payload)
    except (*UNDECODABLE, OverflowError, MemoryError, OSError, struct.error) as error:
        raise Corrupt(str(error)) from error


def _decode(payload: bytes) -> Checkpoint:
    """Decode a payload of the present form. Raises various errors, which `decode` converts."""
    _, facts_size, *rows = STATE_HEADER.unpack_from(payload)
    shapes = list(zip(WIDTHS, rows, strict=True))
    size_bytes = facts_size + sum(8 * columns * count for columns, count in shapes)
    content = pa.decompress(payload[STATE_HEADER.size :], size_bytes, "zstd", asbytes=True)
    if len(content) != size_bytes:  # numpy would read fewer rows, and settled messages would be forgotten
        raise ValueError("facts and columns do not fill the payload")
    tables, begin = [], facts_size
    for columns, count in shapes:
        values = np.frombuffer(content, "<i8", columns * count, begin).reshape(columns, count)
        tables.append(np.cumsum(values, axis=1, dtype=np.int64))
        begin += 8 * columns * count
    (due, seq), moved, woken = tables
    return Checkpoint(msgspec.json.decode(content[:facts_size], type=Facts), due, seq, moved, woken)


def _decode_former(payload: bytes) -> Checkpoint:
    """Decode a payload of a former version: without compression, and with moved and woken rows in the JSON.

    It begins with two counts of 8 bytes. A pair takes 16 bytes. Raises various errors, which `decode` converts.
    """
    facts_size, pair_count = struct.unpack_from("<QQ", payload)
    if 16 + facts_size + 16 * pair_count != len(payload):
        raise ValueError("facts and pairs do not fill the payload")
    encoded = payload[16 : 16 + facts_size]
    former = msgspec.json.decode(encoded, type=_FormerColumns)
    due, seq = np.frombuffer(payload, "<i8", offset=16 + facts_size).astype(np.int64).reshape(2, pair_count)
    moved, woken = (np.array(rows, np.int64).reshape(-1, 4).T for rows in (former.moved, former.woken))
    return Checkpoint(msgspec.json.decode(encoded, type=Facts), due, seq, moved, woken)


def save(files: Files, payload: bytes) -> None:
    """Replace the checkpoint file durably. `payload` is the result of `encode`."""
    files.replace(NAME, HEADER.pack(MAGIC, len(payload), google_crc32c.value(payload)) + payload)


def parse(data: bytes) -> Checkpoint:
    """Decode the bytes of the checkpoint file. Raises Corrupt."""
    try:
        magic, length, crc = HEADER.unpack_from(data)
        payload = data[HEADER.size :]
        if magic != MAGIC or length != len(payload) or crc != google_crc32c.value(payload):
            raise ValueError("bad magic, length or checksum")
    except (ValueError, struct.error) as error:
        raise Corrupt(str(error)) from error
    return decode(payload)


def read(files: Files) -> Checkpoint:
    """Read the checkpoint file. Raises NotFound, Corrupt."""
    mapped = files.map_readonly(NAME)
    check_readable(mapped, 0, mapped.size)
    return parse(bytes(mapped))


def load(files: Files) -> Checkpoint | None:
    """Load the checkpoint. Returns None if there is no file, or if it is damaged, which is logged."""
    if not files.exists(NAME):
        return None
    try:
        return read(files)
    except Corrupt as error:
        logger.warning("checkpoint not used, the log is replayed from its last snapshot reason=%s", error)
        return None


# ---- snapshots ------------------------------------------------------------------------------------------------

SNAPSHOT_BYTES = 256 * 1024 * 1024  # bytes of log that a start without a checkpoint reads at most


def snapshot_row(payload: bytes, now_ms: int) -> pa.RecordBatch:
    """Build the snapshot row of the result of `encode`. Append it with `flags=fmt.SNAPSHOT`."""
    return meta_rows([(SNAPSHOT_KEY, payload)], now_ms)


def last_snapshot(segments: Segments, to_seq: int | None = None) -> Checkpoint | None:
    """Find and decode the newest snapshot among the rows below `to_seq` (None: among all rows).

    Returns None when there is none. Raises Corrupt.
    """
    for segment in reversed(segments.all):
        frame_number = _find_snapshot_frame(segment, segment.next_seq if to_seq is None else to_seq)
        # A damaged snapshot is an error. An older snapshot cannot replace it, because retention may have removed rows
        # between the two.
        if frame_number is not None:
            try:
                return _read_snapshot(segment, int(segment.frame_positions[frame_number]))
            except Corrupt as error:
                raise Corrupt(f"{segment.name}: {error}; restore this file from a copy") from error
    return None


def log_bytes_from(segments: Segments, seq: int) -> int:
    """Count the bytes of the log from the frame that contains row `seq` to the end of the log."""
    size_bytes = 0
    for segment in reversed(segments.all):
        if segment.next_seq <= seq:
            break
        begin = fmt.ALIGN  # the segment has no frames
        if len(segment.frame_seqs):
            begin = int(segment.frame_positions[max(0, segment.frame_at(seq))])
        size_bytes += segment.end - begin
    return size_bytes


def _find_snapshot_frame(segment: Segment, to_seq: int) -> int | None:
    """Find the number (in the segment) of the last frame with the SNAPSHOT flag that begins below `to_seq`, or None.

    Only frame headers are read.
    """
    # A copy: another thread may append a frame meanwhile, and an array cannot grow while numpy holds a view of it.
    positions = np.asarray(segment.frame_positions[: segment.frame_at(to_seq - 1) + 1], dtype=np.int64)
    # All flags are read as one vector, because one call per header would take seconds for a log of a million frames.
    flags = np.frombuffer(segment.buffer, dtype="<u2", count=segment.buffer.size // 2)
    flagged = np.flatnonzero(flags[(positions + fmt.FLAGS_OFFSET) // 2] & fmt.SNAPSHOT)
    return int(flagged[-1]) if len(flagged) else None


def _read_snapshot(segment: Segment, position: int) -> Checkpoint:
    """Read and check the snapshot in the frame at `position`. Raises Corrupt."""
    frame = FrameScan(segment.buffer).read(position)
    assert frame is not None, "a frame with a flag has a magic"
    return decode(fmt.decode_rows(segment.buffer, frame).column("body")[0].as_py())
