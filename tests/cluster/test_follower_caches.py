"""A follower's caches: applied in steps from a replica's log, they equal the caches of a broker's start."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from tests.crash_files import CrashFiles
from tests.node_fixture import running_node

from timeball.broker.registry.groups import EPOCH_KEY, EpochFacts
from timeball.cluster.member import FollowerCaches
from timeball.cluster.protocol.messages import Begin
from timeball.cluster.replica_log import ReplicaLog
from timeball.cluster.transport.data_files import CommittedFiles
from timeball.io.files import RealFiles
from timeball.log import format as fmt
from timeball.log.checkpoint import Checkpoint, Facts, encode, snapshot_row
from timeball.model.config import Settings
from timeball.model.errors import Corrupt
from timeball.model.message import Int64Array, Kind, build_rows, meta_rows
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.catalog import Catalog

NOW_MS = 1_700_000_000_000
NONE: Int64Array = np.empty(0, np.int64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a broker with 20 messages and 30 promises, 10 of which were cancelled."""
    with running_node(tmp_path / "data") as node, node.client() as ball:
        for number in range(20):
            ball.send("orders", f"now {number}")
        later = [ball.send("orders", f"later {number}", after="1h") for number in range(30)]
        for receipt in later[:10]:
            assert ball.cancel(receipt.id).verdict == "cancelled"
    return tmp_path / "data"


@pytest.mark.parametrize("steps", [1, 7, 1_000])
def test_caches_applied_in_steps_have_all_pending_messages(folder: Path, steps: int) -> None:
    (folder / "checkpoint").unlink(missing_ok=True)
    files = RealFiles(folder)
    log = ReplicaLog(files, "a", "g1", 1 << 20)
    caches = FollowerCaches(files, log, Settings(data=folder))
    assert caches.applied_seq == 0
    end = log.log().seq
    for seq in range(1, end + 1, max(1, end // steps)):
        caches.apply(seq)
        assert caches.applied_seq <= max(seq, 1)
    applying = caches.finish(end)
    assert caches.applied_seq == end and applying.tables.topics.find_topic("orders") is not None
    recovered = applying.finish(Catalog(files), NOW_MS)
    assert recovered.waiting_rows == len(recovered.waiting) == 20
    log.close()


class Shortened:
    """A learner's log that begins with row 50: retention has removed the rows before."""

    def __init__(self) -> None:
        files = CrashFiles()
        self.log = ReplicaLog(files, "b", "g1", 1 << 20)
        self.caches = FollowerCaches(files, self.log, Settings(data=Path("in-memory")))
        self.seq, self._position = 50, fmt.ALIGN
        header = fmt.encode_segment_header(self.seq, NOW_MS)
        self.log.begin_segment(Begin(1, 7, 1 << 20, self.seq, header))

    def append(self, rows: pa.RecordBatch, flags: int = 0) -> None:
        """Write a frame of these rows at the end of the log."""
        frame, parts = fmt.encode_frame(
            rows, first_seq=self.seq, span=rows.num_rows, append_ms=NOW_MS, epoch=1, position=self._position,
            synced_to=self._position, flags=flags,
        )  # fmt: skip
        self.log.write(7, self._position, b"".join(map(bytes, parts)))
        self.seq, self._position = frame.next_seq, frame.end

    def append_state(self, count: int) -> None:
        """Append so many state records of a broker's epoch."""
        self.append(
            meta_rows([(EPOCH_KEY, msgspec.json.encode(EpochFacts(1, "a/1", NOW_MS)))] * count, NOW_MS)
        )

    def snapshot(self, log_from_seq: int, *paths: str) -> None:
        """Append a snapshot with these files, which needs the rows from `log_from_seq` on."""
        facts = Facts(
            seq=self.seq, watermark=self.seq, log_from_seq=log_from_seq, files=list(map(entry, paths))
        )
        self.append(snapshot_row(encode(Checkpoint(facts, NONE, NONE)), NOW_MS), fmt.SNAPSHOT)

    def attach(self, path: str, *removes: str) -> None:
        """Append the attachment of a file, which removes others."""
        change = Attachment(
            job="rewrite", job_id="j", epoch=self.seq, files=[entry(path)], removes=list(removes)
        )
        self.append(build_rows(1, kind=int(Kind.TABLE), body=att.encode(change), store_ms=NOW_MS))


def entry(path: str) -> FileEntry:
    """Return the entry of a data file with one row."""
    return FileEntry(
        path=path, bucket="2026-11-24", rows=1, size_bytes=1, min_due_ms=1, max_due_ms=1, min_seq=1, max_seq=1
    )


def test_a_learner_without_the_first_rows_applies_nothing_before_a_snapshot_that_needs_no_earlier_rows() -> (
    None
):
    learner = Shortened()
    learner.append_state(3)
    learner.snapshot(40, "old")  # the snapshot before: it needs rows from 40 on
    learner.caches.apply(learner.seq)
    assert learner.caches.files == CommittedFiles() and learner.caches.applied_seq == 0
    with pytest.raises(Corrupt, match=r"0000000006\.log is missing"):
        learner.caches.finish(learner.seq)
    learner.append_state(2)
    snapshot_seq = learner.seq
    learner.snapshot(50, "one", "two")
    learner.caches.apply(snapshot_seq)  # not committed yet
    assert learner.caches.applied_seq == 0
    learner.caches.apply(learner.seq)
    assert learner.caches.files.log_from_seq == 50
    assert learner.caches.finish(learner.seq).applied_seq == learner.caches.files.seq == learner.seq


def test_the_files_of_the_caches_are_those_that_the_applied_rows_name() -> None:
    follower = Shortened()
    follower.snapshot(50, "one", "two")
    follower.caches.apply(follower.seq)
    before = follower.caches.files
    assert set(before.entries) == {"one", "two"}
    follower.append_state(3)
    follower.caches.apply(follower.seq)
    assert follower.caches.files.entries is before.entries and follower.caches.files.seq == follower.seq
    follower.attach("three", "one")
    seq = follower.seq
    follower.attach("four")
    follower.caches.apply(seq)
    assert set(follower.caches.files.entries) == {"two", "three"}, "the last row is not committed"
    assert set(before.entries) == {"one", "two"}, "another thread may hold it"
    follower.caches.apply(follower.seq)
    assert set(follower.caches.files.entries) == {"two", "three", "four"}
