"""The parts of a group commit: what was appended, the frames it becomes, and what was written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from timeball.clock import Durations
from timeball.errors import StorageError, TimeballError, Unavailable
from timeball.log import format as fmt
from timeball.log.few_rows import EncodedRows, Rows, joined, message_bytes
from timeball.log.segment import Segment
from timeball.message import SMALL_ROWS

DurableCallback = Callable[[], None]


@dataclass(slots=True)
class Entry:
    """Rows of one `append`, until they are durable."""

    rows: Rows
    first_seq: int
    span: int  # >= rows.num_rows: more when numbers are set aside
    size_bytes: int
    done: asyncio.Future[int]  # the caller's: gone when the caller goes
    on_durable: DurableCallback | None
    flags: int = 0
    payload: Future[bytes | pa.Buffer] | None = None  # of rows that are encoded ahead
    flushed: asyncio.Future[None] | None = None  # for `flushed()`: shielded, one for all its callers


class Group(NamedTuple):
    """Rows of one frame."""

    rows: Rows
    first_seq: int
    span: int
    size_bytes: int  # as an Arrow message
    flags: int = 0
    payload: Future[bytes | pa.Buffer] | None = None


def frames_of(entries: list[Entry]) -> list[Group]:
    """Return the frames of entries. Neighbours share one unless one sets numbers aside, has flags or is encoded.

    Of few rows it is encoded once more with its neighbours: a frame costs a reader the same for one row as for many.
    """
    groups: list[Group] = []
    run: list[Entry] = []

    def flush() -> None:
        if run:
            rows, size_bytes = run[0].rows, run[0].size_bytes
            if len(run) > 1:
                rows = joined([entry.rows for entry in run])
                size_bytes = message_bytes(rows)
            groups.append(Group(rows, run[0].first_seq, rows.num_rows, size_bytes))
            run.clear()

    for entry in entries:
        is_encoded = isinstance(entry.rows, EncodedRows) and entry.rows.num_rows >= SMALL_ROWS
        if entry.flags or entry.span != entry.rows.num_rows or entry.payload is not None or is_encoded:
            flush()
            groups.append(
                Group(entry.rows, entry.first_seq, entry.span, entry.size_bytes, entry.flags, entry.payload)
            )
        else:
            run.append(entry)
    flush()
    return groups


@dataclass(slots=True)
class WriterStatistics:
    """Counts since the start."""

    commit_durations: Durations  # frames made, written and synced
    sync_durations: Durations  # of `sync` durability
    commits: int = 0
    frames: int = 0
    rows: int = 0
    bytes: int = 0
    rolls: int = 0


@dataclass(slots=True)
class Commit:
    """The result of the disk thread: frames of one segment."""

    segment: Segment
    frames: list[fmt.Frame] = field(default_factory=list)


def refusal(failure: BaseException) -> TimeballError:
    """Return the error of a call after a failure stopped the log: where another node leads, it is to be asked."""
    if isinstance(failure, Unavailable):
        return type(failure)(str(failure))
    return StorageError(f"the log has stopped: {failure}")
