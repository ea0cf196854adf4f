"""The input of a strategy at a start, read from the log by a plain loop over its rows.

It replaces broker/recovery.py by simpler code, so that these tests do not depend on it.
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
    row_seqs: dict[int, int] = {}
    for rows in reader.rows(reader.first_seq, reader.next_seq):
        for row in rows.select(COLUMNS).to_pylist():
            seq, source_seq = row["seq"], row["source_seq"]
            if row["kind"] in (kind, Kind.MOVED):
                number = seq if row["kind"] == kind else source_seq
                due[number], row_seqs[number] = row["due_ms"], seq
            elif row["kind"] in (Kind.RELEASE, Kind.CANCEL) and seq >= saved.seq:
                pairs[source_seq] = row["due_ms"]
    live: dict[str, FileEntry] = {}
    for _, attachment in attached:
        live = {path: entry for path, entry in live.items() if path not in attachment.removes}
        live |= {entry.path: entry for entry in attachment.files}
    late = (seq_range for seq, attachment in attached if seq >= saved.seq for seq_range in attachment.ranges)
    settled = Settled(
        saved.settled.before_ms, ((column(pairs.values()), column(pairs)),),
        before_seq=min(saved.seq, saved.settled.before_seq), late=(*saved.settled.late, *late),
    )  # fmt: skip
    pending = [seq for seq in row_seqs if seq not in pairs and not is_covered(settled, due[seq], seq)]
    waiting = [seq for seq in pending if seq >= watermark]

    def to_waiting(seqs: Iterable[int]) -> Waiting:
        numbers = list(seqs)
        return Waiting(
            column(due[seq] for seq in numbers), column(numbers), column(row_seqs[seq] for seq in numbers)
        )

    return Restart(
        settled=settled, entries=list(live.values()), state=saved.state,
        since=to_waiting(seq for seq in waiting if row_seqs[seq] >= saved.seq), waiting=to_waiting(waiting),
    )  # fmt: skip


def column(values: Iterable[int]) -> Int64Array:
    """Build an int64 column."""
    return np.array(list(values), dtype=np.int64)
