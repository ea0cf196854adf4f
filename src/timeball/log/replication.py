"""Replication of the log: the operations that the writer needs from the other replicas (cluster/ implements them).

The thread that writes a commit also replicates it. The commit is sent to the other replicas before it is written here,
so that all disks work at the same time. `commit` returns when enough replicas have it. Rows that the writer then shows,
acknowledges and applies are as safe as the group promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from timeball.log.disk_thread import Disk
from timeball.log.segment import SegmentFile


class Extent(NamedTuple):
    """The bytes of a commit and their position. A commit lies in one segment."""

    file: SegmentFile  # of that segment, with space for the frames
    position: int
    end_seq: int  # the sequence number after the last row
    frames: bytes
    # Whether it is the first commit of its segment. The segment's header is then on disk already.
    begins: bool


class Replication(Protocol):
    """Replicates commits. All methods belong to the disk thread."""

    @property
    def epoch(self) -> int:
        """The epoch of the frames that this leader writes."""

    def commit(self, extent: Extent) -> None:
        """Write, sync and replicate. Returns when committed. Raises NotLeader when this node will never commit it.

        After NotLeader the rows may or may not be in the next leader's log, so their senders get no answer.
        """


class FileReplication(Protocol):
    """Replicates the pending table's data files. Its methods may be called in any thread."""

    def ship(self, paths: Sequence[str]) -> Future[None]:
        """Send data files, already synced here, to the other replicas. Done when enough of them have all files on disk.

        Only then may a row of the log name the files. Otherwise the group could commit a row and lose the only disk
        that has its file. The future fails with NotLeader when this node no longer leads.
        """


class Leading(NamedTuple):
    """The parts of a log that this process leads, for the broker's writer."""

    disk: Disk  # the replica's thread, which outlives the broker
    replication: Replication
    files: FileReplication
