"""With any damage to the files of the queue index, readers get exactly the requested rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.broker.on_node import on_node
from tests.crash.world import HOUR_MS, SECOND_MS, World
from tests.crash_files import CrashFiles

from timeball.broker.registry.topics import rebuild_entries
from timeball.log.queue_index import QueueFile, encode
from timeball.model.message import Kind

Read = dict[tuple[str, int], list[tuple[int, str]]]  # by topic and queue: offset and key
FAR_MS = 300 * SECOND_MS


async def lived(world: World) -> None:
    """Messages in three topics and a delay level: two sealed ranges and an open one that a start takes up again."""
    for n in range(3):
        await world.send("a", [None] * 5)
        await world.send("b", [None, SECOND_MS, None, HOUR_MS, None])
        await world.send_levels("c", [1, 3, 6])
        await world.advance(2 * SECOND_MS)
        await world.settled()
        flush = world.broker.tables.topics.indexes.flush(world.broker.log.reader.next_seq)
        flush.seals = n < 2
        flush.write()
        world.broker.tables.topics.indexes.finish(flush)
    await world.stop()


async def everything(world: World, files: CrashFiles) -> Read:
    """Start on these files and read every queue, then again when all levels are due."""
    left = World(files, replace(world.clock))
    await left.start()
    found = await read_all(left)
    await left.advance(FAR_MS)
    await left.settled()
    found |= {(f"{topic} later", queue): rows for (topic, queue), rows in (await read_all(left)).items()}
    assert left.failure is None
    await left.stop()
    await left.abandon()
    return found


async def read_all(left: World) -> Read:
    found: Read = {}
    for topic in left.broker.topics():
        for queue, (low, high) in left.broker.queues(topic).items():
            rows = await left.broker.read_queue(topic, queue, low, high - low + 1)
            assert set(rows["topic"].to_pylist()) <= {topic} and set(rows["queue_id"].to_pylist()) <= {queue}
            found[topic, queue] = list(
                zip(rows["queue_offset"].to_pylist(), rows["unique_key"].to_pylist(), strict=True)
            )
    return found


def names_below(files: CrashFiles, folder: str) -> list[str]:
    inside = files.list_dir(folder)
    if not inside:
        return [folder]
    return [name for each in inside for name in names_below(files, f"{folder}/{each}")]


def damages(files: CrashFiles) -> list[tuple[str, int | None]]:
    """Each file removed, cut in half, or with a flipped bit here and there: (name, position or kind of damage)."""
    found: list[tuple[str, int | None]] = []
    for name in names_below(files, "queues"):
        size = files.size(name)
        flips = np.linspace(0, size - 1, 12).astype(int).tolist()
        found += [(name, None), (name, -1), *((name, at) for at in flips)]
    return found


def copy_of(world: World) -> CrashFiles:
    return world.files.crash(survival="everything")


@pytest.mark.parametrize("part", range(4))
@on_node()
async def test_a_damaged_file_never_gives_another_row_nor_fewer(world: World, part: int) -> None:
    await lived(world)
    expected = await everything(world, copy_of(world))
    assert sum(len(rows) for rows in expected.values()) > 60
    for name, at in damages(world.files)[part::4]:
        files = copy_of(world)
        if at is None:
            files.remove(name)
        elif at == -1:
            files.open(name).allocate(files.size(name) // 2)
        else:
            files.open(name).write_at(at, bytes([files.content(name)[at] ^ 4]))
        assert await everything(world, files) == expected, (name, at)


@on_node()
async def test_the_whole_folder_may_be_lost(world: World) -> None:
    await lived(world)
    expected = await everything(world, copy_of(world))
    files = copy_of(world)
    for name in names_below(files, "queues"):
        files.remove(name)
    assert await everything(world, files) == expected


@on_node()
async def test_a_bit_that_flips_while_the_broker_serves_is_mended_by_the_read_that_finds_it(
    world: World,
) -> None:
    await world.send("a", [None] * 40)
    flush = world.broker.tables.topics.indexes.flush(world.broker.log.reader.next_seq)
    flush.seals = True
    flush.write()
    world.broker.tables.topics.indexes.finish(flush)
    expected = await read_all(world)
    (name,) = names_below(world.files, "queues")
    for at in range(world.files.size(name) - 40 * 20, world.files.size(name), 7):
        world.files.open(name).write_at(at, bytes([world.files.content(name)[at] ^ 64]))
        assert await read_all(world) == expected


@on_node()
async def test_an_index_of_another_log_is_not_believed(world: World) -> None:
    """The control: files that are whole and say something else. The checkpoint knows how long the queues are."""
    await lived(world)
    expected = await everything(world, copy_of(world))
    other = World(CrashFiles(), replace(world.clock))
    await other.start()
    await other.send("a", [None] * 60)
    await other.stop()
    files = copy_of(world)
    for name in names_below(files, "queues"):
        files.remove(name)
    (name,) = names_below(other.files, "queues")
    files.replace(name, other.files.content(name))
    assert await everything(world, files) == expected


@on_node()
async def test_an_index_of_another_time_with_queues_as_long_is_not_believed(world: World) -> None:
    """As long as the checkpoint says, and each file whole: only the rows themselves tell."""
    await world.send("a", [None] * 6)
    await world.stop()
    expected = await everything(world, copy_of(world))
    (name,) = names_below(world.files, "queues")
    parts = QueueFile(name, world.files.content(name)).parts()
    parts[0].entries["seq"], parts[1].entries["seq"] = (
        parts[1].entries["seq"].copy(),
        parts[0].entries["seq"].copy(),
    )
    files = copy_of(world)
    files.replace(name, encode(1, 7, parts))
    assert await everything(world, files) == expected


@on_node()
async def test_entries_are_built_as_they_were_written(world: World) -> None:
    await world.create_topic("m", 2)
    world.broker.tables.topics.get("m").filter_type = "MULTI_TAG"
    await world.send("m", [None] * 6)
    await world.send_levels("m", [1, 2])
    indexes, reader = world.broker.tables.topics.indexes, world.broker.log.reader
    written = {(p.topic, p.queue_id): p.entries.tolist() for p in indexes.flush(reader.next_seq).parts}
    built = rebuild_entries(reader, 1, reader.next_seq, lambda name: name == "m")
    assert {(p.topic, p.queue_id): p.entries.tolist() for p in built} == written
    tags = {tag for p in built if p.topic == "m" for _, _, tag in p.entries.tolist()}
    assert len(tags) == 2, "with a tag and without"
    kinds = [kind for rows in reader.rows(1, reader.next_seq) for kind in rows["kind"].to_pylist()]
    assert kinds.count(Kind.SCHEDULED) == 2 and sum(len(p.entries) for p in built) == 8
