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
from timeball.model.key_hash import (
    FEW,
    KeyRun,
    Pairs,
    UInt64Array,
    distinct,
    hash_keys,
    hash_string,
    joined,
)
from timeball.model.message import READ_SCHEMA, Int64Array

# Pairs of the active segment in the table, before they become a sorted run. A look-up after a cancel has one row to
# index, and building and searching a run for it costs ten times as much as adding it to the table.
NEWEST_PAIRS_MAX = 4_096
_UNIQUE_KEY, _KEYS = (READ_SCHEMA.get_field_index(name) for name in ("unique_key", "keys"))


class KeyIndex:
    """Look-ups over all kept segments. Thread-safe. Do not call it on the event loop: a look-up may index many rows."""

    def __init__(self, files: Files, segments: Segments, reader: LogReader) -> None:
        self._files, self._segments, self._reader = files, segments, reader
        self._lock = threading.Lock()
        self._sealed_runs: dict[int, KeyRun] = {}
        # State of the active segment (the last one): its ordinal, the first row that is not indexed yet, the sorted
        # runs, and a table of the newest rows by hash. Invariant: each run is more than twice as long as the next.
        self._active_ordinal = -1
        self._indexed_to = 0
        self._runs: list[KeyRun] = []
        self._newest: dict[int, list[int]] = defaultdict(list)
        self._newest_pairs = 0
        segments.on_drop.append(self._forget_segments)

    def find_rows(self, hashes: UInt64Array) -> Int64Array:
        """Find the numbers of durable rows whose id or key has one of these hashes. The caller compares the texts.

        A hash may match other texts, too. The result is sorted, without duplicates. Raises Corrupt.
        """
        with self._lock:
            segments = self._segments.all
            row_numbers = [self._find_sealed(segment, hashes) for segment in segments[:-1]]
            self._index_active(segments[-1])
            row_numbers += [run.find_numbers(hashes) for run in self._runs]
            newest_rows = [seq for key_hash in hashes.tolist() for seq in self._newest.get(key_hash, ())]
            row_numbers.append(np.array(newest_rows, np.int64))
        return distinct(np.concatenate(row_numbers))

    def _forget_segments(self, removed: list[Segment]) -> None:
        """Drop the runs of removed segments."""
        with self._lock:
            for segment in removed:
                self._sealed_runs.pop(segment.ordinal, None)

    def _find_sealed(self, segment: Segment, hashes: UInt64Array) -> Int64Array:
        """Search the key run of a sealed segment. Rebuilds a damaged run. Raises Corrupt if the segment is damaged."""
        try:
            return self._open_run(segment).find_numbers(hashes)
        except Corrupt:
            # The run is a cache: it is rebuilt from the segment, the source of truth.
            self._sealed_runs.pop(segment.ordinal, None)
            self._files.remove(_run_name(segment))
            return self._open_run(segment).find_numbers(hashes)

    def _open_run(self, segment: Segment) -> KeyRun:
        """Open the key run file of a sealed segment, and build it from the segment if there is none. Raises Corrupt."""
        run = self._sealed_runs.get(segment.ordinal)
        if run is None:
            name = _run_name(segment)
            if not self._files.exists(name):
                self._files.replace(
                    name, bytes(KeyRun.build(*self._hash_rows(segment.first_seq, segment.next_seq)).data)
                )
            run = KeyRun(self._files.map_readonly(name))
            self._sealed_runs[segment.ordinal] = run
        return run

    def _index_active(self, segment: Segment) -> None:
        """Index the rows of the active segment that were appended since the last look-up."""
        # After a roll of the log the old segment's pairs are dropped: its run is built from the segment when needed.
        if segment.ordinal != self._active_ordinal:
            self._active_ordinal, self._indexed_to, self._runs = segment.ordinal, segment.first_seq, []
            self._forget_newest()
        to_seq = segment.next_seq
        if to_seq > self._indexed_to:
            self._add_pairs(self._hash_rows(self._indexed_to, to_seq))
            self._indexed_to = to_seq

    def _add_pairs(self, pairs: Pairs) -> None:
        """Add pairs of hash and row number to the table of the newest rows.

        If the table would be too large, make a sorted run of its pairs and the new ones instead.
        """
        hashes, seqs = pairs
        if self._newest_pairs + len(seqs) <= NEWEST_PAIRS_MAX:
            for key_hash, seq in zip(hashes.tolist(), seqs.tolist(), strict=True):
                self._newest[key_hash].append(seq)
            self._newest_pairs += len(seqs)
            return
        newest = [(key_hash, seq) for key_hash, seqs_of_hash in self._newest.items() for seq in seqs_of_hash]
        newest_hashes, newest_seqs = zip(*newest, strict=True) if newest else ((), ())
        run = KeyRun.build(
            *joined([(np.array(newest_hashes, np.uint64), np.array(newest_seqs, np.int64)), pairs])
        )
        self._forget_newest()
        # Merging by this rule sorts each pair O(log n) times and leaves O(log n) runs to search.
        while self._runs and self._runs[-1].pairs <= 2 * run.pairs:
            run = KeyRun.build(*joined([self._runs.pop().columns(), run.columns()]))
        self._runs.append(run)

    def _forget_newest(self) -> None:
        """Empty the table of the newest rows."""
        self._newest.clear()
        self._newest_pairs = 0

    def _hash_rows(self, from_seq: int, to_seq: int) -> Pairs:
        """Hash the ids and keys of the rows [from_seq, to_seq).

        Returns pairs of a hash and a sequence number, as two arrays, unsorted. A row has a pair for its id and for each
        of its keys. Raises Corrupt.
        """
        # The usual case: a cancel appended one row since the last look-up. Values cost a tenth of columns.
        few_rows = self._reader.read_values(range(from_seq, to_seq)) if to_seq - from_seq <= FEW else None
        if few_rows is not None:
            few = list[tuple[int, int]]()
            for row in few_rows:
                keys = [key for key in (row[_KEYS] or "").split(" ") if key]
                if row[_UNIQUE_KEY] is not None:
                    keys.append(row[_UNIQUE_KEY])
                few += [(hash_string(key), row[0]) for key in keys]  # row[0]: the sequence number
            few_hashes, few_seqs = zip(*few, strict=True) if few else ((), ())
            return np.array(few_hashes, np.uint64), np.array(few_seqs, np.int64)
        pairs = []
        for rows in self._reader.coalesced(from_seq, to_seq, None, 65_536, ["seq", "unique_key", "keys"]):
            hashes, positions = hash_keys(rows.column("unique_key"), rows.column("keys"))
            seqs = rows.column("seq").to_numpy()
            pairs.append((hashes, seqs[positions]))
        return joined(pairs)


def _run_name(segment: Segment) -> str:
    return f"{FOLDER}/{segment.ordinal:010d}.keys"
