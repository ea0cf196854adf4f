"""Index of the log's rows by message id and key, built at the first look-up.

Cancels and queries by key are rare compared with sends, so a commit does no indexing. A look-up first indexes the rows
appended since the last one, in the calling thread. The index of a sealed segment becomes a key run file beside it and
is mapped. So memory contains only the active segment's index: a table of the newest rows, and sorted runs of the older
rows.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np

from timeball.io.files import Files
from timeball.log.reader import LogReader
from timeball.log.segment import FOLDER, Segment, Segments
from timeball.model.errors import Corrupt
from timeball.model.key_hash import FEW, KeyRun, Pairs, UInt64Array, hash_keys, joined
from timeball.model.message import Int64Array

# Pairs of the active segment in the table, before they become a sorted run. A look-up after a cancel has one row to
# index, and building and searching a run for it costs ten times as much as adding it to the table.
NEWEST_PAIRS_MAX = 4_096


class KeyIndex:
    """Look-ups over all kept segments. Thread-safe, but not for the event loop, because a look-up may index first."""

    def __init__(self, files: Files, segments: Segments, reader: LogReader) -> None:
        self._files, self._segments, self._reader = files, segments, reader
        self._lock = threading.Lock()
        self._sealed: dict[int, KeyRun] = {}
        # State of the active segment: its ordinal, the first row not indexed yet, the sorted runs, and the rows after
        # them by hash. Invariant: each run has more than twice as many pairs as the next one.
        self._active = -1
        self._indexed_to = 0
        self._runs: list[KeyRun] = []
        self._newest: dict[int, list[int]] = defaultdict(list)
        self._newest_pairs = 0
        segments.on_drop.append(self._forget)

    def find_rows(self, wanted: UInt64Array) -> Int64Array:
        """Find the numbers of durable rows whose id or key has one of these hashes. The caller compares the texts."""
        with self._lock:
            segments = self._segments.all
            parts = [self._find_sealed(segment, wanted) for segment in segments[:-1]]
            self._index_active(segments[-1])
            parts += [run.find_numbers(wanted) for run in self._runs]
            newest = [seq for key in wanted.tolist() for seq in self._newest.get(key, ())]
            parts.append(np.array(newest, np.int64))
        return np.unique(np.concatenate(parts))

    def _forget(self, gone: list[Segment]) -> None:
        with self._lock:
            for segment in gone:
                self._sealed.pop(segment.ordinal, None)

    def _find_sealed(self, segment: Segment, wanted: UInt64Array) -> Int64Array:
        try:
            return self._sealed_index(segment).find_numbers(wanted)
        except Corrupt:
            # The run is a cache: it is rebuilt from the segment, the source of truth.
            self._sealed.pop(segment.ordinal, None)
            self._files.remove(_name(segment))
            return self._sealed_index(segment).find_numbers(wanted)

    def _sealed_index(self, segment: Segment) -> KeyRun:
        known = self._sealed.get(segment.ordinal)
        if known is None:
            name = _name(segment)
            if not self._files.exists(name):
                self._files.replace(
                    name, bytes(KeyRun.build(*self._pairs(segment.first_seq, segment.next_seq)).data)
                )
            known = KeyRun(self._files.map_readonly(name))
            self._sealed[segment.ordinal] = known
        return known

    def _index_active(self, segment: Segment) -> None:
        # The log has rolled. The old segment's pairs in memory are dropped: its run is built from the segment when
        # needed.
        if segment.ordinal != self._active:
            self._active, self._indexed_to, self._runs = segment.ordinal, segment.first_seq, []
            self._forget_newest()
        to_seq = segment.next_seq
        if to_seq > self._indexed_to:
            self._note(self._pairs(self._indexed_to, to_seq))
            self._indexed_to = to_seq

    def _note(self, pairs: Pairs) -> None:
        hashes, seqs = pairs
        if self._newest_pairs + len(seqs) <= NEWEST_PAIRS_MAX:
            for key, seq in zip(hashes.tolist(), seqs.tolist(), strict=True):
                self._newest[key].append(seq)
            self._newest_pairs += len(seqs)
            return
        newest = [(key, seq) for key, of_key in self._newest.items() for seq in of_key]
        keys, numbers = zip(*newest, strict=True) if newest else ((), ())
        run = KeyRun.build(*joined([(np.array(keys, np.uint64), np.array(numbers, np.int64)), pairs]))
        self._forget_newest()
        # Merging by this rule sorts each pair O(log n) times and leaves O(log n) runs to search.
        while self._runs and self._runs[-1].pairs <= 2 * run.pairs:
            run = KeyRun.build(*joined([self._runs.pop().columns(), run.columns()]))
        self._runs.append(run)

    def _forget_newest(self) -> None:
        self._newest.clear()
        self._newest_pairs = 0

    def _pairs(self, from_seq: int, to_seq: int) -> Pairs:
        """Hash the ids and keys of the rows [from_seq, to_seq). Return hashes and sequence numbers, unsorted."""
        parts = []
        if to_seq - from_seq <= FEW:
            # The usual case: a cancel has appended one row since the last look-up. To read its frame costs a third of
            # `coalesced`.
            for first_seq, rows in self._reader.frames(from_seq, to_seq):
                hashes, positions = hash_keys(rows.column("unique_key"), rows.column("keys"))
                parts.append((hashes, first_seq + positions))
            return joined(parts)
        for rows in self._reader.coalesced(from_seq, to_seq, None, 65_536, ["seq", "unique_key", "keys"]):
            hashes, positions = hash_keys(rows.column("unique_key"), rows.column("keys"))
            seqs = rows.column("seq").to_numpy()
            parts.append((hashes, seqs[positions]))
        return joined(parts)


def _name(segment: Segment) -> str:
    return f"{FOLDER}/{segment.ordinal:010d}.keys"
