"""A disk with one replica's log: data that was not synced may be lost or torn after a power cut.

A frame of the simulation is two blocks long. After a power cut each block that was not synced is there or not. A frame
with a block missing is torn. A start follows the rule of following.py: a hole in the last segment is the end of the
log, unless a whole frame after it shows that a batch or more after the hole was on the disk. That is damage, as is any
hole in another segment: the disk becomes another incarnation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import google_crc32c

from timeball.cluster.protocol.messages import BEGINNING, Members, Position, extend
from timeball.cluster.protocol.replica import Log
from timeball.log import format as fmt
from timeball.model.message import SCHEMA_VERSION

FRAME_BYTES = 128
SEGMENT_FRAMES = 6
SEGMENT_BYTES = fmt.ALIGN + SEGMENT_FRAMES * FRAME_BYTES
BATCH_BYTES = 3 * FRAME_BYTES


class Frame(NamedTuple):
    """One row, in a frame of its own."""

    raw: bytes
    epoch: int
    seq: int
    synced_to: int
    kind: str  # E epoch, M message, P promise (scheduled), R release of a promise, S snapshot
    number: int


def make_frame(epoch: int, seq: int, position: int, synced_to: int, kind: str, number: int) -> Frame:
    """Return a frame as log/format.py has it, with 64 bytes that are no Arrow message."""
    payload = f"{kind} {number}".encode().ljust(fmt.ALIGN, b"\0")

    def header(crc: int) -> bytes:
        return fmt.FRAME.pack(
            fmt.FRAME_MAGIC, SCHEMA_VERSION, 0, FRAME_BYTES, 1, seq, 1, 0, epoch, fmt.ALIGN, crc, synced_to
        )  # fmt: skip

    raw = header(google_crc32c.value(header(0) + payload)) + payload
    return Frame(raw, epoch, seq, synced_to, kind, number)


class Entry(NamedTuple):
    """A frame at its position. `chain` covers the frames before it."""

    ordinal: int
    position: int
    frame: Frame
    chain: int

    @property
    def end(self) -> Position:
        """Return the position after the frame."""
        return Position(self.ordinal, self.position + FRAME_BYTES, self.frame.seq + 1)


@dataclass
class Disk:
    """One replica's disk. Rows are numbered from 1, so `entries[seq - 1]` is the row `seq`."""

    incarnation: int = 1
    promised: int = 0  # as the running process knows
    promised_durably: int = 0
    promised_to: str = ""  # the replica to which this epoch is promised
    members: Members = field(default_factory=Members)  # stored with the promise
    headers: dict[int, bytes] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    synced: int = 0  # entries
    # Number of entries that retention has removed from the disk. They stay in `entries`: a snapshot replaces them.
    removed: int = 0
    damaged: set[int] = field(default_factory=set)  # entries whose blocks have changed

    def begin(self, ordinal: int, header: bytes) -> None:
        """Make a segment; its header is synced with its name."""
        self.headers[ordinal] = header

    def write(self, ordinal: int, position: int, frames: list[Frame]) -> None:
        """Append frames."""
        assert ordinal in self.headers, "no such segment"
        for frame in frames:
            before = self.entries[-1].chain if self.entries else 0
            self.entries.append(Entry(ordinal, position, frame, hash((before, frame.raw))))
            position += FRAME_BYTES

    def begin_after(self, known: list[Entry]) -> None:
        """Begin an empty log after the rows of `known`, which the leader has removed."""
        self.entries, self.synced, self.removed = list(known), len(known), len(known)

    def drop_below(self, seq: int) -> bool:
        """Remove the segments that end before a row. Return whether there were any."""
        before = self.removed
        for ordinal in sorted(self.headers)[:-1]:
            last = max((entry.frame.seq for entry in self.entries if entry.ordinal == ordinal), default=seq)
            if last >= seq:
                break
            del self.headers[ordinal]
            self.removed = last
        return self.removed > before

    @property
    def first(self) -> Position:
        """Return where the log begins."""
        return Position(min(self.headers), fmt.ALIGN, self.removed + 1) if self.headers else BEGINNING

    def cut(self, at: Position) -> list[Entry]:
        """Remove everything from `at` on, and return it."""
        count = self.count(at)
        cut_entries = self.entries[count:]
        del self.entries[count:]
        self.removed = self.removed if count else 0
        self.headers = {ordinal: header for ordinal, header in self.headers.items() if ordinal <= at.ordinal}
        self.synced = len(self.entries)
        return cut_entries

    def count(self, at: Position) -> int:
        """Return the number of frames before `at`."""
        return at.seq - 1 if at != BEGINNING else 0

    def lose_power(self, random: Random, *, keeps_promise: bool) -> None:
        """Keep a random part of the data that was not synced: nothing, all, or some blocks."""
        share = random.choice((0.0, 0.5, 0.8, 1.0))
        for index in range(self.synced, len(self.entries)):
            if any(random.random() >= share for _ in range(2)):
                self.damaged.add(index)
        # Missing entries at the end of the log are no hole.
        while self.entries and len(self.entries) - 1 in self.damaged:
            self.damaged.discard(len(self.entries) - 1)
            self.entries.pop()
        self.synced = min(self.synced, len(self.entries))
        if not keeps_promise:
            self.promised = self.promised_durably = random.randint(0, self.promised)

    def damage(self, random: Random) -> bool:
        """Change a synced frame so that a start can tell it from a torn batch. Return whether there is such a frame."""
        candidates = [index for index in range(self.removed, self.synced) if self._is_proved(index)]
        if candidates:
            self.damaged.add(random.choice(candidates))
        return bool(candidates)

    def _is_proved(self, hole: int) -> bool:
        """Check whether the log shows that the entry was synced, so that a hole there is damage and no torn batch."""
        entry = self.entries[hole]
        if entry.ordinal != max(self.headers):
            return True
        return any(
            other.frame.synced_to - entry.position >= BATCH_BYTES
            for index, other in enumerate(self.entries[hole + 1 :], hole + 1)
            if index not in self.damaged
        )

    def start(self) -> Log:
        """Return what a start reads: it cuts a torn batch or a damaged part, and syncs what is left.

        After damage the disk becomes another incarnation.
        """
        if self.damaged:
            hole = min(self.damaged)
            if self._is_proved(hole):
                self.incarnation += 1
            self.damaged.clear()
            self.cut(self.entries[hole - 1].end if hole > self.removed else BEGINNING)
        self.synced = len(self.entries)
        self.promised = self.promised_durably
        ends = ()
        for entry in self.entries[self.removed :]:
            ends = extend(ends, entry.frame.epoch, entry.end)
        if not self.headers:
            return Log()
        ordinal = max(self.headers)
        is_inside = len(self.entries) > self.removed and self.entries[-1].ordinal == ordinal
        next_byte = self.entries[-1].end.end if is_inside else fmt.ALIGN
        return Log(ends, ordinal, next_byte, len(self.entries) + 1)
