"""Rows of the log by message id or key, indexed at the first look-up.

Cancels and queries by key are rare beside sends, so a commit pays nothing for them: the first look-up indexes
what has been appended since the last one, in the calling (reader) thread. A sealed segment's index becomes a
key run beside it and is mapped, so memory holds only the active segment's.
"""

from __future__ import annotations

import threading

import numpy as np

from timeball.errors import Corrupt
from timeball.files import Files
from timeball.key_hash import KeyRun, UInt64Array, hash_keys, joined
from timeball.log.reader import LogReader
from timeball.log.segment import FOLDER, Segment, Segments
from timeball.message import Int64Array

RUNS_MAX = 16  # sorted runs of the active segment before they are merged: each look-up bisects every run


class KeyIndex:
    """Look-ups over all kept segments. Thread safe; meant for the reader thread, since it may have to index."""

    def __init__(self, files: Files, segments: Segments, reader: LogReader) -> None:
        self._files, self._segments, self._reader = files, segments, reader
        self._lock = threading.Lock()
        self._sealed: dict[int, KeyRun] = {}
        self._runs: list[KeyRun] = []
        # Of the active segment: its ordinal, the row that the next look-up indexes from, and the runs made so far.
        self._active = -1
        self._indexed_to = 0
        segments.on_drop.append(self._forget)

    def find_rows(self, wanted: UInt64Array) -> Int64Array:
        """Return the numbers of durable rows whose id or key has one of these hashes; the caller compares the text."""
        with self._lock:
            segments = self._segments.all
            parts = [self._find_sealed(segment, wanted) for segment in segments[:-1]]
            self._index_active(segments[-1])
            parts += [run.find_numbers(wanted) for run in self._runs]
        return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def _forget(self, gone: list[Segment]) -> None:
        with self._lock:
            for segment in gone:
                self._sealed.pop(segment.ordinal, None)

    def _find_sealed(self, segment: Segment, wanted: UInt64Array) -> Int64Array:
        try:
            return self._sealed_index(segment).find_numbers(wanted)
        except Corrupt:
            # A cache: built again from the segment, which is the truth.
            self._sealed.pop(segment.ordinal, None)
            self._files.remove(_name(segment))
            return self._sealed_index(segment).find_numbers(wanted)

    def _sealed_index(self, segment: Segment) -> KeyRun:
        known = self._sealed.get(segment.ordinal)
        if known is None:
            name = _name(segment)
            if not self._files.exists(name):
                self._files.replace(name, bytes(self._index(segment.first_seq, segment.next_seq).data))
            known = KeyRun(self._files.map_readonly(name))
            self._sealed[segment.ordinal] = known
        return known

    def _index_active(self, segment: Segment) -> None:
        # The log has rolled: what is indexed of the old segment is thrown away, since its run is made from the file.
        if segment.ordinal != self._active:
            self._active, self._indexed_to, self._runs = segment.ordinal, segment.first_seq, []
        to_seq = segment.next_seq
        if to_seq > self._indexed_to:
            self._runs.append(self._index(self._indexed_to, to_seq))
            self._indexed_to = to_seq
        if len(self._runs) > RUNS_MAX:
            self._runs = [KeyRun.build(*joined([run.columns() for run in self._runs]))]

    def _index(self, from_seq: int, to_seq: int) -> KeyRun:
        parts = []
        for rows in self._reader.coalesced(from_seq, to_seq, None, 65_536):
            hashes, positions = hash_keys(rows.column("unique_key"), rows.column("keys"))
            seqs = rows.column("seq").to_numpy()
            parts.append((hashes, seqs[positions]))
        return KeyRun.build(*joined(parts))


def _name(segment: Segment) -> str:
    return f"{FOLDER}/{segment.ordinal:010d}.keys"
