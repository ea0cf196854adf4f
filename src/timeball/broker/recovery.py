"""Rebuild every cache from the log: from the checkpoint on, or from the last snapshot, or from the first row.

"The checkpoint" below is the one of these that a start begins with; a snapshot says the same, in the log.

    1. the checkpoint gives the state at sequence number C; the files of the queue index say where the messages
       before it stand, and where these are damaged or missing, the log does
    2. rows from C on are replayed: visible rows into the queue indexes, releases and cancels into the set of
       settled promises, TABLE rows into the state of attaches and reservations
    3. the data files that live are those of the checkpoint, changed by the attaches from C on; each must be
       there; the Delta table, which is a cache of this list, is brought up to it or made anew
    4. promises from the watermark W on that are not settled are what waits in the tail, each in the last of its
       rows; a strategy that has files of its own and finds them as the checkpoint says needs only those from C on
    5. a release or cancel record settles a promise wherever it waits, in a level's queue as anywhere else
    6. the tick goes on from the checkpoint's with every release record of an instant since
    7. a MOVED row to another instant settles the version it names, and is the newest one of its promise
    8. promises without an instant (half messages) of the checkpoint's list and from C on, named by no row from C on,
       are open
    9. how many promises wait, and which leases the log keeps: the checkpoint's, changed by the rows from C on

Invariant: the same log gives the same state, however often a recovery was itself interrupted.
"""

from __future__ import annotations

import numpy as np

from timeball.broker.applying import Applying
from timeball.broker.components import Tables
from timeball.errors import Corrupt
from timeball.log import checkpoint as cp
from timeball.log.checkpoint import last_snapshot
from timeball.log.reader import LogReader
from timeball.log.segment import Segments, segment_name

_EMPTY = np.empty(0, np.int64)


def newest_known(
    checkpoint: cp.Checkpoint | None, segments: Segments, to_seq: int | None = None
) -> cp.Checkpoint:
    """Return what `starting_point` does, also when the log lacks rows that it needs."""
    if checkpoint is not None and not lacks_rows(checkpoint, segments):
        return checkpoint
    # A checkpoint of a log that retention has shortened since knows less than its snapshot, so it is not used.
    return last_snapshot(segments, to_seq) or cp.Checkpoint(cp.Facts(seq=1), _EMPTY, _EMPTY)


def lacks_rows(known: cp.Checkpoint, segments: Segments) -> bool:
    """Return whether the log begins behind rows that this starting point needs."""
    return segments.first_seq > known.facts.log_from_seq


def starting_point(
    checkpoint: cp.Checkpoint | None, segments: Segments, to_seq: int | None = None
) -> cp.Checkpoint:
    """Return what to begin with: the checkpoint when it fits the log, else the last snapshot, else nothing at all.

    `to_seq`: only rows below it are committed; a snapshot behind it may be cut again, and is not begun with.

    Raises Corrupt when the log lacks rows that retention has not let go.
    """
    known = newest_known(checkpoint, segments, to_seq)
    if lacks_rows(known, segments):
        raise Corrupt(
            f"{segment_name(segments.all[0].ordinal - 1)} is missing: the log begins with seq {segments.first_seq}, "
            f"but retention has let go nothing from seq {known.facts.log_from_seq} on; restore the file from a copy"
        )
    return known


def apply_log(known: cp.Checkpoint, reader: LogReader, tables: Tables, *, resumes: bool = False) -> Applying:
    """Return the caches with the whole log applied, from a starting point on; `tables` are filled. Blocking.

    `resumes`: the strategy finds promises before the starting point in files of its own.
    """
    applying = Applying(known, reader, tables, resumes=resumes)
    applying.apply(reader.next_seq)
    return applying
