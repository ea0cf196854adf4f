"""The contents of a data folder, read without a broker and without changing a byte, for `timeball dump`.

This module only reads and takes no lock, so it can run while a broker writes:

- The checkpoint is read before the log, so that the log is never older than the checkpoint.
- A position that looks damaged is read again, because the broker may have completed a commit meanwhile.
- If retention removes a segment during the listing, the listing is repeated.

Recovery stops at the first damage, because it must not guess. Inspection reports damage with its file and position, and
continues at the next whole frame. It distinguishes a torn tail from damage as recovery does (log/recovery.py): frames
of a commit that was never acknowledged are not shown.

A report is rows, frames or a summary, as plain dictionaries. A `Selection` chooses the part of the log. Every frame of
a selected segment is read and checked, even if it is not shown. Torn tails and damage (`Torn`, `Damage`) are always
reported. A summary of the whole folder includes the live data files of the pending table (inspect_table.py).
`CacheCheck` compares the caches beside the log with the log (`--verify`).
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from timeball.io.files import Files, Unreadable, check_readable
from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log import recovery
from timeball.log.frame_scan import FrameScan, read_segment_header
from timeball.log.queue_index import Part, QueueFile, file_name, file_names
from timeball.log.recovery import find_later_proof, last_written, whole_frames
from timeball.log.segment import FOLDER, SUFFIX, Segment, segment_name
from timeball.model.errors import Corrupt, NotFound, SetupError
from timeball.model.key_hash import KeyRun, UInt64Array, hash_keys
from timeball.model.message import Int64Array, Kind, without_secrets
from timeball.node.inspect_table import DataFileCheck

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
        if self.first_seq is None:
            return None
        *_, created_ms, _checksum = fmt.SEGMENT.unpack_from(self.buffer)
        return int(created_ms)


WalkResult = InspectedFrame | Torn | Damage


class FolderDump:
    """A data folder at the time of reading."""

    def __init__(self, files: Files) -> None:
        """Read the checkpoint and map the segments. Raises SetupError for a newer format, NotFound as `_segments`."""
        self.files = files
        self.damage: list[Damage] = []  # of the folder as a whole; `walk` yields the damage of a segment
        self.checkpoint = self._checkpoint()  # read before the log, which may grow meanwhile
        self.segments = self._segments()
        in_use = [segment for segment in self.segments if not segment.is_spare]
        if in_use and self.checkpoint is None and not _is_beginning_explained(in_use):
            text = "the log's beginning is missing, and no snapshot stands for it: restore it from a copy"
            self.damage.append(Damage(segment_name(in_use[0].ordinal - 1), None, text))
        if not in_use and self.checkpoint is not None and self.checkpoint.facts.seq > 1:
            last = self.checkpoint.facts.seq - 1
            self.damage.append(
                Damage(FOLDER, None, f"the log is missing, but the checkpoint covers seq {last}")
            )

    def walk(self, segment: InspectedSegment) -> Iterator[WalkResult]:
        """Yield the frames, the damage and the torn tail of one segment, in order. Checks all checksums."""
        if segment.damage is not None:
            yield segment.damage
        if segment.is_spare:
            return
        walk = _SegmentWalk(self.files, segment)
        yield from walk.all()
        yield from self._check_end(segment, walk.expected_seq)

    def _checkpoint(self) -> cp.Checkpoint | None:
        """Read the checkpoint. None if there is none, or if it is damaged, which is recorded."""
        try:
            return cp.read(self.files)
        except NotFound:
            return None
        except Corrupt as error:
            self.damage.append(Damage(cp.NAME, None, str(error)))
            return None

    def _segments(self) -> list[InspectedSegment]:
        """Map all segments, and read their headers. Records missing ones.

        Raises NotFound if retention removes files in each attempt.
        """
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
            text = f"it ends before seq {next_seq}, but the checkpoint covers seq {last}"
            yield Damage(segment.name, None, f"{text}: restore it from a copy")


class _SegmentWalk:
    """A pass over the frames of a segment."""

    def __init__(self, files: Files, segment: InspectedSegment) -> None:
        self.files, self.segment, self.buffer = files, segment, segment.buffer
        self.scan = FrameScan(self.buffer)
        self.position = fmt.ALIGN  # of the next frame
        self.expected_seq = segment.first_seq  # the first number of the next frame; None if unknown
        self.is_refused = False  # True if the frame at `position` has another version

    def all(self) -> Iterator[WalkResult]:
        """Yield the frames, and the damage or the torn tail between and after them."""
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
        """Read the frame at the current position. Returns the frame or its fault, or neither if nothing was written."""
        self.is_refused = False
        try:
            frame = self.scan.read(self.position)
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
        """Classify the bytes at the current position, which are not a frame: as a torn tail, or as damage.

        `fault`: the error of the read, or None for blank bytes. Returns None at the end of the segment. The rules are
        those of recovery: only the last segment may have a torn tail, and a later whole frame proves damage.
        """
        segment, position = self.segment, self.position
        if not segment.is_last:
            is_end = self.expected_seq == segment.until_seq or last_written(self.buffer, position) == position
            if fault is None and is_end:
                return None  # `_check_end` compares this end with the next segment
            return Damage(segment.name, position, fault or "blank, though the log went on here")
        try:
            check_readable(self.buffer, position, self.buffer.size)
        except Unreadable as error:
            return Damage(segment.name, position, str(error))
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
            self.scan = FrameScan(self.buffer)
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
        """Decode the rows of a frame. Returns damage if that is not possible."""
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


def _is_beginning_explained(in_use: list[InspectedSegment]) -> bool:
    """Check whether the log begins with its first row, or a snapshot records that retention removed the older rows.

    `in_use`: the segments that are not spare, in order. An unknown beginning counts as explained.
    """
    first_seq = in_use[0].first_seq
    if first_seq is None or first_seq == 1:
        return True
    for segment in reversed(in_use):
        for frame in whole_frames(segment.buffer, fmt.ALIGN):
            if frame.flags & fmt.SNAPSHOT:
                body = fmt.decode_rows(segment.buffer, frame).column("body")[0].as_py()
                if cp.decode(body).facts.log_from_seq >= first_seq:
                    return True
    return False


def _parse_ordinals(names: list[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal())


def _read_headers(ordinals: list[int], buffers: list[pa.Buffer]) -> list[InspectedSegment]:
    """Read the headers of all segments, and build their list. `ordinals` and `buffers` are in order."""
    # From the last to the first, because a broker may begin segments meanwhile. If a segment were read before its
    # successor, it could look blank although the successor is in use.
    pairs = zip(reversed(ordinals), reversed(buffers), strict=True)
    headers = [_read_header(ordinal, buffer, is_final=ordinal == ordinals[-1]) for ordinal, buffer in pairs]
    headers.reverse()
    in_use = [index for index, header in enumerate(headers) if header != (None, None)]
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
        first_seq = read_segment_header(buffer)
    except Corrupt as error:
        is_torn_spare = is_final and not _holds_frames(buffer)
        return None, None if is_torn_spare else Damage(segment_name(ordinal), 0, str(error))
    if first_seq is None and _holds_frames(buffer):
        # A broker may have begun the segment after the header was read above. It writes the header before the frames.
        first_seq = read_segment_header(buffer)
        if first_seq is not None:
            return first_seq, None
        return None, Damage(segment_name(ordinal), 0, "it holds data but its header is blank")
    return first_seq, None


def _holds_frames(buffer: pa.Buffer) -> bool:
    """Check whether anything was written after the header of a segment."""
    return last_written(buffer, 0) > fmt.ALIGN


# ---- reports --------------------------------------------------------------------------------------------------

KIND_NAMES = {int(kind): kind.name for kind in Kind}


@dataclass(frozen=True)
class Selection:
    """The part of the log to report. The defaults select all of it."""

    segments: frozenset[int] = frozenset()  # empty: all
    kinds: frozenset[int] = frozenset()  # empty: all
    from_seq: int = 0
    to_seq: int | None = None

    def has_segment(self, segment: InspectedSegment) -> bool:
        """Check whether the segment is selected and may have rows in the range."""
        if self.segments:
            return segment.ordinal in self.segments
        first_seq, until_seq = segment.first_seq, segment.until_seq
        is_before_range = until_seq is not None and until_seq <= self.from_seq
        return not is_before_range and (self.to_seq is None or first_seq is None or first_seq < self.to_seq)

    def has_frame(self, inspected: InspectedFrame) -> bool:
        """Check whether the frame has rows in the range, and if kinds are selected a row of one of them."""
        frame = inspected.frame
        if frame.next_seq <= self.from_seq or (self.to_seq is not None and frame.first_seq >= self.to_seq):
            return False
        return not self.kinds or not self.kinds.isdisjoint(inspected.rows.column("kind").to_pylist())


def find_rows(folder: FolderDump, selection: Selection) -> Iterator[WalkResult]:
    """Yield the damage of the folder, then the selected frames, torn tails and damage of the selected segments."""
    yield from folder.damage
    for segment in filter(selection.has_segment, folder.segments):
        for result in folder.walk(segment):
            if not isinstance(result, InspectedFrame) or selection.has_frame(result):
                yield result


def describe_frame(inspected: InspectedFrame) -> dict[str, Any]:
    """Describe a frame: its header and the number of rows of each kind."""
    return {
        "segment": inspected.segment.ordinal,
        **msgspec.structs.asdict(inspected.frame),
        "checksum": "ok",
        "kinds": inspected.kinds(),
    }


def describe_rows(inspected: InspectedFrame, selection: Selection) -> Iterator[dict[str, Any]]:
    """Yield the selected rows of a frame as dictionaries by column name, without null values and secrets."""
    first_seq = inspected.frame.first_seq
    begin = max(0, selection.from_seq - first_seq)
    end = inspected.rows.num_rows if selection.to_seq is None else max(begin, selection.to_seq - first_seq)
    # Users attach dumps to bug reports, so the broker's secrets are removed.
    rows = without_secrets(inspected.rows.slice(begin, end - begin))
    for seq, row in enumerate(rows.to_pylist(), first_seq + begin):
        kind = row.pop("kind")
        if selection.kinds and kind not in selection.kinds:
            continue
        values = {name: value for name, value in row.items() if value is not None}
        yield {
            "seq": seq,
            "kind": KIND_NAMES.get(kind, str(kind)),
            **_encode_body(values.pop("body", None)),
            **values,
        }


def _encode_body(body: bytes | None) -> dict[str, str]:
    """Show a body as text if it is UTF-8, else as base64. Empty for no body."""
    if body is None:
        return {}
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


@dataclass
class SegmentSummary:
    """A file of the log, with totals of its selected frames."""

    file: str
    size_bytes: int
    state: str  # spare, sealed or active
    first_seq: int | None
    next_seq: int | None
    created_ms: int | None
    last_append_ms: int | None = None
    used_bytes: int = 0
    frames: int = 0
    rows: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, inspected: InspectedFrame) -> None:
        """Add a frame to the totals. Frames come in the order of the log."""
        self.frames += 1
        self.rows += inspected.frame.rows
        self.used_bytes = inspected.frame.end
        self.next_seq, self.last_append_ms = inspected.frame.next_seq, inspected.frame.append_ms
        for name, count in inspected.kinds().items():
            self.kinds[name] = self.kinds.get(name, 0) + count


@dataclass
class Summary:
    """A summary of a folder. `flaws` are the torn tails and damage in the order of the log."""

    segments: list[SegmentSummary]
    checkpoint: dict[str, Any] | None
    queues: list[dict[str, Any]]
    flaws: list[Torn | Damage]
    verified: bool

    @property
    def damage(self) -> list[Damage]:
        """The flaws that a start of the broker does not repair by itself."""
        return [flaw for flaw in self.flaws if isinstance(flaw, Damage)]

    def document(self) -> dict[str, Any]:
        """Build the summary as one JSON document."""
        return {
            "segments": [asdict(segment) for segment in self.segments],
            "torn": [asdict(flaw) for flaw in self.flaws if isinstance(flaw, Torn)],
            "checkpoint": self.checkpoint,
            "queues": self.queues,
            "verified": self.verified,
            "damage": [asdict(flaw) for flaw in self.damage],
        }


def summarise(folder: FolderDump, selection: Selection, *, verify: bool = False) -> Summary:
    """Summarise the selected part of a folder, and check the data files if all segments are selected.

    With `verify`, also compare the caches with the log, and check all bytes of the data files. The log is read only
    once.
    """
    check = CacheCheck(folder) if verify else None
    data_files = None
    if all(map(selection.has_segment, folder.segments)):
        checkpoint = folder.checkpoint
        data_files = DataFileCheck(folder.files, cp.Facts(seq=1) if checkpoint is None else checkpoint.facts)
    segments: list[SegmentSummary] = []
    flaws: list[Torn | Damage] = list(folder.damage)
    for segment in filter(selection.has_segment, folder.segments):
        state = "spare" if segment.is_spare else "active" if segment.is_last else "sealed"
        first_seq = segment.first_seq
        summary = SegmentSummary(
            segment.name, segment.size_bytes, state, first_seq, first_seq, segment.created_ms
        )
        for result in folder.walk(segment):
            if not isinstance(result, InspectedFrame):
                flaws.append(result)
                continue
            if check is not None:
                check.add(result)
            if data_files is not None:
                data_files.add(segment.buffer, result.frame, result.rows)
            if selection.has_frame(result):
                summary.add(result)
        if check is not None:
            flaws += check.finish(segment)
        segments.append(summary)
    if data_files is not None:
        is_log_whole = not any(isinstance(flaw, Damage) and _is_of_log(flaw) for flaw in flaws)
        faults = data_files.finish(is_log_whole=is_log_whole, verify=verify)
        flaws += [Damage(name, None, f"{fault}; restore this file from a copy") for name, fault in faults]
    return Summary(segments, _checkpoint_fields(folder), _queue_ranges(folder), flaws, verify)


def _is_of_log(damage: Damage) -> bool:
    """Check whether rows of the log may be lost, and not only a cache."""
    return damage.file == FOLDER or damage.file.endswith(SUFFIX)


def _checkpoint_fields(folder: FolderDump) -> dict[str, Any] | None:
    """Show the facts of the checkpoint and the number of rows of its tables. None without a checkpoint."""
    if folder.checkpoint is None:
        return None
    # `asdict`, because encoding the struct itself leaves out fields with their default value.
    facts = msgspec.structs.asdict(folder.checkpoint.facts)
    del facts["queues"]  # `_queue_ranges` shows them
    # These are shown as counts, because there may be thousands of files, and META values may be secret.
    for name in ("files", "meta"):
        facts[name] = len(facts[name] or ())
    fields: dict[str, Any] = msgspec.to_builtins(facts)
    moved_rows, woken_rows = (table.shape[1] for table in (folder.checkpoint.moved, folder.checkpoint.woken))
    settled_rows = len(folder.checkpoint.settled_seq)
    return {**fields, "settled_rows": settled_rows, "moved_rows": moved_rows, "woken_rows": woken_rows}


def _queue_ranges(folder: FolderDump) -> list[dict[str, Any]]:
    """List the range of offsets of each queue in the checkpoint."""
    topics = folder.checkpoint.facts.queues if folder.checkpoint is not None else {}
    return [
        {"topic": topic, "queue_id": queue_id, "min_offset": low, "max_offset": high}
        for topic, queues in topics.items()
        for queue_id, (low, high) in queues.items()
    ]


# ---- comparison of the caches with the log -------------------------------------------------------------------
# The caches are key runs, frame indexes and the queue index. A broker rebuilds a cache that does not match its
# checksum. But a cache may be intact and belong to another log. So each cache is compared with the frames and rows
# while the log is read, segment by segment. The queue index is compared only up to the checkpoint, because a start of
# the broker writes the rest again.


class CacheCheck:
    """Compares the caches with the frames of the log.

    Call `add` for each frame in the order of the log, and `finish` after each segment, which returns the damage.
    """

    def __init__(self, folder: FolderDump) -> None:
        self._files: Files = folder.files
        self._checkpoint_seq = folder.checkpoint.facts.seq if folder.checkpoint is not None else 0
        # For each frame of the current segment: the hashes of its keys, and the sequence numbers of their rows.
        self._segment_keys: list[tuple[UInt64Array, Int64Array]] = []
        self._segment_frames: list[fmt.Frame] = []  # of the current segment
        self._damage: dict[str, Damage] = {}  # the first damage of each file
        self._unused_queue_files: set[str] = set()  # damaged, or removed by retention while they were listed
        self._queue_files = self._open_queue_files()
        # The queue file that was read last, and its entries by topic and queue, or None if they are damaged.
        self._last_read: tuple[QueueFile, dict[tuple[str, int], Part] | None] | None = None
        self._uncovered_ranges = self._find_uncovered_ranges()

    def add(self, inspected: InspectedFrame) -> None:
        """Add the next frame of the current segment, and compare its rows with the queue index."""
        rows, first_seq = inspected.rows, inspected.frame.first_seq
        hashes, row_numbers = hash_keys(rows.column("unique_key"), rows.column("keys"))
        self._segment_keys.append((hashes, first_seq + row_numbers))
        self._segment_frames.append(inspected.frame)
        visible = np.flatnonzero(rows.column("queue_offset").is_valid())
        if len(visible):
            self._compare_queues(rows.take(pa.array(visible)), first_seq + visible)

    def finish(self, segment: InspectedSegment) -> list[Damage]:
        """Compare the key run and the frame index of the segment whose last frame was added. Returns all damage."""
        keys, self._segment_keys = self._segment_keys, []
        frames, self._segment_frames = self._segment_frames, []
        if not segment.is_last and not segment.is_spare:
            self._compare_keys(f"{FOLDER}/{segment.ordinal:010d}.keys", keys)
            self._compare_frame_index(segment, frames)
        damage, self._damage = list(self._damage.values()), {}
        return damage

    def _compare_keys(self, name: str, keys: list[tuple[UInt64Array, Int64Array]]) -> None:
        """Compare a key run with the keys of its segment."""
        try:
            stored = KeyRun(self._files.map_readonly(name)).columns()
        except NotFound:
            return  # the broker writes this file at the first look-up
        except Corrupt as error:
            self._record(name, None, f"{error}; delete it, it is made again")
            return
        hashes = np.concatenate([np.empty(0, np.uint64), *(frame_hashes for frame_hashes, _ in keys)])
        seqs = np.concatenate([np.empty(0, np.int64), *(frame_seqs for _, frame_seqs in keys)])
        if not _are_same_pairs(hashes, seqs, *stored):
            self._record(name, None, "it does not hold the keys of its segment; delete it, it is made again")

    def _compare_frame_index(self, inspected: InspectedSegment, frames: list[fmt.Frame]) -> None:
        """Compare the frame index of a segment with its frames."""
        segment = Segment(inspected.ordinal, inspected.first_seq or 0, inspected.buffer)
        for frame in frames:
            if (frame.first_seq, frame.position) != (segment.next_seq, segment.end):
                return  # a frame is damaged (which was reported), so the correct content of the index is unknown
            segment.add(frame)
        name = recovery.index_name(segment)
        try:
            stored = bytes(self._files.map_readonly(name))
        except NotFound:
            return  # the broker writes this file during maintenance
        if inspected.until_seq == segment.next_seq and stored != recovery.encode(segment):
            self._record(
                name, None, "it does not name the frames of its segment; delete it, it is made again"
            )

    def _compare_queues(self, rows: pa.RecordBatch, seqs: Int64Array) -> None:
        """Compare visible rows, whose numbers are `seqs`, with the queue files that should have entries for them."""
        for file in self._queue_files:
            is_in_file = (seqs >= file.first_seq) & (seqs < min(file.next_seq, self._checkpoint_seq))
            if is_in_file.any():
                self._compare_file(file, rows.filter(pa.array(is_in_file)), seqs[is_in_file])
        overlapping = [
            (begin, end) for begin, end in self._uncovered_ranges if seqs[0] < end and seqs[-1] >= begin
        ]
        for begin, end in overlapping:
            uncovered = np.flatnonzero((seqs >= begin) & (seqs < end))
            if len(uncovered):
                self._record(
                    file_name(begin), None, f"it is missing: seq {seqs[uncovered[0]]} is in no queue"
                )

    def _compare_file(self, file: QueueFile, rows: pa.RecordBatch, seqs: Int64Array) -> None:
        """Compare rows with the entries of one queue file, which should have an entry for each."""
        stored = self._read_entries(file)
        if stored is None:
            return  # it is damaged, which is recorded
        columns = zip(
            rows.column("topic").to_pylist(), rows.column("queue_id").to_pylist(),
            rows.column("queue_offset").to_pylist(), seqs.tolist(), strict=True,
        )  # fmt: skip
        for topic, queue_id, offset, seq in columns:
            part = stored.get((topic, queue_id))
            index = offset - part.first_offset if part is not None else -1
            is_stored = part is not None and 0 <= index < len(part.entries)
            stored_seq = int(part.entries["seq"][index]) if part is not None and is_stored else None
            if stored_seq != seq:
                text = f"offset {offset} of queue {queue_id} of {topic!r} should name seq {seq}, and names {stored_seq}"
                self._record(file.name, None, f"{text}; delete it, it is made again")

    def _read_entries(self, file: QueueFile) -> dict[tuple[str, int], Part] | None:
        """Read the entries of a queue file, by topic and queue. None if they are damaged, which is recorded.

        Only the entries of the last file are kept in memory.
        """
        if self._last_read is None or self._last_read[0] is not file:
            try:
                self._last_read = (file, {(part.topic, part.queue_id): part for part in file.parts()})
            except Corrupt as error:
                self._record(file.name, None, f"{error}; delete it, it is made again")
                self._last_read = (file, None)
        return self._last_read[1]

    def _open_queue_files(self) -> list[QueueFile]:
        """Map the queue files. A damaged one is recorded and left out."""
        queue_files = []
        for name in file_names(self._files):
            try:
                queue_files.append(QueueFile(name, self._files.map_readonly(name)))
                continue
            except NotFound:
                pass
            except Corrupt as error:
                self._record(name, None, f"{error}; delete it, it is made again")
            self._unused_queue_files.add(name)
        return sorted(queue_files, key=lambda file: file.first_seq)

    def _find_uncovered_ranges(self) -> list[tuple[int, int]]:
        """Find the ranges of rows [begin, end) below the checkpoint that no queue file covers.

        Ranges of files in `_unused_queue_files` are left out: their damage is recorded, or their rows are removed.
        """
        covered_seq, ranges = 1, []
        for file in self._queue_files:
            if file.first_seq > covered_seq:
                ranges.append((covered_seq, file.first_seq))
            covered_seq = max(covered_seq, file.next_seq)
        if covered_seq < self._checkpoint_seq:
            ranges.append((covered_seq, self._checkpoint_seq))
        return [(begin, end) for begin, end in ranges if file_name(begin) not in self._unused_queue_files]

    def _record(self, name: str, position: int | None, text: str) -> None:
        """Record the damage of a file. Only its first damage is kept."""
        self._damage.setdefault(name, Damage(name, position, text))


def _are_same_pairs(
    hashes: UInt64Array, seqs: Int64Array, stored: UInt64Array, stored_seqs: Int64Array
) -> bool:
    """Check whether `stored` and `stored_seqs` are the same pairs as `hashes` and `seqs`, sorted by hash.

    Pairs with the same hash may be in any order.
    """
    if len(hashes) != len(stored) or np.any(stored[1:] < stored[:-1]):
        return False
    order, stored_order = np.lexsort((seqs, hashes)), np.lexsort((stored_seqs, stored))
    return bool(
        np.array_equal(hashes[order], stored[stored_order])
        and np.array_equal(seqs[order], stored_seqs[stored_order])
    )
