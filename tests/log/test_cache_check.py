"""The caches are held against the log: each lie is found, and a healthy folder is left in peace."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import AtOnce, batch, opened

from timeball.key_sidecar import KeySidecar
from timeball.log import checkpoint as cp
from timeball.log import frame_index
from timeball.log.cache_check import CacheCheck
from timeball.log.dump import Damage, FolderDump, FrameFound
from timeball.log.key_index import KeyIndex
from timeball.log.queue_index import ENTRY, QueueIndex

KEYS, FRAMES, QUEUE = "log/0000000001.keys", "log/0000000001.frames", "queues/7/0/00000000.cq"


def folder() -> CrashFiles:
    """Three segments of messages in four queues of `orders`, with every cache a broker would make."""
    files = CrashFiles()

    async def write() -> None:
        async with opened(files, disk=AtOnce()) as log:
            for n in range(20):
                await log.append(batch(3 * n, 3))
            KeyIndex(files, log.segments, log.reader).find(np.array([1], np.uint64))
            assert frame_index.save_sealed(files, log.segments) == 2

    asyncio.run(write())
    for queue in range(4):  # row n of the log has seq n + 1, and stands in queue n % 4
        seqs = np.arange(queue, 60, 4) + 1
        QueueIndex(files, f"queues/7/{queue}").append(seqs, seqs, seqs)
    save(files, dict.fromkeys(range(4), (0, 15)))
    return files


def save(files: CrashFiles, queues: dict[int, tuple[int, int]]) -> None:
    nothing = np.empty(0, np.int64)
    cp.save(files, cp.Checkpoint(cp.Facts(seq=61, queues={"orders": queues}), nothing, nothing))


def check(files: CrashFiles, numbers: dict[str, int] | None = None) -> list[Damage]:
    found = FolderDump(files)
    caches = CacheCheck(found, {"orders": 7} if numbers is None else numbers)
    wrong = list(found.damage)
    for segment in found.segments:
        for each in found.walk(segment):
            if isinstance(each, FrameFound):
                caches.take(each)
        wrong += caches.end_of(segment)
    return wrong


def overwrite(files: CrashFiles, name: str, at: int, data: bytes) -> None:
    files.open(name).write_at(at, data)


def test_what_a_broker_has_made_agrees_and_is_left_as_it_is() -> None:
    files = folder()
    calls = files.calls
    assert check(files) == []
    assert files.calls == calls


@pytest.mark.parametrize("name", [KEYS, FRAMES])
def test_a_cache_that_is_made_when_asked_for_may_be_missing(name: str) -> None:
    files = folder()
    files.remove(name)
    assert check(files) == []


@pytest.mark.parametrize("name", [KEYS, FRAMES])
def test_one_that_does_not_match_its_checksum_is_named(name: str) -> None:
    files = folder()
    overwrite(files, name, 30, b"?")
    assert [d.file for d in check(files)] == [name]


def test_a_whole_one_of_another_segment_is_named() -> None:
    files = folder()
    for kind in ("keys", "frames"):
        files.replace(f"log/0000000001.{kind}", files.content(f"log/0000000002.{kind}"))
    assert {d.file for d in check(files)} == {KEYS, FRAMES}


def test_a_sidecar_that_has_lost_or_swapped_a_pair_is_named() -> None:
    files = folder()
    whole = KeySidecar.parse(files.map_readonly(KEYS))
    swapped = whole.rows.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    for wrong in (KeySidecar(whole.hashes[1:], whole.rows[1:]), KeySidecar(whole.hashes, swapped)):
        files.replace(KEYS, wrong.encode())
        assert [d.file for d in check(files)] == [KEYS]
    files.replace(KEYS, KeySidecar(whole.hashes[::-1], whole.rows[::-1]).encode())
    assert [d.file for d in check(files)] == [KEYS], "the right pairs, and not sorted"


def test_a_wrong_entry_of_a_queue_is_named_with_its_place() -> None:
    files = folder()
    overwrite(files, QUEUE, 3 * ENTRY.itemsize + 7, b"\x63")
    (wrong,) = check(files)
    assert (wrong.file, wrong.position) == (QUEUE, 3 * ENTRY.itemsize)
    assert "entry 3 should name seq 13, and names 99" in wrong.text


def test_a_queue_that_is_gone_or_too_short_is_named_once() -> None:
    files = folder()
    files.remove(QUEUE)
    assert [(d.file, "missing" in d.text) for d in check(files)] == [(QUEUE, True)] * 3, "once a segment"
    short = folder()
    short.open(QUEUE).allocate(10 * ENTRY.itemsize)
    assert all(d.file == QUEUE and "shorter than" in d.text for d in check(short)) and check(short)


def test_only_what_the_checkpoint_vouches_for_is_compared() -> None:
    files = folder()
    overwrite(files, QUEUE, 0, b"?" * ENTRY.itemsize)
    overwrite(files, QUEUE, 14 * ENTRY.itemsize, b"?" * ENTRY.itemsize)
    assert [d.position for d in check(files)] == [0, 14 * ENTRY.itemsize]
    save(files, {0: (1, 14)})
    assert check(files) == []
    files.remove(cp.NAME)
    assert check(files) == []


def test_a_topic_nobody_knows_is_not_looked_for() -> None:
    files = folder()
    files.remove(QUEUE)
    assert check(files, {}) == []
