"""Another program changes the pending table, at each stage of a broker's life. The log decides, and no row is lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from tests.broker.third_party import OPERATIONS, Operation, RealWorld
from tests.crash.checker import check
from tests.crash.lives import run
from tests.crash.world import HOUR_MS, World
from tests.rounds import rounds
from tests.table.test_catalog import seqs

from timeball.model.errors import MissingFile, OverLimit
from timeball.table import catalog as catalog_module
from timeball.table import layout, live_files, merging

Stage = Callable[[World, Callable[[], None]], Awaitable[None]]

DELAYS = [HOUR_MS, HOUR_MS + 1, 2 * HOUR_MS, 30 * HOUR_MS, 80 * HOUR_MS]


@pytest.fixture(autouse=True)
def _a_file_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows then make several files."""
    monkeypatch.setattr(layout, "FILE_ROWS", 1)


def uri_of(world: World) -> str:
    return str(world.broker.status()["table"]["uri"])


async def watch(world: World) -> None:
    """Run the periodic check of the table now."""
    assert world.node is not None
    await world.node.maintenance.watch.watch_table()


def live_seqs(world: World) -> list[int]:
    """The numbers of all rows in the files that the schedule uses."""
    files = world.broker.scheduling.hour_log.pending.all()
    parts = [file.positions_between((0, 0), (1 << 62, 0))[1].tolist() for file in files]
    return sorted(seq for part in parts for seq in part)


# ---- stages ---------------------------------------------------------------------------------------------------


async def before_the_start(world: World, operate: Callable[[], None]) -> None:
    await world.stop()
    operate()
    await world.start()


async def while_it_runs(world: World, operate: Callable[[], None]) -> None:
    operate()
    await watch(world)


async def before_a_release(world: World, operate: Callable[[], None]) -> None:
    operate()
    await world.advance(HOUR_MS)


async def before_a_compaction(world: World, operate: Callable[[], None]) -> None:
    await world.send("a", DELAYS)
    operate()
    await world.compact()


async def within_an_attach(world: World, operate: Callable[[], None]) -> None:
    """After the append of the row to the log, before the commit to the table."""
    catalog, commit = world.broker.pending_table.catalog, catalog_module.Catalog.commit

    def operate_and_commit(*args: object) -> int:
        del catalog.commit
        operate()
        return commit(catalog, *args)  # type: ignore[arg-type]

    catalog.commit = operate_and_commit
    await world.send("a", DELAYS)
    await world.compact()


async def before_a_rewrite(world: World, operate: Callable[[], None]) -> None:
    operate()
    assert await world.broker.mover.rewrite() is not None


async def before_a_restart(world: World, operate: Callable[[], None]) -> None:
    operate()
    await world.restart()


async def before_a_kill(world: World, operate: Callable[[], None]) -> None:
    operate()
    await world.abandon()
    await world.start()


async def after_a_kill(world: World, operate: Callable[[], None]) -> None:
    await world.abandon()
    operate()
    await world.start()


async def twice(world: World, operate: Callable[[], None]) -> None:
    operate()
    await watch(world)
    operate()
    await world.merge()


STAGES: dict[str, Stage] = {
    stage.__name__.replace("_", " "): stage
    for stage in (
        before_the_start, while_it_runs, before_a_release, before_a_compaction, within_an_attach, before_a_rewrite,
        before_a_restart, before_a_kill, after_a_kill, twice,
    )
}  # fmt: skip
# Of all other pairs, which take minutes, CI runs a fifth: each operation at two stages.
FAST = {
    ("OPTIMIZE", "while it runs"), ("OPTIMIZE and VACUUM", "while it runs"), ("ADD COLUMN", "while it runs"),
    ("DELETE and VACUUM", "before a release"), ("DELETE and VACUUM", "after a kill"), ("VACUUM", "within an attach"),
    ("OPTIMIZE and VACUUM", "before a rewrite"), ("append-only", "before a rewrite"), ("UPDATE", "before the start"),
}  # fmt: skip


def cases() -> list[object]:
    """The operations and stages of this run. Those that are not in FAST are slow."""
    return [
        pytest.param(
            operation, stage, id=f"{operation}, {stage}",
            marks=() if (operation, stage) in FAST else pytest.mark.slow,
        )
        for row, stage in enumerate(STAGES)
        for column, operation in enumerate(OPERATIONS)
        if (operation, stage) in FAST or (row + column) % rounds(5, 1) == 0
    ]  # fmt: skip


async def _check_operation(world: RealWorld, operation: Operation, stage: Stage) -> None:
    """Let another program change the table at a stage, and check that no message is lost, doubled or early."""
    for _ in range(2):
        await world.send("a", DELAYS)
        await world.compact()
    await world.send("b", [*DELAYS, 5])
    await world.cancel(["k00001", "k00006"])
    uri = uri_of(world)
    await stage(world, lambda: operation(uri))
    await watch(world)
    # The table and the log have the same rows, and a vacuum, which runs a day later, deletes no live file.
    await world.send("b", [HOUR_MS])
    await world.compact()
    catalog = world.broker.pending_table.catalog
    before = {entry.path for entry in world.broker.scheduling.hour_log.pending.live_entries()}
    assert set(pa.table(DeltaTable(uri).get_add_actions())["path"].to_pylist()) == before
    assert seqs(DeltaTable(uri)) == live_seqs(world)
    await asyncio.get_running_loop().run_in_executor(world.broker.threads.table, catalog._vacuum, 0)
    assert {path for path in before if world.files.exists(f"pending/{path}")} == before
    assert world.broker.pending_table.status()["lost_files"] == 0
    for delay_ms in (1, HOUR_MS, HOUR_MS, 28 * HOUR_MS, 50 * HOUR_MS, 10 * HOUR_MS):
        await world.advance(delay_ms)
        await world.consume()
    assert check(world.observed, await world.outcome()) == []
    assert len((await world.outcome()).rows) == len(world.observed.sent) - 2
    await world.restart()
    assert check(world.observed, await world.outcome()) == []
    await world.stop()


def run_world(folder: Path, test: Callable[[RealWorld], Awaitable[None]]) -> None:
    """Run a test with a broker on a real disk."""

    async def main() -> None:
        world = RealWorld(folder)
        await world.start()
        try:
            await test(world)
        finally:
            await world.abandon()
        assert world.unheard == []

    run(main())


@pytest.fixture(autouse=True)
def _merges_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FILES_MIN", 2)


@pytest.mark.siege
@pytest.mark.parametrize(("operation", "stage"), cases())
def test_no_operation_of_another_program_makes_a_message_lost_doubled_or_early(
    tmp_path: Path, operation: str, stage: str
) -> None:
    run_world(tmp_path, lambda world: _check_operation(world, OPERATIONS[operation], STAGES[stage]))


async def _check_stale_operation(world: RealWorld, operate: Callable[[DeltaTable], object]) -> None:
    """Another program opened the table, and works on it only when the broker has changed it."""
    for _ in range(2):
        await world.send("a", DELAYS)
        await world.compact()
    table = DeltaTable(uri_of(world))
    assert await world.broker.mover.rewrite() is not None
    await world.send("a", DELAYS)
    await world.compact()
    with suppress(CommitFailedError):
        operate(table)
    await watch(world)
    await world.send("b", [HOUR_MS])
    await world.compact()
    assert seqs(DeltaTable(uri_of(world))) == live_seqs(world)
    await world.advance(81 * HOUR_MS)
    assert check(world.observed, await world.outcome()) == []
    assert len((await world.outcome()).rows) == len(world.observed.sent)
    await world.stop()


@pytest.mark.parametrize(
    "operate",
    [
        pytest.param(lambda table: table.optimize.compact(), id="OPTIMIZE"),
        pytest.param(lambda table: table.delete("seq > 0"), id="DELETE"),
        # It deletes files that its version of the table does not contain.
        pytest.param(
            lambda table: table.vacuum(
                retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True
            ),
            id="VACUUM",
        ),
    ],
)
def test_an_operation_on_an_older_version_of_the_table_loses_no_message(
    tmp_path: Path, operate: Callable[[DeltaTable], object]
) -> None:
    run_world(tmp_path, lambda world: _check_stale_operation(world, operate))


# ---- the status ------------------------------------------------------------------------------------------


async def _check_foreign_commit(world: RealWorld) -> None:
    await world.send("a", DELAYS)
    await world.compact()
    await world.send("a", DELAYS)
    await world.compact()
    uri, status = uri_of(world), world.broker.pending_table.status
    assert status()["foreign_commits"] == 0
    OPERATIONS["OPTIMIZE"](uri)
    await world.until(lambda: status()["foreign_commits"], "the periodic task has found the commit")
    assert status()["last_foreign_commit"] == "OPTIMIZE at version 3"
    assert status()["version"] == DeltaTable(uri).version() == 4
    assert seqs(DeltaTable(uri)) == live_seqs(world)
    # `dataChange` is false, so that a stream which follows the table does not read these rows again.
    entry = (world.files.root / "pending/_delta_log" / f"{4:020d}.json").read_text().splitlines()  # type: ignore[attr-defined]
    actions = [next(iter(json.loads(line).items())) for line in entry]
    assert {body["dataChange"] for kind, body in actions if kind in ("add", "remove")} == {False}
    await watch(world)
    assert (status()["foreign_commits"], DeltaTable(uri).version()) == (1, 4)
    await world.stop()


def test_the_watch_finds_a_foreign_commit_and_the_status_shows_it(tmp_path: Path) -> None:
    run_world(tmp_path, _check_foreign_commit)


async def _check_missing_file(world: RealWorld) -> None:
    """The hard link is missing too, as on a file system without links, or after `rm -r`."""
    keys = await world.send("a", [HOUR_MS, 5 * HOUR_MS, 9 * HOUR_MS])
    await world.compact()
    entry = min(world.broker.scheduling.hour_log.pending.live_entries(), key=lambda entry: entry.min_due_ms)
    copy = world.files.map_readonly(f"pending/{entry.path}").to_pybytes()
    live_files.remove(world.files, entry.path)
    world.clock.advance(6 * HOUR_MS)
    world.broker.ticker.wake()

    async def released_keys() -> list[str]:
        return [row.key for row in (await world.outcome()).rows]

    outcomes = world.broker.scheduling.scheduler.outcomes
    await world.until(
        lambda: outcomes.cursor.local_index or outcomes.cursor.tick_ms, "the second message is released"
    )
    await world.until(
        lambda: world.broker.scheduling.hour_log.pending.missing, "the file of the first message is missing"
    )
    while await released_keys() != [keys[1]]:
        await asyncio.sleep(0.01)
    assert world.failure is None
    assert world.broker.scheduling.scheduler.settled_before_ms <= entry.min_due_ms
    await world.checkpoint()
    with pytest.raises(MissingFile, match="put this file back from a copy"):
        await asyncio.get_running_loop().run_in_executor(
            world.broker.threads.reader,
            world.broker.pending_table.catalog.live_files.map_readonly,
            f"pending/{entry.path}",
        )
    await world.broker.mover.rewrite()  # chooses other files
    await world.stop()
    with pytest.raises(MissingFile, match=f"{entry.path} is missing: restore this file from a copy"):
        await world.start()
    world.files.replace(f"pending/{entry.path}", copy)
    await world.start()
    await world.settled()
    assert sorted(await released_keys()) == sorted(keys[:2])
    world.files.remove(f"pending/{entry.path}")
    await watch(world)  # finds nothing, because the link exists again
    await world.advance(9 * HOUR_MS)
    assert sorted(await released_keys()) == sorted(keys)
    assert check(world.observed, await world.outcome()) == []
    await world.stop()


def test_a_missing_file_delays_only_its_own_messages(tmp_path: Path) -> None:
    run_world(tmp_path, _check_missing_file)


async def _check_restored_file(world: RealWorld) -> None:
    keys = await world.send("a", [HOUR_MS, 5 * HOUR_MS])
    await world.compact()
    entry = min(world.broker.scheduling.hour_log.pending.live_entries(), key=lambda entry: entry.min_due_ms)
    copy = world.files.map_readonly(f"pending/{entry.path}").to_pybytes()
    live_files.remove(world.files, entry.path)
    OPERATIONS["append-only"](uri_of(world))  # after a foreign commit, the watch looks for all files
    await watch(world)
    assert (
        world.broker.pending_table.status()["lost_files"],
        world.broker.pending_table.status()["lost_rows"],
    ) == (1, 1)
    world.clock.advance(2 * HOUR_MS)
    world.broker.ticker.wake()
    world.files.replace(f"pending/{entry.path}", copy)
    await watch(world)
    await world.settled()
    assert [row.key for row in (await world.outcome()).rows] == keys[:1]
    assert world.broker.pending_table.status()["lost_files"] == 0
    await world.stop()


def test_messages_of_a_restored_file_are_released_without_a_restart(tmp_path: Path) -> None:
    run_world(tmp_path, _check_restored_file)


# ---- a full disk ----------------------------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir()
    if subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounting a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A file system with few inodes. A full XFS allocates inodes when they are needed, and may have none left."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=64m,nr_inodes=400", "none") as folder:
        yield folder


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(300 << 20)
    mkfs = shutil.which("mkfs.xfs")
    if mkfs is None or subprocess.run([mkfs, "-q", str(image)], check=False).returncode:
        pytest.skip("this machine cannot make an XFS")
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as folder:
        yield folder


def use_up_inodes(filler: Path, spare: int) -> None:
    """Leave room for `spare` files."""
    count = 0
    with suppress(OSError):
        while True:
            (filler / str(count)).touch()
            count += 1
    for number in range(spare):
        (filler / str(number)).unlink()


def use_up_bytes(filler: Path, spare: int) -> None:
    """Leave room for `spare` pages."""
    with (filler / "bytes").open("wb", buffering=0) as file:
        for size_bytes in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(size_bytes))
        file.truncate(max(0, file.tell() - 4096 * spare))
        os.fsync(file.fileno())


async def _check_full_disk(folder: Path, spare: int, fill: Callable[[Path, int], None]) -> None:
    world = RealWorld(folder / "d")
    await world.start()
    try:
        await world.send("a", DELAYS)
        await world.compact()
        await world.send("a", DELAYS)
        await world.checkpoint()
        (filler := folder / "filler").mkdir()
        fill(filler, spare)
        refused = 0
        assert world.node is not None
        for step in (
            world.compact,
            world.merge,
            world.checkpoint,
            world.apply_retention,
            world.node.maintenance.index_keys,
        ):
            try:
                await step()
            except OverLimit as error:
                assert "disk" in str(error)
                refused += 1
        assert refused or spare > 8
        assert world.failure is None, world.failure
        assert world.node._failed is not None and not world.node._failed.done()
        shutil.rmtree(filler)
        await watch(world)
        # Files of failed attempts were deleted. Otherwise each attempt on a full disk would leave more.
        known_paths = {
            entry.path for entry in world.broker.scheduling.hour_log.pending.live_entries()
        } | world.broker.pending_table.catalog._removed_ms.keys()
        pending = folder / "d" / "pending"
        assert {str(path.relative_to(pending)) for path in pending.glob("bucket=*/*")} <= known_paths
        await world.compact()
        await world.merge()
        await world.checkpoint()
        assert seqs(DeltaTable(uri_of(world))) == live_seqs(world)
        await world.advance(81 * HOUR_MS)
        assert len((await world.outcome()).rows) == len(world.observed.sent)
        assert check(world.observed, await world.outcome()) == []
        await world.restart()
        assert check(world.observed, await world.outcome()) == []
        await world.stop()
    finally:
        await world.abandon()


@pytest.mark.parametrize("spare", [0, 3, pytest.param(7, marks=pytest.mark.slow), 12])
def test_a_disk_without_inodes_postpones_changes_of_the_table_and_loses_no_message(
    few_inodes: Path, spare: int
) -> None:
    """Any step of a compaction may fail: a folder, a file, its key index, the entry of the Delta log."""
    run(_check_full_disk(few_inodes, spare, use_up_inodes))


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.parametrize("spare", range(0, 40, rounds(9, 3)))
def test_a_full_xfs_postpones_changes_of_the_table_and_loses_no_message(xfs: Path, spare: int) -> None:
    run(_check_full_disk(xfs, spare, use_up_bytes))
