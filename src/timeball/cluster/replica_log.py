"""The log of a replica on its disk, which the protocol's effects change.

The log of a follower equals its leader's log, byte for byte and in the same segments. The segment files are those of
a broker alone: `log/0000000001.log` and so on. `log/replica` stores the identity of the replica, the epoch that it
has promised, and the newest set of replicas that it knows (`IdentityFile`). It is in the log folder so that deleting
the log makes this disk another replica, even if other files of the data folder stay. The file also stores how far the
log was synced (`SyncedPosition`).

While this replica leads, the broker's writer appends. It passes each new segment to `follow_writer`, and it makes the
frames visible to readers. All methods belong to the replica's thread, except `opened`, which passes the log on to the
broker.
"""

from __future__ import annotations

import logging
import secrets
import struct
from array import array
from itertools import takewhile

import google_crc32c
import msgspec

from timeball.cluster.protocol.messages import (
    BEGINNING,
    FRAMES_BYTES_MAX,
    Begin,
    Ends,
    EpochEnd,
    Members,
    Position,
)
from timeball.cluster.protocol.replica import Log
from timeball.io.files import File, Files, disk_full
from timeball.log import format as fmt
from timeball.log.recovery import OpenedLog, last_written, read_replica, whole_frames
from timeball.log.segment import (
    FOLDER,
    STEP_BYTES,
    Segment,
    SegmentFile,
    Segments,
    epoch_ends,
    prepare,
)
from timeball.model.errors import Corrupt, OverLimit, SetupError

logger = logging.getLogger(__name__)

IDENTITY_NAME = f"{FOLDER}/replica"
SLOT_BYTES = 4_096  # of each part of `log/replica`
BATCH_BYTES = 8 << 20  # a replica syncs after at most this many bytes; the same in all replicas of a group
_SYNCED_FIELDS = struct.Struct("<QQ")  # ordinal of a segment, byte
READ_BYTES = 4 << 20  # older frames per message; a follower acknowledges each message before the next is sent


class Identity(msgspec.Struct, frozen=True):
    """The content of `log/replica`."""

    group: str
    replica: str  # node and incarnation
    promised: int = 0  # epoch
    promised_to: str = ""  # the replica that may lead in this epoch
    members: Members = Members()  # the newest set of replicas that this one knows
    has_log: bool = False  # a segment was created: an empty log at a start is a lost one


class IdentityFile:
    """The identity in the file `log/replica`: twice, each time in a slot of its own.

    A slot has the CRC-32C of the JSON (4 bytes, little-endian), and the JSON with zeros behind it. The file is never
    replaced by a new one: overwriting needs no free space on most file systems, so a replica can vote on a full disk.
    A save writes and syncs the first slot, then the second. If a power cut tears a slot, or it is damaged later, the
    other one has the identity. It may be the one before the save, which no other replica knows yet.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def load(self) -> Identity | None:
        """Read the identity, and repair a damaged slot. None without a file. Raises Corrupt if both are damaged."""
        if not self._files.exists(IDENTITY_NAME):
            return None
        content = bytes(self._files.map_readonly(IDENTITY_NAME))
        for begin in (0, SLOT_BYTES):
            crc, document = content[begin : begin + 4], content[begin + 4 : begin + SLOT_BYTES].rstrip(b"\0")
            if document and google_crc32c.value(document) == int.from_bytes(crc, "little"):
                identity = msgspec.json.decode(document, type=Identity)
                if content[:SLOT_BYTES] != content[SLOT_BYTES : 2 * SLOT_BYTES]:
                    self.save(identity)
                return identity
        raise Corrupt(
            f"{IDENTITY_NAME} is damaged; remove this node's data folder, and it joins as a new replica"
        )

    def save(self, identity: Identity) -> None:
        """Store the identity durably. Raises DiskFailed, and OverLimit for the first save on a full disk."""
        document = msgspec.json.encode(identity)
        slot = google_crc32c.value(document).to_bytes(4, "little") + document
        assert len(slot) <= SLOT_BYTES, "names have at most 64 characters"
        slot = slot.ljust(SLOT_BYTES, b"\0")
        if not self._files.exists(IDENTITY_NAME):
            self._files.replace(IDENTITY_NAME, slot * 2 + bytes(SLOT_BYTES))
            return
        file = self._files.open(IDENTITY_NAME)
        try:
            for begin in (0, SLOT_BYTES):
                file.write_at(begin, slot)
                file.sync()
        finally:
            file.close()


class SyncedPosition:
    """The position up to which frames of other leaders were synced: the third slot of `log/replica`.

    It has the CRC-32C of the other fields, the ordinal of the segment, and the byte (4, 8 and 8 bytes, little-endian).

    Invariant: all bytes of the log before it were on this disk, so a hole there is damage. It is stored after each sync
    of the log, without a sync of its own. A power cut may bring an older one back, which is true as well. Before the
    log is cut, it is set back durably.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._file: File | None = None
        self.ordinal = self.end = 0

    def load(self) -> None:
        """Read the position. It stays (0, 0) if there is none."""
        if self._files.exists(IDENTITY_NAME):
            slot = bytes(self._files.map_readonly(IDENTITY_NAME))[2 * SLOT_BYTES :]
            crc, fields = slot[:4], slot[4 : 4 + _SYNCED_FIELDS.size]
            if len(fields) == _SYNCED_FIELDS.size and google_crc32c.value(fields) == int.from_bytes(
                crc, "little"
            ):
                self.ordinal, self.end = _SYNCED_FIELDS.unpack(fields)

    def store(self, ordinal: int, end: int) -> None:
        """Store the position after a sync of the log."""
        self._file = self._file or self._files.open(IDENTITY_NAME)
        fields = _SYNCED_FIELDS.pack(ordinal, end)
        try:
            self._file.write_at(2 * SLOT_BYTES, google_crc32c.value(fields).to_bytes(4, "little") + fields)
        except OverLimit:
            # The file of an earlier version has no third slot, and the disk is too full for one. A start then finds
            # less damage, because only the frames prove how far the log was synced.
            return
        self.ordinal, self.end = ordinal, end

    def set_back(self, cut_at: Position) -> None:
        """Set the position back to `cut_at` durably, if it is after `cut_at`. Called before the log is cut there."""
        if (self.ordinal, self.end) > cut_at[:2]:
            self.store(cut_at.ordinal, cut_at.end)
            assert self._file is not None
            self._file.sync()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class LogPiece(msgspec.Struct, frozen=True):
    """Older frames of one segment, to be sent to a replica.

    `begin`: the BEGIN to send before them, if they are the first of the segment. `end`: the end of the last frame.
    """

    begin: Begin | None
    ordinal: int
    position: int
    frames: bytes
    end: Position


class ReplicaLog:
    """The log of a replica, and its identity."""

    def __init__(
        self, files: Files, node: str, group: str, segment_bytes: int, batch_bytes: int = BATCH_BYTES
    ) -> None:
        """Open the log and remove its torn end.

        A damaged log is cut, and the rows after the damage are shipped to it again, to a new incarnation. Raises
        SetupError, OverLimit or DiskFailed, and Corrupt if no other replica of the group is known to have the rows.
        """
        self._files, self._segment_bytes, self._batch_bytes = files, segment_bytes, batch_bytes
        self._identity_file = IdentityFile(files)
        stored = self._identity_file.load()
        if stored is not None and (stored.group, stored.replica.partition("/")[0]) != (group, node):
            raise SetupError(
                f"the log belongs to replica {stored.replica} of group {stored.group}, this is node {node}, group "
                f"{group}: name the folder of this node (--data)"
            )
        # A promise names the replica that may lead, so no other one has written frames of this epoch.
        has_led = stored is not None and stored.promised_to == stored.replica
        self._synced = SyncedPosition(files)
        self._synced.load()
        segments, damage = read_replica(
            files,
            batch_bytes=batch_bytes,
            own_epoch=stored.promised if stored is not None and has_led else 0,
            synced=(self._synced.ordinal, self._synced.end),
        )
        if damage and _knows_no_other_replica(stored):
            raise Corrupt(
                f"{damage}; no other replica is known to have these rows: restore the file from a copy. If other "
                "replicas have them, remove this node's data folder, and it joins as a new replica"
            )
        # By ordinal. While this replica leads, the reader thread removes the oldest ones, so loops use a copy.
        self._segments: dict[int, Segment] = {segment.ordinal: segment for segment in segments}
        # The segments for readers in other threads, which read only committed rows. None while the log is empty.
        self.segments: Segments | None = None
        self._file: SegmentFile | None = None
        # True while this replica leads: the broker's writer appends, and its event loop adds frames to `segments`.
        self._is_leading = False
        self.identity = self._identify(stored, node, group, damage)
        if segments and not damage:
            _log_removed_frames(segments[-1])
        ends = self.ends()
        self._cut_after(ends[-1].position if ends else BEGINNING, keeps_header=True)
        self._save_has_log()
        if self.minimum_promise(ends) > self.identity.promised:
            self.keep_promise(self.minimum_promise(ends), "", self.identity.members)

    def _identify(self, stored: Identity | None, node: str, group: str, damage: str) -> Identity:
        """Return the stored identity, or create a new one if the disk is new, was wiped or is damaged."""
        if stored is not None and not damage and (self._segments or not stored.has_log):
            return stored
        if damage:
            logger.error("log damaged, the rows after the damage are fetched again reason=%s", damage)
        identity = Identity(group, f"{node}/{secrets.token_hex(4)}", has_log=bool(self._segments))
        self._save_identity(identity)
        return identity

    # -- disk operations of the protocol -----------------------------------------------------------------------------

    def log(self) -> Log:
        """Describe the log for the protocol's state."""
        if not self._segments:
            return Log()
        last = self._last
        return Log(self.ends(), last.ordinal, last.end, last.next_seq)

    def ends(self) -> Ends:
        """List the end of each epoch in the log."""
        epochs: list[EpochEnd] = []
        for segment in self._segments.copy().values():
            for frame in epoch_ends(segment):
                if epochs and epochs[-1].epoch == frame.epoch:
                    epochs.pop()
                epochs.append(EpochEnd(frame.epoch, segment.ordinal, frame.end, frame.next_seq))
        return tuple(epochs)

    @property
    def first(self) -> Position:
        """The begin of the log, after the segments that retention has deleted."""
        if not (segments := self._segments.copy()):
            return BEGINNING
        segment = segments[min(segments)]
        return Position(segment.ordinal, fmt.ALIGN, segment.first_seq)

    @staticmethod
    def minimum_promise(ends: Ends) -> int:
        """Find the highest epoch that this replica must have promised, by the frames in its log."""
        return ends[-1].epoch if ends else 0

    def keep_promise(self, epoch: int, to: str, members: Members) -> None:
        """Store the promised epoch durably, the replica to which it is promised, and the set of replicas."""
        self._save_identity(
            msgspec.structs.replace(self.identity, promised=epoch, promised_to=to, members=members)
        )

    def begin_segment(self, begin: Begin) -> None:
        """Create a segment and write and sync its header, unless the segment exists."""
        if begin.ordinal in self._segments:
            # Either the broker's writer has created it, or it is an empty segment of an earlier leader, and this leader
            # repeats its header for the other replicas.
            return
        self._close_file()
        spare = prepare(self._files, begin.ordinal, begin.size_bytes)
        spare.file.write_at(0, begin.header)
        spare.file.sync()
        self._file = spare
        segment = Segment(begin.ordinal, begin.first_seq, spare.mapped)
        self._segments[begin.ordinal] = segment
        if self.segments is None:
            self._share_segments()
        else:
            self.segments.add(segment)
        self._save_has_log()

    def write(self, ordinal: int, position: int, frames: bytes) -> None:
        """Write whole frames at byte `position` of the last segment, the end of the log.

        Adds them to the segment's frames, unless the broker's writer does that (while this replica leads).
        """
        file = self._open_file()
        assert file.ordinal == ordinal, f"frames for segment {ordinal}, open is {file.ordinal}"
        if position + len(frames) > file.reserved_to:
            file.reserve(position + len(frames))
        file.file.write_at(position, frames)
        if self._is_leading:
            return
        segment, end = self._segments[ordinal], position + len(frames)
        while segment.end < end:
            frame = fmt.read_frame_header(segment.buffer, segment.end)
            assert frame is not None, "the protocol has checked the frames"
            segment.add(frame)

    def reserve(self, size_bytes: int, begins: int = 0) -> None:
        """Reserve space for frames of this size, in the last segment or in a new one. Raises OverLimit.

        `begins`: the ordinal of the segment that a BEGIN message of this size begins, unless it exists.
        """
        if begins in self._segments:
            return
        last = self._last if self._segments and not begins else None
        if last is not None and last.end + size_bytes <= last.buffer.size:
            self._open_file().reserve(last.end + size_bytes)
        elif self._files.free_bytes() < min(self._segment_bytes, STEP_BYTES):
            raise disk_full("beginning a segment")

    def sync(self) -> None:
        """Sync everything that was written, and store how far that is."""
        self._open_file().file.sync()
        if not self._is_leading:  # the frames of a leader's own log prove by themselves how far it was synced
            last = self._last
            self._synced.store(last.ordinal, last.end)

    def cut(self, cut_at: Position) -> None:
        """Remove everything after `cut_at`, from the end backwards, so that a crash in between leaves a valid log."""
        if cut_at == BEGINNING:
            # Before the removal: with `has_log` set, the next start would take the empty log for a lost one.
            self._save_identity(msgspec.structs.replace(self.identity, has_log=False))
        self._cut_after(cut_at, keeps_header=False)

    def delete_segments_before(self, before_seq: int) -> None:
        """Delete the segments whose rows are all below `before_seq`. Do nothing once the broker's writer appends."""
        if self._is_leading or self.segments is None:
            return  # the broker's own retention removes segments
        removable = takewhile(lambda segment: segment.next_seq <= before_seq, self.segments.all[:-1])
        self.segments.remove(self._files, list(removable))

    def read(self, begin: Position, end: Position, epoch: int) -> LogPiece | None:
        """Read at most READ_BYTES of frames of one segment, in [`begin`, `end`). Returns None if there are none.

        `epoch`: of this leader, for the BEGIN.
        """
        if begin >= end:
            return None
        ordinal, position, segments = begin.ordinal, begin.end, self._segments.copy()
        segment = segments.get(ordinal)
        # The frames continue in the next segment. Or retention has deleted the segment: they begin with the oldest one.
        if segment is None or self._frame_at(segment, position, end) is None:
            ordinal = ordinal + 1 if segment is not None else min(segments)
            segment, position = segments[ordinal], fmt.ALIGN
        begin_message = None
        if position == fmt.ALIGN:
            header = bytes(segment.buffer[: fmt.ALIGN])
            begin_message = Begin(epoch, ordinal, segment.buffer.size, segment.first_seq, header)
        read_to, seq = position, begin.seq
        # The first frame is read also if it is larger than READ_BYTES.
        while (frame := self._frame_at(segment, read_to, end)) is not None and (
            read_to == position or frame.end - position <= min(READ_BYTES, FRAMES_BYTES_MAX)
        ):
            read_to, seq = frame.end, frame.next_seq
        if read_to == position:
            return None
        return LogPiece(
            begin_message,
            ordinal,
            position,
            bytes(segment.buffer[position:read_to]),
            Position(ordinal, read_to, seq),
        )

    def _frame_at(self, segment: Segment, position: int, end: Position) -> fmt.Frame | None:
        """Read the header of the frame at a byte of a segment. None at the end of the log, or at or after `end`."""
        if (segment.ordinal, position) >= end[:2]:
            return None
        return fmt.read_frame_header(segment.buffer, position)

    # -- the writer of a leader --------------------------------------------------------------------------------------

    def place_commit(
        self, size_bytes: int, seq: int, now_ms: int, epoch: int
    ) -> tuple[Begin | None, int, int]:
        """Find the position of this leader's next commit, of `size_bytes`, whose first row is `seq`.

        Returns the BEGIN to send if the commit is the first of its segment (else None), the segment's ordinal, and the
        byte.
        """
        if self._segments and self._last.end + size_bytes <= self._last.buffer.size:
            last, begin = self._last, None
            if last.end == fmt.ALIGN:  # the segment of an earlier leader, which is still empty
                begin = Begin(epoch, last.ordinal, last.buffer.size, seq, bytes(last.buffer[: fmt.ALIGN]))
            return begin, last.ordinal, last.end
        ordinal = self._last.ordinal + 1 if self._segments else 1
        header = fmt.encode_segment_header(seq, now_ms)
        return Begin(epoch, ordinal, self._segment_bytes, seq, header), ordinal, fmt.ALIGN

    def close(self) -> None:
        """Close the files, except the segment that the broker's writer owns."""
        self._synced.close()
        if not self._is_leading:
            self._close_file()

    def opened(self) -> OpenedLog:
        """Pass the log to the broker's writer, which appends from now on."""
        self._is_leading = True
        assert self.segments is not None, "the row that opens the epoch is in it"
        return OpenedLog(self.segments, self._open_file(), 0)

    def _share_segments(self) -> None:
        """Build `segments` anew for readers in other threads, or None if the log is empty."""
        self.segments = Segments(list(self._segments.values())) if self._segments else None
        if self.segments is not None:
            self.segments.on_drop.append(self._forget_segments)

    def _forget_segments(self, removed: list[Segment]) -> None:
        """Forget segments that retention has removed.

        Another thread calls this method. Each removal from the dict is atomic.
        """
        for segment in removed:
            self._segments.pop(segment.ordinal, None)

    def follow_writer(self, file: SegmentFile, first_seq: int) -> None:
        """Add the segment that the broker's writer has created, as the last one.

        The writer itself adds it to `segments`, after its commit.
        """
        self._file = file
        if file.ordinal not in self._segments:
            self._segments[file.ordinal] = Segment(file.ordinal, first_seq, file.mapped)

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _last(self) -> Segment:
        return self._segments[max(self._segments)]

    def _save_has_log(self) -> None:
        """Store that the disk has a log, after its first header is written and before its first frame."""
        if self._segments and not self.identity.has_log:
            self._save_identity(msgspec.structs.replace(self.identity, has_log=True))

    def _save_identity(self, identity: Identity) -> None:
        self._identity_file.save(identity)
        self.identity = identity

    def _open_file(self) -> SegmentFile:
        """Open the file of the last segment, if it is not open yet."""
        if self._file is None:
            last = self._last
            file = self._files.open(last.name)
            self._file = SegmentFile(last.ordinal, file, last.buffer, last.end)
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.file.close()
            self._file = None

    def _cut_after(self, cut_at: Position, *, keeps_header: bool) -> None:
        """Remove everything after `cut_at`: later segments, then the frames in its own segment. Syncs.

        With `keeps_header`, the header of an empty segment right after `cut_at` stays.
        """
        self._synced.set_back(cut_at)
        kept_ordinals = {ordinal for ordinal in self._segments if ordinal <= cut_at.ordinal}
        if keeps_header and cut_at.ordinal + 1 in self._segments:
            kept_ordinals.add(cut_at.ordinal + 1)  # begun, but still empty
        self._remove_names(kept_ordinals)
        for ordinal in self._segments.keys() - kept_ordinals:
            del self._segments[ordinal]
        if not self._segments or self.segments is None:
            self._share_segments()
        else:
            self.segments.cut(list(self._segments.values()))
        if not self._segments:
            return
        last = self._last
        if last.ordinal == cut_at.ordinal:
            _cut_frames(last, cut_at)
        self._overwrite_with_zeros(last)

    def _remove_names(self, kept_ordinals: set[int]) -> None:
        """Remove the files of segments and spares that are not in `kept_ordinals`, the last first.

        The directory is synced after each segment, so a crash in between leaves no gap in the sequence of segments.
        """
        names = [name for name in self._files.list_dir(FOLDER) if name.endswith(".log")]
        for name in reversed(names):
            ordinal = int(name.removesuffix(".log"))
            if ordinal in kept_ordinals:
                continue
            if self._file is not None and self._file.ordinal == ordinal:
                self._close_file()
            for suffix in (".log", ".frames", ".keys"):
                if self._files.exists(f"{FOLDER}/{ordinal:010d}{suffix}"):
                    self._files.remove(f"{FOLDER}/{ordinal:010d}{suffix}")
            self._files.sync_dir(FOLDER)

    def _overwrite_with_zeros(self, segment: Segment) -> None:
        """Overwrite the bytes after the last frame with zeros, from the back, with a sync after each batch.

        A crash in between then leaves a hole of at most one batch, which recovery does not take for damage.
        """
        file, end = self._open_file(), last_written(segment.buffer, segment.end)
        while end > segment.end:
            begin = max(segment.end, end - self._batch_bytes)
            file.file.write_at(begin, bytes(end - begin))
            file.file.sync()
            end = begin
        # Also when nothing was overwritten: frames of a killed process may be only in the page cache.
        file.file.sync()


def _log_removed_frames(last: Segment) -> None:
    """Log that whole frames behind the end of the log are removed: a power cut may leave them behind a torn batch."""
    removed = next(whole_frames(last.buffer, last.end + fmt.ALIGN), None)
    if removed is not None:
        logger.warning(
            "frames behind a torn write are removed file=%s byte=%d seq=%d",
            last.name,
            removed.position,
            removed.first_seq,
        )


def _knows_no_other_replica(stored: Identity | None) -> bool:
    """Check whether no other replica of the group is known. Without an identity, none is."""
    return stored is None or (
        stored.members.generation > 0 and set(stored.members.replicas) <= {stored.replica}
    )


def _cut_frames(segment: Segment, cut_at: Position) -> None:
    """Set the end of a segment to `cut_at`, and remove the frames after it from its index in memory."""
    count = sum(1 for position in segment.frame_positions if position < cut_at.end)
    positions = array("q", segment.frame_positions[:count])
    segment.frame_positions, segment.frame_seqs = positions, array("q", segment.frame_seqs[:count])
    segment.end, segment.next_seq = fmt.ALIGN, segment.first_seq
    if count:
        frame = fmt.read_frame_header(segment.buffer, positions[-1])
        assert frame is not None
        segment.end, segment.next_seq = frame.end, frame.next_seq
