"""The broker's caches of a follower, kept up to the committed rows, so that a takeover has nothing left to replay.

Rows are applied in a thread of its own as the leader tells that they are committed. The first of them waits for the
queues and tables of the last checkpoint or snapshot; from then on memory follows the log (broker/applying.py). A
learner whose first rows were let go before it came waits for the snapshot that says what they said.
"""

from __future__ import annotations

from timeball.broker.applying import Applying
from timeball.broker.components import Tables
from timeball.broker.recovery import lacks_rows, newest_known, starting_point
from timeball.cluster.data_files import CommittedFiles
from timeball.cluster.replica_log import ReplicaLog
from timeball.config import Settings
from timeball.files import Files
from timeball.log import checkpoint
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader


class FollowerCaches:
    """Blocking; belongs to one thread at a time, but `files` may be read in any."""

    def __init__(self, files: Files, log: ReplicaLog, settings: Settings) -> None:
        self._files, self._log, self._settings = files, log, settings
        self._applying: Applying | None = None
        self._attach_seq = -1  # of the last attach that `files` knows
        self.files = CommittedFiles()  # replaced whole

    @property
    def applied_seq(self) -> int:
        """Return the number behind the last row applied."""
        return 0 if self._applying is None else self._applying.applied_seq

    def apply(self, to_seq: int) -> None:
        """Apply the committed rows below `to_seq`; raises Corrupt and what the disk says."""
        segments = self._log.segments
        assert segments is not None, "rows are committed"
        if self._applying is None:
            # A snapshot behind `to_seq` may be cut again with the epoch that wrote it.
            known = newest_known(checkpoint.load(self._files), segments, to_seq)
            if lacks_rows(known, segments):
                return
            self._applying = self._begin(known, to_seq)
        self._applying.apply(to_seq)
        self._publish(self._applying)

    def finish(self, to_seq: int) -> Applying:
        """Return the caches with the rows below `to_seq`, which are all; raises Corrupt when some are missing."""
        self.apply(to_seq)
        if self._applying is None:
            assert self._log.segments is not None
            starting_point(None, self._log.segments, to_seq)  # raises, and says which file is missing
        assert self._applying is not None
        return self._applying

    def _begin(self, known: Checkpoint, to_seq: int) -> Applying:
        assert self._log.segments is not None
        tables = Tables(self._files, self._settings.queues_per_topic)
        applying = Applying(known, LogReader(self._log.segments), tables)
        applying.read_tail()
        snapshot = checkpoint.last_snapshot(self._log.segments, to_seq)
        if snapshot is not None:
            applying.log_from_seq = snapshot.facts.log_from_seq
        return applying

    def _publish(self, applying: Applying) -> None:
        entries = self.files.entries
        if applying.ledger.attach_seq != self._attach_seq:
            self._attach_seq, entries = applying.ledger.attach_seq, dict(applying.files)
        self.files = CommittedFiles(applying.applied_seq, entries, applying.log_from_seq)
