"""The claims of a job are checked against the log before its files become part of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.table.small_table import ALL_ZONES, NOW_MS, attachment, table_rows, write

from timeball.broker.registry.campaigns import AttachState, check_count, check_files
from timeball.io.files import Files
from timeball.model import limits
from timeball.model.errors import (
    Corrupt,
    InvalidDelay,
    InvalidMessage,
    NotFound,
    OutOfRange,
    OverLimit,
    RequestError,
)
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.table.attachment import ANY_ROWS, Attachment, FileEntry

DURABLE = 100  # the end of the durable log
LIVE = "bucket=2026-11/live.parquet"  # a file of the table


def entry(first_seq: int, rows: int, path: str = "bucket=2026-11/new.parquet") -> FileEntry:
    """The entry of a file with the numbers first_seq, first_seq + 1, …"""
    return FileEntry(
        path=path, bucket="2026-11", rows=rows, size_bytes=9, min_due_ms=1, max_due_ms=2,
        min_seq=first_seq, max_seq=first_seq + rows - 1,
    )  # fmt: skip


def compact(from_seq: int, to_seq: int, **fields: Any) -> Attachment:
    """The attach of a compaction of the rows [from_seq, to_seq), without files."""
    return attachment([], **{"job": "compact", "from_seq": from_seq, "to_seq": to_seq, **fields})


def bulk(*ranges: tuple[int, int], files: list[FileEntry] | None = None, **fields: Any) -> Attachment:
    """A bulk attach of these ranges (first_seq, rows), by default with a file for each range."""
    if files is None:
        files = [entry(first, rows, f"bucket=2026-11/{i}.parquet") for i, (first, rows) in enumerate(ranges)]
    return attachment(files, **{"job": "bulk", "ranges": list(ranges), **fields})


def check(attach_state: AttachState, change: Attachment, now_ms: int = NOW_MS) -> None:
    attach_state.check(change, durable_seq=DURABLE, is_live=lambda path: path == LIVE, now_ms=now_ms)


@pytest.fixture
def attach_state() -> AttachState:
    attach_state = AttachState(watermark=10)
    attach_state.reserve(50, 5)
    attach_state.reserve(60, 7)
    return attach_state


# ---- checks -------------------------------------------------------------------------------------------------


def test_a_valid_attach_is_accepted(attach_state: AttachState) -> None:
    for change in (
        compact(10, 11), compact(10, DURABLE), bulk((50, 5)), bulk((60, 7), (50, 5)),
        attachment([entry(1, 1)]), attachment([], removes=[LIVE]), attachment([entry(1, 1)], removes=[LIVE]),
    ):  # fmt: skip
        check(attach_state, change)


@pytest.mark.parametrize("from_seq", [0, 9, 11, 100])
def test_a_compact_that_does_not_begin_at_the_watermark_is_refused(
    attach_state: AttachState, from_seq: int
) -> None:
    with pytest.raises(OutOfRange, match="the watermark is 10"):
        check(attach_state, compact(from_seq, 100))


@pytest.mark.parametrize("to_seq", [0, 9, 10, DURABLE + 1])
def test_a_compact_that_ends_at_its_begin_or_beyond_the_durable_log_is_refused(
    attach_state: AttachState, to_seq: int
) -> None:
    with pytest.raises(OutOfRange, match="between 11 and 100"):
        check(attach_state, compact(10, to_seq))


@pytest.mark.parametrize(
    "ranges", [[(50, 4)], [(50, 6)], [(51, 4)], [(55, 5)], [(1, 1)], [(50, 5), (70, 1)], [(60, 5)]]
)
def test_ranges_that_were_not_reserved_are_refused(
    attach_state: AttachState, ranges: list[tuple[int, int]]
) -> None:
    with pytest.raises(OutOfRange, match="were not set aside"):
        check(attach_state, bulk(*ranges))


@pytest.mark.parametrize(
    "files",
    [
        [], [entry(50, 4)], [entry(50, 6)],  # fewer or more rows than reserved
        [entry(49, 5)], [entry(51, 5)], [entry(60, 5)],  # other numbers
    ],
)  # fmt: skip
def test_files_with_other_numbers_than_the_reserved_ones_are_refused(
    attach_state: AttachState, files: list[FileEntry]
) -> None:
    with pytest.raises(InvalidMessage, match=r"the ranges hold 5 rows|are in no range"):
        check(attach_state, bulk((50, 5), files=files))


def test_files_with_overlapping_numbers_are_refused() -> None:
    """The files have as many rows as were reserved, all in the range, but two messages would have the number 52."""
    attach_state = AttachState()
    attach_state.reserve(50, 6)
    doubled = [entry(50, 3), entry(52, 3, "bucket=2026-11/more.parquet")]
    with pytest.raises(InvalidMessage, match="both hold seq 52"):
        check(attach_state, bulk((50, 6), files=doubled))
    check(attach_state, bulk((50, 6), files=[doubled[0], entry(53, 3, "bucket=2026-11/more.parquet")]))


def test_a_range_that_is_named_twice_is_refused(attach_state: AttachState) -> None:
    """Otherwise a row would be counted for two scheduled messages."""
    with pytest.raises(OutOfRange, match="twice"):
        check(attach_state, bulk((50, 5), (50, 5)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (bulk((50, 5), from_seq=10), "covers no range of the log"),
        (attachment([], to_seq=5), "covers no range of the log"),
        (compact(10, 20, ranges=[(50, 5)]), "only a bulk attach has ranges"),
        (attachment([], ranges=[(50, 5)]), "only a bulk attach has ranges"),
        (compact(10, 20, removes=[LIVE]), "only a rewrite removes"),
        (bulk((50, 5), removes=[LIVE]), "only a rewrite removes"),
        (attachment([entry(1, 1, LIVE)]), "part of the pending table already"),
        (attachment([entry(1, 1, LIVE)], removes=[LIVE]), "part of the pending table already"),
        (attachment([entry(1, 1), entry(2, 1)]), "named twice"),
        (attachment([], removes=[LIVE, LIVE]), "named twice"),
    ],
)
def test_an_attach_with_fields_of_another_job_is_refused(
    attach_state: AttachState, change: Attachment, text: str
) -> None:
    with pytest.raises(InvalidMessage, match=text):
        check(attach_state, change)


def test_only_live_files_can_be_removed(attach_state: AttachState) -> None:
    with pytest.raises(NotFound, match="not part of the pending table"):
        check(attach_state, attachment([], removes=["bucket=2026-11/gone.parquet"]))


# ---- earlier attaches ---------------------------------------------------------------------------------------


def test_only_a_compact_moves_the_watermark(attach_state: AttachState) -> None:
    for change in (bulk((50, 5)), attachment([entry(1, 1)]), attachment([], removes=[LIVE])):
        attach_state.apply(change, 1, NOW_MS)
        assert attach_state.watermark == 10
    attach_state.apply(compact(10, 42), 1, NOW_MS)
    assert attach_state.watermark == 42


def test_an_attach_uses_up_its_reserved_numbers(attach_state: AttachState) -> None:
    attach_state.apply(bulk((50, 5)), 1, NOW_MS)
    with pytest.raises(OutOfRange, match="used up"):
        check(attach_state, bulk((50, 5), job_id="another"))
    check(attach_state, bulk((60, 7)))


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=20), st.sampled_from(["", "r"])
)
def test_a_repeated_attach_is_recognized_by_job_and_epoch(
    attaches: list[tuple[str, int]], digest: str
) -> None:
    attach_state, last_epochs = AttachState(), dict[str, int]()
    for job_id, epoch in attaches:
        change = attachment([], job_id=job_id, epoch=epoch, digest=digest)
        last_epoch = last_epochs.get(job_id, -1)
        if digest and epoch < last_epoch:
            with pytest.raises(RequestError, match=f"has come to epoch {last_epoch}"):
                attach_state.is_repeated(change)
            continue
        assert attach_state.is_repeated(change) == (epoch <= last_epoch)
        if not attach_state.is_repeated(change):
            attach_state.apply(change, 1, NOW_MS)
            last_epochs[job_id] = epoch
    epochs = attach_state.epochs | {name: job.epoch for name, job in attach_state.jobs.items()}
    assert epochs == last_epochs


def test_an_attach_of_other_rows_under_a_remembered_job_is_refused() -> None:
    """The other rows are a different write. An earlier version dropped them without an error."""
    attach_state = AttachState()
    first = attachment([], job_id="import", epoch=3, digest="30 rows 0a")
    attach_state.apply(first, 1, NOW_MS)
    assert attach_state.is_repeated(first)
    other = msgspec.structs.replace(first, digest="30 rows 0b")
    with pytest.raises(RequestError, match=r"\(30 rows 0a, now 30 rows 0b\).*another job_id.*on_repeat=skip"):
        attach_state.is_repeated(other)
    for digest in ("", ANY_ROWS):
        assert attach_state.is_repeated(msgspec.structs.replace(first, digest=digest))
    attach_state.apply(msgspec.structs.replace(first, digest=ANY_ROWS), 1, NOW_MS)
    assert attach_state.is_repeated(other)


def test_a_compact_is_repeated_when_the_watermark_has_passed_it(attach_state: AttachState) -> None:
    """This holds for any job that moved the watermark, and for any epoch."""
    assert not attach_state.is_repeated(compact(10, 20, epoch=1))
    attach_state.apply(compact(10, 42, job_id="another", epoch=9), 1, NOW_MS)
    assert attach_state.is_repeated(compact(10, 20, epoch=1))
    assert attach_state.is_repeated(compact(10, 42, epoch=1))
    assert not attach_state.is_repeated(compact(10, 43, epoch=1))
    assert not attach_state.is_repeated(compact(0, 0, epoch=1))


def test_at_the_limit_the_oldest_jobs_and_reservations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest job without a digest, or the oldest reservation, is forgotten first."""
    monkeypatch.setattr(limits, "RESERVATIONS_MAX", 3)
    monkeypatch.setattr(limits, "JOBS_UNNAMED_MAX", 3)
    attach_state = AttachState()
    for number in (1, 2, 3, 1, 4):
        attach_state.apply(attachment([], job_id=f"job{number}", epoch=number), 1, NOW_MS)
        attach_state.make_room_for(1)
        attach_state.reserve(number * 10, 1)
    assert set(attach_state.epochs) == {"job3", "job1", "job4"}
    assert len(attach_state.reserved) <= 3
    assert 40 in attach_state.reserved


def test_a_new_job_is_refused_if_it_would_displace_one_that_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job with a digest stays remembered beside any number of jobs without one, and for 7 days beside other jobs."""
    monkeypatch.setattr(limits, "JOBS_MAX", 3)
    monkeypatch.setattr(limits, "JOBS_UNNAMED_MAX", 3)
    attach_state = AttachState()

    def named(number: int, epoch: int = 1) -> Attachment:
        return attachment([], job_id=f"named{number}", epoch=epoch, digest="rows")

    for number in range(3):
        check(attach_state, named(number))
        attach_state.apply(named(number), 1, NOW_MS + number)
    for number in range(20):
        attach_state.apply(attachment([], job_id=f"once{number}"), 1, NOW_MS)
    assert all(attach_state.is_repeated(named(number)) for number in range(3))
    with pytest.raises(OverLimit, match=r"3 jobs have been named within 7 days: .*option epoch"):
        check(attach_state, named(3), NOW_MS + 1 + limits.JOB_KEPT_MS - 2)
    check(attach_state, named(2, epoch=2))  # a remembered job needs no free entry
    check(attach_state, attachment([], job_id="once"))
    check(attach_state, named(3), NOW_MS + limits.JOB_KEPT_MS)
    attach_state.apply(named(3), 1, NOW_MS + limits.JOB_KEPT_MS)
    assert set(attach_state.jobs) == {"named1", "named2", "named3"}


@pytest.mark.parametrize("rows", [0, -1, (1 << 40) + 1])
def test_a_reservation_of_no_or_too_many_rows_is_refused(rows: int) -> None:
    with pytest.raises(InvalidMessage, match="reserve"):
        AttachState().make_room_for(rows)


# ---- files --------------------------------------------------------------------------------------------------


def check_files_of(files: Files, change: Attachment, delay_ms_max: int = 900 * DAY_MS) -> None:
    check_files(files, change, now_ms=NOW_MS, delay_ms_max=delay_ms_max)


def test_files_that_agree_with_the_attach_are_accepted() -> None:
    files = CrashFiles()
    check_files_of(files, attachment(write(files, table_rows([NOW_MS, *ALL_ZONES]))))


def test_an_attach_that_contradicts_a_file_is_refused() -> None:
    files = CrashFiles()
    [right_entry] = write(files, table_rows([NOW_MS + HOUR_MS] * 3))
    for name, text in {"rows": "rows 3", "max_due_ms": "max_due_ms", "min_seq": "min_seq 1"}.items():
        wrong_entry = msgspec.structs.replace(right_entry, **{name: getattr(right_entry, name) + 1})
        with pytest.raises(Corrupt, match=text):
            check_files_of(files, attachment([wrong_entry]))
    missing_file = msgspec.structs.replace(right_entry, path="bucket=2026-11/none.parquet")
    with pytest.raises(NotFound):
        check_files_of(files, attachment([missing_file]))


def test_a_bulk_attach_beyond_the_maximum_delay_is_refused() -> None:
    files = CrashFiles()
    entries = write(files, table_rows([NOW_MS + 41 * DAY_MS]))
    with pytest.raises(InvalidDelay, match="beyond the maximum delay"):
        check_files_of(files, attachment(entries, job="bulk"), delay_ms_max=40 * DAY_MS)
    for job in ("bulk", "compact", "rewrite"):
        with pytest.raises(InvalidDelay, match="due between -5"):
            check_files_of(files, attachment([msgspec.structs.replace(entries[0], min_due_ms=-5)], job=job))


@pytest.mark.parametrize("job", ["compact", "rewrite"])
def test_rows_that_were_accepted_before_may_be_due_beyond_the_maximum_delay(job: str) -> None:
    files = CrashFiles()
    entries = write(files, table_rows([NOW_MS + 41 * DAY_MS]))
    check_files_of(files, attachment(entries, job=job), delay_ms_max=40 * DAY_MS)


def test_an_attach_with_too_many_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ATTACH_FILES_MAX", 3)
    check_count(attachment([entry(1, 1)], removes=[LIVE, LIVE]))
    with pytest.raises(OverLimit, match="at most 3 files"):
        check_count(attachment([entry(1, 1)] * 2, removes=[LIVE, LIVE]))
