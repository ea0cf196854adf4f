"""The log, elsewhere too: what the writer asks of the other replicas of its log (cluster/ implements it).

A commit is replicated by the thread that writes it: it leaves for the others before it is written here, so that all
disks work at the same time, and `commit` returns when enough of them have it. What the writer shows, acknowledges and
applies behind it is then as safe as the group promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from timeball.log.disk_thread import Disk
from timeball.log.segment import SegmentFile


class Extent(NamedTuple):
    """The bytes of a commit, and their place: all of it stands in one segment."""

    file: SegmentFile  # of that segment, with room for the frames
    position: int
    end_seq: int  # sequence number after the last row
    frames: bytes
    begins: bool  # whether it is the first commit of its segment, whose header is on the disk already


class Replication(Protocol):
    """All methods belong to the disk thread."""

    @property
    def epoch(self) -> int:
        """Return the epoch of the frames that this leader writes."""

    def commit(self, extent: Extent) -> None:
        """Write, sync and replicate; return when it is committed. Raises NotLeader when it will never be, by this node.

        After NotLeader the rows may be in the log of the next leader, or not: their senders are not answered.
        """


class FileReplication(Protocol):
    """The pending table's data files, elsewhere too. Its methods may be called in any thread."""

    def ship(self, paths: Sequence[str]) -> Future[None]:
        """Send data files, synced here, to the other replicas; done when enough of them have each on their disks.

        Only then may a row of the log name them: else the group could commit a row, and lose the one disk that has the
        file. The future fails with NotLeader when this node leads no more.
        """


class Leading(NamedTuple):
    """A log that this process leads: what the broker's writer is given."""

    disk: Disk  # the replica's thread; it outlives the broker
    replication: Replication
    files: FileReplication
