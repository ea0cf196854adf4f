"""Do the caches beside the log say what the log says? For `timeball dump --verify`.

Caches are key sidecars, frame indexes and consume queues. A broker rebuilds one that does not match its checksum,
but a consume queue has none, and another may be whole and of another segment. Here each is compared with the frames
and rows, segment by segment as these are read. A queue is
compared only where the checkpoint vouches for it; what lies beyond is written again at a start.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball.errors import Corrupt, NotFound
from timeball.files import Files
from timeball.key_hash import UInt64Array, hash_keys
from timeball.key_sidecar import KeySidecar
from timeball.log import format as fmt
from timeball.log import frame_index
from timeball.log.dump import Damage, FolderDump, FrameFound, SegmentFound
from timeball.log.queue_index import ENTRY, FILE_ENTRIES
from timeball.log.queue_index import FOLDER as QUEUES
from timeball.log.segment import FOLDER, Segment
from timeball.message import Int64Array, Kind

VISIBLE = np.array([Kind.MESSAGE, Kind.RELEASE], np.int8)


class CacheCheck:
    """Takes frames in the order of the log, and answers after each segment."""

    def __init__(self, folder: FolderDump, topic_numbers: dict[str, int]) -> None:
        self._files: Files = folder.files
        self._numbers = topic_numbers
        self._lengths = folder.checkpoint.facts.queues if folder.checkpoint is not None else {}
        self._keys: list[tuple[UInt64Array, Int64Array]] = []
        self._frames: list[fmt.Frame] = []
        self._mapped: dict[str, pa.Buffer | None] = {}
        self._damage: dict[str, Damage] = {}  # the first of each file

    def take(self, found: FrameFound) -> None:
        """One frame of the segment at hand."""
        rows, first_seq = found.rows, found.frame.first_seq
        hashes, at = hash_keys(rows.column("unique_key"), rows.column("keys"))
        self._keys.append((hashes, first_seq + at))
        self._frames.append(found.frame)
        visible = np.flatnonzero(np.isin(rows.column("kind").to_numpy(), VISIBLE))
        if len(visible):
            self._compare_queues(rows.take(pa.array(visible)), first_seq + visible)

    def end_of(self, segment: SegmentFound) -> list[Damage]:
        """What was found wrong since the last segment."""
        keys, self._keys = self._keys, []
        frames, self._frames = self._frames, []
        if not segment.is_last and not segment.is_spare:
            self._compare_sidecar(f"{FOLDER}/{segment.ordinal:010d}.keys", keys)
            self._compare_frame_index(segment, frames)
        found, self._damage = list(self._damage.values()), {}
        return found

    def _compare_sidecar(self, name: str, keys: list[tuple[UInt64Array, Int64Array]]) -> None:
        try:
            stored = KeySidecar.parse(self._files.map_readonly(name))
        except NotFound:
            return  # made when somebody asks
        except Corrupt as error:
            self._note(name, None, f"{error}; delete it, it is made again")
            return
        hashes = np.concatenate([np.empty(0, np.uint64), *(pair[0] for pair in keys)])
        seqs = np.concatenate([np.empty(0, np.int64), *(pair[1] for pair in keys)])
        if not _same(hashes, seqs, stored.hashes, stored.rows):
            self._note(name, None, "it does not hold the keys of its segment; delete it, it is made again")

    def _compare_frame_index(self, found: SegmentFound, frames: list[fmt.Frame]) -> None:
        segment = Segment(found.ordinal, found.first_seq or 0, found.buffer)
        for frame in frames:
            if (frame.first_seq, frame.position) != (segment.next_seq, segment.end):
                return  # damage lies between: it has been named, and what the index should say is not known
            segment.add(frame)
        name = frame_index.index_name(segment)
        try:
            stored = bytes(self._files.map_readonly(name))
        except NotFound:
            return  # made by the broker's upkeep
        if found.until_seq == segment.next_seq and stored != frame_index.encode(segment):
            self._note(name, None, "it does not name the frames of its segment; delete it, it is made again")

    def _compare_queues(self, rows: pa.RecordBatch, seqs: Int64Array) -> None:
        topics = rows.column("topic").dictionary_encode()
        codes = topics.indices.to_numpy(zero_copy_only=False)
        queue_id = rows.column("queue_id").to_numpy(zero_copy_only=False)
        offset = rows.column("queue_offset").to_numpy(zero_copy_only=False).astype(np.int64)
        for code, topic in enumerate(topics.dictionary.to_pylist()):
            lengths = self._lengths.get(topic, {})
            for queue, (low, high) in lengths.items():
                mine = (codes == code) & (queue_id == queue) & (offset >= low) & (offset < high)
                if mine.any() and topic in self._numbers:
                    folder = f"{QUEUES}/{self._numbers[topic]}/{queue}"
                    self._compare_queue(folder, offset[mine], seqs[mine])

    def _compare_queue(self, folder: str, offset: Int64Array, seqs: Int64Array) -> None:
        for number in np.unique(offset // FILE_ENTRIES).tolist():
            name = f"{folder}/{number:08d}.cq"
            mine = offset // FILE_ENTRIES == number
            at, expected = offset[mine] % FILE_ENTRIES, seqs[mine]
            stored = self._entries(name)
            if stored is None:
                self._note(name, None, "it is missing, but the checkpoint knows of entries in it")
                continue
            there = at < len(stored)
            if not there.all():
                self._note(
                    name, None, f"it is shorter than the {int(at.max()) + 1} entries that it should have"
                )
            wrong = np.flatnonzero(stored["seq"][at[there]] != expected[there])
            if len(wrong):
                entry, seq = int(at[there][wrong[0]]), int(expected[there][wrong[0]])
                text = f"entry {entry} should name seq {seq}, and names {int(stored['seq'][entry])}"
                self._note(name, entry * ENTRY.itemsize, text)

    def _entries(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.void]] | None:
        if name not in self._mapped:
            try:
                self._mapped[name] = self._files.map_readonly(name)
            except NotFound:
                self._mapped[name] = None
        buffer = self._mapped[name]
        return None if buffer is None else np.frombuffer(buffer, ENTRY, count=buffer.size // ENTRY.itemsize)

    def _note(self, name: str, position: int | None, text: str) -> None:
        self._damage.setdefault(name, Damage(name, position, text))


def _same(hashes: UInt64Array, seqs: Int64Array, stored: UInt64Array, stored_seqs: Int64Array) -> bool:
    """Whether the same pairs are stored, sorted by hash; pairs of one hash may stand in any order."""
    if len(hashes) != len(stored) or np.any(stored[1:] < stored[:-1]):
        return False
    mine, theirs = np.lexsort((seqs, hashes)), np.lexsort((stored_seqs, stored))
    return bool(
        np.array_equal(hashes[mine], stored[theirs]) and np.array_equal(seqs[mine], stored_seqs[theirs])
    )
