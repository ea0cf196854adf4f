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


async def fill_queues(world: World) -> None:
    """Send messages to two topics and three delay levels. The index gets two sealed files and an open part.

    Then stop the broker.
    """
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


async def read_after_start(world: World, files: CrashFiles) -> Read:
    """Start on these files and read every queue, then again when all levels are due."""
    after_cut = World(files, replace(world.clock))
    await after_cut.start()
    read = await read_all(after_cut)
    await after_cut.advance(FAR_MS)
    await after_cut.settled()
    read |= {(f"{topic} later", queue): rows for (topic, queue), rows in (await read_all(after_cut)).items()}
    assert after_cut.failure is None
    await after_cut.stop()
    await after_cut.abandon()
    return read


async def read_all(world: World) -> Read:
    """Read all queues of all topics."""
    read: Read = {}
    for topic in world.broker.topics():
        for queue, (low, high) in world.broker.queues(topic).items():
            rows = await world.broker.read_queue(topic, queue, low, high - low + 1)
            assert set(rows["topic"].to_pylist()) <= {topic} and set(rows["queue_id"].to_pylist()) <= {queue}
            read[topic, queue] = list(
                zip(rows["queue_offset"].to_pylist(), rows["unique_key"].to_pylist(), strict=True)
            )
    return read


def names_below(files: CrashFiles, folder: str) -> list[str]:
    """The names of all files below a folder."""
    entries = files.list_dir(folder)
    if not entries:
        return [folder]
    return [name for entry in entries for name in names_below(files, f"{folder}/{entry}")]


def damages(files: CrashFiles) -> list[tuple[str, int | None]]:
    """Damages of each file of the index: (name, None) to remove it, (name, -1) to cut it in half.

    (name, position) flips a bit of the byte at this position.
    """
    all_damages: list[tuple[str, int | None]] = []
    for name in names_below(files, "queues"):
        size = files.size(name)
        flips = np.linspace(0, size - 1, 12).astype(int).tolist()
        all_damages += [(name, None), (name, -1), *((name, at) for at in flips)]
    return all_damages


def copy_of_files(world: World) -> CrashFiles:
    """A copy of all files as they are now."""
    return world.files.crash(survival="everything")


@pytest.mark.parametrize("part", range(4))
@on_node()
async def test_a_damaged_or_missing_index_file_gives_the_same_rows(world: World, part: int) -> None:
    await fill_queues(world)
    expected = await read_after_start(world, copy_of_files(world))
    assert sum(len(rows) for rows in expected.values()) > 60
    for name, at in damages(world.files)[part::4]:
        files = copy_of_files(world)
        if at is None:
            files.remove(name)
        elif at == -1:
            files.open(name).allocate(files.size(name) // 2)
        else:
            files.open(name).write_at(at, bytes([files.content(name)[at] ^ 4]))
        assert await read_after_start(world, files) == expected, (name, at)


@on_node()
async def test_a_lost_index_folder_is_rebuilt_from_the_log(world: World) -> None:
    await fill_queues(world)
    expected = await read_after_start(world, copy_of_files(world))
    files = copy_of_files(world)
    for name in names_below(files, "queues"):
        files.remove(name)
    assert await read_after_start(world, files) == expected


@on_node()
async def test_a_bit_that_flips_in_a_running_broker_is_repaired_by_the_read_that_finds_it(
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
    """The control: whole files with other entries. The checkpoint contains the lengths of the queues."""
    await fill_queues(world)
    expected = await read_after_start(world, copy_of_files(world))
    other = World(CrashFiles(), replace(world.clock))
    await other.start()
    await other.send("a", [None] * 60)
    await other.stop()
    files = copy_of_files(world)
    for name in names_below(files, "queues"):
        files.remove(name)
    (name,) = names_below(other.files, "queues")
    files.replace(name, other.files.content(name))
    assert await read_after_start(world, files) == expected


@on_node()
async def test_an_index_whose_entries_name_other_rows_is_rebuilt(world: World) -> None:
    """The files are whole, and have the lengths of the checkpoint. Only a comparison with the rows shows the fault."""
    await world.send("a", [None] * 6)
    await world.stop()
    expected = await read_after_start(world, copy_of_files(world))
    (name,) = names_below(world.files, "queues")
    parts = QueueFile(name, world.files.content(name)).parts()
    parts[0].entries["seq"], parts[1].entries["seq"] = (
        parts[1].entries["seq"].copy(),
        parts[0].entries["seq"].copy(),
    )
    files = copy_of_files(world)
    files.replace(name, encode(1, 7, parts))
    assert await read_after_start(world, files) == expected


@on_node()
async def test_rebuilt_entries_equal_the_written_ones(world: World) -> None:
    await world.create_topic("m", 2)
    world.broker.tables.topics.get("m").filter_type = "MULTI_TAG"
    await world.send("m", [None] * 6)
    await world.send_levels("m", [1, 2])
    indexes, reader = world.broker.tables.topics.indexes, world.broker.log.reader
    written_parts = indexes.flush(reader.next_seq).parts
    built_parts = rebuild_entries(reader, 1, reader.next_seq, lambda name: name == "m")
    written, built = (
        {(part.topic, part.queue_id): part.entries.tolist() for part in parts}
        for parts in (written_parts, built_parts)
    )
    assert built == written
    tags = {tag for part in built_parts if part.topic == "m" for _, _, tag in part.entries.tolist()}
    assert len(tags) == 2, "messages with a tag and without"
    kinds = [kind for rows in reader.rows(1, reader.next_seq) for kind in rows["kind"].to_pylist()]
    assert kinds.count(Kind.SCHEDULED) == 2 and sum(len(part.entries) for part in built_parts) == 8
