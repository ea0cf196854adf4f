"""Recovery: the same log gives the same state, with any checkpoint and any of the caches."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.broker.on_node import on_node
from tests.crash.checker import check
from tests.crash.lives import AFTER_MS
from tests.crash.scenarios import SCENARIOS, Scenario
from tests.crash.world import HOUR_MS, SECOND_MS, World
from tests.crash_files import CrashFiles
from tests.table.test_catalog import commits

from timeball.log import checkpoint
from timeball.model.errors import Corrupt
from timeball.table.catalog import DELTA_LOG
from timeball.table.layout import KEYS_FOLDER


def build_scenario(*names: str) -> Scenario:
    """Join scenarios without their first steps, because the first step of each starts the node."""
    return [step for name in names for step in SCENARIOS[name][1:]]


LIFE = build_scenario("compact", "bulk")


async def live_through(world: World, scenario: Scenario) -> list[bytes]:
    """Run a scenario. Return every checkpoint that was the newest at the end of a step, oldest first."""
    checkpoints: list[bytes] = []
    for step in scenario:
        await step(world)
        if world.files.exists(checkpoint.NAME):
            data = world.files.content(checkpoint.NAME)
            checkpoints += [data] if data not in checkpoints else []
    if world.node is not None:
        await world.stop()
    return checkpoints


async def state(world: World, files: CrashFiles) -> dict[str, Any]:
    """Start on these files. Returns the state of the broker, and all later deliveries."""
    restarted = World(files, replace(world.clock), deepcopy(world.observed))
    await restarted.start()
    await restarted.settled()
    ledger, hour_log = restarted.broker.attach_state, restarted.broker.scheduling.hour_log
    observed_state = {
        "watermark": ledger.watermark, "epochs": ledger.epochs, "jobs": ledger.jobs, "reserved": ledger.reserved,
        "queues": {topic: restarted.broker.queues(topic) for topic in restarted.broker.topics()},
        "files": sorted(entry.path for entry in hour_log.pending.live_entries()),
        "waiting": restarted.broker.status()["schedule"]["tail_rows"],
        "tick": restarted.broker.scheduling.outcomes.cursor,
        "waiting messages": restarted.broker.pending_messages,
    }  # fmt: skip
    await restarted.advance(AFTER_MS)
    await restarted.consume()
    outcome = await restarted.outcome()
    assert check(restarted.observed, outcome) == []
    observed_state["waiting in the end"] = restarted.broker.pending_messages
    observed_state["rows"] = [(row.place, row.key) for row in outcome.rows]
    await restarted.stop()
    await restarted.abandon()
    return observed_state


def copy_of_files(world: World) -> CrashFiles:
    return world.files.crash(survival="everything")


@pytest.mark.parametrize("names", [("compact", "bulk"), ("compact", "late"), ("plain",)])
@on_node()
async def test_a_start_from_any_earlier_checkpoint_gives_the_same_state(
    world: World, names: tuple[str, ...]
) -> None:
    """Also a checkpoint from before compactions, bulk attaches and removals."""
    saved = await live_through(world, build_scenario(*names))
    assert len(saved) > 1
    expected = await state(world, copy_of_files(world))
    for data in saved:
        files = copy_of_files(world)
        files.replace(checkpoint.NAME, data)
        assert await state(world, files) == expected


@on_node()
async def test_a_checkpoint_that_has_forgotten_what_is_settled_is_noticed(world: World) -> None:
    """The control of the test above: a start from this checkpoint delivers messages a second time."""
    await live_through(world, LIFE)
    files = copy_of_files(world)
    saved = checkpoint.load(files)
    assert saved is not None
    facts = msgspec.structs.replace(saved.facts, settled_before_ms=-(1 << 62))
    none = np.empty(0, np.int64)
    checkpoint.save(files, checkpoint.encode(checkpoint.Checkpoint(facts, none, none)))
    with pytest.raises(AssertionError, match="doubled"):
        await state(world, files)


def remove(files: CrashFiles, folder: str) -> None:
    for name in files.list_dir(folder):
        files.remove(f"{folder}/{name}")


@pytest.mark.parametrize("lost", ["checkpoint", "damaged checkpoint", "queues", "keys", "commits"])
@on_node()
async def test_deleted_caches_are_rebuilt(world: World, lost: str) -> None:
    """A start needs only the log and the data files. In each case the checkpoint is lost or damaged, too."""
    await live_through(world, LIFE)
    expected = await state(world, copy_of_files(world))
    files = copy_of_files(world)
    if lost != "damaged checkpoint":
        files.remove(checkpoint.NAME)
    else:
        data = files.content(checkpoint.NAME)
        files.replace(checkpoint.NAME, data[:-1] + bytes([data[-1] ^ 1]))
    if lost == "queues":
        remove(files, "queues")
    elif lost == "keys":
        remove(files, KEYS_FOLDER)
    elif lost == "commits":
        for name in commits(files)[3:]:
            files.remove(f"{DELTA_LOG}/{name}")
    assert await state(world, files) == expected


@on_node(retention_ms=1)
async def test_a_lost_delta_log_is_rebuilt_although_retention_has_removed_its_rows(world: World) -> None:
    """An earlier version lost 100 pending messages without an error: the checkpoint lists the live files."""
    for _ in range(4):
        await world.send("a", [None, SECOND_MS, HOUR_MS, 2 * HOUR_MS], 100_000)
        await world.advance(2 * SECOND_MS)
        await world.compact()
    await world.consume()
    await world.checkpoint()
    await world.apply_retention()
    assert world.broker.log.reader.first_seq > world.broker.attach_state.attach_seq - 12 > 1
    await world.stop()
    remove(world.files, DELTA_LOG)
    await world.start()
    assert world.broker.status()["schedule"]["table_rows"] == 8
    await world.advance(2 * HOUR_MS)
    await world.consume()
    assert check(world.observed, await world.outcome()) == []


@pytest.mark.parametrize(
    "removed", ["log/0000000001.log", "log/0000000002.log", "log/0000000003.log", "pending/bucket="]
)
@on_node()
async def test_a_start_without_a_segment_or_data_file_is_refused_and_names_it(
    world: World, removed: str
) -> None:
    for _ in range(5):
        await world.send("a", [None, None, SECOND_MS, HOUR_MS], 100_000)
        await world.consume()
    await world.compact()
    await world.send("a", [HOUR_MS] * 3, 100_000)
    await world.stop()
    files = copy_of_files(world)
    if removed.startswith("pending/"):
        folder = f"pending/{next(n for n in files.list_dir('pending') if n.startswith('bucket='))}"
        removed = f"{folder}/{files.list_dir(folder)[0]}"
    assert files.exists(removed)
    files.remove(removed)
    with pytest.raises(Corrupt, match=rf"{removed}.*(is missing|if there was one)"):
        await World(files, world.clock).start()


@on_node(retention_ms=1)
async def test_a_start_from_a_snapshot_knows_the_settled_messages_of_removed_rows(
    world: World,
) -> None:
    for _ in range(4):
        await world.send("a", [None, SECOND_MS, HOUR_MS, None, None], 100_000)
        await world.advance(2 * SECOND_MS)
    await world.consume()  # before retention removes the rows
    await world.compact()
    await world.checkpoint()
    await world.apply_retention()
    assert world.broker.log.reader.first_seq > 1
    await world.stop()
    expected = await state(world, copy_of_files(world))
    files = copy_of_files(world)
    files.remove(checkpoint.NAME)
    assert await state(world, files) == expected
    stale = copy_of_files(world)
    saved = checkpoint.load(stale)
    assert saved is not None
    facts = msgspec.structs.replace(saved.facts, log_from_seq=1, meta={}, watermark=1)
    checkpoint.save(
        stale, checkpoint.encode(checkpoint.Checkpoint(facts, saved.settled_due, saved.settled_seq))
    )
    assert await state(world, stale) == expected, "a checkpoint from before retention is not used"
    await world.start()


@on_node()
async def test_a_restart_of_an_empty_log_recovers_nothing(world: World) -> None:
    for _ in range(3):
        await world.restart()
    status = world.broker.status()
    assert (status["log"]["next_seq"], status["watermark"], status["table"]["version"]) == (1, 1, 0)
