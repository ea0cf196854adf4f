"""The broker's caches of a follower, kept up to the committed rows, so that a takeover has nothing left to replay.

Rows are applied in a thread of its own as the leader tells that they are committed. The first of them waits for the
queues and tables of the last checkpoint or snapshot; from then on memory follows the log (broker/applying.py).
"""

from __future__ import annotations

from timeball.broker.applying import Applying
from timeball.broker.components import Tables
from timeball.broker.recovery import starting_point
from timeball.cluster.replica_log import ReplicaLog
from timeball.config import Settings
from timeball.files import Files
from timeball.log import checkpoint
from timeball.log.reader import LogReader


class FollowerCaches:
    """Blocking; belongs to one thread at a time."""

    def __init__(self, files: Files, log: ReplicaLog, settings: Settings) -> None:
        self._files, self._log, self._settings = files, log, settings
        self._applying: Applying | None = None

    @property
    def applied_seq(self) -> int:
        """Return the number behind the last row applied."""
        return 0 if self._applying is None else self._applying.applied_seq

    @property
    def log_from_seq(self) -> int:
        """Return the first row that the caches need of the log, by the last snapshot applied."""
        return 0 if self._applying is None else self._applying.log_from_seq

    def apply(self, to_seq: int) -> Applying:
        """Apply the committed rows below `to_seq`; return the caches. Raises Corrupt and what the disk says."""
        if self._applying is None:
            self._applying = self._begin(to_seq)
        self._applying.apply(to_seq)
        return self._applying

    def _begin(self, to_seq: int) -> Applying:
        segments = self._log.segments
        assert segments is not None, "rows are committed"
        # A snapshot behind `to_seq` may be cut again with the epoch that wrote it.
        known = starting_point(checkpoint.load(self._files), segments, to_seq)
        tables = Tables(self._files, self._settings.queues_per_topic)
        applying = Applying(known, LogReader(segments), tables)
        applying.read_tail()
        return applying
