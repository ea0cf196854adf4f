"""A read that resumes where it broke off when the broker goes away and comes back.

Rows of the log and of queues are numbered and never change, so a reader that remembers the last number can read on and
yield every row once. It waits for the broker as long as any call does (endpoint.PATIENCE_S). A broker that is there and
breaks off TRIES times without a row between is an error.
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


def retrying_read(endpoint: Endpoint, read: Read, position: int, after: After) -> Iterator[pa.RecordBatch]:
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
