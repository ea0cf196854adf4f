"""The caches are held against the log: each lie is found, and a healthy folder is left in peace."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import AtOnce, batch, opened

from timeball.log import checkpoint as cp
from timeball.log import recovery
from timeball.log.key_index import KeyIndex
from timeball.log.queue_index import QueueFile, QueueIndexes, encode, file_name
from timeball.model import key_hash
from timeball.model.key_hash import KeyRun
from timeball.node.inspect.folder import Damage, FolderDump, InspectedFrame
from timeball.node.inspect.report import CacheCheck

KEYS, FRAMES, QUEUE = "log/0000000001.keys", "log/0000000001.frames", file_name(1)
SECOND = file_name(31)


def folder() -> CrashFiles:
    """Three segments of messages in four queues of `orders`, with every cache a broker would make."""
    files = CrashFiles()

    async def write() -> None:
        async with opened(files, disk=AtOnce()) as log:
            for n in range(20):
                await log.append(batch(3 * n, 3))
            KeyIndex(files, log.segments, log.reader).find_rows(np.array([1], np.uint64))
            assert recovery.save_sealed(files, log.segments) == 2

    asyncio.run(write())
    indexes = QueueIndexes(files)
    for first, end in ((0, 30), (30, 60)):  # row n of the log has seq n + 1, and stands in queue n % 4
        for queue in range(4):
            seqs = np.arange(first, end)[np.arange(first, end) % 4 == queue] + 1
            indexes.queue("orders", queue).append(seqs, seqs, seqs)
        flush = indexes.flush(end + 1)
        flush.seals = True
        flush.write()
        indexes.finish(flush)
    save(files, 61)
    return files


def save(files: CrashFiles, seq: int) -> None:
    nothing = np.empty(0, np.int64)
    cp.save(files, cp.Checkpoint(cp.Facts(seq=seq), nothing, nothing))


def check(files: CrashFiles) -> list[Damage]:
    found = FolderDump(files)
    caches = CacheCheck(found)
    wrong = list(found.damage)
    for segment in found.segments:
        for each in found.walk(segment):
            if isinstance(each, InspectedFrame):
                caches.add(each)
        wrong += caches.finish(segment)
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


def test_a_key_run_that_has_lost_or_swapped_a_pair_is_named() -> None:
    files = folder()
    hashes, rows = KeyRun(files.map_readonly(KEYS)).columns()
    swapped = rows.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    for wrong in ((hashes[1:], rows[1:]), (hashes, swapped)):
        files.replace(KEYS, b"".join(key_hash.encode([wrong])))
        assert [d.file for d in check(files)] == [KEYS]
    files.replace(KEYS, b"".join(key_hash.encode([(hashes[::-1], rows[::-1])])))
    assert [d.file for d in check(files)] == [KEYS], "the right pairs, and not sorted"


@pytest.mark.parametrize("at", [20, -13])
def test_a_file_of_the_queue_index_that_a_bit_flipped_in_is_named(at: int) -> None:
    files = folder()
    data = bytearray(files.content(QUEUE))
    data[at] ^= 4
    files.replace(QUEUE, bytes(data))
    (wrong,) = check(files)
    assert wrong.file == QUEUE and "checksum" in wrong.text and "delete it" in wrong.text


def test_a_whole_one_that_says_something_else_is_named() -> None:
    files = folder()
    parts = QueueFile(QUEUE, files.content(QUEUE)).parts()
    parts[0].entries["seq"][3] += 1
    files.replace(QUEUE, encode(1, 31, parts))
    (wrong,) = check(files)
    assert (
        wrong.file == QUEUE
        and "offset 3 of queue 0 of 'orders' should name seq 13, and names 14" in wrong.text
    )


def test_one_that_is_gone_is_named() -> None:
    files = folder()
    files.remove(QUEUE)
    assert {(wrong.file, "missing" in wrong.text) for wrong in check(files)} == {(QUEUE, True)}


def test_only_what_the_checkpoint_vouches_for_is_compared() -> None:
    files = folder()
    files.remove(SECOND)
    assert [d.file for d in check(files)] == [SECOND] * 2, "once a segment"
    save(files, 31)
    assert check(files) == []
    files.remove(cp.NAME)
    files.remove(QUEUE)
    assert check(files) == []
