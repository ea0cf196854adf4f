"""The contents of a data folder, read without a broker and without changing a byte.

This module only reads and takes no lock, so it can run while a broker writes:

- The checkpoint is read before the log, so that the log is never older than the checkpoint.
- A position that looks damaged is read again, because the broker may have completed a commit meanwhile.
- If retention removes a segment during the listing, the listing is repeated.

Recovery stops at the first damage, because it must not guess. Inspection reports damage with its file and position, and
continues at the next whole frame. It distinguishes a torn tail from damage as recovery does (log/recovery.py): frames
of a commit that was never acknowledged are not shown.
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
from timeball.log.recovery import find_later_proof, last_written, whole_frames
from timeball.log.segment import FOLDER, SUFFIX, segment_name
from timeball.model.errors import Corrupt, NotFound, SetupError
from timeball.model.message import Kind, without_secrets

LISTINGS_MAX = 100  # a broker removes a segment every few seconds at most


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that do not match their checksum or their neighbours. `position` is the first damaged byte, if known."""

    file: str
    position: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Torn:
    """A torn tail: a commit that was never acknowledged, because it is incomplete or is being written now."""

    file: str
    position: int
    size_bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class InspectedFrame:
    """A whole frame, and its rows in LOG_SCHEMA, without secret values."""

    segment: InspectedSegment
    frame: fmt.Frame
    rows: pa.RecordBatch

    def kinds(self) -> dict[str, int]:
        """Count the rows of each kind."""
        return kind_counts(self.rows)


@dataclass(frozen=True, slots=True)
class InspectedSegment:
    """A file of the log. `first_seq` is None for a spare, and for a file whose header is damaged."""

    ordinal: int
    size_bytes: int
    buffer: pa.Buffer
    first_seq: int | None
    is_spare: bool
    is_last: bool  # the last segment in use: only this segment may have a torn tail
    until_seq: int | None  # the number with which the next segment begins
    damage: Damage | None  # damage of the header

    @property
    def name(self) -> str:
        """The file name, relative to the data folder."""
        return segment_name(self.ordinal)

    @property
    def created_ms(self) -> int | None:
        """The time when the log began this segment. None in the same cases as `first_seq`."""
        return None if self.first_seq is None else int(fmt.SEGMENT.unpack_from(self.buffer)[4])


WalkResult = InspectedFrame | Torn | Damage


class FolderDump:
    """A data folder at the time of reading. Raises SetupError if a segment has a newer format."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.damage: list[
            Damage
        ] = []  # damage of the folder as a whole; `walk` yields the damage of a segment
        self.checkpoint = self._checkpoint()  # read before the log, which may grow meanwhile
        self.segments = self._segments()
        in_use = [segment for segment in self.segments if not segment.is_spare]
        if in_use and self.checkpoint is None and not _is_beginning_kept(in_use):
            text = "the log's beginning is missing, and no snapshot stands for it: restore it from a copy"
            self.damage.append(Damage(segment_name(in_use[0].ordinal - 1), None, text))
        if not in_use and self.checkpoint is not None and self.checkpoint.facts.seq > 1:
            last = self.checkpoint.facts.seq - 1
            self.damage.append(
                Damage(FOLDER, None, f"the log is gone, but the checkpoint knows of seq {last}")
            )

    def walk(self, segment: InspectedSegment) -> Iterator[WalkResult]:
        """Yield the frames and damages of one segment, in order. Every frame is checked against its checksum."""
        if segment.damage is not None:
            yield segment.damage
        if segment.is_spare:
            return
        walk = _SegmentWalk(self.files, segment)
        yield from walk.all()
        yield from self._check_end(segment, walk.expected_seq)

    def _checkpoint(self) -> cp.Checkpoint | None:
        try:
            return cp.parse(bytes(self.files.map_readonly(cp.NAME)))
        except NotFound:
            return None
        except Corrupt as error:
            self.damage.append(Damage(cp.NAME, None, str(error)))
            return None

    def _segments(self) -> list[InspectedSegment]:
        for _ in range(LISTINGS_MAX):
            names = [name for name in self.files.list_dir(FOLDER) if name.endswith(SUFFIX)]
            ordinals = _parse_ordinals([name.removesuffix(SUFFIX) for name in names])
            try:
                buffers = [self.files.map_readonly(segment_name(ordinal)) for ordinal in ordinals]
            except NotFound:
                continue  # retention has removed the oldest segment meanwhile
            self._record_missing_segments(ordinals)
            return _read_headers(ordinals, buffers)
        raise NotFound(f"the files in {FOLDER} change faster than they can be listed")

    def _record_missing_segments(self, ordinals: list[int]) -> None:
        """Record damage for each gap in the ordinals."""
        for before, after in itertools.pairwise(ordinals):
            if after != before + 1:
                text = f"it is missing, but {segment_name(after)} is there: restore it from a copy"
                self.damage.append(Damage(segment_name(before + 1), None, text))

    def _check_end(self, segment: InspectedSegment, next_seq: int | None) -> Iterator[Damage]:
        """Yield damage if the segment ends before its successor begins, or before the checkpoint.

        `next_seq` is the number after the segment's last row, if known.
        """
        if next_seq is None:
            return
        if segment.until_seq is not None and next_seq != segment.until_seq:
            text = f"it ends before seq {next_seq}, but the next segment begins with {segment.until_seq}"
            yield Damage(segment.name, None, f"{text}: restore it from a copy")
        if segment.is_last and self.checkpoint is not None and next_seq < self.checkpoint.facts.seq:
            last = self.checkpoint.facts.seq - 1
            text = f"it ends before seq {next_seq}, but the checkpoint knows of seq {last}"
            yield Damage(segment.name, None, f"{text}: restore it from a copy")

    def _size(self, name: str) -> int | None:
        try:
            return self.files.size(name)
        except NotFound:
            return None  # retention has removed the file meanwhile


class _SegmentWalk:
    """A pass over the frames of a segment. `expected_seq` is the next sequence number, if known."""

    def __init__(self, files: Files, segment: InspectedSegment) -> None:
        self.files, self.segment, self.buffer = files, segment, segment.buffer
        self.position, self.expected_seq = fmt.ALIGN, segment.first_seq
        self.is_refused = False  # True if the frame at `position` has another version

    def all(self) -> Iterator[WalkResult]:
        """Yield the frames, and damage or a torn tail between and after them."""
        while True:
            frame, fault = self._read()
            if frame is not None:
                yield self._decode(frame)
                self.position, self.expected_seq = frame.end, frame.next_seq
                continue
            flaw = self._classify(fault)
            if isinstance(flaw, Damage) and self._has_become_frame():
                continue
            if flaw is not None:
                yield flaw
            if not isinstance(flaw, Damage) or not self._skip_to_next_frame():
                return

    def _read(self) -> tuple[fmt.Frame | None, str | None]:
        """Read the frame at the current position. Returns it or its fault, or neither if nothing was written."""
        self.is_refused = False
        try:
            frame = fmt.read_frame(self.buffer, self.position)
        except Corrupt as error:
            return None, str(error)
        # The folder has a supported format, so a frame of another version is damage. A broker refuses to start on it.
        except SetupError as error:
            self.is_refused = True
            return None, str(error)
        if frame is None or self.expected_seq in (None, frame.first_seq):
            return frame, None
        return None, (
            f"frame at byte {self.position} begins with seq {frame.first_seq}, expected {self.expected_seq}"
        )

    def _classify(self, fault: str | None) -> Torn | Damage | None:
        """Classify the bytes at the current position, which are not a frame.

        Returns None for the end of the segment, a torn tail, or damage.
        """
        segment, position = self.segment, self.position
        if not segment.is_last:
            is_end = self.expected_seq == segment.until_seq or last_written(self.buffer, position) == position
            if fault is None and is_end:
                return None  # `_check_end` compares this end with the next segment
            return Damage(segment.name, position, fault or "blank, though the log went on here")
        size_bytes = last_written(self.buffer, position) - position
        if size_bytes == 0:
            return None
        proof = find_later_proof(self.buffer, position, self.expected_seq or 0)
        if proof is None and self.is_refused:
            return Damage(segment.name, position, fault or "")
        if proof is None:
            return Torn(segment.name, position, size_bytes, fault or "blank")
        text = f"{fault or 'blank'}; the frame at byte {proof.position} proves that it was acknowledged"
        return Damage(segment.name, position, text)

    def _has_become_frame(self) -> bool:
        """Read the current position again. Returns True if a broker has completed a commit there meanwhile."""
        # The file is mapped again, because it may have grown.
        try:
            self.buffer = self.files.map_readonly(self.segment.name)
        except NotFound:
            return False  # retention has removed the segment meanwhile
        return self._read()[0] is not None

    def _skip_to_next_frame(self) -> bool:
        """Move to the next whole frame whose numbers fit into the segment. Returns False if there is none."""
        until_seq = self.segment.until_seq
        for frame in whole_frames(self.buffer, self.position + fmt.ALIGN):
            is_beyond_segment = until_seq is not None and frame.next_seq > until_seq
            if frame.first_seq >= (self.expected_seq or 0) and not is_beyond_segment:
                self.position, self.expected_seq = frame.position, frame.first_seq
                return True
        return False

    def _decode(self, frame: fmt.Frame) -> InspectedFrame | Damage:
        try:
            return InspectedFrame(self.segment, frame, without_secrets(fmt.decode_rows(self.buffer, frame)))
        except (Corrupt, pa.ArrowException) as error:
            return Damage(
                self.segment.name,
                frame.position,
                f"the checksum is right, but the rows cannot be decoded: {error}",
            )


def kind_counts(rows: pa.RecordBatch) -> dict[str, int]:
    """Count rows by the name of their kind. An unknown kind is named by its number."""
    kinds, counts = np.unique(rows.column("kind").to_numpy(zero_copy_only=False), return_counts=True)
    kind_names = {int(kind): kind.name for kind in Kind}
    pairs = zip(kinds.tolist(), counts.tolist(), strict=True)
    return {kind_names.get(kind, str(kind)): count for kind, count in pairs}


def _is_beginning_kept(in_use: list[InspectedSegment]) -> bool:
    """Check whether the log begins with its first row, or a snapshot records that retention removed the older rows.

    `in_use`: the segments that are not spare.
    """
    first_seq = in_use[0].first_seq
    if first_seq in (None, 1):
        return True
    for segment in reversed(in_use):
        for frame in whole_frames(segment.buffer, fmt.ALIGN):
            if frame.flags & fmt.SNAPSHOT:
                body = fmt.decode_rows(segment.buffer, frame).column("body")[0].as_py()
                if cp.decode(body).facts.log_from_seq >= (first_seq or 0):
                    return True
    return False


def _parse_ordinals(names: list[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal())


def _read_headers(ordinals: list[int], buffers: list[pa.Buffer]) -> list[InspectedSegment]:
    """Build the list of segments from their headers."""
    # From the last to the first: a broker may begin the next segments meanwhile, and a segment must not look blank
    # because it was read before its successor.
    pairs = zip(reversed(ordinals), reversed(buffers), strict=True)
    headers = [_read_header(ordinal, buffer, is_final=ordinal == ordinals[-1]) for ordinal, buffer in pairs][
        ::-1
    ]
    in_use = [
        index
        for index, (first_seq, damage) in enumerate(headers)
        if first_seq is not None or damage is not None
    ]
    segments = []
    for index, (ordinal, buffer) in enumerate(zip(ordinals, buffers, strict=True)):
        first_seq, damage = headers[index]
        is_last = bool(in_use) and index == in_use[-1]
        is_spare = first_seq is None and damage is None
        if is_spare and in_use and index < in_use[-1]:
            damage = Damage(segment_name(ordinal), 0, "blank, but the segment behind it is not")
        has_successor = index + 1 < len(headers) and ordinals[index + 1] == ordinal + 1
        until_seq = headers[index + 1][0] if has_successor else None
        segments.append(
            InspectedSegment(ordinal, buffer.size, buffer, first_seq, is_spare, is_last, until_seq, damage)
        )
    return segments


def _read_header(ordinal: int, buffer: pa.Buffer, *, is_final: bool) -> tuple[int | None, Damage | None]:
    """Read a segment's header by the rules of recovery. Returns (first_seq, damage), both None for a spare segment.

    `is_final`: this is the last file of the log, whose header may be torn.
    """
    try:
        first_seq = fmt.read_segment_header(buffer)
    except Corrupt as error:
        is_torn_spare = is_final and not _holds_frames(buffer)
        return None, None if is_torn_spare else Damage(segment_name(ordinal), 0, str(error))
    if first_seq is None and _holds_frames(buffer):
        # A broker may have begun the segment after the header was read above. It writes the header before the frames.
        first_seq = fmt.read_segment_header(buffer)
        if first_seq is not None:
            return first_seq, None
        return None, Damage(segment_name(ordinal), 0, "it holds data but its header is blank")
    return first_seq, None


def _holds_frames(buffer: pa.Buffer) -> bool:
    return last_written(buffer, 0) > fmt.ALIGN
