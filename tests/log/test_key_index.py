"""Look-ups by message id or key find all rows, in any segment and whenever these were indexed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.log.small_log import AtOnce, Log, batch, opened, reopened

from timeball.io.files import Files, RealFiles
from timeball.log import key_index as module
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.model.key_hash import KeyRun, UInt64Array, hash_string
from timeball.model.message import Kind, build_rows

SMALL = 4096  # bytes of a segment


def hashes(*texts: str) -> UInt64Array:
    return np.array([hash_string(text) for text in texts], np.uint64)


def index_of(files: Files, log: Log) -> KeyIndex:
    return KeyIndex(files, log.segments, log.reader)


def index_of_commits(files: Files, commits: int, *, look_up_after: tuple[int, ...] = ()) -> KeyIndex:
    """Write a log of commits of three messages. Returns its index.

    Messages are numbered from 0, and message n has seq n + 1. After the commits `look_up_after`, the index is used.
    """

    async def write() -> KeyIndex:
        async with opened(files, disk=AtOnce(), segment_bytes=SMALL) as log:
            index = index_of(files, log)
            for commit in range(commits):
                await log.append(batch(3 * commit))
                if commit in look_up_after:
                    index.find_rows(hashes("id-0"))
            return index

    return asyncio.run(write())


words = st.sampled_from(["a", "b", "c", "order-17", "ü", "a b", ""])
message = st.tuples(st.none() | words, st.none() | st.lists(words, max_size=3).map(" ".join))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(message, min_size=1, max_size=5), st.booleans()), max_size=8),
    st.lists(words, min_size=1, max_size=3),
)
def test_find_rows_equals_a_plain_search(
    commits: list[tuple[list[tuple[str | None, str | None]], bool]], wanted: list[str]
) -> None:
    files = CrashFiles()

    async def work() -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=SMALL) as log:
            index, expected = index_of(files, log), []
            for messages, is_looked_up in commits:
                ids, keys_texts = zip(*messages, strict=True)
                (first_seq,) = await log.append(
                    build_rows(len(ids), kind=int(Kind.MESSAGE), unique_key=list(ids), keys=list(keys_texts))
                )
                for seq, (unique_key, keys_text) in enumerate(messages, first_seq):
                    if {unique_key, *filter(None, (keys_text or "").split(" "))} & set(wanted):
                        expected.append(seq)
                if is_looked_up:
                    assert index.find_rows(hashes(*wanted)).tolist() == expected
            assert index.find_rows(hashes(*wanted)).tolist() == expected
            new_index = index_of(files, log)
            assert new_index.find_rows(hashes(*wanted)).tolist() == expected

    asyncio.run(work())


def test_an_empty_log_has_no_rows() -> None:
    assert index_of_commits(CrashFiles(), 0).find_rows(hashes("id-1")).tolist() == []


def test_the_same_row_by_id_and_by_key_is_one_row() -> None:
    index = index_of_commits(CrashFiles(), 10)
    assert index.find_rows(hashes("id-7", "order-7", "id-8", "nobody")).tolist() == [8, 9]


def test_reserved_numbers_are_skipped() -> None:
    files = CrashFiles()

    async def work() -> None:
        async with opened(files, disk=AtOnce()) as log:
            await log.append(batch(0))
            await log.writer.append(build_rows(1, kind=int(Kind.TABLE), body=b"9"), span=10)[1]
            await log.append(batch(3))
            assert index_of(files, log).find_rows(hashes("id-2", "id-3")).tolist() == [3, 14]

    asyncio.run(work())


# ---- runs --------------------------------------------------------------------------------------------


def runs_of(files: Files) -> list[str]:
    return [name for name in files.list_dir("log") if name.endswith(".keys")]


def test_only_a_look_up_makes_key_runs_and_only_of_sealed_segments() -> None:
    files = CrashFiles()
    index = index_of_commits(files, 8)
    assert runs_of(files) == []
    index.find_rows(hashes("id-1"))
    sealed = [f"{segment.ordinal:010d}.keys" for segment in reopened(files).segments.all[:-1]]
    assert runs_of(files) == sealed and len(sealed) >= 3


def test_key_run_contains_every_id_and_key_of_its_segment() -> None:
    files = CrashFiles()
    index_of_commits(files, 8).find_rows(hashes("id-1"))
    first = reopened(files).segments.all[0]
    stored = KeyRun(files.map_readonly("log/0000000001.keys"))
    expected = []
    for number, seq in enumerate(range(first.first_seq, first.next_seq)):  # message n has seq n + 1
        keys = [f"id-{number}", *([f"order-{number}", f"customer-{number % 5}"] if number % 2 else [])]
        expected += [(hash_string(key), seq) for key in keys]
    assert sorted(zip(*(column.tolist() for column in stored.columns()), strict=True)) == sorted(expected)


def test_existing_key_run_is_read_and_not_rebuilt() -> None:
    files = CrashFiles()
    index_of_commits(files, 8).find_rows(hashes("id-1"))
    segments = reopened(files).segments
    new_index = KeyIndex(files, segments, LogReader(segments))
    calls_before = files.calls
    assert new_index.find_rows(hashes("id-1", "id-20")).tolist() == [2, 21]
    assert files.calls == calls_before, "the look-up writes nothing"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda run: run[:40] + bytes([run[40] ^ 1]) + run[41:], id="flipped bit"),
        pytest.param(lambda run: run[:-8], id="cut"),
        pytest.param(lambda run: b"", id="empty"),
        pytest.param(lambda run: run[:-8] + b"TBKEYS9\0", id="another format"),
    ],
)
def test_damaged_key_run_is_rebuilt_from_the_log(damage: Callable[[bytes], bytes]) -> None:
    files = CrashFiles()
    index_of_commits(files, 8).find_rows(hashes("id-1"))
    name = "log/0000000001.keys"
    undamaged = files.content(name)
    files.replace(name, damage(undamaged))
    segments = reopened(files).segments
    assert KeyIndex(files, segments, LogReader(segments)).find_rows(hashes("id-1")).tolist() == [2]
    assert files.content(name) == undamaged


def test_power_cut_while_key_runs_are_made_loses_nothing() -> None:
    uncut = CrashFiles()
    index = index_of_commits(uncut, 8)
    calls_before = uncut.calls
    index.find_rows(hashes("id-1"))
    for cut in range(calls_before + 1, uncut.calls + 1):
        files = CrashFiles()
        index = index_of_commits(files, 8)
        files.crash_at = cut
        with pytest.raises(BaseException, match="power"):
            index.find_rows(hashes("id-1"))
        for seed in range(3):
            after = files.crash(seed)
            segments = reopened(after).segments
            row_numbers = KeyIndex(after, segments, LogReader(segments)).find_rows(hashes("id-1", "order-21"))
            assert row_numbers.tolist() == [2, 22], (cut, seed)


# ---- the segment being written ---------------------------------------------------------------------------


def test_many_small_runs_are_merged_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # A commit has three rows with an id, and one or two of them have two keys. So each third look-up makes a run.
    monkeypatch.setattr(module, "NEWEST_PAIRS_MAX", 13)
    files, sizes = CrashFiles(), set[int]()

    async def work() -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=256 * 1024) as log:
            index = index_of(files, log)
            for messages in range(0, 72, 3):
                await log.append(batch(messages))
                ids = [f"id-{message}" for message in range(messages + 3)]
                assert index.find_rows(hashes(*ids)).tolist() == list(range(1, messages + 4))
                run_sizes = [run.pairs for run in index._runs]
                assert all(size > 2 * following for size, following in itertools.pairwise(run_sizes)), (
                    run_sizes
                )
                sizes.update(run_sizes)
            assert len(sizes) > 2, "runs were merged"
            assert len(log.segments.all) == 1

    asyncio.run(work())


def test_a_roll_between_two_look_ups_loses_nothing() -> None:
    index = index_of_commits(CrashFiles(), 10, look_up_after=(0, 1, 4, 5))
    ids = [f"id-{message}" for message in range(30)]
    assert index.find_rows(hashes(*ids)).tolist() == list(range(1, 31))


def test_rows_removed_by_retention_are_not_found(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)

    async def work() -> None:
        async with opened(files, segment_bytes=SMALL) as log:
            index = index_of(files, log)
            for number in range(8):
                await log.append(batch(3 * number))
            assert index.find_rows(hashes("id-0", "id-20")).tolist() == [1, 21]
            removed = log.segments.all[:2]
            log.segments.remove(files, removed)
            assert index.find_rows(hashes("id-0", "id-20")).tolist() == [21]
            assert index._sealed_runs.keys() == {segment.ordinal for segment in log.segments.all[:-1]}
            assert len(runs_of(files)) == len(log.segments.all) - 1

    asyncio.run(work())
