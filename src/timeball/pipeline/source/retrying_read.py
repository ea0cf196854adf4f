"""A read that goes on where it broke off when the broker goes away and comes back.

Rows of the log and of queues never change and have numbers, so a reader that remembers the last number can read on, and
hands on every row once. The broker is waited for as long as any call waits (endpoint.PATIENCE_S); one that is there and
breaks off again and again without a single row between is a failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pyarrow as pa

from timeball.errors import Unavailable
from timeball.pipeline.endpoint import Endpoint

LOG = logging.getLogger("timeball.pipeline")

TRIES = 3

Read = Callable[[int], Iterator[pa.RecordBatch]]  # rows from a position on, in order
After = Callable[[pa.RecordBatch, int], int]  # the position behind a batch that began at one


def resuming(endpoint: Endpoint, read: Read, position: int, after: After) -> Iterator[pa.RecordBatch]:
    """Yield all batches of `read(position)`; Unavailable when the broker stays away."""
    broken = 0
    while True:
        try:
            for batch in read(position):
                position, broken = after(batch, position), 0
                yield batch
            return
        except Unavailable as error:
            broken += 1
            if broken > TRIES:
                raise
            LOG.warning(
                "read broke off broker=%s at_seq=%d try=%d reason=%s", endpoint.uri, position, broken, error
            )
            endpoint.status()  # returns once the broker is back


def behind_last_seq(batch: pa.RecordBatch, _: int) -> int:
    """Return the position behind rows of the log, which must have their number."""
    return int(batch.column("seq")[-1].as_py()) + 1


def behind_rows(batch: pa.RecordBatch, position: int) -> int:
    """Return the position behind rows of a queue, which has one at each offset."""
    return position + int(batch.num_rows)
