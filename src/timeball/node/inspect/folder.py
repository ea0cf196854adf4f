"""The contents of a data folder, read without a broker and without changing a byte.

This module only reads and takes no lock, so it can run while a broker writes:

- The checkpoint is read first, so that the log is never older than it.
- A position that looks damaged is read again, because a commit may have been completed meanwhile.
- If retention removes a segment during the listing, the listing is repeated.

Recovery stops at the first damage, because it must not guess. Here, damage is reported with its file and position, and
reading continues at the next whole frame. A torn tail is distinguished from damage as in recovery (log/recovery.py):
frames of a commit that was never acknowledged are not shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.io.files import Files
from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log.recovery import last_written, proof_behind, whole_frames
from timeball.log.segment import FOLDER, SUFFIX, segment_name
from timeball.model.errors import Corrupt, NotFound, SetupError
from timeball.model.message import Kind, without_secrets

LISTINGS_MAX = 100  # a broker removes a segment every few seconds at most


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that do not match their checksum or their neighbours. `position` is the first of them, if it is known."""

    file: str
    position: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Torn:
    """The end of a commit that was never acknowledged: it was never completed, or it is being written at the moment."""

    file: str
    position: int
    size_bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class FrameFound:
    """A whole frame, and its rows in LOG_SCHEMA, without secret values."""

    segment: SegmentFound
    frame: fmt.Frame
    rows: pa.RecordBatch

    def kinds(self) -> dict[str, int]:
        """Count the rows of each kind."""
        return kind_counts(self.rows)


@dataclass(frozen=True, slots=True)
class SegmentFound:
    """A file of the log. `first_seq` is None for a spare, and for a file whose header is damaged."""

    ordinal: int
    size_bytes: int
    buffer: pa.Buffer
    first_seq: int | None
    is_spare: bool
    is_last: bool  # the last segment that has begun: only this one may have a torn tail
    until_seq: int | None  # the number with which the next segment begins
    damage: Damage | None  # of its header

    @property
    def name(self) -> str:
        """The file name, relative to the data folder."""
        return segment_name(self.ordinal)

    @property
    def created_ms(self) -> int | None:
        """The time when the log began this segment. None in the same cases as `first_seq`."""
        return None if self.first_seq is None else int(fmt.SEGMENT.unpack_from(self.buffer)[4])


Found = FrameFound | Torn | Damage


class FolderDump:
    """A data folder at the time of reading. Raises SetupError if a segment has a newer format."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.damage: list[Damage] = []  # of the folder as a whole; `walk` yields that of a segment
        self.checkpoint = self._checkpoint()  # read before the log, which may grow meanwhile
        self.segments = self._segments()
        begun = [segment for segment in self.segments if not segment.is_spare]
        if begun and self.checkpoint is None and not _is_all_there(begun):
            text = "the log's beginning is missing, and no snapshot stands for it: restore it from a copy"
            self.damage.append(Damage(segment_name(begun[0].ordinal - 1), None, text))
        if not begun and self.checkpoint is not None and self.checkpoint.facts.seq > 1:
            last = self.checkpoint.facts.seq - 1
            self.damage.append(
                Damage(FOLDER, None, f"the log is gone, but the checkpoint knows of seq {last}")
            )

    def walk(self, segment: SegmentFound) -> Iterator[Found]:
        """Yield the frames and damages of one segment, in order. Every frame is checked against its checksum."""
        if segment.damage is not None:
            yield segment.damage
        if segment.is_spare:
            return
        walk = _Walk(self.files, segment)
        yield from walk.all()
        yield from self._end(segment, walk.expected)

    def _checkpoint(self) -> cp.Checkpoint | None:
        try:
            return cp.parse(bytes(self.files.map_readonly(cp.NAME)))
        except NotFound:
            return None
        except Corrupt as error:
            self.damage.append(Damage(cp.NAME, None, str(error)))
            return None

    def _segments(self) -> list[SegmentFound]:
        for _ in range(LISTINGS_MAX):
            names = [name for name in self.files.list_dir(FOLDER) if name.endswith(SUFFIX)]
            ordinals = _numbers([name.removesuffix(SUFFIX) for name in names])
            try:
                buffers = [self.files.map_readonly(segment_name(ordinal)) for ordinal in ordinals]
            except NotFound:
                continue  # retention has removed one meanwhile, the oldest
            self._note_holes(ordinals)
            return _headers(ordinals, buffers)
        raise NotFound(f"the files in {FOLDER} change faster than they can be listed")

    def _note_holes(self, ordinals: list[int]) -> None:
        for before, after in itertools.pairwise(ordinals):
            if after != before + 1:
                text = f"it is missing, but {segment_name(after)} is there: restore it from a copy"
                self.damage.append(Damage(segment_name(before + 1), None, text))

    def _end(self, segment: SegmentFound, reached: int | None) -> Iterator[Damage]:
        """Yield damage if the segment does not reach its successor, or the checkpoint."""
        if reached is None:
            return
        if segment.until_seq is not None and reached != segment.until_seq:
            text = f"it ends before seq {reached}, but the next segment begins with {segment.until_seq}"
            yield Damage(segment.name, None, f"{text}: restore it from a copy")
        if segment.is_last and self.checkpoint is not None and reached < self.checkpoint.facts.seq:
            last = self.checkpoint.facts.seq - 1
            text = f"it ends before seq {reached}, but the checkpoint knows of seq {last}"
            yield Damage(segment.name, None, f"{text}: restore it from a copy")

    def _size(self, name: str) -> int | None:
        try:
            return self.files.size(name)
        except NotFound:
            return None  # retention has removed the file meanwhile


class _Walk:
    """One pass over a segment. `expected` is the next sequence number, if it is known."""

    def __init__(self, files: Files, segment: SegmentFound) -> None:
        self.files, self.segment, self.buffer = files, segment, segment.buffer
        self.position, self.expected = fmt.ALIGN, segment.first_seq
        self.is_refused = False  # True if the frame at `position` has another version

    def all(self) -> Iterator[Found]:
        """Yield the frames, and the flaws between and after them."""
        while True:
            frame, broken = self._read()
            if frame is not None:
                yield self._decoded(frame)
                self.position, self.expected = frame.end, frame.next_seq
                continue
            found = self._judge(broken)
            if isinstance(found, Damage) and self._look_again():
                continue
            if found is not None:
                yield found
            if not isinstance(found, Damage) or not self._resume():
                return

    def _read(self) -> tuple[fmt.Frame | None, str | None]:
        """Read the frame at the current position: the frame or the fault, or neither if nothing was written."""
        self.is_refused = False
        try:
            frame = fmt.read_frame(self.buffer, self.position)
        except Corrupt as error:
            return None, str(error)
        # The folder has a supported format, so a frame of another version is damage. A start refuses it in any case.
        except SetupError as error:
            self.is_refused = True
            return None, str(error)
        if frame is None or self.expected in (None, frame.first_seq):
            return frame, None
        return None, (
            f"frame at byte {self.position} begins with seq {frame.first_seq}, expected {self.expected}"
        )

    def _judge(self, broken: str | None) -> Torn | Damage | None:
        """Classify the bytes from here on, which are not a frame: the end (None), a torn commit, or damage."""
        segment, position = self.segment, self.position
        if not segment.is_last:
            is_end = self.expected == segment.until_seq or last_written(self.buffer, position) == position
            if broken is None and is_end:
                return None  # `_end` compares this end with the next segment
            return Damage(segment.name, position, broken or "blank, though the log went on here")
        size = last_written(self.buffer, position) - position
        if size == 0:
            return None
        proof = proof_behind(self.buffer, position, self.expected or 0)
        if proof is None and self.is_refused:
            return Damage(segment.name, position, broken or "")
        if proof is None:
            return Torn(segment.name, position, size, broken or "blank")
        text = f"{broken or 'blank'}; the frame at byte {proof.position} proves that it was acknowledged"
        return Damage(segment.name, position, text)

    def _look_again(self) -> bool:
        """Read again. True if a broker has completed a commit here meanwhile, in a file that may have grown."""
        try:
            self.buffer = self.files.map_readonly(self.segment.name)
        except NotFound:
            return False  # retention has removed the segment meanwhile
        return self._read()[0] is not None

    def _resume(self) -> bool:
        """Move to the next whole frame that may follow. False if there is none."""
        until = self.segment.until_seq
        for frame in whole_frames(self.buffer, self.position + fmt.ALIGN):
            is_too_late = until is not None and frame.next_seq > until
            if frame.first_seq >= (self.expected or 0) and not is_too_late:
                self.position, self.expected = frame.position, frame.first_seq
                return True
        return False

    def _decoded(self, frame: fmt.Frame) -> FrameFound | Damage:
        try:
            return FrameFound(self.segment, frame, without_secrets(fmt.decode_rows(self.buffer, frame)))
        except (Corrupt, pa.ArrowException) as error:
            return Damage(self.segment.name, frame.position, f"checksum right, but not our rows: {error}")


def kind_counts(rows: pa.RecordBatch) -> dict[str, int]:
    """Count rows by the name of their kind. An unknown kind is named by its number."""
    kinds, counts = np.unique(rows.column("kind").to_numpy(zero_copy_only=False), return_counts=True)
    known = {int(kind): kind.name for kind in Kind}
    pairs = zip(kinds.tolist(), counts.tolist(), strict=True)
    return {known.get(kind, str(kind)): count for kind, count in pairs}


def _is_all_there(begun: list[SegmentFound]) -> bool:
    """Return whether the log begins with its first row, or a snapshot records that older rows were removed."""
    first_seq = begun[0].first_seq
    if first_seq in (None, 1):
        return True
    for segment in reversed(begun):
        for frame in whole_frames(segment.buffer, fmt.ALIGN):
            if frame.flags & fmt.SNAPSHOT:
                body = fmt.decode_rows(segment.buffer, frame).column("body")[0].as_py()
                if cp.decode(body).facts.log_from_seq >= (first_seq or 0):
                    return True
    return False


def _numbers(names: list[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal())


def _headers(ordinals: list[int], buffers: list[pa.Buffer]) -> list[SegmentFound]:
    """Build the list of segments from their headers."""
    # The last one first: a broker may begin the next segments meanwhile, and a segment must not look blank because it
    # was read before its successor.
    pairs = zip(reversed(ordinals), reversed(buffers), strict=True)
    read = [_header(ordinal, buffer, is_final=ordinal == ordinals[-1]) for ordinal, buffer in pairs][::-1]
    begun = [at for at, (first_seq, damage) in enumerate(read) if first_seq is not None or damage is not None]
    found = []
    for at, (ordinal, buffer) in enumerate(zip(ordinals, buffers, strict=True)):
        first_seq, damage = read[at]
        is_last = bool(begun) and at == begun[-1]
        is_spare = first_seq is None and damage is None
        if is_spare and begun and at < begun[-1]:
            damage = Damage(segment_name(ordinal), 0, "blank, but the segment behind it is not")
        until_seq = read[at + 1][0] if at + 1 < len(read) and ordinals[at + 1] == ordinal + 1 else None
        found.append(
            SegmentFound(ordinal, buffer.size, buffer, first_seq, is_spare, is_last, until_seq, damage)
        )
    return found


def _header(ordinal: int, buffer: pa.Buffer, *, is_final: bool) -> tuple[int | None, Damage | None]:
    """Read a header: (first_seq, damage), or neither for a spare. The rules are those of recovery."""
    try:
        first_seq = fmt.read_segment_header(buffer)
    except Corrupt as error:
        is_torn_spare = is_final and not _holds_frames(buffer)
        return None, None if is_torn_spare else Damage(segment_name(ordinal), 0, str(error))
    if first_seq is None and _holds_frames(buffer):
        # A broker may have begun the segment after its header was read here. The header is written before the frames.
        first_seq = fmt.read_segment_header(buffer)
        if first_seq is not None:
            return first_seq, None
        return None, Damage(segment_name(ordinal), 0, "it holds data but its header is blank")
    return first_seq, None


def _holds_frames(buffer: pa.Buffer) -> bool:
    return last_written(buffer, 0) > fmt.ALIGN
