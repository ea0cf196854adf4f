"""The log of a replica on its disk: what the effects of the protocol do to it.

A follower's log is its leader's, byte for byte, in the same segments. `log/0000000001.log` and its neighbours are those
of a broker alone; beside them stands `log/replica.json`: which replica this disk is, and the epoch that it has
promised. It lies there so that a log that is wiped is another replica, though other files of the folder may stay.

While this replica leads, the broker's writer appends: it brings its segment (`follow_writer`), and the frames become
visible to readers by the writer. All methods belong to the replica's thread, but for `opened`, which hands over.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from itertools import takewhile

import msgspec

from timeball.cluster.messages import FRAMES_BYTES_MAX, Begin
from timeball.cluster.positions import BEGINNING, Ends, EpochEnd, Position
from timeball.cluster.replica import Log
from timeball.errors import Corrupt, SetupError
from timeball.files import Files
from timeball.log import format as fmt
from timeball.log.recovery import Opened, last_written, read_replica
from timeball.log.segment import (
    FOLDER,
    Segment,
    SegmentFile,
    Segments,
    epoch_ends,
    prepare,
)

logger = logging.getLogger(__name__)

IDENTITY_NAME = f"{FOLDER}/replica.json"
BATCH_BYTES = 8 << 20  # a replica syncs after so much at the latest; all replicas of a group agree on it
READ_BYTES = 4 << 20  # of older frames in one message: a follower acknowledges them before the next


class Identity(msgspec.Struct, frozen=True):
    """The content of `log/replica.json`."""

    group: str
    replica: str  # node and incarnation
    promised: int = 0  # epoch
    has_log: bool = False  # a segment was begun: a log that is empty now has been lost


class Piece(msgspec.Struct, frozen=True):
    """Older frames, read to be sent; `begin` when they are the first of their segment."""

    begin: Begin | None
    ordinal: int
    position: int
    frames: bytes
    end: Position


class ReplicaLog:
    """A replica's log and identity."""

    def __init__(
        self, files: Files, node: str, group: str, segment_bytes: int, batch_bytes: int = BATCH_BYTES
    ) -> None:
        """Open the log and cut what cannot be believed; raises SetupError, OverLimit or DiskFailed."""
        self._files, self._segment_bytes, self._batch_bytes = files, segment_bytes, batch_bytes
        segments, damage = read_replica(files, batch_bytes=batch_bytes)
        self._segments: dict[int, Segment] = {segment.ordinal: segment for segment in segments}
        # The same for readers in other threads; None while the log is empty. They read committed rows alone.
        self.segments: Segments | None = None
        self._file: SegmentFile | None = None
        self._is_led = False  # the broker's writer appends, and its event loop adds the frames
        self.identity = self._identity(node, group, damage)
        ends = self.ends()
        self._cut_behind(ends[-1].position if ends else BEGINNING, keeps_header=True)
        self._keep_has_log()
        if self.promised_at_least(ends) > self.identity.promised:
            self.keep_promise(self.promised_at_least(ends))

    def _identity(self, node: str, group: str, damage: str) -> Identity:
        """Return who this disk is: the one it says, or another one if it is new, was wiped or is damaged."""
        known = _read_identity(self._files)
        if known is not None and (known.group, known.replica.partition("/")[0]) != (group, node):
            raise SetupError(
                f"the log belongs to replica {known.replica} of group {known.group}, this is node {node}, group "
                f"{group}: name the folder of this node (--data)"
            )
        if known is None or damage or (not self._segments and known.has_log):
            if damage:
                logger.error("log damaged, what is behind is fetched again reason=%s", damage)
            known = Identity(group, f"{node}/{secrets.token_hex(4)}", has_log=bool(self._segments))
            self._keep(known)
        return known

    # -- what the protocol asks of the disk --------------------------------------------------------------------------

    def log(self) -> Log:
        """Return the log as the protocol knows it."""
        if not self._segments:
            return Log()
        last = self._last
        return Log(self.ends(), last.ordinal, last.end, last.next_seq)

    def ends(self) -> Ends:
        """Return where each epoch ends."""
        found: list[EpochEnd] = []
        for segment in self._segments.values():
            for frame in epoch_ends(segment):
                if found and found[-1].epoch == frame.epoch:
                    found.pop()
                found.append(EpochEnd(frame.epoch, segment.ordinal, frame.end, frame.next_seq))
        return tuple(found)

    @property
    def first(self) -> Position:
        """Return where the log begins: behind the segments that retention has dropped."""
        if not self._segments:
            return BEGINNING
        segment = self._segments[min(self._segments)]
        return Position(segment.ordinal, fmt.ALIGN, segment.first_seq)

    @staticmethod
    def promised_at_least(ends: Ends) -> int:
        """Return the epoch that the log itself proves to have been promised."""
        return ends[-1].epoch if ends else 0

    def keep_promise(self, epoch: int) -> None:
        """Put the promised epoch on the disk."""
        self._keep(msgspec.structs.replace(self.identity, promised=epoch))

    def begin_segment(self, begin: Begin) -> None:
        """Make a segment and write its header, synced; nothing when the writer has begun it here."""
        if begin.ordinal in self._segments:
            # The writer's own, or an empty one of an earlier leader, whose header is repeated for the others.
            return
        self._close_file()
        spare = prepare(self._files, begin.ordinal, begin.size_bytes)
        spare.file.write_at(0, begin.header)
        spare.file.sync()
        self._file = spare
        segment = Segment(begin.ordinal, begin.first_seq, spare.mapped)
        self._segments[begin.ordinal] = segment
        if self.segments is None:
            self._share()
        else:
            self.segments.add(segment)
        self._keep_has_log()

    def write(self, ordinal: int, position: int, frames: bytes) -> None:
        """Write whole frames at the end of the log."""
        file = self._open_file()
        assert file.ordinal == ordinal, f"frames for segment {ordinal}, open is {file.ordinal}"
        if position + len(frames) > file.reserved_to:
            file.reserve(position + len(frames))
        file.file.write_at(position, frames)
        if self._is_led:
            return
        segment, end = self._segments[ordinal], position + len(frames)
        while segment.end < end:
            frame = fmt.read_frame_header(segment.buffer, segment.end)
            assert frame is not None, "the protocol has checked the frames"
            segment.add(frame)

    def sync(self) -> None:
        """Put on the disk what was written."""
        self._open_file().file.sync()

    def cut(self, at: Position) -> None:
        """Remove all behind `at`, from the back, so that a crash on the way leaves a log that is only longer."""
        if at == BEGINNING:
            # Before the log goes: an empty one that is expected to hold frames would be taken for lost.
            self._keep(msgspec.structs.replace(self.identity, has_log=False))
        self._cut_behind(at, keeps_header=False)

    def let_go(self, before_seq: int) -> None:
        """Remove the segments that lie wholly before a row; nothing once the broker's writer appends."""
        if self._is_led or self.segments is None:
            return  # the broker lets its segments go by itself
        gone = takewhile(lambda segment: segment.next_seq <= before_seq, self.segments.all[:-1])
        self.segments.remove(self._files, list(gone))

    def read(self, begin: Position, end: Position, epoch: int) -> Piece | None:
        """Return frames from `begin` on, of one segment, up to `end`; None when there are none."""
        if begin >= end:
            return None
        ordinal, position = begin.ordinal, begin.end
        segment = self._segments.get(ordinal)
        if segment is None or self._frame_at(segment, position, end) is None:
            ordinal = ordinal + 1 if segment is not None else min(self._segments)
            segment, position = self._segments[ordinal], fmt.ALIGN
        opening = None
        if position == fmt.ALIGN:
            header = bytes(segment.buffer[: fmt.ALIGN])
            opening = Begin(epoch, ordinal, segment.buffer.size, segment.first_seq, header)
        to, seq = position, begin.seq
        while (frame := self._frame_at(segment, to, end)) is not None and (
            to == position or frame.end - position <= min(READ_BYTES, FRAMES_BYTES_MAX)
        ):
            to, seq = frame.end, frame.next_seq
        if to == position:
            return None
        return Piece(
            opening, ordinal, position, bytes(segment.buffer[position:to]), Position(ordinal, to, seq)
        )

    def _frame_at(self, segment: Segment, position: int, end: Position) -> fmt.Frame | None:
        if (segment.ordinal, position) >= end[:2]:
            return None
        return fmt.read_frame_header(segment.buffer, position)

    # -- the writer of a leader --------------------------------------------------------------------------------------

    def room_for(self, size_bytes: int, seq: int, now_ms: int, epoch: int) -> tuple[Begin | None, int, int]:
        """Return where a commit of this replica's own goes: the segment to be begun if any, ordinal and position."""
        if self._segments and self._last.end + size_bytes <= self._last.buffer.size:
            last, begin = self._last, None
            if last.end == fmt.ALIGN:  # begun by an earlier leader, and still empty
                begin = Begin(epoch, last.ordinal, last.buffer.size, seq, bytes(last.buffer[: fmt.ALIGN]))
            return begin, last.ordinal, last.end
        ordinal = self._last.ordinal + 1 if self._segments else 1
        header = fmt.encode_segment_header(seq, now_ms)
        return Begin(epoch, ordinal, self._segment_bytes, seq, header), ordinal, fmt.ALIGN

    def close(self) -> None:
        """Close the file that is written, unless the broker's writer has it."""
        if not self._is_led:
            self._close_file()

    def opened(self) -> Opened:
        """Return the log for a broker's writer, which appends from now on."""
        self._is_led = True
        assert self.segments is not None, "the row that opens the epoch is in it"
        return Opened(self.segments, self._open_file(), 0)

    def _share(self) -> None:
        self.segments = Segments(list(self._segments.values())) if self._segments else None
        if self.segments is not None:
            self.segments.on_drop.append(self._drop)

    def _drop(self, gone: list[Segment]) -> None:
        """Forget segments that retention has removed (another thread's call: a dict's item goes at once)."""
        for segment in gone:
            self._segments.pop(segment.ordinal, None)

    def follow_writer(self, file: SegmentFile, first_seq: int) -> None:
        """Take the segment that the writer has begun as the last one; it adds it to `segments` behind its commit."""
        self._file = file
        if file.ordinal not in self._segments:
            self._segments[file.ordinal] = Segment(file.ordinal, first_seq, file.mapped)

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _last(self) -> Segment:
        return self._segments[max(self._segments)]

    def _keep_has_log(self) -> None:
        """Note that there is a log, behind its first header and before its first frame."""
        if self._segments and not self.identity.has_log:
            self._keep(msgspec.structs.replace(self.identity, has_log=True))

    def _keep(self, identity: Identity) -> None:
        self._files.replace(IDENTITY_NAME, msgspec.json.encode(identity))
        self.identity = identity

    def _open_file(self) -> SegmentFile:
        if self._file is None:
            last = self._last
            file = self._files.open(last.name)
            self._file = SegmentFile(last.ordinal, file, last.buffer, last.end)
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.file.close()
            self._file = None

    def _cut_behind(self, at: Position, *, keeps_header: bool) -> None:
        kept = {ordinal for ordinal in self._segments if ordinal <= at.ordinal}
        if keeps_header and at.ordinal + 1 in self._segments:
            kept.add(at.ordinal + 1)  # begun, and still empty
        self._remove_names(kept)
        for ordinal in [each for each in self._segments if each not in kept]:
            del self._segments[ordinal]
        if not self._segments or self.segments is None:
            self._share()
        else:
            self.segments.cut(list(self._segments.values()))
        if not self._segments:
            return
        last = self._last
        if last.ordinal == at.ordinal:
            _forget_frames(last, at)
        self._blank(last)

    def _remove_names(self, kept: set[int]) -> None:
        """Remove segments and spares that are not kept, the last first, each name durably before the next."""
        names = [name for name in self._files.list_dir(FOLDER) if name.endswith(".log")]
        for name in reversed(names):
            ordinal = int(name.removesuffix(".log"))
            if ordinal in kept:
                continue
            if self._file is not None and self._file.ordinal == ordinal:
                self._close_file()
            for suffix in (".log", ".frames", ".keys"):
                if self._files.exists(f"{FOLDER}/{ordinal:010d}{suffix}"):
                    self._files.remove(f"{FOLDER}/{ordinal:010d}{suffix}")
            self._files.sync_dir(FOLDER)

    def _blank(self, segment: Segment) -> None:
        """Overwrite what stands behind the last frame, from the back, at most a batch between two syncs."""
        file, end = self._open_file(), last_written(segment.buffer, segment.end)
        while end > segment.end:
            begin = max(segment.end, end - self._batch_bytes)
            file.file.write_at(begin, bytes(end - begin))
            file.file.sync()
            end = begin
        # Also where nothing was blanked: what a killed process has written may be in the system's cache alone.
        file.file.sync()


def _forget_frames(segment: Segment, at: Position) -> None:
    """Let a segment end at `at`: frames behind it are gone."""
    count = sum(1 for position in segment.frame_positions if position < at.end)
    positions = array("q", segment.frame_positions[:count])
    segment.frame_positions, segment.frame_seqs = positions, array("q", segment.frame_seqs[:count])
    segment.end, segment.next_seq = fmt.ALIGN, segment.first_seq
    if count:
        frame = fmt.read_frame_header(segment.buffer, positions[-1])
        assert frame is not None
        segment.end, segment.next_seq, segment.last_append_ms = frame.end, frame.next_seq, frame.append_ms


def _read_identity(files: Files) -> Identity | None:
    if not files.exists(IDENTITY_NAME):
        return None
    try:
        return msgspec.json.decode(bytes(files.map_readonly(IDENTITY_NAME)), type=Identity)
    except msgspec.DecodeError as error:
        raise Corrupt(
            f"{IDENTITY_NAME}: {error}; remove this node's data folder, and it joins as a new replica"
        ) from error
