"""Gather batches into chunks: as many rows as a task sorts and writes at a time.

A task has a stream of batches without a bound on their number, and a file should have as many sorted rows as memory
allows. Does not import Spark: the commands on campaigns write files too, in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

CHUNK_ROWS = 1_000_000
CHUNK_BYTES = 256 * 1024 * 1024  # with its sorted copy and the encoder's pages: under 1 GB in a worker


def chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Gather batches into tables of at most CHUNK_ROWS rows and about CHUNK_BYTES bytes."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for whole in batches:
        for begin in range(0, whole.num_rows, CHUNK_ROWS):
            batch = whole.slice(begin, CHUNK_ROWS)
            if held and (rows + batch.num_rows > CHUNK_ROWS or size + batch.nbytes > CHUNK_BYTES):
                yield pa.Table.from_batches(held)
                held, rows, size = [], 0, 0
            held.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
    if held:
        yield pa.Table.from_batches(held)
