"""The broker's caches on a follower, which apply committed rows so that a takeover need not replay the log.

Committed rows are applied in a separate thread. The first call loads the queues and tables of the last checkpoint or
snapshot. From then on the caches follow the log (broker/recovery/applying.py). When the leader's retention has deleted
the first rows before a learner joined, the learner applies nothing until a snapshot with their state is committed.
"""

from __future__ import annotations

from timeball.broker.recovery.applying import Applying
from timeball.broker.recovery.recovery import lacks_rows, newest_starting_point, starting_point
from timeball.broker.registry.tables import Tables
from timeball.cluster.replica_log import ReplicaLog
from timeball.cluster.transport.data_files import CommittedFiles
from timeball.io.files import Files
from timeball.log import checkpoint
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader
from timeball.model.config import Settings


class FollowerCaches:
    """The caches of one follower.

    The methods block and belong to one thread at a time. Any thread may read `files`.
    """

    def __init__(self, files: Files, log: ReplicaLog, settings: Settings) -> None:
        self._files, self._log, self._settings = files, log, settings
        self._applying: Applying | None = None
        self._attach_seq = -1  # row of the last attach whose files are in `files`
        self.files = CommittedFiles()  # replaced as a whole, never changed, so other threads may read it

    @property
    def applied_seq(self) -> int:
        """The sequence number after the last row applied."""
        return 0 if self._applying is None else self._applying.applied_seq

    def apply(self, to_seq: int) -> None:
        """Apply the committed rows below `to_seq`. Raises Corrupt and errors of the disk."""
        segments = self._log.segments
        assert segments is not None, "rows are committed"
        if self._applying is None:
            # Only a snapshot below `to_seq` is committed. A later one may still be cut from the log.
            start = newest_starting_point(checkpoint.load(self._files), segments, to_seq)
            if lacks_rows(start, segments):
                return
            self._applying = self._load(start, to_seq)
        self._applying.apply(to_seq)
        self._publish(self._applying)

    def finish(self, to_seq: int) -> Applying:
        """Apply the last rows, those below `to_seq`. Returns the caches. Raises Corrupt when rows are missing."""
        self.apply(to_seq)
        if self._applying is None:
            assert self._log.segments is not None
            starting_point(None, self._log.segments, to_seq)  # raises an error that names the missing file
        assert self._applying is not None
        return self._applying

    def _load(self, start: Checkpoint, to_seq: int) -> Applying:
        assert self._log.segments is not None
        tables = Tables(self._files, self._settings.queues_per_topic)
        applying = Applying(start, LogReader(self._log.segments), tables)
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
