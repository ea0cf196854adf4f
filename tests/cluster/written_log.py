"""A replica's log written by the messages of a leader, and a record of the frames that it must have.

The frames are real. `Written` does what the protocol does: it begins a segment when a commit does not fit, syncs
before that and at the end of each batch, and cuts only at ends of frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tests.log.small_log import batch

from timeball.cluster.protocol.messages import BEGINNING, Position
from timeball.cluster.replica_log import ReplicaLog
from timeball.io.files import Files
from timeball.log import format as fmt

SEGMENT_BYTES = 8 * 1024
BATCH_BYTES = 4 * 1024
NODE, GROUP = "b", "g1"
NOW_MS = 1_700_000_000_000


def opened(files: Files) -> ReplicaLog:
    return ReplicaLog(files, NODE, GROUP, SEGMENT_BYTES, BATCH_BYTES)


class WrittenFrame(NamedTuple):
    """A frame and its location: the ordinal of the segment, and the byte in it. `end`: the position after it."""

    ordinal: int
    position: int
    raw: bytes
    epoch: int
    end: Position


@dataclass
class Written:
    """All written frames from the beginning, without those that were cut."""

    entries: list[WrittenFrame] = field(default_factory=list)
    headers: dict[int, bytes] = field(default_factory=dict)  # of the segments, by ordinal
    synced: int = 0  # number of entries that were synced
    epoch: int = 1  # of the next frames

    @property
    def end(self) -> Position:
        return self.entries[-1].end if self.entries else BEGINNING

    def commit(self, log: ReplicaLog, frames: int, rows: int = 1) -> None:
        """Write a commit of `frames` frames. The leader's own disk has only the rows before it."""
        seq = max(self.end.seq, 1)
        size_bytes = sum(
            len(_frame(seq + number * rows, rows, self.epoch, fmt.ALIGN, 0)) for number in range(frames)
        )
        begin, ordinal, position = log.place_commit(size_bytes, seq, NOW_MS, self.epoch)
        if begin is not None:
            self.sync(log)
            log.begin_segment(begin)
            self.headers[ordinal] = begin.header
        synced_to, raws = position, []
        for number in range(frames):
            raw = _frame(seq + number * rows, rows, self.epoch, position, synced_to)
            end = Position(ordinal, position + len(raw), seq + (number + 1) * rows)
            self.entries.append(WrittenFrame(ordinal, position, raw, self.epoch, end))
            raws.append(raw)
            position = end.end
        log.write(ordinal, position - sum(map(len, raws)), b"".join(raws))
        if sum(len(entry.raw) for entry in self.entries[self.synced :]) >= BATCH_BYTES:
            self.sync(log)

    def sync(self, log: ReplicaLog) -> None:
        """Sync the log, unless all frames are synced."""
        if self.synced < len(self.entries):
            log.sync()
            self.synced = len(self.entries)

    def drop_after(self, count: int) -> Position:
        """Drop all frames but the first `count`, before the log is cut. Returns the end of the last one."""
        del self.entries[count:]
        self.headers = {
            ordinal: header for ordinal, header in self.headers.items() if ordinal <= self.end.ordinal
        }
        self.synced = min(self.synced, count)
        return self.end


def _frame(seq: int, rows: int, epoch: int, position: int, synced_to: int) -> bytes:
    """Encode a frame of `rows` messages."""
    _, parts = fmt.encode_frame(
        batch(seq, rows), first_seq=seq, span=rows, append_ms=NOW_MS, epoch=epoch, position=position,
        synced_to=synced_to,
    )  # fmt: skip
    return b"".join(map(bytes, parts))


def frames_in(log: ReplicaLog) -> list[tuple[int, int, bytes]]:
    """Read all frames of a log as they would be shipped: ordinal of the segment, byte in it, and bytes of each."""
    frames, begin, end = [], BEGINNING, log.log().end
    while (piece := log.read(begin, end, 9)) is not None:
        offset = 0
        while offset < len(piece.frames):
            length = fmt.FRAME.unpack_from(piece.frames, offset)[3]  # the length of the frame
            frames.append((piece.ordinal, piece.position + offset, piece.frames[offset : offset + length]))
            offset += length
        begin = piece.end
    return frames


def ship(log: ReplicaLog, to: ReplicaLog) -> None:
    """Ship a log to another replica, whose log is empty, piece by piece."""
    begin, end = BEGINNING, log.log().end
    while (piece := log.read(begin, end, 9)) is not None:
        if piece.begin is not None:
            to.begin_segment(piece.begin)
        to.write(piece.ordinal, piece.position, piece.frames)
        to.sync()
        begin = piece.end
