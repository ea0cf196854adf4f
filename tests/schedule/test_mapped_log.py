"""The mapped log: the records between `begin` and `end`, across files, growth, power cuts and restarts."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.crash_files import CrashFiles

from timeball.io.files import RealFiles
from timeball.model.errors import Corrupt, OutOfRange, OverLimit
from timeball.schedule import mapped_log
from timeball.schedule.mapped_log import MappedLog, RecordArray, RecordType, check

FOLDER = "some/log"
RECORD = np.dtype([("value", "<i8"), ("twice", "<i4"), ("mark", "<i4")])
SMALL = 10  # records a file
SMALL_FILES = RecordType(RECORD, SMALL, "mark")


@pytest.fixture(autouse=True)
def small_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_log, "FIRST_ALLOCATION", 3)


def records(values: list[int]) -> RecordArray:
    records = np.zeros(len(values), RECORD)
    records["value"] = values
    records["twice"] = records["value"] * 2
    return records


def open_log(files: CrashFiles | RealFiles, begin: int = 0, end: int = 0) -> MappedLog:
    return MappedLog(files, FOLDER, SMALL_FILES, begin=begin, end=end)


def is_whole(files: CrashFiles, begin: int, end: int) -> bool:
    """Check whether a start would use these records. A fault must name the file."""
    try:
        check(files, FOLDER, SMALL_FILES, begin=begin, end=end)
    except Corrupt as error:
        assert re.match(f"{FOLDER}/0000000[0-9].log (is|does)", str(error))
        return False
    return True


def save(log: MappedLog, files: CrashFiles) -> tuple[int, int]:
    """Sync as a checkpoint does. Returns the bounds that it saves."""
    begin, end = log.begin, log.end
    dirty = log.files_to_sync()
    for file in dirty:
        file.sync()
    if dirty:
        files.sync_dir(FOLDER)
    return begin, end


def values_of(log: MappedLog) -> list[int]:
    read_records = log.read(log.begin, log.end)
    assert (read_records["twice"] == read_records["value"] * 2).all()
    return [int(value) for value in read_records["value"]]


def names(files: CrashFiles) -> list[str]:
    return files.list_dir(FOLDER)


# ---- the invariant ---------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """A log compared with a list. A restart from the last checkpoint must be possible at any time."""

    @initialize()
    def begin(self) -> None:
        self.files = CrashFiles()
        self.log = open_log(self.files)
        self.values: list[int] = []  # of all records, also of dropped ones
        self.next_value = 0
        self.checkpoint = (0, 0)
        self.saved_values: list[int] = []

    @rule(count=st.integers(0, 35))
    def append(self, count: int) -> None:
        new_values = list(range(self.next_value, self.next_value + count))
        self.next_value += count
        assert self.log.append(records(new_values)) == len(self.values)
        self.values += new_values

    @rule(share=st.floats(0, 1))
    def drop(self, share: float) -> None:
        self.log.drop_below(int(len(self.values) * share))

    @rule()
    def save(self) -> None:
        self.checkpoint = save(self.log, self.files)
        self.saved_values = list(self.values)

    @rule(synced=st.booleans())
    def fail_to_save(self, synced: bool) -> None:
        """The files may have been synced, the checkpoint was not saved."""
        if synced:
            save(self.log, self.files)
        else:
            self.log.files_to_sync()
        self.log.sync_failed()

    @rule(synced=st.booleans(), seed=st.integers(0, 2**16))
    def crash_in_a_checkpoint(self, synced: bool, seed: int) -> None:
        """The broker stops before the checkpoint is saved, so `sync_failed` is not called."""
        if synced:
            save(self.log, self.files)
        else:
            self.log.files_to_sync()
        self.crash(seed)

    @rule(seed=st.none() | st.integers(0, 2**16))
    def crash(self, seed: int | None) -> None:
        begin, end = self.checkpoint
        self.log.close()
        if seed is not None:
            self.files = self.files.crash(seed)
        assert is_whole(self.files, begin, end)
        self.log = open_log(self.files, begin, end)
        self.values = list(self.saved_values)

    @invariant()
    def holds_what_was_appended(self) -> None:
        if hasattr(self, "log"):
            assert self.log.end == len(self.values)
            assert values_of(self.log) == self.values[self.log.begin :]

    @rule()
    def files_do_not_pile_up(self) -> None:
        self.save()
        self.save()
        begin, end = self.checkpoint
        assert len(names(self.files)) <= -(-end // SMALL) - begin // SMALL


def test_log_contains_appended_records_except_dropped_ones() -> None:
    machine = Machine.TestCase
    machine.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
    machine().runTest()


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), max_size=6),
    begin=st.integers(0, 80),
    end=st.integers(0, 80),
    chosen=st.lists(st.integers(0, 79), max_size=20),
)
def test_a_range_within_the_log_is_read_and_any_other_is_refused(
    counts: list[int], begin: int, end: int, chosen: list[int]
) -> None:
    log = open_log(CrashFiles())
    for count in counts:
        log.append(records(list(range(log.end, log.end + count))))
    total = sum(counts)
    if begin <= end <= total:
        assert log.read(begin, end)["value"].tolist() == list(range(begin, end))
    else:
        with pytest.raises(OutOfRange, match=f"keeps 0 to {total}"):
            log.read(begin, end)
    existing = np.array([index for index in chosen if index < total], dtype=np.int64)
    assert log.at(existing)["value"].tolist() == existing.tolist()
    with pytest.raises(OutOfRange, match=f"keeps 0 to {total}"):
        log.at(np.append(existing, total))


# ---- single cases --------------------------------------------------------------------------------------------


def test_records_after_the_end_are_overwritten() -> None:
    files = CrashFiles()
    log = open_log(files)
    log.append(records([1, 2, 3, 4, 5]))
    log.close()
    log = open_log(files, 0, 3)
    assert log.append(records([9])) == 3
    assert values_of(log) == [1, 2, 3, 9]


def test_files_outside_the_bounds_are_removed_at_the_opening() -> None:
    files = CrashFiles()
    open_log(files).append(records(list(range(50))))
    assert len(names(files)) == 5
    log = open_log(files, 12, 25)
    assert names(files) == ["00000001.log", "00000002.log"]
    assert values_of(log) == list(range(12, 25))


def test_a_file_is_removed_once_a_checkpoint_without_it_is_saved() -> None:
    files = CrashFiles()
    log = open_log(files)
    log.append(records(list(range(25))))
    save(log, files)
    log.drop_below(21)
    save(log, files)
    assert len(names(files)) == 3, "if this checkpoint is not saved, the previous one needs them"
    save(log, files)
    assert names(files) == ["00000002.log"]


def test_failed_checkpoint_removes_no_file() -> None:
    files = CrashFiles()
    log = open_log(files)
    log.append(records(list(range(25))))
    save(log, files)
    log.drop_below(21)
    for _ in range(3):
        assert log.files_to_sync() is not None
        log.sync_failed()
    assert len(names(files)) == 3


def test_only_written_files_are_synced() -> None:
    files = CrashFiles()
    log = open_log(files)
    log.append(records(list(range(25))))
    assert len(log.files_to_sync()) == 3
    log.append(records([25]))
    assert len(log.files_to_sync()) == 1
    assert log.files_to_sync() == []
    log.sync_failed()
    assert len(log.files_to_sync()) == 3


def test_without_a_sync_a_power_cut_loses_records() -> None:
    """The control of the crash tests above."""
    lost = 0
    for seed in range(20):
        files = CrashFiles(forget_sync=True)
        log = open_log(files)
        log.append(records(list(range(1, 26))))
        begin, end = save(log, files)
        files = files.crash(seed)
        is_complete = is_whole(files, begin, end)
        is_kept = is_complete and open_log(files, begin, end).read(begin, end)["value"].tolist() == list(
            range(1, 26)
        )
        lost += not is_kept
    assert lost


@pytest.mark.parametrize("damage", ["missing", "short", "bit", "block"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_damaged_file_is_reported_by_check(damage: str, number: int) -> None:
    files = CrashFiles()
    log = open_log(files)
    log.append(records(list(range(25))))
    save(log, files)
    assert is_whole(files, 0, 25)
    name = f"{FOLDER}/{number:08d}.log"
    if damage == "missing":
        files.remove(name)
    elif damage == "short":
        files.open(name).allocate(RECORD.itemsize)
    else:
        damaged = bytes(40) if damage == "block" else bytes([files.content(name)[30] ^ 4])
        files.open(name).write_at(30, damaged)
    assert not is_whole(files, 0, 25)
    if damage in ("bit", "block"):
        for read in (lambda: log.read(0, 25), lambda: log.at(np.arange(24, -1, -1))):
            with pytest.raises(Corrupt, match=f"{name} does not match its checksums"):
                read()
    after = (number + 1) * SMALL
    if after < 25:
        assert is_whole(files, after, 25)
        assert log.read(after, 25)["value"].tolist() == list(range(after, 25))


def test_each_flipped_bit_is_reported() -> None:
    """A bit of a record, of its checksum, or of a marked field."""
    files = CrashFiles()
    log = open_log(files)
    log.append(records([5, 6]))
    log.mark(np.array([1]))
    name, content = f"{FOLDER}/00000000.log", files.content(f"{FOLDER}/00000000.log")
    for position in range(2 * (RECORD.itemsize + 8)):
        for bit in range(8):
            files.open(name).write_at(position, bytes([content[position] ^ 1 << bit]))
            assert not is_whole(files, 0, 2), (position, bit)
            files.open(name).write_at(position, content[position : position + 1])
    assert is_whole(files, 0, 2)


def test_check_of_an_empty_range_needs_no_file() -> None:
    assert is_whole(CrashFiles(), 0, 0)
    assert is_whole(CrashFiles(), 10, 10)


def test_mark_replaces_one_field_in_place() -> None:
    files = CrashFiles()
    log = open_log(files)
    log.append(records(list(range(25))))
    save(log, files)
    for _ in range(2):
        log.mark(np.array([24, 3, 11]))
    assert np.flatnonzero(log.read(0, 25)["mark"] == ~0).tolist() == [3, 11, 24]
    assert values_of(log) == list(range(25))
    assert len(log.files_to_sync()) == 3


@pytest.mark.parametrize("call", range(1, 7))
def test_append_on_a_full_disk_adds_all_records_or_none(call: int) -> None:
    files = CrashFiles()
    log = open_log(files)
    log.append(records([1, 2]))
    files.fail_at(files.calls + call, OverLimit("disk full"), forever=True)
    new_values = list(range(3, 33))
    try:
        log.append(records(new_values))
        assert values_of(log) == [1, 2, *new_values]
    except OverLimit:
        assert values_of(log) == [1, 2]
        files.heal()
        log.append(records(new_values))
        assert values_of(log) == [1, 2, *new_values]


def test_unused_log_makes_no_folder() -> None:
    files = CrashFiles()
    log = open_log(files)
    assert (log.files_to_sync(), len(log.read(0, 0)), files.exists(FOLDER)) == ([], 0, False)


def test_readers_see_whole_records_while_the_log_grows(tmp_path: Path) -> None:
    log = open_log(RealFiles(tmp_path))
    log.append(records([0]))

    def read_all() -> int:
        end = log.end
        assert values_of_range(log, end) == list(range(end))
        assert log.at(np.arange(end))["value"].tolist() == list(range(end))
        return end

    with ThreadPoolExecutor(2) as threads:
        readings = []
        for value in range(1, 400):
            log.append(records([value]))
            readings.append(threads.submit(read_all))
        assert max(reading.result() for reading in readings) == 400
    log.close()


def values_of_range(log: MappedLog, end: int) -> list[int]:
    return [int(value) for value in log.read(0, end)["value"]]


@pytest.mark.parametrize("rows", [0, 1, mapped_log.FEW, mapped_log.FEW + 1, 999])
@pytest.mark.parametrize("size", [1, 16, 24, 40])
def test_checksums_equal_those_of_the_library(rows: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_log, "BLOCK", 100)
    raw = np.random.default_rng(rows).integers(0, 256, rows * size, dtype=np.uint8)
    checksums = mapped_log.checksums_of(raw.view(f"V{size}"))
    assert checksums.tolist() == [google_crc32c.value(row.tobytes()) for row in raw.reshape(rows, size)]


def test_checksums_of_structured_records_equal_those_of_the_library() -> None:
    records = np.zeros(200, [("a", "<i8"), ("b", "<i8"), ("c", "<u4")])
    records["a"], records["c"] = np.arange(200) - 100, 7
    assert mapped_log.checksums_of(records).tolist() == [
        google_crc32c.value(each.tobytes()) for each in records
    ]


GENERATIONS = "wheel"


def logs(files: CrashFiles, generation: int) -> list[str]:
    return files.list_dir(f"{mapped_log.folder_of(GENERATIONS, generation)}/links")


def write(files: CrashFiles, generation: int) -> None:
    folder = f"{mapped_log.folder_of(GENERATIONS, generation)}/links"
    files.make_dir(folder)
    files.create(f"{folder}/00000000.log").write_at(0, b"links")


def test_saved_generation_is_used_again_and_others_are_removed() -> None:
    files = CrashFiles()
    for generation in (3, 4):
        write(files, generation)
    files.create(f"{GENERATIONS}/ring")
    assert mapped_log.begin_generation(files, GENERATIONS, 3) == 3
    assert (logs(files, 3), logs(files, 4)) == (["00000000.log"], [])
    assert files.exists(f"{GENERATIONS}/ring")


def test_without_a_saved_generation_a_new_number_is_used_and_others_are_removed() -> None:
    files = CrashFiles()
    assert mapped_log.begin_generation(files, GENERATIONS, None) == 1
    write(files, 1)
    assert mapped_log.begin_generation(files, GENERATIONS, None) == 2
    assert logs(files, 1) == []
    assert mapped_log.begin_generation(files.crash(1), GENERATIONS, None) == 3
