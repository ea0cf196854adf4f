"""A broker whose pending table is in an object store that is at times away, slow or wrong."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.bounds import BOUND_S
from tests.node_fixture import RunningNode, eventually
from tests.rounds import rounds
from tests.s3_fixtures import proxy as proxy
from tests.s3_fixtures import server as server
from tests.s3_server import BUCKET, FaultyStore
from tests.spark.due_rows import attach
from tests.spark.traffic import visible

from timeball.broker.tables import table_changes
from timeball.io.clock import ManualClock
from timeball.io.threads import in_thread
from timeball.model import storage_uris
from timeball.model.access import ANONYMOUS
from timeball.model.errors import SetupError, TimeballError, Unavailable
from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS
from timeball.spark.endpoint import Endpoint
from timeball.spark.table_store import open_table
from timeball.table import layout, object_store, pending_table
from timeball.table.attachment import Attachment
from timeball.table.layout import FOLDER
from timeball.table.object_store import FileCache, ObjectStore

pytestmark = pytest.mark.slow
T = TypeVar("T")

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
SOON_MS = 40 * MINUTE_MS


@pytest.fixture(autouse=True)
def _a_file_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows then make several files."""
    monkeypatch.setattr(layout, "FILE_ROWS", 1)


@pytest.fixture
def store(proxy: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    monkeypatch.setattr(table_changes, "FETCH_EVERY_MS", 20)
    return proxy


@dataclass
class World:
    """A broker, its clock and its store. `node` is another one after `restart`."""

    node: RunningNode
    clock: ManualClock
    store: FaultyStore
    uri: str
    data: Path

    def attach(self, name: str, *delays_ms: int) -> None:
        """Let another writer put one file of scheduled messages there, and attach it."""
        with Endpoint(self.node.endpoint) as broker:
            attach(broker, [self.clock.wall + delay for delay in delays_ms], topic=name, job_id=name)

    def cancel(self, *ids: str) -> str:
        """Cancel, and return the one verdict of all ids. Not through a client, which would retry for seconds."""
        found = self.node.run(self.node.broker.cancel(ids=list(ids)))
        [verdict] = {one.verdict for one in found}
        return str(verdict)

    def compact(self) -> None:
        self.node.run(self.node.broker.mover.compact())

    def visible(self, topic: str) -> int:
        with self.node.client() as ball:
            return visible(ball, topic)

    @property
    def cache(self) -> FileCache:
        found = self.node.broker.pending_table.cache
        assert found is not None
        return found

    def table(self) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            return dict(self.node.broker.status()["table"])

        return self.node.run(ask())

    def copies(self) -> list[Path]:
        return list((self.data / FOLDER).glob("bucket=*/*.parquet"))

    def store_bytes(self, path: str) -> bytes:
        return bytes(ObjectStore(self.uri).map_readonly(f"{FOLDER}/{path}"))

    def is_away(self) -> bool:
        return bool(self.table()["problem"])

    def restart(self, **settings: Any) -> None:
        self.node.stop()
        self.node = RunningNode(self.data, self.clock, **{"table": self.uri, "compact_rows": 0, **settings})
        self.node.start()


@pytest.fixture
def world(store: FaultyStore, tmp_path: Path) -> Iterator[World]:
    uri, clock = f"s3://{BUCKET}/{uuid.uuid4().hex}/pending", ManualClock()
    node = RunningNode(tmp_path / "data", clock, table=uri, compact_rows=0)
    node.start()
    made = World(node, clock, store, uri, tmp_path / "data")
    try:
        yield made
    finally:
        store.heal()
        made.node.stop()


# ---- a table that is elsewhere ----------------------------------------------------------------------------------


def test_scheduled_messages_go_there_and_come_back_when_they_are_due(world: World) -> None:
    with world.node.client() as ball:
        for i in range(6):
            ball.send("orders", f"body {i}", after="20m" if i < 3 else "40d", keys=f"key{i}")
        world.compact()
        rows = open_table(world.uri).to_pyarrow_table()
        assert rows.num_rows == 6 and world.table()["version"] == 1
        world.clock.advance(21 * MINUTE_MS)
        eventually(lambda: visible(ball, "orders") == 3, "what was due came out")
        ends = [ball.cancel(key=key)[0].verdict for key in ("key4", "key0", "none")]
        assert ends == ["cancelled", "released", "not_found"]
        world.restart()
    with world.node.client() as ball:
        ends = [ball.cancel(key=key)[0].verdict for key in ("key4", "key5")]
        assert ends == ["already_cancelled", "cancelled"]
        world.clock.advance(41 * DAY_MS)
        eventually(lambda: visible(ball, "orders") == 4, "the one that waited on came out")


def test_a_file_of_another_writer_is_compared_by_its_footer_and_copied_when_it_is_read(world: World) -> None:
    world.attach("far0", *[3 * DAY_MS] * 50_000)
    assert world.copies() == []
    read = [asked for method, path, asked in world.store.asked if method == "GET" and ".parquet" in path]
    assert read and all(asked.startswith("bytes=") for asked in read)
    # Its keys were uploaded beside it: one row is read, from a copy.
    assert world.cancel("far07") == "cancelled"
    assert len(world.copies()) == 1
    assert ObjectStore(world.uri).list_dir(f"{FOLDER}/_keys") == []
    # Copies are removed for others, except those of messages due soon.
    world.cache._size_bytes_max = 1
    world.attach("soon", SOON_MS)
    for day in (1, 2):
        world.attach(f"far{day}", (day + 3) * DAY_MS)
        assert world.cancel(f"far{day}0") == "cancelled"
    names = [path.parent.name for path in world.copies()]
    assert len(names) == 2 and any("T" in name for name in names), "of an hour, and the one used last"


def test_files_that_have_left_are_removed_there_and_here(world: World) -> None:
    world.attach("far", 3 * DAY_MS)
    assert world.cancel("far0") == "cancelled"
    [copy] = world.copies()
    entries = world.node.broker.scheduling.hour_log.pending.live_entries()

    async def remove() -> int:
        gone = Attachment(job="rewrite", job_id="gone", epoch=1, removes=[entries[0].path])
        await world.node.broker.attach(gone)
        return await world.node.loop.run_in_executor(
            world.node.broker.threads.table,
            world.node.broker.pending_table.catalog.delete_removed_files,
            world.node.broker.clock.now_ms() + 1,
        )

    assert world.node.run(remove()) == 1
    assert not copy.exists() and entries[0].path not in ObjectStore(world.uri).sizes()


def test_a_table_of_the_data_folder_moves_when_a_place_is_named(store: FaultyStore, tmp_path: Path) -> None:
    node = RunningNode(tmp_path, ManualClock(), compact_rows=0)
    node.start()
    world = World(node, node._clock, store, f"s3://{BUCKET}/{uuid.uuid4().hex}", tmp_path)  # type: ignore[arg-type]
    world.attach("moved", SOON_MS, 3 * DAY_MS)
    world.restart()
    try:
        assert open_table(world.uri).to_pyarrow_table().num_rows == 2
        world.clock.advance(HOUR_MS)
        eventually(lambda: world.visible("moved") == 1, "it is released from its copy")
    finally:
        world.node.stop()


# ---- a store that is away ---------------------------------------------------------------------------------------


def is_in_time(world: World) -> bool:
    """Check whether an hour without the store delays any message that was attached before."""
    world.attach("soon", *[SOON_MS] * 100)
    # As after a start on a fresh disk: nothing is local that is not fetched ahead.
    for path in list(world.cache._local):
        world.cache._remove(path)
    world.clock.advance(1)
    if table_changes.FETCH_AHEAD_MS > 0:
        eventually(world.copies, "it is fetched ahead")
    world.store.go_away()
    world.clock.advance(SOON_MS)
    with world.node.client() as ball:
        ball.send("marker", "x", after="1ms")
        world.clock.advance(1_000)
        # Messages due later, and those in the log, are released. The ones before them are released, or late.
        eventually(lambda: visible(ball, "marker") == 1, "the marker came out")
        return visible(ball, "soon") == 100


def test_an_hour_without_the_store_makes_nothing_late(world: World) -> None:
    world.attach("far", *[3 * DAY_MS] * 10)
    assert is_in_time(world)
    # A look-up that needs the store gets an error, and is never told that there is no such message.
    with pytest.raises(Unavailable, match="object store"):
        world.cancel("far3")
    assert world.is_away()
    text = world.node.run(world.node.node.metrics.text(ANONYMOUS)).decode()
    assert "timeball_store_up 0.0" in text
    told = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE timeball_store_")}
    assert told == set(re.findall(r"^\| `(timeball_store_\w+)", PAGE.read_text(), re.MULTILINE))
    world.store.heal()
    eventually(lambda: not world.is_away(), "it answers again")
    assert world.cancel("far3") == "cancelled"


def test_a_store_that_is_not_asked_ahead_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without fetching ahead the same hour makes all of it late; and no later than the store is back."""
    monkeypatch.setattr(table_changes, "FETCH_AHEAD_MS", -10_000)  # less what is opened ahead
    assert not is_in_time(world)
    assert world.node.broker.scheduling.scheduler.settled_before_ms <= world.clock.wall - 1_000
    world.store.heal()
    world.clock.advance(1)
    eventually(lambda: world.visible("soon") == 100, "they are released when it is back")


def test_a_restart_in_that_hour_loses_and_doubles_nothing(world: World) -> None:
    world.attach("soon", *[SOON_MS] * 100)
    world.attach("far", *[3 * DAY_MS] * 10)
    eventually(lambda: len(world.copies()) == 1, "one of them is local")
    world.store.go_away()
    world.restart()
    eventually(world.is_away, "the broker says so")
    assert world.table()["version"] == -1
    world.clock.advance(HOUR_MS)
    eventually(lambda: world.visible("soon") == 100, "what is local comes out")
    world.clock.advance(3 * DAY_MS)
    world.store.heal()
    eventually(lambda: world.visible("far") == 10, "the rest comes out when the store is back")
    world.restart()
    world.clock.advance(HOUR_MS)
    assert (world.visible("soon"), world.visible("far")) == (100, 10)


def test_a_start_is_refused_at_the_place_of_another_or_at_one_that_never_answered(
    world: World, tmp_path: Path
) -> None:
    world.attach("mine", 3 * DAY_MS)
    assert "another broker's" in refused(RunningNode(tmp_path / "a", ManualClock(), table=world.uri))
    world.store.go_away()
    assert "--table s3://" in refused(RunningNode(tmp_path / "b", ManualClock(), table=world.uri))
    world.store.heal()
    assert open_table(world.uri).to_pyarrow_table().num_rows == 1


@pytest.mark.parametrize("attaches", [True, False])
def test_of_two_brokers_that_opened_an_empty_table_the_second_stops(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attaches: bool
) -> None:
    """It must take no commit of the other for its own. Its messages stay in its log, and the other broker goes on."""
    monkeypatch.setattr(table_changes, "FETCH_EVERY_MS", HOUR_MS)  # its duties must not be first
    other = RunningNode(tmp_path / "other", world.clock, table=world.uri, compact_rows=0)
    other.start()
    with world.node.client() as ball:
        ball.send_many([{"body": "mine", "after": "40d"}] * 5, topic="mine")
    world.compact()
    with other.client() as ball:
        ball.send_many([{"body": "other", "after": "40d"}] * 3, topic="other")
    mover, catalog = other.broker.mover, other.broker.pending_table.catalog
    with pytest.raises(SetupError, match="has 1 files that this data folder's log does not know"):
        if attaches:
            other.run(mover.compact())
        else:
            catalog.check_foreign_commits(world.clock.wall)
    assert not mover.has_unfinished_attach and not list(
        other.broker.scheduling.hour_log.pending.live_entries()
    )
    other.stop()
    world.attach("more", 3 * DAY_MS)
    assert open_table(world.uri).to_pyarrow_table().num_rows == 6
    again = RunningNode(tmp_path / "other", world.clock, table=f"{world.uri}-other", compact_rows=0)
    again.start()
    again.run(again.broker.mover.compact())
    assert open_table(f"{world.uri}-other").to_pyarrow_table().num_rows == 3
    again.stop()


def test_a_row_number_of_another_broker_does_not_count_as_a_commit(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit has no files, so it does not show yet that the table is shared. The own file is in the table."""
    monkeypatch.setattr(table_changes, "FETCH_EVERY_MS", HOUR_MS)  # its duties must not be first
    other = RunningNode(tmp_path / "other", world.clock, table=world.uri, compact_rows=0)
    other.start()
    with other.client() as ball:
        ball.send_many([{"body": "now"}] * 50, topic="other")
    other.run(other.broker.mover.compact(even_without_rows=True))
    world.attach("mine", 3 * DAY_MS)
    assert open_table(world.uri).to_pyarrow_table().num_rows == 1
    with pytest.raises(SetupError):
        other.broker.pending_table.catalog.check_foreign_commits(world.clock.wall)
    other.stop()


def refused(node: RunningNode) -> str:
    """Return the reason why a node does not start."""
    with pytest.raises(SetupError) as refusal:
        node.start()
    node.loop.call_soon_threadsafe(node.loop.stop)
    node._thread.join()
    node.loop.close()
    for one in node._shortened:
        one.end()
    return str(refusal.value)


# ---- a store that takes requests and answers none -----------------------------------------------------------------


def begin(world: World, work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin a call that needs the store. Return when it waits for an answer."""
    before = world.store.hanging
    begun = asyncio.run_coroutine_threadsafe(work, world.node.loop)
    eventually(lambda: world.store.hanging > before, "a request hangs")
    return begun


def test_nothing_waits_for_a_store_that_is_silent_but_what_needs_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ANSWER_S", BOUND_S)  # longer than all that follows
    broker = world.node.broker
    world.attach("far", *[3 * DAY_MS] * 10)
    world.attach("soon", *[SOON_MS] * 100)
    eventually(world.copies, "what is due soon is local")
    with world.node.client() as ball:
        ball.send("kept", "x", after="20m")
        world.store.break_next("silent", "PUT", "_delta_log", times=1 << 30)
        commit = begin(world, broker.mover.compact())
        world.store.go_away("silent")
        look_up = begin(world, broker.cancel(ids=["far3"]))
        # Neither has an answer during all of this.
        world.clock.advance(SOON_MS)
        eventually(lambda: world.visible("soon") == 100 and world.visible("kept") == 1, "all are released")
        assert ball.send("orders", "x").seq
        world.node.run(world.node.node.maintenance.checkpoint())
        assert not commit.done() and not look_up.done()
    world.node.run(world.node.node.stop())
    assert world.store.hanging >= 2, "the stop has not waited for them"
    with pytest.raises(Unavailable, match="the broker stops"):
        look_up.result(BOUND_S)  # its error passes through the loop, and may arrive after the stop
    world.node.end_loop()
    world.store.heal()
    world.node.start()
    eventually(lambda: not world.node.broker.mover.has_unfinished_attach, "the table follows the log")
    world.clock.advance(HOUR_MS)
    assert [world.visible(topic) for topic in ("soon", "kept", "orders")] == [100, 1, 1]


def test_a_call_that_needs_a_silent_store_fails_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ANSWER_S", 0.2)
    monkeypatch.setattr(pending_table, "START_ANSWER_S", 0.2)
    # Abandoned requests end sooner: Arrow creates no second file system in a process while a request is in flight.
    monkeypatch.setattr(storage_uris, "_REQUEST_TIMEOUT_S", 0.3)
    world.restart()
    world.attach("far", *[3 * DAY_MS] * 10)
    world.attach("soon", *[SOON_MS] * 100)
    eventually(world.copies, "what is due soon is local")
    world.store.go_away("silent")
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"does not answer: no answer within 0\.2 s; ask again later"):
            world.cancel("far3")
    with pytest.raises(Unavailable, match="does not answer"):
        world.compact()
    # A start waits for it no longer, either.
    world.restart()
    assert world.is_away() and world.table()["version"] == -1
    world.clock.advance(SOON_MS)
    eventually(lambda: world.visible("soon") == 100, "what is local comes out")
    world.store.heal()
    eventually(lambda: not world.is_away(), "it answers again")
    assert world.cancel("far3") == "cancelled"


# ---- a store that is wrong now and then ---------------------------------------------------------------------------


FAULTS = [
    ("unavailable", "PUT", "_delta_log", 20),  # longer than delta-rs waits
    ("lost_answer", "PUT", "_delta_log", 1),
    ("stale_list", "GET", "_delta_log/00000000000000000001", 50),
]
MORE_FAULTS = [
    ("slow", "PUT", "_delta_log", 1),
    ("slow", "GET", ".parquet", 5),
    ("unavailable", "PUT", "_delta_log", 1),
    ("unavailable", "PUT", ".parquet", 1),
    ("unavailable", "PUT", ".parquet", 20),
    ("unavailable", "GET", ".parquet", 20),
    ("lost_answer", "PUT", ".parquet", 1),
    ("lost_answer", "DELETE", "_keys", 1),
    ("stale_list", "GET", ".parquet", 50),
]


@pytest.mark.siege
@pytest.mark.parametrize(
    ("fault", "method", "part", "times"), [*FAULTS, *MORE_FAULTS[: rounds(0, len(MORE_FAULTS))]]
)
def test_each_scheduled_message_is_there_once_whatever_the_store_does(
    world: World, fault: Any, method: str, part: str, times: int
) -> None:
    world.attach("before", SOON_MS)
    world.store.break_next(fault, method, part, times=times)
    for name in ("a", "b"):
        for _ in range(100):
            try:
                world.attach(name, SOON_MS, 3 * DAY_MS)
                break
            except TimeballError:
                world.clock.advance(1)
    world.store.heal()
    eventually(lambda: not world.node.broker.mover.has_unfinished_attach, "the table follows the log")
    seqs = open_table(world.uri).to_pyarrow_table()["seq"].to_pylist()
    assert len(seqs) == len(set(seqs)) == 5
    world.restart()
    world.clock.advance(HOUR_MS)
    for name in ("before", "a", "b"):
        eventually(lambda name=name: world.visible(name) == 1, name)  # type: ignore[misc]


def test_a_damaged_copy_is_fetched_again(world: World) -> None:
    world.attach("soon", *[SOON_MS] * 1_000)
    eventually(world.copies, "it is fetched ahead")
    world.node.stop()
    [copy] = world.copies()
    data = bytearray(copy.read_bytes())
    data[len(data) // 3] ^= 1
    copy.write_bytes(data)
    world.node.start()
    eventually(lambda: world.table()["missing_files"] == 0, "it is looked at")
    world.clock.advance(HOUR_MS)
    eventually(lambda: world.visible("soon") == 1_000, "it is released")
    assert world.copies()[0].read_bytes() != bytes(data)


def test_a_damaged_file_in_the_store_makes_its_own_scheduled_messages_late_alone(world: World) -> None:
    world.attach("damaged", SOON_MS)
    world.attach("whole", SOON_MS)
    at = ObjectStore(world.uri)
    [name] = [
        f"{FOLDER}/{entry.path}"
        for entry in world.node.broker.scheduling.hour_log.pending.live_entries()
        if b"damaged0" in bytes(at.map_readonly(f"{FOLDER}/{entry.path}"))
    ]
    good = at.map_readonly(name)
    bad = bytearray(good)
    bad[len(bad) // 3] ^= 1
    at.put(name, pa.py_buffer(bytes(bad)))
    world.cache._remove(name.partition("/")[2])
    world.clock.advance(HOUR_MS)
    eventually(lambda: world.visible("whole") == 1, "the other one is released")
    eventually(lambda: world.table()["missing_files"] == 1, "the broker says so")
    at.put(name, good)
    eventually(lambda: world.visible("damaged") == 1, "it is released when it is put right")


# ---- another program works on it ----------------------------------------------------------------------------------


def delta(world: World) -> DeltaTable:
    return open_table(world.uri)


def vacuum(table: DeltaTable) -> None:
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)


def look(world: World) -> None:
    world.node.run(world.node.node.maintenance.watch.watch_table())


@pytest.mark.parametrize("stage", ["while it runs", "before a start"])
def test_files_optimized_by_another_program_stay_live(world: World, stage: str) -> None:
    for name in ("one", "two"):
        world.attach(name, 3 * DAY_MS, SOON_MS)
    if stage == "before a start":
        world.node.stop()
    delta(world).optimize.compact()
    if stage == "before a start":
        world.node = RunningNode(world.data, world.clock, table=world.uri, compact_rows=0)
        world.node.start()
    look(world)
    assert world.table()["last_foreign_commit"].startswith("OPTIMIZE") and world.table()["lost_files"] == 0
    live = {entry.path for entry in world.node.broker.scheduling.hour_log.pending.live_entries()}
    assert {uri.partition("/pending/")[2].replace("%3D", "=") for uri in delta(world).file_uris()} == live
    vacuum(delta(world))  # of what was optimized, by now
    assert world.node.run(in_table_thread(world)) == 0
    look(world)
    assert world.table()["lost_files"] == 0
    world.clock.advance(4 * DAY_MS)
    eventually(lambda: world.visible("one") + world.visible("two") == 4, "all came out")


async def in_table_thread(world: World) -> int:
    return await in_thread(
        world.node.broker.threads.table, world.node.broker.pending_table.catalog._vacuum, 0
    )


def test_files_vacuumed_by_another_program_are_restored_or_delay_no_others(world: World) -> None:
    """Within seconds of its OPTIMIZE. Copies of files due soon are local. The others are the operator's task."""
    for name in ("one", "two"):
        world.attach(name, SOON_MS, 3 * DAY_MS)
    lost = [e for e in world.node.broker.scheduling.hour_log.pending.live_entries() if "T" not in e.bucket]
    contents = {entry.path: world.store_bytes(entry.path) for entry in lost}
    table = delta(world)
    table.optimize.compact()
    vacuum(table)
    look(world)
    assert (world.table()["lost_files"], world.table()["lost_rows"]) == (2, 2)
    world.attach("three", SOON_MS)  # the broker goes on
    world.clock.advance(SOON_MS)
    eventually(lambda: sum(map(world.visible, ("one", "two", "three"))) == 3, "what is here came out")
    world.clock.advance(4 * DAY_MS)
    for path, content in contents.items():
        ObjectStore(world.uri).put(f"{FOLDER}/{path}", pa.py_buffer(content))
    look(world)
    assert world.table()["lost_files"] == 0
    eventually(lambda: sum(map(world.visible, ("one", "two"))) == 4, "and the rest")
