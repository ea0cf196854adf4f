"""A replica's log on disks that lose power, ignore syncs, tear writes and damage bytes."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import google_crc32c
import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster.written_log import (
    BATCH_BYTES,
    GROUP,
    NODE,
    SEGMENT_BYTES,
    Written,
    WrittenFrame,
    frames_in,
    opened,
    ship,
)
from tests.crash_files import CrashFiles, PowerCut, Survival

from timeball.cluster import replica_log
from timeball.cluster.protocol.messages import BEGINNING, Members, Position
from timeball.cluster.protocol.replica import Log
from timeball.cluster.replica_log import IDENTITY_NAME, SLOT_BYTES, ReplicaLog
from timeball.io.files import RealFiles
from timeball.log import format as fmt
from timeball.log.segment import Segment, segment_name
from timeball.model.errors import Corrupt, SetupError

MEMBERS = Members(3, ("a/1", "b/1", "c/1"))


def synced_log(files: CrashFiles, commits: int = 12, frames: int = 2) -> tuple[ReplicaLog, Written]:
    """Write and sync a log of several segments, with frames of two epochs."""
    log, written = opened(files), Written()
    for number in range(commits):
        written.epoch = 1 if number < commits // 2 else 2
        written.commit(log, frames)
    written.sync(log)
    return log, written


def flip(files: CrashFiles, ordinal: int, position: int) -> None:
    """Flip one bit of a segment durably."""
    name = segment_name(ordinal)
    file = files.open(name)
    file.write_at(position, bytes([files.content(name)[position] ^ 1]))
    file.sync()
    file.close()


def frames_of(written: Written, count: int | None = None) -> list[tuple[int, int, bytes]]:
    """List the first `count` written frames (None: all), in the form of `frames_in`."""
    return [(entry.ordinal, entry.position, entry.raw) for entry in written.entries[:count]]


# ---- reading written frames ---------------------------------------------------------------------------------


def test_a_new_log_is_empty_and_has_an_incarnation_of_its_own() -> None:
    first, second = opened(CrashFiles()), opened(CrashFiles())
    for log in (first, second):
        assert log.log() == Log() and log.ends() == ()
        assert log.identity.replica.startswith(f"{NODE}/")
    assert first.identity.replica != second.identity.replica


def test_an_opened_log_equals_the_written_one() -> None:
    files = CrashFiles()
    log, written = synced_log(files)
    assert log.log().end == written.end and len({entry.ordinal for entry in written.entries}) > 2
    reopened = opened(files.crash(survival="nothing"))
    assert reopened.identity.replica == log.identity.replica
    assert reopened.log() == log.log() and [end.epoch for end in reopened.ends()] == [1, 2]
    assert frames_in(reopened) == frames_in(log) == frames_of(written)


def test_a_shipped_log_is_equal_byte_for_byte() -> None:
    leader_files, follower_files = CrashFiles(), CrashFiles()
    leader, written = synced_log(leader_files)
    follower = opened(follower_files)
    ship(leader, follower)
    assert follower.log() == leader.log()
    for ordinal in written.headers:
        name = segment_name(ordinal)
        assert follower_files.content(name) == leader_files.content(name)


def test_pieces_are_short_lie_in_one_segment_and_end_at_the_requested_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_log, "READ_BYTES", BATCH_BYTES)
    log, written = synced_log(CrashFiles())
    begin, ends = BEGINNING, [entry.end for entry in written.entries]
    while (piece := log.read(begin, written.entries[-3].end, 7)) is not None:
        assert len(piece.frames) <= BATCH_BYTES and piece.end in ends and piece.end > begin
        assert (piece.begin is not None) == (piece.position == fmt.ALIGN)
        if piece.begin is not None:
            assert (piece.begin.ordinal, piece.begin.epoch) == (piece.ordinal, 7)
            assert piece.begin.header == written.headers[piece.ordinal]
        begin = piece.end
    assert begin == written.entries[-3].end


def test_a_frame_longer_than_read_bytes_is_read_as_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_log, "READ_BYTES", 64)
    log, written = synced_log(CrashFiles(), commits=3, frames=1)
    assert frames_in(log) == frames_of(written)


def test_a_read_from_the_end_of_the_log_returns_none() -> None:
    log, written = synced_log(CrashFiles())
    assert log.read(written.end, written.end, 1) is None
    assert opened(CrashFiles()).read(BEGINNING, BEGINNING, 1) is None


def test_a_begin_of_an_existing_segment_changes_nothing() -> None:
    log, written = synced_log(CrashFiles(), commits=1)
    begin, ordinal, position = log.place_commit(SEGMENT_BYTES, written.end.seq, 5, 1)
    assert begin is not None and (ordinal, position) == (2, fmt.ALIGN)
    log.begin_segment(begin)
    log.begin_segment(msgspec.structs.replace(begin, header=bytes(64)))
    assert log.log() == Log(log.ends(), 2, fmt.ALIGN, written.end.seq)
    # The segment is empty, so the next leader sends its BEGIN again to the other replicas, with the same header.
    assert log.place_commit(100, written.end.seq, 6, 3)[0] == msgspec.structs.replace(begin, epoch=3)


# ---- a power cut at any call ----------------------------------------------------------------------------------


class Life:
    """A replica that takes random steps, and the content that its disk may have after a power cut."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.files = CrashFiles()
        self.log = opened(self.files)
        self.replica = self.log.identity.replica
        self.written = Written()
        self.promised = [0]  # the disk has promised one of these epochs
        self.lengths = (0, 0)  # the log has at least and at most these numbers of frames
        self.possible: list[tuple[int, int, bytes]] = []  # the log is the beginning of these frames

    def step(self) -> None:
        """Write, sync, promise or cut, at random."""
        written, chance = self.written, self.random.random()
        self.possible, self.lengths = frames_of(written), (written.synced, len(written.entries))
        if chance < 0.6:
            frames = self.random.randint(1, 3)
            self.write(frames)
        elif chance < 0.75:
            written.sync(self.log)
        elif chance < 0.85:
            self.promise()
        elif written.entries:
            self.cut(self.random.randrange(len(written.entries)))

    def write(self, frames: int) -> None:
        """Write a commit of so many frames."""
        try:
            self.written.commit(self.log, frames, self.random.randint(1, 3))
        finally:
            self.possible = frames_of(self.written)
            self.lengths = (self.lengths[0], len(self.possible))

    def promise(self) -> None:
        """Promise a later epoch."""
        epoch = self.log.identity.promised + self.random.randint(1, 2)
        self.promised = [self.log.identity.promised, epoch]
        self.log.keep_promise(epoch, "b/1", MEMBERS)
        self.promised = [epoch]
        self.written.epoch = max(self.written.epoch, epoch)

    def cut(self, count: int) -> None:
        """Cut the log after `count` frames."""
        self.lengths = (min(count, self.written.synced), len(self.written.entries))
        end = self.written.drop_after(count)
        self.log.cut(end)
        # A cut is durable, because another leader writes there next.
        self.written.synced = count
        assert self.log.log().end == end and self.log.log().is_at_a_frame

    def lose_power(self) -> None:
        """Start on what the disk has kept, and compare."""
        self.files = self.files.crash(self.random.randrange(1 << 30))
        self.log = opened(self.files)
        frames = frames_in(self.log)
        assert self.log.identity.replica == self.replica, "a torn batch was taken for damage"
        # The epoch of a written frame proves that the epoch was promised.
        least = max([min(self.promised), *(end.epoch for end in self.log.ends())])
        assert least <= self.log.identity.promised <= max([*self.promised, least])
        assert frames == self.possible[: len(frames)], "another log"
        assert self.lengths[0] <= len(frames) <= self.lengths[1], (len(frames), self.lengths)
        self._continue(len(frames))

    def _continue(self, count: int) -> None:
        """Take the first `count` possible frames as the written ones from now on."""
        kept = {(ordinal, position) for ordinal, position, _ in self.possible[:count]}
        entries = [entry for entry in self.written.entries if (entry.ordinal, entry.position) in kept]
        if len(entries) < count:
            # The power was cut before the log was cut, so the leader requests the cut again.
            self.log.cut(self.written.end)
            entries = self.written.entries
        self.written.entries = entries
        self.written.headers = {
            segment: header
            for segment, header in self.written.headers.items()
            if segment <= self.written.end.ordinal
        }
        self.written.synced = len(entries)
        self.promised = [self.log.identity.promised]


@given(seed=st.integers(0, 2**32))
def test_synced_data_survives_a_power_cut_at_any_call(seed: int) -> None:
    random = Random(seed)
    life = Life(random)
    for _ in range(6):
        life.files.crash_at = life.files.calls + random.randint(1, 60)
        try:
            for _ in range(30):
                life.step()
            life.possible, life.lengths = (
                frames_of(life.written),
                (life.written.synced, len(life.written.entries)),
            )
        except PowerCut:
            pass
        life.lose_power()


@pytest.mark.parametrize("forget", ["forget_sync", "forget_sync_dir"])
def test_a_disk_that_forgets_is_noticed(forget: str) -> None:
    """The control: a disk that ignores syncs of files, or of folders, loses frames."""

    def check(seed: int) -> None:
        files = CrashFiles(**{forget: True})
        _, written = synced_log(files)
        assert frames_in(opened(files.crash(seed))) == frames_of(written)

    with pytest.raises((AssertionError, Corrupt)):
        for seed in range(20):
            check(seed)


# ---- cut ------------------------------------------------------------------------------------------------------


def test_a_power_cut_during_a_cut_of_the_log_leaves_a_log_that_is_only_longer() -> None:
    files = CrashFiles()
    log, written = synced_log(files, 8)
    end, all_frames = written.entries[1].end, frames_of(written)
    calls_before = files.calls
    log.cut(end)
    calls = files.calls - calls_before
    assert calls > 5
    for number in range(1, calls + 1):
        for seed in range(2):
            files = CrashFiles()
            log, _ = synced_log(files, 8)
            files.crash_at = files.calls + number
            with pytest.raises(PowerCut):
                log.cut(end)
            reopened = opened(files.crash(seed))
            frames = frames_in(reopened)
            assert reopened.identity.replica == log.identity.replica
            assert len(frames) >= 2 and frames == all_frames[: len(frames)]
            reopened.cut(end)
            assert frames_in(reopened) == all_frames[:2]


def test_cut_frames_do_not_come_back_behind_new_ones() -> None:
    files = CrashFiles()
    log, written = synced_log(files)
    log.cut(written.drop_after(1))
    written.epoch = 5
    written.commit(log, 1, 3)
    written.sync(log)
    assert frames_in(opened(files.crash(survival="nothing"))) == frames_of(written)


def test_a_log_cut_to_the_beginning_is_empty_and_can_be_written_again() -> None:
    files = CrashFiles()
    log, written = synced_log(files)
    log.cut(written.drop_after(0))
    assert log.log() == Log() and frames_in(log) == []
    written.commit(log, 2)
    written.sync(log)
    assert frames_in(log) == frames_of(written)


# ---- the identity of a replica --------------------------------------------------------------------------------


def test_a_node_whose_log_was_wiped_is_a_new_replica_without_promises() -> None:
    files = CrashFiles()
    log, written = synced_log(files)
    for ordinal in written.headers:
        files.remove(segment_name(ordinal))
    reopened = opened(files)
    assert reopened.identity.replica != log.identity.replica and reopened.identity.promised == 0


def test_a_replica_that_has_no_log_yet_keeps_its_identity() -> None:
    files = CrashFiles()
    log = opened(files)
    log.keep_promise(4, "b/1", MEMBERS)
    reopened = opened(files.crash(survival="nothing"))
    assert reopened.identity == log.identity and reopened.identity.promised == 4


def test_a_log_of_another_node_or_group_is_refused() -> None:
    files = CrashFiles()
    opened(files)
    for node, group in (("c", GROUP), (NODE, "g2")):
        with pytest.raises(SetupError, match="--data"):
            ReplicaLog(files, node, group, SEGMENT_BYTES, BATCH_BYTES)


def test_an_identity_file_without_a_valid_slot_is_corrupt() -> None:
    files = CrashFiles()
    opened(files)
    files.replace(IDENTITY_NAME, b"{")
    with pytest.raises(Corrupt, match="joins as a new replica"):
        opened(files)


def test_a_promise_takes_no_more_space_on_the_disk(tmp_path: Path) -> None:
    log = ReplicaLog(RealFiles(tmp_path), NODE, GROUP, SEGMENT_BYTES, BATCH_BYTES)
    before = (tmp_path / IDENTITY_NAME).stat()
    for epoch in range(2, 9):
        log.keep_promise(epoch, "b/1", MEMBERS)
        after = (tmp_path / IDENTITY_NAME).stat()
        assert (after.st_ino, after.st_blocks, after.st_size) == (
            before.st_ino,
            before.st_blocks,
            before.st_size,
        )
        assert os.listdir(tmp_path / "log") == ["replica"]


@pytest.mark.parametrize("slot", [0, 1])
def test_one_damaged_slot_of_the_identity_is_repaired(slot: int) -> None:
    files = CrashFiles()
    log = opened(files)
    log.keep_promise(4, "b/1", MEMBERS)
    whole = bytes(files.map_readonly(IDENTITY_NAME))
    damaged = bytearray(whole)
    damaged[slot * SLOT_BYTES + 9] ^= 1
    files.replace(IDENTITY_NAME, bytes(damaged))
    assert opened(files).identity == log.identity and log.identity.promised == 4
    assert bytes(files.map_readonly(IDENTITY_NAME)) == whole


def test_the_set_of_replicas_is_stored_with_the_promise() -> None:
    files = CrashFiles()
    log = opened(files)
    assert log.identity.members == Members()
    log.keep_promise(4, "b/1", MEMBERS)
    assert opened(files).identity.members == MEMBERS


def test_an_identity_of_an_earlier_version_knows_no_set() -> None:
    files = CrashFiles()
    log = opened(files)
    fields = {**msgspec.structs.asdict(log.identity), "promised": 7}
    del fields["members"]
    document = msgspec.json.encode(fields)
    slot = google_crc32c.value(document).to_bytes(4, "little") + document
    files.replace(IDENTITY_NAME, slot.ljust(SLOT_BYTES, b"\0") * 2)
    assert opened(files).identity == msgspec.structs.replace(log.identity, promised=7)


def test_frames_prove_a_promise_that_the_identity_lacks() -> None:
    files = CrashFiles()
    log, _ = synced_log(files)
    assert log.identity.promised == 0, "the fixture writes without a promise, unlike the protocol"
    assert opened(files).identity.promised == 2


def synced_to(entry: WrittenFrame) -> int:
    """Return the position up to which a frame states that its segment was synced."""
    frame = fmt.read_frame(pa.py_buffer(entry.raw), 0, origin=entry.position)
    assert frame is not None
    return frame.synced_to


@given(seed=st.integers(0, 2**32))
def test_proved_damage_makes_a_new_incarnation_with_the_rows_before_it(seed: int) -> None:
    random = Random(seed)
    files = CrashFiles()
    log, written = synced_log(files)
    number = random.randrange(len(written.entries))
    entry = written.entries[number]
    position = entry.position + random.randrange(len(entry.raw))
    file = files.open(segment_name(entry.ordinal))
    changed = bytes([files.content(segment_name(entry.ordinal))[position] ^ (1 << random.randrange(8))])
    file.write_at(position, changed)
    file.sync()
    reopened = opened(files)
    # Damage in the last batch looks like a torn write, unless a later frame states that the batch was synced.
    is_proved = (
        entry.ordinal != written.end.ordinal
        or number < written.synced
        or any(synced_to(other) > entry.position + BATCH_BYTES for other in written.entries[number + 1 :])
    )
    assert frames_in(reopened) == frames_of(written, number)
    assert (reopened.identity.replica != log.identity.replica) == is_proved
    # The next start finds no damage, and keeps this identity.
    assert opened(files.crash(survival="nothing")).identity == reopened.identity


def follower(files: CrashFiles, commits: int) -> tuple[ReplicaLog, Written]:
    """Open the log of a follower and write commits of one frame each, which are synced at the end of a batch only."""
    log, written = opened(files), Written()
    log.keep_promise(1, "a/1", MEMBERS)
    for _ in range(commits):
        written.commit(log, 1)
    return log, written


@pytest.mark.parametrize("has_led", [True, False])
def test_only_a_former_leader_finds_damage_in_an_unsynced_batch(has_led: bool) -> None:
    """Its own frames state how far its disk was synced. Frames of another leader refer to the leader's disk."""
    files = CrashFiles()
    log, written = opened(files), Written()
    log.keep_promise(1, log.identity.replica if has_led else "a/1", MEMBERS)
    for _ in range(2):
        written.commit(log, 1)
    assert written.synced == 0 and written.end.end < BATCH_BYTES
    flip(files, 1, written.entries[0].position + 60)
    reopened = opened(files)
    assert frames_in(reopened) == frames_of(written, 0)
    assert (reopened.identity.replica != log.identity.replica) == has_led


@pytest.mark.parametrize("synced", [1, 2, 3])
def test_a_follower_finds_damage_in_rows_that_it_had_synced(synced: int) -> None:
    """A hole behind the last sync is a torn write of the leader's batch."""
    files = CrashFiles()
    log, written = opened(files), Written()
    log.keep_promise(1, "a/1", MEMBERS)
    for number in range(1, 4):
        written.commit(log, 1)
        if number == synced:
            written.sync(log)
    flip(files, 1, written.entries[1].position + 60)
    reopened = opened(files)
    assert frames_in(reopened) == frames_of(written, 1)
    assert (reopened.identity.replica != log.identity.replica) == (synced >= 2)


def test_a_power_cut_may_bring_back_an_older_synced_position() -> None:
    files = CrashFiles()
    log, written = follower(files, commits=3)
    written.sync(log)
    files = files.crash(survival="nothing")  # the position was stored, but not synced
    flip(files, 1, written.entries[1].position + 60)
    reopened = opened(files)
    assert frames_in(reopened) == frames_of(written, 1) and reopened.identity == log.identity


def test_a_missing_segment_before_the_synced_position_is_damage() -> None:
    files = CrashFiles()
    log, written = synced_log(files)
    assert written.synced == len(written.entries) and written.end.ordinal > 1
    files.remove(segment_name(written.end.ordinal))
    reopened = opened(files)
    assert reopened.identity.replica != log.identity.replica
    assert frames_in(reopened) == [frame for frame in frames_of(written) if frame[0] < written.end.ordinal]


def test_an_identity_file_of_an_earlier_version_gets_a_synced_position() -> None:
    files = CrashFiles()
    opened(files).close()
    files.replace(IDENTITY_NAME, bytes(files.map_readonly(IDENTITY_NAME))[: 2 * SLOT_BYTES])
    log, written = follower(files, commits=2)
    written.sync(log)
    flip(files, 1, written.entries[0].position + 60)
    reopened = opened(files)
    assert frames_in(reopened) == [] and reopened.identity.replica != log.identity.replica


@pytest.mark.parametrize("survival", ["nothing", "everything"])
def test_a_cut_sets_the_synced_position_back(survival: Survival) -> None:
    files = CrashFiles()
    log, written = follower(files, commits=3)
    written.sync(log)
    log.cut(written.drop_after(1))
    reopened = opened(files.crash(survival=survival))
    assert frames_in(reopened) == frames_of(written) and reopened.identity == log.identity


@pytest.mark.parametrize("knows_itself", [True, False])
def test_a_damaged_log_of_the_only_known_replica_is_refused_and_not_changed(knows_itself: bool) -> None:
    files = CrashFiles()
    log, written = synced_log(files)
    if knows_itself:
        log.keep_promise(2, log.identity.replica, Members(1, (log.identity.replica,)))
    else:
        files.remove(IDENTITY_NAME)
    names = files.list_dir("log")
    flip(files, 1, written.entries[1].position + 60)
    before = [bytes(files.content(f"log/{name}")) for name in names]
    with pytest.raises(Corrupt, match=r"0000000001\.log.*restore the file from a copy"):
        opened(files)
    assert [bytes(files.content(f"log/{name}")) for name in files.list_dir("log")] == before
    flip(files, 1, written.entries[1].position + 60)
    assert frames_in(opened(files)) == frames_of(written), "the restored file is accepted"


def test_whole_frames_that_a_start_removes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    files = CrashFiles()
    _, written = follower(files, commits=2)
    opened(files.crash(survival="everything"))
    assert not caplog.records
    flip(files, 1, written.entries[0].position + 60)
    opened(files)
    assert f"byte={written.entries[1].position}" in caplog.text


def test_a_missing_sealed_segment_is_damage() -> None:
    files = CrashFiles()
    log, written = synced_log(files)
    files.remove(segment_name(2))
    reopened = opened(files)
    assert reopened.identity.replica != log.identity.replica
    assert frames_in(reopened) == [frame for frame in frames_of(written) if frame[0] == 1]
    assert [name for name in files.list_dir("log") if name.endswith(".log")] == ["0000000001.log"]


# ---- while this replica leads ----------------------------------------------------------------------------------


def test_segments_that_retention_has_removed_are_not_shipped() -> None:
    files = CrashFiles()
    log, written = synced_log(files)
    segments = log.opened().segments
    segments.remove(files, segments.all[:1])
    remaining = [frame for frame in frames_of(written) if frame[0] > 1]  # of the segments after the first
    assert frames_in(log) == remaining
    piece = log.read(BEGINNING, written.end, 3)
    assert piece is not None and piece.begin is not None
    assert piece.begin.ordinal == 2 and piece.begin.first_seq == segments.all[0].first_seq
    reopened = opened(files)
    assert frames_in(reopened) == remaining and reopened.identity.replica == log.identity.replica


def test_a_segment_may_be_removed_while_another_thread_reads_the_log() -> None:
    class Dropping(dict[int, Segment]):
        """Loses its oldest segment before each access."""

        def __getitem__(self, ordinal: int) -> Segment:
            self.pop(min(self), None)
            return super().__getitem__(ordinal)

    log, written = synced_log(CrashFiles())
    log._segments = Dropping(log._segments)
    assert log.first.ordinal == 1
    assert log.read(BEGINNING, written.end, 9) is not None


def test_the_log_begins_after_the_segments_that_retention_has_removed() -> None:
    log, written = synced_log(CrashFiles())
    assert log.first == Position(1, fmt.ALIGN, 1)
    segments = log.opened().segments
    segments.drop(segments.all[:1])
    first = next(entry for entry in written.entries if entry.ordinal == 2)
    assert log.first[:2] == (2, fmt.ALIGN) and log.first.seq == first.end.seq - 1
