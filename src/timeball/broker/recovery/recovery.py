"""Rebuild all caches from the log, beginning at the checkpoint, at the last snapshot, or at the first row.

Below, "the checkpoint" means the starting point that a start uses. A snapshot is a row of the log with the same content
as a checkpoint. *Settled* means released or cancelled.

    1. The checkpoint contains the state at sequence number C. The files of the queue index contain the positions of
       the messages before C. If the files are damaged or missing, these entries are rebuilt from the log.
    2. Rows from C on are replayed: visible rows into the queue indexes, releases and cancels into the set of settled
       scheduled messages, TABLE rows into the state of attaches and reservations.
    3. The live data files are those of the checkpoint, changed by the attaches from C on. Each file must exist. The
       Delta table is a cache of this list. It is updated to match, or created again.
    4. The pending messages of the log's tail are the scheduled messages from the watermark W on that are not settled.
       Each is represented by the last of its rows. If a strategy has its own files and they match the checkpoint, only
       scheduled messages from C on are needed.
    5. A RELEASE or CANCEL row settles a scheduled message wherever it is pending, also in the queue of a delay level.
    6. The release cursor continues from the checkpoint's value, with every RELEASE row of a message with a due time.
    7. A MOVED row to another due time settles the version that it names, and is the newest version of its message.
    8. Half messages (scheduled messages without a due time) in the checkpoint's list and from C on are open, unless a
       row from C on names them.
    9. The number of pending messages and the leases in the log are those of the checkpoint, changed by the rows from C
       on.

Invariant: the same log gives the same state, however often a recovery was interrupted.
"""

from __future__ import annotations

import numpy as np

from timeball.broker.recovery.applying import Applying
from timeball.broker.registry.tables import Tables
from timeball.log import checkpoint as cp
from timeball.log.checkpoint import last_snapshot
from timeball.log.reader import LogReader
from timeball.log.segment import Segments, segment_name
from timeball.model.errors import Corrupt

_EMPTY = np.empty(0, np.int64)


def newest_starting_point(
    checkpoint: cp.Checkpoint | None, segments: Segments, to_seq: int | None = None
) -> cp.Checkpoint:
    """Choose the checkpoint if the log has the rows that it needs, else the last snapshot, else an empty state.

    The log may lack rows that the result needs. `starting_point` refuses that.
    """
    if checkpoint is not None and not lacks_rows(checkpoint, segments):
        return checkpoint
    # Retention has removed rows that the checkpoint needs. It does so only after a later snapshot. Without a snapshot,
    # recovery replays the log from its first row.
    return last_snapshot(segments, to_seq) or cp.Checkpoint(cp.Facts(seq=1), _EMPTY, _EMPTY)


def lacks_rows(start: cp.Checkpoint, segments: Segments) -> bool:
    """Check whether the log no longer has rows that this starting point needs."""
    return segments.first_seq > start.facts.log_from_seq


def starting_point(
    checkpoint: cp.Checkpoint | None, segments: Segments, to_seq: int | None = None
) -> cp.Checkpoint:
    """Choose the starting point: the checkpoint if it fits the log, else the last snapshot, else an empty state.

    Only rows below `to_seq` are committed. A later snapshot may still be truncated from a replicated log, so it is not
    used. Raises Corrupt if the log lacks rows that retention cannot have removed.
    """
    start = newest_starting_point(checkpoint, segments, to_seq)
    # Retention never removes rows from `log_from_seq` on, so a file must be missing.
    if lacks_rows(start, segments):
        raise Corrupt(
            f"{segment_name(segments.all[0].ordinal - 1)} is missing: the log begins with seq {segments.first_seq}, "
            f"but retention has removed nothing from seq {start.facts.log_from_seq} on; restore the file from a copy"
        )
    return start


def apply_log(start: cp.Checkpoint, reader: LogReader, tables: Tables, *, resumes: bool = False) -> Applying:
    """Apply the whole log from a starting point on, fill `tables`, and return the caches. Blocking.

    `resumes` means that the strategy has saved the scheduled messages before the starting point in its own files.
    """
    applying = Applying(start, reader, tables, resumes=resumes)
    applying.apply(reader.next_seq)
    return applying
