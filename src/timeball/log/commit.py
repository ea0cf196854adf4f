"""The parts of a group commit: appended entries, the frames made of them, and the written result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from timeball.io.clock import Durations
from timeball.log import format as fmt
from timeball.log.few_rows import EncodedRows, Rows, joined, message_bytes
from timeball.log.segment import Segment
from timeball.model.errors import StorageError, TimeballError, Unavailable
from timeball.model.message import SMALL_ROWS

DurableCallback = Callable[[], None]


@dataclass(slots=True)
class Entry:
    """Rows of one `append` call until they are durable."""

    rows: Rows
    first_seq: int
    # At least rows.num_rows. It is larger when the entry reserves sequence numbers beyond its rows.
    span: int
    size_bytes: int
    # The caller's future. A caller that is cancelled cancels it.
    done: asyncio.Future[int]
    on_durable: DurableCallback | None
    flags: int = 0
    # The encoded rows, when the encoder thread encodes them while an earlier commit is written.
    payload: Future[bytes | pa.Buffer] | None = None
    # One future for all callers of `flushed()`, which shield it.
    flushed: asyncio.Future[None] | None = None


class Group(NamedTuple):
    """Rows of one frame."""

    rows: Rows
    first_seq: int
    span: int
    size_bytes: int  # of the rows as an Arrow message
    flags: int = 0
    payload: Future[bytes | pa.Buffer] | None = None


def frames_of(entries: list[Entry]) -> list[Group]:
    """Combine entries into frames.

    Neighbouring entries share a frame, except an entry that reserves numbers, has flags, or is encoded already. Encoded
    entries of fewer than SMALL_ROWS rows are encoded again together with their neighbours: a reader pays the same for a
    frame of one row as for a frame of many.
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
        # Not joined: a large message would have to be decoded and encoded again.
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
    """Counters since the start of the writer."""

    commit_durations: Durations  # encode, write and sync
    sync_durations: Durations  # sync alone, with `sync` durability
    commits: int = 0
    frames: int = 0
    rows: int = 0
    bytes: int = 0
    rolls: int = 0


@dataclass(slots=True)
class Commit:
    """The result of one commit in the disk thread: the frames written, all in one segment."""

    segment: Segment
    frames: list[fmt.Frame] = field(default_factory=list)


def refusal(failure: BaseException) -> TimeballError:
    """Build the error for calls after `failure` stopped the log.

    An Unavailable (such as NotLeader) keeps its type, so that the caller asks the node that leads now.
    """
    if isinstance(failure, Unavailable):
        return type(failure)(str(failure))
    return StorageError(f"the log has stopped: {failure}")
