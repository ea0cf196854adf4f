"""The data files that the committed rows of a replica's log name, without a broker.

It begins with the last committed snapshot, which lists them, or with the first row of a log that has all its rows, and
reads TABLE rows from there on. A snapshot says besides which rows the leader may have let go.
"""

from __future__ import annotations

import msgspec

from timeball.log import checkpoint
from timeball.log.reader import LogReader
from timeball.log.segment import Segments
from timeball.message import SNAPSHOT_KEY, Kind
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry

COLUMNS = ("seq", "kind", "unique_key", "body")
BATCH_ROWS = 8_192


class LiveFiles:
    """The live files up to a row. Blocking; belongs to one thread."""

    def __init__(self) -> None:
        self.seq = 0  # all rows below it are read; 0: it is not known yet what lives
        self.entries: dict[str, FileEntry] = {}  # by path
        self.log_from_seq = 0  # rows below it may be let go

    def read(self, log: Segments, to_seq: int) -> tuple[list[FileEntry], list[str]]:
        """Read the rows below `to_seq`, all of them committed; return new files, and the paths of those that have left.

        A file that has joined and left the table on the way is among the latter alone.
        """
        before, left = set(self.entries), list[str]()
        if not self.seq and not self._begin(log, to_seq):
            return [], []
        rows = LogReader(log).coalesced(self.seq, to_seq, (Kind.TABLE, Kind.META), BATCH_ROWS, COLUMNS)
        for batch in rows:
            columns = (batch.column(name) for name in ("kind", "unique_key", "body"))
            for kind, key, body in zip(*columns, strict=True):
                if kind.as_py() == Kind.TABLE:
                    left += self._apply(body.as_py())
                elif key.as_py() == SNAPSHOT_KEY:
                    self.log_from_seq = checkpoint.decode(body.as_py()).facts.log_from_seq
        self.seq = max(self.seq, to_seq)
        return [entry for path, entry in self.entries.items() if path not in before], left

    def _begin(self, log: Segments, to_seq: int) -> bool:
        """Find where to begin; return whether there is such a row below `to_seq`."""
        known = checkpoint.last_snapshot(log, to_seq)
        if known is not None:
            entries = msgspec.convert(known.facts.files, list[FileEntry])
            self.entries = {entry.path: entry for entry in entries}
            self.seq, self.log_from_seq = known.facts.seq, known.facts.log_from_seq
        elif log.first_seq <= 1:
            self.seq = 1
        # Else its first rows were let go before it came, and the snapshot that says what they said is still to come.
        return self.seq > 0

    def _apply(self, body: bytes) -> list[str]:
        change = att.decode_change(body)
        if not isinstance(change, Attachment):
            return []
        for path in change.removes:
            self.entries.pop(path, None)
        self.entries |= {entry.path: entry for entry in change.files}
        return change.removes
