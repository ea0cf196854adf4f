"""Count the files of the pending table and the bytes written to it, for a named load. Not a measure of speed.

The load: a bulk of a million rows over 40 days in two tasks, a compaction of 50,000 rows over the same days, and an
hour of compactions of 10,000 rows a minute. Merges follow each step, as the broker makes them. Run it with
`python -m benchmarks.table_files`. It needs 2 GB of disk space and some minutes.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from timeball.broker.tables.compact import rewrite, write_files
from timeball.io.files import RealFiles
from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS
from timeball.model.message import TABLE_SCHEMA
from timeball.schedule.outcomes import Holds
from timeball.table import merging
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile

NOW_MS = 1_796_000_000_000  # 2026-11-30
DAYS, BULK_ROWS, COMPACT_ROWS, MINUTE_ROWS = 40, 1_000_000, 50_000, 10_000
TASKS = 2
BODY_BYTES = 128


class Table:
    """The files of a table in a folder, without a broker."""

    def __init__(self, folder: Path, seed: int = 7) -> None:
        self._files, self._random = RealFiles(folder), np.random.default_rng(seed)
        self._next_seq = 1
        self.live: dict[str, FileEntry] = {}
        self.bytes_by_step = Counter[str]()

    def add(self, step: str, now_ms: int, rows: int, from_ms: int, until_ms: int) -> None:
        """Write rows due in [from_ms, until_ms), and merge until nothing is worth its cost."""
        due_ms = self._random.integers(from_ms, until_ms, rows)
        for entry in write_files(self._files, self._rows(due_ms), now_ms):
            self.live[entry.path] = entry
            self.bytes_by_step[step] += entry.size_bytes
        self.merge(now_ms)

    def merge(self, now_ms: int) -> None:
        """Rewrite files as long as a rewrite is worth its cost."""
        while files := merging.choose(list(self.live.values()), now_ms, self._raw_bytes).files:
            made = rewrite(
                self._files, self._files, files, np.empty(0, np.int64),
                settled_before_ms=now_ms, holds=Holds(), now_ms=now_ms, epoch=1,
            )  # fmt: skip
            for path in made.removes:
                del self.live[path]
            for entry in made.files:
                self.live[entry.path] = entry
                self.bytes_by_step["merges"] += entry.size_bytes

    def _raw_bytes(self, entry: FileEntry) -> int:
        return DataFile(self._files, entry).raw_bytes()

    def _rows(self, due_ms: np.ndarray) -> pa.Table:
        count, first_seq = len(due_ms), self._next_seq
        self._next_seq += count
        values = {
            "seq": np.arange(first_seq, self._next_seq),
            "due_ms": due_ms,
            "topic": ["mail"] * count,
            "queue_id": np.full(count, -1),
            "unique_key": [f"{number:032x}" for number in self._random.integers(0, 1 << 62, count)],
            "body": [self._random.bytes(BODY_BYTES) for _ in range(count)],
            "accepted_ms": np.full(count, NOW_MS),
        }
        arrays = [pa.array(values.get(field.name, [None] * count), field.type) for field in TABLE_SCHEMA]
        return pa.Table.from_arrays(arrays, schema=TABLE_SCHEMA)


def steps(table: Table) -> Iterator[str]:
    """Run the load. Yields the name of each step after it."""
    for task in range(TASKS):
        from_ms = NOW_MS + MINUTE_MS + task * DAYS * DAY_MS // TASKS
        table.add("bulk", NOW_MS, BULK_ROWS // TASKS, from_ms, from_ms + DAYS * DAY_MS // TASKS)
    yield "bulk"
    table.add("compactions", NOW_MS, COMPACT_ROWS, NOW_MS + MINUTE_MS, NOW_MS + DAYS * DAY_MS)
    yield "one compaction"
    table.merge(NOW_MS + HOUR_MS)
    yield "an hour of broker time"
    for minute in range(60):
        now_ms = NOW_MS + HOUR_MS + minute * MINUTE_MS
        table.add("compactions", now_ms, MINUTE_ROWS, now_ms + MINUTE_MS, now_ms + DAYS * DAY_MS)
    yield "60 more compactions"


def main() -> None:
    """Print the files after each step, and the bytes written in all for each byte that was added."""
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder))
        for step in steps(table):
            written = table.bytes_by_step
            amplification = written.total() / (written["bulk"] + written["compactions"])
            print(f"{step}: {len(table.live)} files, {amplification:.2f} bytes written per byte added")


if __name__ == "__main__":
    main()
