"""The checkpoint: how far the caches had got, so that recovery need not replay the whole log.

    byte  0           8        16        24
          +-----------+--------+---------+------- … -------+------- … --------+
          | "TBCHECK1"| length | crc32c  | JSON facts      | settled: due, seq |
          +-----------+--------+---------+------- … -------+------- … --------+

Written whole with `Files.replace`, after everything it vouches for has been synced. A cache: without it a start reads
the log from the last snapshot on (snapshot.py), which holds the same facts, and comes to the same state.
"""

from __future__ import annotations

import logging
import struct
from typing import Any

import google_crc32c
import msgspec
import numpy as np

from timeball.errors import Corrupt
from timeball.files import Files
from timeball.message import Int64Array

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


class Facts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is true at `seq`: all rows below it have been applied to the caches."""

    seq: int = 0
    settled_before_ms: int = -(1 << 62)
    settled_before_seq: int = 1 << 62  # see schedule/outcomes.py, Settled
    late: list[tuple[int, int]] = []
    watermark: int = 1
    epochs: dict[str, int] = {}  # job id -> last epoch attached, of those without a digest
    jobs: dict[str, JobFacts] = {}  # job id -> its last attach, of those with one
    reserved: list[tuple[int, int]] = []  # (first_seq, rows) set aside and not attached yet
    queues: dict[str, dict[int, tuple[int, int]]] = {}  # topic -> queue -> (min_offset, max_offset)
    halves: list[tuple[int, int]] = []  # (seq, times its producer was asked) of every open half message
    levels: dict[int, LevelFacts] = {}  # queue of the schedule topic, a level's number less one
    tick: tuple[int, int] = (
        0,
        0,
    )  # see schedule/outcomes.py: the second being sent, and how many of it have been
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
        if 16 + facts_size + 16 * count != len(payload):
            raise ValueError("its lengths do not add up")
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
    """From the bytes of the file; raises Corrupt."""
    try:
        magic, length, crc = HEADER.unpack_from(data)
        payload = data[HEADER.size :]
        if magic != MAGIC or length != len(payload) or crc != google_crc32c.value(payload):
            raise ValueError("it does not match its checksum")
    except (ValueError, struct.error) as error:
        raise Corrupt(str(error)) from error
    return decode(payload)


def load(files: Files) -> Checkpoint | None:
    """The last checkpoint, or None when there is none that can be trusted."""
    if not files.exists(NAME):
        return None
    try:
        return parse(bytes(files.map_readonly(NAME)))
    except Corrupt as error:
        logger.warning("checkpoint not used, the log is replayed from its last snapshot reason=%s", error)
        return None
