"""Comparison of the caches beside the log with the log, for `timeball dump --verify`.

The caches are key runs, frame indexes and the queue index. A broker rebuilds a cache that does not match its checksum.
But a cache may be intact and belong to another log. So each cache is compared here with frames and rows, segment by
segment as these are read. The queue index is only compared up to the checkpoint. A start writes the rest again.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball.io.files import Files
from timeball.log import format as fmt
from timeball.log import frame_index
from timeball.log.queue_file import FOLDER as QUEUES
from timeball.log.queue_file import Part, QueueFile, file_name
from timeball.log.segment import FOLDER, Segment
from timeball.model.errors import Corrupt, NotFound
from timeball.model.key_hash import KeyRun, UInt64Array, hash_keys
from timeball.model.message import Int64Array
from timeball.node.inspect.folder import Damage, FolderDump, FrameFound, SegmentFound


class CacheCheck:
    """Compares the caches with frames that are added in the order of the log. Reports damage after each segment."""

    def __init__(self, folder: FolderDump) -> None:
        self._files: Files = folder.files
        self._vouched_seq = folder.checkpoint.facts.seq if folder.checkpoint is not None else 0
        self._keys: list[tuple[UInt64Array, Int64Array]] = []  # of the current segment
        self._frames: list[fmt.Frame] = []  # of the current segment
        self._damage: dict[str, Damage] = {}  # the first damage of each file
        self._queue_files = self._open_queue_files()
        # the file that was read last, and its entries
        self._opened: tuple[QueueFile, dict[tuple[str, int], Part] | None] | None = None
        self._holes = self._find_holes()

    def add(self, found: FrameFound) -> None:
        """Compare one frame of the current segment."""
        rows, first_seq = found.rows, found.frame.first_seq
        hashes, at = hash_keys(rows.column("unique_key"), rows.column("keys"))
        self._keys.append((hashes, first_seq + at))
        self._frames.append(found.frame)
        visible = np.flatnonzero(rows.column("queue_offset").is_valid())
        if len(visible):
            self._compare_queues(rows.take(pa.array(visible)), first_seq + visible)

    def finish(self, segment: SegmentFound) -> list[Damage]:
        """List the damage found in the segment whose last frame was added."""
        keys, self._keys = self._keys, []
        frames, self._frames = self._frames, []
        if not segment.is_last and not segment.is_spare:
            self._compare_keys(f"{FOLDER}/{segment.ordinal:010d}.keys", keys)
            self._compare_frame_index(segment, frames)
        found, self._damage = list(self._damage.values()), {}
        return found

    def _compare_keys(self, name: str, keys: list[tuple[UInt64Array, Int64Array]]) -> None:
        try:
            stored = KeyRun(self._files.map_readonly(name)).columns()
        except NotFound:
            return  # the broker makes this file at the first look-up
        except Corrupt as error:
            self._note(name, None, f"{error}; delete it, it is made again")
            return
        hashes = np.concatenate([np.empty(0, np.uint64), *(pair[0] for pair in keys)])
        seqs = np.concatenate([np.empty(0, np.int64), *(pair[1] for pair in keys)])
        if not _same(hashes, seqs, *stored):
            self._note(name, None, "it does not hold the keys of its segment; delete it, it is made again")

    def _compare_frame_index(self, found: SegmentFound, frames: list[fmt.Frame]) -> None:
        segment = Segment(found.ordinal, found.first_seq or 0, found.buffer)
        for frame in frames:
            if (frame.first_seq, frame.position) != (segment.next_seq, segment.end):
                return  # after damage, which was reported, the correct content of the index is unknown
            segment.add(frame)
        name = frame_index.index_name(segment)
        try:
            stored = bytes(self._files.map_readonly(name))
        except NotFound:
            return  # the broker makes this file during maintenance
        if found.until_seq == segment.next_seq and stored != frame_index.encode(segment):
            self._note(name, None, "it does not name the frames of its segment; delete it, it is made again")

    def _compare_queues(self, rows: pa.RecordBatch, seqs: Int64Array) -> None:
        for file in self._queue_files:
            mine = (seqs >= file.first_seq) & (seqs < min(file.next_seq, self._vouched_seq))
            if mine.any():
                self._compare_file(file, rows.filter(pa.array(mine)), seqs[mine])
        holes = [(before, after) for before, after in self._holes if seqs[0] < after and seqs[-1] >= before]
        for before, after in holes:
            lost = np.flatnonzero((seqs >= before) & (seqs < after))
            if len(lost):
                self._note(file_name(before), None, f"it is missing: seq {seqs[lost[0]]} is in no queue")

    def _compare_file(self, file: QueueFile, rows: pa.RecordBatch, seqs: Int64Array) -> None:
        columns = zip(
            rows.column("topic").to_pylist(), rows.column("queue_id").to_pylist(),
            rows.column("queue_offset").to_pylist(), seqs.tolist(), strict=True,
        )  # fmt: skip
        stored = self._parts_of(file)
        for topic, queue_id, offset, seq in columns if stored is not None else ():
            part = stored.get((topic, queue_id)) if stored is not None else None
            at = offset - part.first_offset if part is not None else -1
            named = int(part.entries["seq"][at]) if part is not None and 0 <= at < len(part.entries) else None
            if named != seq:
                text = f"offset {offset} of queue {queue_id} of {topic!r} should name seq {seq}, and names {named}"
                self._note(file.name, None, f"{text}; delete it, it is made again")

    def _parts_of(self, file: QueueFile) -> dict[tuple[str, int], Part] | None:
        """Read the entries of a file. None if they are damaged. One file is kept in memory at a time."""
        if self._opened is None or self._opened[0] is not file:
            try:
                self._opened = (file, {(part.topic, part.queue_id): part for part in file.parts()})
            except Corrupt as error:
                self._note(file.name, None, f"{error}; delete it, it is made again")
                self._opened = (file, None)
        return self._opened[1]

    def _open_queue_files(self) -> list[QueueFile]:
        found = []
        for name in self._files.list_dir(QUEUES):
            try:
                found.append(QueueFile(f"{QUEUES}/{name}", self._files.map_readonly(f"{QUEUES}/{name}")))
            except Corrupt as error:
                self._note(f"{QUEUES}/{name}", None, f"{error}; delete it, it is made again")
        return sorted(found, key=lambda file: file.first_seq)

    def _find_holes(self) -> list[tuple[int, int]]:
        """Find the ranges below the checkpoint that no file covers.

        Ranges whose damaged file was reported already are left out.
        """
        covered, holes = 1, []
        for file in self._queue_files:
            if file.first_seq > covered:
                holes.append((covered, file.first_seq))
            covered = max(covered, file.next_seq)
        if covered < self._vouched_seq:
            holes.append((covered, self._vouched_seq))
        return [hole for hole in holes if file_name(hole[0]) not in self._damage]

    def _note(self, name: str, position: int | None, text: str) -> None:
        self._damage.setdefault(name, Damage(name, position, text))


def _same(hashes: UInt64Array, seqs: Int64Array, stored: UInt64Array, stored_seqs: Int64Array) -> bool:
    """Return whether the same pairs are stored, sorted by hash. Pairs with the same hash may be in any order."""
    if len(hashes) != len(stored) or np.any(stored[1:] < stored[:-1]):
        return False
    mine, theirs = np.lexsort((seqs, hashes)), np.lexsort((stored_seqs, stored))
    return bool(
        np.array_equal(hashes[mine], stored[theirs]) and np.array_equal(seqs[mine], stored_seqs[theirs])
    )
