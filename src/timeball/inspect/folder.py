"""What stands in a data folder, read without a broker and without changing a byte.

Reads only, claims nothing, and may look on while a broker writes: the checkpoint is read first, so that the log
can only know more than it; a place that looks damaged is looked at again, because a commit may have been finished
meanwhile; a segment that retention takes away while we list has us list again.

Recovery stops at the first damage, since it must not guess. Here damage is a finding: it is named with file and
position, and the reading goes on at the next whole frame behind it. A torn tail is told from damage as recovery does it
(log/recovery.py): frames of a commit that was never acknowledged are not shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.errors import Corrupt, NotFound, SetupError
from timeball.files import Files
from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log.recovery import last_written, proof_behind, whole_frames
from timeball.log.segment import FOLDER, SUFFIX, segment_name
from timeball.message import Kind, without_secrets

LISTINGS_MAX = 100  # a broker lets a segment go at most every few seconds


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that do not match themselves or their neighbours; `position` is the first of them, where known."""

    file: str
    position: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Torn:
    """The end of a commit that was never acknowledged: never finished, or being written just now."""

    file: str
    position: int
    size_bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class FrameFound:
    """A whole frame, and its rows in LOG_SCHEMA, without values that are secret."""

    segment: SegmentFound
    frame: fmt.Frame
    rows: pa.RecordBatch

    def kinds(self) -> dict[str, int]:
        """How many rows of each kind."""
        return kind_counts(self.rows)


@dataclass(frozen=True, slots=True)
class SegmentFound:
    """A file of the log. `first_seq` is None for a spare and for a file whose header is damaged."""

    ordinal: int
    size_bytes: int
    buffer: pa.Buffer
    first_seq: int | None
    is_spare: bool
    is_last: bool  # of those begun: the only one that may have a torn tail
    until_seq: int | None  # where the next one begins
    damage: Damage | None  # of its header

    @property
    def name(self) -> str:
        """File name, relative to the data folder."""
        return segment_name(self.ordinal)

    @property
    def created_ms(self) -> int | None:
        """When the log rolled into it; None as for `first_seq`."""
        return None if self.first_seq is None else int(fmt.SEGMENT.unpack_from(self.buffer)[4])


Found = FrameFound | Torn | Damage


class FolderDump:
    """A data folder as it stands. Raises SetupError when a segment is of a newer format."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.damage: list[Damage] = []  # of the folder as a whole; that of a segment comes from `walk`
        self.checkpoint = self._checkpoint()  # before the log, which may grow while we look
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
        """Yield the frames and damages of one segment, in order; every frame is checked against its checksum."""
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
                continue  # retention has taken one away since, the oldest
            self._note_holes(ordinals)
            return _headers(ordinals, buffers)
        raise NotFound(f"the files in {FOLDER} change faster than they can be listed")

    def _note_holes(self, ordinals: list[int]) -> None:
        for before, after in itertools.pairwise(ordinals):
            if after != before + 1:
                text = f"it is missing, but {segment_name(after)} is there: restore it from a copy"
                self.damage.append(Damage(segment_name(before + 1), None, text))

    def _end(self, segment: SegmentFound, reached: int | None) -> Iterator[Damage]:
        """Return whether a segment goes as far as its follower, or the checkpoint, says."""
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
            return None  # retention has taken it away since


class _Walk:
    """One pass over a segment. `expected` is the sequence number that comes next, as far as it is known."""

    def __init__(self, files: Files, segment: SegmentFound) -> None:
        self.files, self.segment, self.buffer = files, segment, segment.buffer
        self.position, self.expected = fmt.ALIGN, segment.first_seq
        self.is_refused = False  # what stands here says that it is of another version

    def all(self) -> Iterator[Found]:
        """Frames, and what lies between and behind them."""
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
        """Return the whole frame that should stand here, or else the fault; neither where nothing was written."""
        self.is_refused = False
        try:
            frame = fmt.read_frame(self.buffer, self.position)
        except Corrupt as error:
            return None, str(error)
        # The folder is of our format, so a frame of another version is damage; a start refuses it anyhow.
        except SetupError as error:
            self.is_refused = True
            return None, str(error)
        if frame is None or self.expected in (None, frame.first_seq):
            return frame, None
        return None, (
            f"frame at byte {self.position} begins with seq {frame.first_seq}, expected {self.expected}"
        )

    def _judge(self, broken: str | None) -> Torn | Damage | None:
        """Return what the bytes from here on are, which are no frame: the end, a torn commit, or damage."""
        segment, position = self.segment, self.position
        if not segment.is_last:
            is_end = self.expected == segment.until_seq or last_written(self.buffer, position) == position
            if broken is None and is_end:
                return None  # where it should have ended is judged by its follower
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
        """Return whether a broker has finished a commit here, in a file that may have grown, since we looked."""
        try:
            self.buffer = self.files.map_readonly(self.segment.name)
        except NotFound:
            return False  # let go since
        return self._read()[0] is not None

    def _resume(self) -> bool:
        """Go to the next whole frame that may follow; False when there is none."""
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
    """Kind's name -> number of rows; an unknown kind is named by its number."""
    kinds, counts = np.unique(rows.column("kind").to_numpy(zero_copy_only=False), return_counts=True)
    known = {int(kind): kind.name for kind in Kind}
    pairs = zip(kinds.tolist(), counts.tolist(), strict=True)
    return {known.get(kind, str(kind)): count for kind, count in pairs}


def _is_all_there(begun: list[SegmentFound]) -> bool:
    """Return whether the log begins with its first row, or a snapshot says that older rows were let go."""
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
    """The files of the log by what their headers say."""
    read = [_header(o, b, is_final=o == ordinals[-1]) for o, b in zip(ordinals, buffers, strict=True)]
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
    """(first_seq, damage); neither for a spare. Judged as in recovery."""
    try:
        first_seq = fmt.read_segment_header(buffer)
    except Corrupt as error:
        is_torn_spare = is_final and not _holds_frames(buffer)
        return None, None if is_torn_spare else Damage(segment_name(ordinal), 0, str(error))
    if first_seq is None and _holds_frames(buffer):
        return None, Damage(segment_name(ordinal), 0, "it holds data but its header is blank")
    return first_seq, None


def _holds_frames(buffer: pa.Buffer) -> bool:
    return last_written(buffer, 0) > fmt.ALIGN
