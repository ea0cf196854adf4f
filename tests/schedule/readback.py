"""The input of a strategy at a start, read from the log by a plain loop over its rows.

It replaces broker/recovery.py, which has tests of its own, by code that is simple enough to need none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from tests.schedule.stage import Restart, Saved, is_covered

from timeball.log.reader import LogReader
from timeball.model.message import Int64Array, Kind
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import Settled
from timeball.table.attachment import Attachment, FileEntry

COLUMNS = ["seq", "kind", "due_ms", "source_seq"]


def read_back(
    reader: LogReader, kind: Kind, saved: Saved, attached: Sequence[tuple[int, Attachment]], watermark: int
) -> Restart:
    """Read the log from a checkpoint on. `attached` are (seq, attachment); `kind` is that of the messages' rows."""
    pairs = dict(zip(saved.settled.seq.tolist(), saved.settled.due_ms.tolist(), strict=True))
    due: dict[int, int] = {}
    at: dict[int, int] = {}
    for rows in reader.rows(reader.first_seq, reader.next_seq):
        for row in rows.select(COLUMNS).to_pylist():
            seq, source_seq = row["seq"], row["source_seq"]
            if row["kind"] in (kind, Kind.MOVED):
                named = seq if row["kind"] == kind else source_seq
                due[named], at[named] = row["due_ms"], seq
            elif row["kind"] in (Kind.RELEASE, Kind.CANCEL) and seq >= saved.seq:
                pairs[source_seq] = row["due_ms"]
    live: dict[str, FileEntry] = {}
    for _, attachment in attached:
        live = {path: entry for path, entry in live.items() if path not in attachment.removes}
        live |= {entry.path: entry for entry in attachment.files}
    late = (given for seq, attachment in attached if seq >= saved.seq for given in attachment.ranges)
    settled = Settled(
        saved.settled.before_ms, ((column(pairs.values()), column(pairs)),),
        before_seq=min(saved.seq, saved.settled.before_seq), late=(*saved.settled.late, *late),
    )  # fmt: skip
    open_ = [seq for seq in at if seq not in pairs and not is_covered(settled, due[seq], seq)]
    waiting = [seq for seq in open_ if seq >= watermark]

    def placed(seqs: Iterable[int]) -> Waiting:
        chosen = list(seqs)
        return Waiting(column(due[s] for s in chosen), column(chosen), column(at[s] for s in chosen))

    return Restart(
        settled=settled, entries=list(live.values()), state=saved.state,
        since=placed(seq for seq in waiting if at[seq] >= saved.seq), waiting=placed(waiting),
    )  # fmt: skip


def column(values: Iterable[int]) -> Int64Array:
    """Build an int64 column."""
    return np.array(list(values), dtype=np.int64)
