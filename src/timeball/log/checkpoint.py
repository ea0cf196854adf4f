"""The checkpoint: how far the caches had got, so that recovery need not replay the whole log. A snapshot says the same.

    byte  0           8        16        24
          +-----------+--------+---------+------- … -------+------- … --------+
          | "TBCHECK1"| length | crc32c  | JSON facts      | settled: due, seq |
          +-----------+--------+---------+------- … -------+------- … --------+

Written whole with `Files.replace`, after everything it vouches for has been synced. A cache: without it a start reads
the log from the last snapshot on, and comes to the same state.

A snapshot is all that the rows before it said and that still counts, so retention may let go what stands before. It is
a META row of the key `snapshot`, in a frame of its own that carries a flag: the last one is found from frame headers
alone, backwards, and nothing else is decoded. Its value is what the checkpoint file holds, without what only files
know. It holds the secrets too, so no reader outside the broker is given the value. One row, not a row for each fact:
half a snapshot would be worth nothing, and a row is either whole or not there.
"""

from __future__ import annotations

import logging
import struct
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa

from timeball.errors import Corrupt
from timeball.files import Files
from timeball.log import format as fmt
from timeball.log.segment import Segment, Segments
from timeball.message import SNAPSHOT_KEY, Int64Array, meta_rows

logger = logging.getLogger(__name__)

NAME = "checkpoint"
MAGIC = b"TBCHECK1"
HEADER = struct.Struct("<8sQQ")


class LevelFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A queue of the schedule topic: what stands before `offset` is settled."""

    offset: int


class JobFacts(msgspec.Struct, frozen=True):
    """The last attach of a job that said of which rows it is: by this a repeated one is known."""

    epoch: int
    at_ms: int
    digest: str


class LeaseFacts(msgspec.Struct, frozen=True, array_like=True):
    """Leases of a group in a topic that the log keeps, by the numbers of their promises: (first, count)."""

    group: str
    topic: str
    held: list[tuple[int, int]]
    nacked: list[tuple[int, int]]  # given back, waiting for the next delivery


class Facts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The broker's state at `seq`: all rows below it have been applied, none at or above it."""

    # Every default says "nothing yet", and defaults are left out: an old file without a field reads as a new broker
    # would.
    seq: int = 0
    # The mark covers most of what is settled with two numbers; only the exceptions are listed behind the facts.
    settled_before_ms: int = -(1 << 62)
    settled_before_seq: int = 1 << 62  # see schedule/outcomes.py, Settled
    late: list[tuple[int, int]] = []
    settled_released: int = 0  # so many of those listed, the last ones, were released
    watermark: int = 1
    epochs: dict[str, int] = {}  # job id -> last epoch attached, of those without a digest
    jobs: dict[str, JobFacts] = {}  # job id -> its last attach, of those with one
    reserved: list[tuple[int, int]] = []  # (first_seq, rows) set aside and not attached yet
    queues: dict[str, dict[int, tuple[int, int]]] = {}  # topic -> queue -> (min_offset, max_offset)
    waiting_rows: int = 0  # promises for an instant that wait, wherever they lie
    leases: list[LeaseFacts] = []
    halves: list[tuple[int, int]] = []  # (seq, times its producer was asked) of every open half message
    levels: dict[int, LevelFacts] = {}  # queue of the schedule topic, a level's number less one
    tick: tuple[int, int] = (
        0,
        0,
    )  # schedule/outcomes.py: the second being sent, and how many of it have been
    moved: list[tuple[int, int, int, int]] = []  # schedule/moved.py: (due_ms, number, version, until_ms)
    schedule: str = "hour_log"  # who kept promises for an instant
    kept: dict[str, Any] | None = None  # what it needs besides its files, when it has some
    files: list[Any] = []  # live data files (table/attachment.py): what the TABLE rows below `seq` add up to
    attach_seq: int = 0  # the last of those rows
    log_from_seq: int = 1  # retention may have let go what stands below it, and nothing else
    snapshot_seq: int = 1  # the last snapshot's row, or the first row of all
    meta: dict[str, msgspec.Raw] = {}  # what the META rows below `seq` add up to: key -> value


class Checkpoint(msgspec.Struct, frozen=True):
    """Facts, and the promises settled that `settled_before_*` does not cover: (due_ms, seq) pairs."""

    facts: Facts
    settled_due: Int64Array
    settled_seq: Int64Array


def encode(checkpoint: Checkpoint) -> bytes:
    """Return the payload: what stands behind the header, and what a snapshot row has for its value."""
    facts = msgspec.json.encode(checkpoint.facts)
    return b"".join(
        [
            struct.pack("<QQ", len(facts), len(checkpoint.settled_due)),
            facts,
            checkpoint.settled_due.astype("<i8").tobytes(),
            checkpoint.settled_seq.astype("<i8").tobytes(),
        ]
    )


def decode(payload: bytes) -> Checkpoint:
    """Inverse of `encode`; raises Corrupt."""
    try:
        facts_size, count = struct.unpack_from("<QQ", payload)
        # Before anything is parsed: numpy would read a short buffer as fewer pairs, and so forget what is settled.
        if 16 + facts_size + 16 * count != len(payload):
            raise ValueError("facts and pairs do not fill the payload")
        facts = msgspec.json.decode(payload[16 : 16 + facts_size], type=Facts)
        arrays = np.frombuffer(payload, dtype="<i8", offset=16 + facts_size, count=2 * count).astype(np.int64)
    except (ValueError, struct.error, msgspec.DecodeError) as error:
        raise Corrupt(str(error)) from error
    return Checkpoint(facts, arrays[:count], arrays[count:])


def save(files: Files, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint, durably."""
    payload = encode(checkpoint)
    files.replace(NAME, HEADER.pack(MAGIC, len(payload), google_crc32c.value(payload)) + payload)


def parse(data: bytes) -> Checkpoint:
    """Return the checkpoint in the bytes of the file; raises Corrupt."""
    try:
        magic, length, crc = HEADER.unpack_from(data)
        payload = data[HEADER.size :]
        if magic != MAGIC or length != len(payload) or crc != google_crc32c.value(payload):
            raise ValueError("bad magic, length or checksum")
    except (ValueError, struct.error) as error:
        raise Corrupt(str(error)) from error
    return decode(payload)


def load(files: Files) -> Checkpoint | None:
    """Return the last checkpoint, or None when there is none that can be trusted."""
    if not files.exists(NAME):
        return None
    try:
        return parse(bytes(files.map_readonly(NAME)))
    except Corrupt as error:
        logger.warning("checkpoint not used, the log is replayed from its last snapshot reason=%s", error)
        return None


# ---- snapshots ------------------------------------------------------------------------------------------------

SNAPSHOT_BYTES = 256 * 1024 * 1024  # of log: what a start reads at most that has no checkpoint


def snapshot_row(state: Checkpoint, now_ms: int) -> pa.RecordBatch:
    """Return the row to be appended, with `flags=fmt.SNAPSHOT`."""
    return meta_rows([(SNAPSHOT_KEY, encode(state))], now_ms)


def last_snapshot(segments: Segments, to_seq: int | None = None) -> Checkpoint | None:
    """Return what the newest snapshot of the rows below `to_seq` says; None when there is none. Raises Corrupt."""
    for segment in reversed(segments.all):
        at = _last_flagged(segment, segment.next_seq if to_seq is None else to_seq)
        # A damaged snapshot is an error, not a reason to take the one before: retention may have removed rows that the
        # older one needs behind it.
        if at is not None:
            try:
                return _snapshot_at(segment, int(segment.frame_positions[at]))
            except Corrupt as error:
                raise Corrupt(f"{segment.name}: {error}; restore this file from a copy") from error
    return None


def bytes_behind(segments: Segments, seq: int) -> int:
    """Return how much log stands at and behind a row."""
    found = 0
    for segment in reversed(segments.all):
        if segment.next_seq <= seq:
            break
        at = max(0, segment.frame_at(seq)) if len(segment.frame_seqs) else -1
        found += segment.end - (int(segment.frame_positions[at]) if at >= 0 else fmt.ALIGN)
    return found


def _last_flagged(segment: Segment, to_seq: int) -> int | None:
    """Return the number of the segment's last frame before `to_seq` with the flag, by their headers alone."""
    # Of a copy: another thread may append a frame meanwhile, which it cannot to an array that numpy looks into.
    positions = np.asarray(segment.frame_positions[: segment.frame_at(to_seq - 1) + 1], dtype=np.int64)
    # The flags of all frames as one vector: a header a call would take seconds for a log of a million frames.
    flags = np.frombuffer(segment.buffer, dtype="<u2", count=segment.buffer.size // 2)
    flagged = np.flatnonzero(flags[(positions + fmt.FLAGS_OFFSET) // 2] & fmt.SNAPSHOT)
    return int(flagged[-1]) if len(flagged) else None


def _snapshot_at(segment: Segment, position: int) -> Checkpoint:
    frame = fmt.read_frame(segment.buffer, position)
    assert frame is not None, "a frame with a flag has a magic"
    return decode(fmt.decode_rows(segment.buffer, frame).column("body")[0].as_py())
