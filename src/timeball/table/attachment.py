"""Changes of the pending table: an attach adds and removes files, a reservation takes sequence numbers for later files.

Each change is the body of a TABLE row of the log: JSON with its type in the field `change`. An `Attachment` is also
sent over Flight, and its row becomes a commit of the Delta table. It names files and not rows, so its size does not
grow with the number of rows.

    compact   `files` contain the rows [from_seq, to_seq) of the log; the watermark moves to `to_seq`
    bulk      `files` contain rows that never passed through the log; `ranges` are their reserved sequence numbers, each
              used once
    rewrite   `files` replace `removes`, with the same rows except those of settled messages. If it ends the pause of a
              campaign, `ranges` are the numbers of the campaign, whose messages may have later due times in `files`

A message is *settled* when it is durably released or cancelled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.model import limits
from timeball.model.errors import UNDECODABLE, InvalidMessage, OverLimit
from timeball.model.message import Int64Array

Ranges = Sequence[tuple[int, int]]  # ranges of sequence numbers: (first_seq, rows)
# JSON has integers of any size, but the table and the log have these.
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Job = Literal["compact", "bulk", "rewrite"]
ANY_ROWS = "any"  # as `digest`: record the job, but do not compare its input rows
# Matches exactly the paths that layout.describe makes. The random name identifies a file in all folders.
PATH = re.compile(r"bucket=[0-9T-]{7,13}/[0-9a-f]{32}\.parquet")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One data file.

    `path` is relative to the table. Sizes are in bytes. The bounds of due times (ms) and sequence numbers are
    inclusive.
    """

    path: str
    bucket: str
    rows: Int64
    size_bytes: Int64
    min_due_ms: Int64
    max_due_ms: Int64
    min_seq: Int64
    max_seq: Int64


class Reservation(msgspec.Struct, frozen=True, tag_field="change", tag="reserve"):
    """Reserves `rows` sequence numbers for a later bulk attach.

    They are the numbers after this row's own number. The frame of the row in the log spans them.
    """

    rows: Int64


class Attachment(msgspec.Struct, frozen=True, kw_only=True, tag_field="change", tag="attach"):
    """Adds `files` to the table and removes the paths `removes`.

    The broker recognises a repeated attach by `job_id` and `epoch`, and ignores it (broker/registry/campaigns.py).
    `digest` identifies the input rows of a bulk job: a repeat with another digest is refused.
    """

    job: Job
    job_id: str
    epoch: Int64
    files: list[FileEntry] = []
    removes: list[str] = []
    from_seq: Int64 = 0
    to_seq: Int64 = 0
    ranges: list[tuple[Int64, Int64]] = []  # (first_seq, rows)
    digest: str = ""

    @property
    def rows(self) -> int:
        """The number of rows in the attached files."""
        return sum(entry.rows for entry in self.files)


def apply_to(live: dict[str, FileEntry], attachment: Attachment) -> None:
    """Apply an attach to `live`, the live files by path. Attaches must be applied in the order of the log."""
    for path in attachment.removes:
        live.pop(path, None)
    for entry in attachment.files:
        live[entry.path] = entry


def live_files(files: list[FileEntry], attaches: Sequence[tuple[int, Attachment]]) -> list[FileEntry]:
    """Compute the live files after some attaches.

    `files`: the live files before them. `attaches`: (sequence number, attach) pairs in the order of the log.
    """
    live = {entry.path: entry for entry in files}
    for _, attachment in attaches:
        apply_to(live, attachment)
    return list(live.values())


def encode(change: Attachment | Reservation) -> bytes:
    """Encode a change as the JSON used in the log and over Flight."""
    return msgspec.json.encode(change)


def decode_change(body: bytes) -> Attachment | Reservation:
    """Decode the body of a TABLE row of the log. Raises msgspec.DecodeError if it is malformed."""
    return msgspec.json.decode(body, type=Attachment | Reservation)


def decode(data: bytes) -> Attachment:
    """Decode the attach that a client sent as JSON. Raises InvalidMessage if it is malformed or has a wrong path.

    Raises OverLimit for more than ATTACH_FILES_MAX files.
    """
    try:
        attachment = msgspec.json.decode(data, type=Attachment)
    except UNDECODABLE as error:
        raise InvalidMessage(f"not an attachment: {error}") from error
    if len(attachment.files) > limits.ATTACH_FILES_MAX:
        raise OverLimit(f"{len(attachment.files)} files in one attach; at most {limits.ATTACH_FILES_MAX}")
    for entry in attachment.files:
        if PATH.fullmatch(entry.path) is None or not entry.path.startswith(f"bucket={entry.bucket}/"):
            raise InvalidMessage(
                f"file path {entry.path!r}: relative to the table, as bucket=<bucket>/<32 hex digits>.parquet"
            )
    return attachment


def within(seq: Int64Array, ranges: Ranges) -> npt.NDArray[np.bool_]:
    """Compute a mask: True for each sequence number that is in one of the ranges, which are disjoint."""
    if not ranges:
        return np.zeros(len(seq), dtype=np.bool_)
    first_seq, rows = np.array(sorted(ranges), dtype=np.int64).T
    index = np.searchsorted(first_seq, seq, side="right") - 1
    return np.asarray((index >= 0) & (seq < first_seq[index] + rows[index]))


def overlap(begin: Int64Array, end: Int64Array, ranges: Ranges) -> npt.NDArray[np.bool_]:
    """Compute a mask: True for each span begin <= seq < end that overlaps one of the ranges, which are disjoint."""
    if not ranges:
        return np.zeros(len(begin), dtype=np.bool_)
    first_seq, rows = np.array(sorted(ranges), dtype=np.int64).T
    # Disjoint ranges: of those that begin before the end of a span, the last one also ends last.
    index = np.searchsorted(first_seq, end, side="left") - 1
    return np.asarray((index >= 0) & (begin < first_seq[index] + rows[index]))
