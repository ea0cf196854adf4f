"""Rows of the log by message id or key, indexed at the first look-up.

Cancels and queries by key are rare beside sends, so a commit pays nothing for them: the first look-up indexes
what has been appended since the last one, in the calling (reader) thread. A sealed segment's index goes to a
sidecar beside it and is mapped, so memory holds only the active segment's.
"""

from __future__ import annotations

import threading

import numpy as np

from timeball.errors import Corrupt
from timeball.files import Files
from timeball.key_hash import KeySidecar, UInt64Array, hash_keys
from timeball.log.reader import LogReader
from timeball.log.segment import FOLDER, Segment, Segments
from timeball.message import Int64Array

RUNS_MAX = 16  # sorted runs of the active segment before they are merged: each look-up bisects every run


class KeyIndex:
    """Look-ups over all kept segments. Thread safe; meant for the reader thread, since it may have to index."""

    def __init__(self, files: Files, segments: Segments, reader: LogReader) -> None:
        self._files, self._segments, self._reader = files, segments, reader
        self._lock = threading.Lock()
        self._sealed: dict[int, KeySidecar] = {}
        self._runs: list[KeySidecar] = []
        # Of the active segment: its ordinal, the row that the next look-up indexes from, and the runs made so far.
        self._active = -1
        self._indexed_to = 0
        segments.on_drop.append(self._forget)

    def find_rows(self, wanted: UInt64Array) -> Int64Array:
        """Return the numbers of durable rows whose id or key has one of these hashes; the caller compares the text."""
        with self._lock:
            segments = self._segments.all
            parts = [self._sealed_index(segment).find_rows(wanted) for segment in segments[:-1]]
            self._index_active(segments[-1])
            parts += [run.find_rows(wanted) for run in self._runs]
        return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def _forget(self, gone: list[Segment]) -> None:
        with self._lock:
            for segment in gone:
                self._sealed.pop(segment.ordinal, None)

    def _sealed_index(self, segment: Segment) -> KeySidecar:
        known = self._sealed.get(segment.ordinal)
        if known is None:
            name = f"{FOLDER}/{segment.ordinal:010d}.keys"
            try:
                known = KeySidecar.parse(self._files.map_readonly(name)) if self._files.exists(name) else None
            except Corrupt:
                known = None  # a cache: built again from the segment, which is the truth
            if known is None:
                self._files.replace(name, self._index(segment.first_seq, segment.next_seq).encode())
                known = KeySidecar.parse(self._files.map_readonly(name))
            self._sealed[segment.ordinal] = known
        return known

    def _index_active(self, segment: Segment) -> None:
        # The log has rolled: what is indexed of the old segment is thrown away, since its sidecar is made from the
        # file.
        if segment.ordinal != self._active:
            self._active, self._indexed_to, self._runs = segment.ordinal, segment.first_seq, []
        to_seq = segment.next_seq
        if to_seq > self._indexed_to:
            self._runs.append(self._index(self._indexed_to, to_seq))
            self._indexed_to = to_seq
        if len(self._runs) > RUNS_MAX:
            self._runs = [_merge(self._runs)]

    def _index(self, from_seq: int, to_seq: int) -> KeySidecar:
        runs = []
        for rows in self._reader.coalesced(from_seq, to_seq, None, 65_536):
            hashes, positions = hash_keys(rows.column("unique_key"), rows.column("keys"))
            seqs = rows.column("seq").to_numpy()
            runs.append(KeySidecar(hashes, seqs[positions]))
        return _merge(runs)


def _merge(runs: list[KeySidecar]) -> KeySidecar:
    if not runs:
        return KeySidecar(np.empty(0, np.uint64), np.empty(0, np.int64))
    return KeySidecar.build(np.concatenate([r.hashes for r in runs]), np.concatenate([r.rows for r in runs]))
