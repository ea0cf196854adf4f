"""A broker whose pending table is in an object store that at times does not answer, is slow or gives wrong answers."""

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
        """Let another writer put a file of messages of the topic `name` into the store, and attach it.

        Their ids are name0, name1, …
        """
        with Endpoint(self.node.endpoint) as broker:
            attach(broker, [self.clock.wall + delay for delay in delays_ms], topic=name, job_id=name)

    def cancel(self, *ids: str) -> str:
        """Cancel, and return the one verdict of all ids. Not through a client, which would retry for seconds."""
        verdicts = self.node.run(self.node.broker.cancel(ids=list(ids)))
        [name] = {verdict.verdict for verdict in verdicts}
        return str(name)

    def compact(self) -> None:
        """Move the scheduled messages from the log to the table."""
        self.node.run(self.node.broker.mover.compact())

    def visible(self, topic: str) -> int:
        """The number of visible messages in a topic."""
        with self.node.client() as ball:
            return visible(ball, topic)

    @property
    def cache(self) -> FileCache:
        cache = self.node.broker.pending_table.cache
        assert cache is not None
        return cache

    def table(self) -> dict[str, Any]:
        async def read_status() -> dict[str, Any]:
            return dict(self.node.broker.status()["table"])

        return self.node.run(read_status())

    def copies(self) -> list[Path]:
        """The local copies of data files."""
        return list((self.data / FOLDER).glob("bucket=*/*.parquet"))

    def store_bytes(self, path: str) -> bytes:
        return bytes(ObjectStore(self.uri).map_readonly(f"{FOLDER}/{path}"))

    def is_away(self) -> bool:
        """Check whether the status shows a problem with the store."""
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
    world = World(node, clock, store, uri, tmp_path / "data")
    try:
        yield world
    finally:
        store.heal()
        world.node.stop()


# ---- a table in an object store ----------------------------------------------------------------------------------


def test_messages_compacted_to_an_object_store_are_released_when_due(world: World) -> None:
    with world.node.client() as ball:
        for number in range(6):
            ball.send("orders", f"body {number}", after="20m" if number < 3 else "40d", keys=f"key{number}")
        world.compact()
        rows = open_table(world.uri).to_pyarrow_table()
        assert rows.num_rows == 6 and world.table()["version"] == 1
        world.clock.advance(21 * MINUTE_MS)
        eventually(lambda: visible(ball, "orders") == 3, "the due messages are released")
        verdicts = [ball.cancel(key=key)[0].verdict for key in ("key4", "key0", "none")]
        assert verdicts == ["cancelled", "released", "not_found"]
        world.restart()
    with world.node.client() as ball:
        verdicts = [ball.cancel(key=key)[0].verdict for key in ("key4", "key5")]
        assert verdicts == ["already_cancelled", "cancelled"]
        world.clock.advance(41 * DAY_MS)
        eventually(lambda: visible(ball, "orders") == 4, "the remaining message is released")


def test_a_file_of_another_writer_is_compared_by_its_footer_and_copied_when_it_is_read(world: World) -> None:
    world.attach("far0", *[3 * DAY_MS] * 50_000)
    assert world.copies() == []
    ranges = [
        byte_range for method, path, byte_range in world.store.asked if method == "GET" and ".parquet" in path
    ]
    assert ranges and all(byte_range.startswith("bytes=") for byte_range in ranges)
    # The key index was uploaded as well, so the look-up needs only this file. It reads one row, from a copy.
    assert world.cancel("far07") == "cancelled"
    assert len(world.copies()) == 1
    assert ObjectStore(world.uri).list_dir(f"{FOLDER}/_keys") == []
    # A full cache removes copies, except those of messages due soon.
    world.cache._size_bytes_max = 1
    world.attach("soon", SOON_MS)
    for day in (1, 2):
        world.attach(f"far{day}", (day + 3) * DAY_MS)
        assert world.cancel(f"far{day}0") == "cancelled"
    names = [path.parent.name for path in world.copies()]
    assert len(names) == 2 and any("T" in name for name in names), (
        "the copy with messages due soon, and the copy that was used last"
    )


def test_removed_files_are_deleted_in_the_store_and_locally(world: World) -> None:
    world.attach("far", 3 * DAY_MS)
    assert world.cancel("far0") == "cancelled"
    [copy] = world.copies()
    entries = world.node.broker.scheduling.hour_log.pending.live_entries()

    async def remove() -> int:
        rewrite = Attachment(job="rewrite", job_id="gone", epoch=1, removes=[entries[0].path])
        await world.node.broker.attach(rewrite)
        return await world.node.loop.run_in_executor(
            world.node.broker.threads.table,
            world.node.broker.pending_table.catalog.delete_removed_files,
            world.node.broker.clock.now_ms() + 1,
        )

    assert world.node.run(remove()) == 1
    assert not copy.exists() and entries[0].path not in ObjectStore(world.uri).sizes()


def test_a_local_table_is_uploaded_when_a_store_is_configured(store: FaultyStore, tmp_path: Path) -> None:
    node = RunningNode(tmp_path, ManualClock(), compact_rows=0)
    node.start()
    world = World(node, node._clock, store, f"s3://{BUCKET}/{uuid.uuid4().hex}", tmp_path)  # type: ignore[arg-type]
    world.attach("moved", SOON_MS, 3 * DAY_MS)
    world.restart()
    try:
        assert open_table(world.uri).to_pyarrow_table().num_rows == 2
        world.clock.advance(HOUR_MS)
        eventually(lambda: world.visible("moved") == 1, "the message is released")
    finally:
        world.node.stop()


# ---- a store that does not answer -----------------------------------------------------------------------------------


def is_in_time(world: World) -> bool:
    """Check whether an hour without the store delays any message that was attached before."""
    world.attach("soon", *[SOON_MS] * 100)
    # As after a start on an empty disk: only files that are fetched ahead are local.
    for path in list(world.cache._local):
        world.cache._remove(path)
    world.clock.advance(1)
    if table_changes.FETCH_AHEAD_MS > 0:
        eventually(world.copies, "the file is fetched ahead")
    world.store.go_away()
    world.clock.advance(SOON_MS)
    with world.node.client() as ball:
        ball.send("marker", "x", after="1ms")
        world.clock.advance(1_000)
        # The marker is released without the store. By then, the messages due before are released or late.
        eventually(lambda: visible(ball, "marker") == 1, "the marker is released")
        return visible(ball, "soon") == 100


def test_an_hour_without_answers_of_the_store_makes_no_message_late(world: World) -> None:
    world.attach("far", *[3 * DAY_MS] * 10)
    assert is_in_time(world)
    # A look-up that needs the store gets an error, never the verdict `not_found`.
    with pytest.raises(Unavailable, match="object store"):
        world.cancel("far3")
    assert world.is_away()
    text = world.node.run(world.node.node.metrics.text(ANONYMOUS)).decode()
    assert "timeball_store_up 0.0" in text
    metrics = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE timeball_store_")}
    assert metrics == set(re.findall(r"^\| `(timeball_store_\w+)", PAGE.read_text(), re.MULTILINE))
    world.store.heal()
    eventually(lambda: not world.is_away(), "the store answers again")
    assert world.cancel("far3") == "cancelled"


def test_a_store_that_is_not_asked_ahead_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without fetching ahead the same hour makes all messages late, until the store answers again."""
    # Negative, because files are opened some time ahead.
    monkeypatch.setattr(table_changes, "FETCH_AHEAD_MS", -10_000)
    assert not is_in_time(world)
    assert world.node.broker.scheduling.scheduler.settled_before_ms <= world.clock.wall - 1_000
    world.store.heal()
    world.clock.advance(1)
    eventually(lambda: world.visible("soon") == 100, "the messages are released when the store answers again")


def test_a_restart_while_the_store_does_not_answer_loses_and_doubles_no_message(world: World) -> None:
    world.attach("soon", *[SOON_MS] * 100)
    world.attach("far", *[3 * DAY_MS] * 10)
    eventually(lambda: len(world.copies()) == 1, "the file of messages due soon is local")
    world.store.go_away()
    world.restart()
    eventually(world.is_away, "the status shows that the store does not answer")
    assert world.table()["version"] == -1
    world.clock.advance(HOUR_MS)
    eventually(lambda: world.visible("soon") == 100, "the messages of the local file are released")
    world.clock.advance(3 * DAY_MS)
    world.store.heal()
    eventually(
        lambda: world.visible("far") == 10, "the other messages are released when the store answers again"
    )
    world.restart()
    world.clock.advance(HOUR_MS)
    assert (world.visible("soon"), world.visible("far")) == (100, 10)


def test_a_start_is_refused_with_a_store_of_another_broker_or_one_that_does_not_answer(
    world: World, tmp_path: Path
) -> None:
    world.attach("mine", 3 * DAY_MS)
    assert "another broker's" in refusal_of(RunningNode(tmp_path / "a", ManualClock(), table=world.uri))
    world.store.go_away()
    assert "--table s3://" in refusal_of(RunningNode(tmp_path / "b", ManualClock(), table=world.uri))
    world.store.heal()
    assert open_table(world.uri).to_pyarrow_table().num_rows == 1


@pytest.mark.parametrize("attaches", [True, False])
def test_the_second_of_two_brokers_that_opened_the_same_empty_table_stops(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attaches: bool
) -> None:
    """It must not count commits of the first broker as its own. Its messages stay in its log. The first one continues.

    `attaches`: the second broker finds the commit by an attach, otherwise by a check.
    """
    # So that the periodic task of the node does not find the commit first.
    monkeypatch.setattr(table_changes, "FETCH_EVERY_MS", HOUR_MS)
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
    restarted = RunningNode(tmp_path / "other", world.clock, table=f"{world.uri}-other", compact_rows=0)
    restarted.start()
    restarted.run(restarted.broker.mover.compact())
    assert open_table(f"{world.uri}-other").to_pyarrow_table().num_rows == 3
    restarted.stop()


def test_a_row_number_in_a_commit_of_another_broker_does_not_count_as_committed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit has no files, so it does not show yet that the table is shared. The file of `world` is committed."""
    # So that the periodic task of the node does not find the commit first.
    monkeypatch.setattr(table_changes, "FETCH_EVERY_MS", HOUR_MS)
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


def refusal_of(node: RunningNode) -> str:
    """Return the reason why a node does not start."""
    with pytest.raises(SetupError) as refusal:
        node.start()
    node.loop.call_soon_threadsafe(node.loop.stop)
    node._thread.join()
    node.loop.close()
    for loop in node._shortened:
        loop.end()
    return str(refusal.value)


# ---- a store that accepts requests and does not answer --------------------------------------------------------------


def begin(world: World, work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin a call that needs the store. Return when it waits for an answer."""
    before = world.store.hanging
    result = asyncio.run_coroutine_threadsafe(work, world.node.loop)
    eventually(lambda: world.store.hanging > before, "a request hangs")
    return result


def test_only_calls_that_need_the_store_wait_for_a_silent_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ANSWER_S", BOUND_S)  # longer than this test takes
    broker = world.node.broker
    world.attach("far", *[3 * DAY_MS] * 10)
    world.attach("soon", *[SOON_MS] * 100)
    eventually(world.copies, "the file of messages due soon is local")
    with world.node.client() as ball:
        ball.send("in-log", "x", after="20m")
        world.store.break_next("silent", "PUT", "_delta_log", times=1 << 30)
        commit = begin(world, broker.mover.compact())
        world.store.go_away("silent")
        look_up = begin(world, broker.cancel(ids=["far3"]))
        # Neither call gets an answer while the lines below run.
        world.clock.advance(SOON_MS)
        eventually(lambda: world.visible("soon") == 100 and world.visible("in-log") == 1, "all are released")
        assert ball.send("orders", "x").seq
        world.node.run(world.node.node.maintenance.checkpoint())
        assert not commit.done() and not look_up.done()
    world.node.run(world.node.node.stop())
    assert world.store.hanging >= 2, "the stop does not wait for the requests"
    with pytest.raises(Unavailable, match="the broker stops"):
        look_up.result(BOUND_S)  # its error passes through the loop, and may arrive after the stop
    world.node.end_loop()
    world.store.heal()
    world.node.start()
    eventually(lambda: not world.node.broker.mover.has_unfinished_attach, "the table follows the log")
    world.clock.advance(HOUR_MS)
    assert [world.visible(topic) for topic in ("soon", "in-log", "orders")] == [100, 1, 1]


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
    eventually(world.copies, "the file of messages due soon is local")
    world.store.go_away("silent")
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"does not answer: no answer within 0\.2 s; ask again later"):
            world.cancel("far3")
    with pytest.raises(Unavailable, match="does not answer"):
        world.compact()
    # A start waits no longer than START_ANSWER_S.
    world.restart()
    assert world.is_away() and world.table()["version"] == -1
    world.clock.advance(SOON_MS)
    eventually(lambda: world.visible("soon") == 100, "the messages of the local file are released")
    world.store.heal()
    eventually(lambda: not world.is_away(), "the store answers again")
    assert world.cancel("far3") == "cancelled"


# ---- a store with faults ---------------------------------------------------------------------------


# A fault, the method and a part of the path of the requests that have it, and their number.
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
def test_each_message_is_in_the_table_once_after_any_fault_of_the_store(
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
    eventually(world.copies, "the file is fetched ahead")
    world.node.stop()
    [copy] = world.copies()
    data = bytearray(copy.read_bytes())
    data[len(data) // 3] ^= 1
    copy.write_bytes(data)
    world.node.start()
    eventually(lambda: world.table()["missing_files"] == 0, "the copy was checked")
    world.clock.advance(HOUR_MS)
    eventually(lambda: world.visible("soon") == 1_000, "the messages are released")
    assert world.copies()[0].read_bytes() != bytes(data)


def test_a_damaged_file_in_the_store_delays_only_its_own_messages(world: World) -> None:
    world.attach("damaged", SOON_MS)
    world.attach("whole", SOON_MS)
    store = ObjectStore(world.uri)
    [name] = [
        f"{FOLDER}/{entry.path}"
        for entry in world.node.broker.scheduling.hour_log.pending.live_entries()
        if b"damaged0" in bytes(store.map_readonly(f"{FOLDER}/{entry.path}"))
    ]
    content = store.map_readonly(name)
    damaged = bytearray(content)
    damaged[len(damaged) // 3] ^= 1
    store.put(name, pa.py_buffer(bytes(damaged)))
    world.cache._remove(name.partition("/")[2])
    world.clock.advance(HOUR_MS)
    eventually(lambda: world.visible("whole") == 1, "the message of the other file is released")
    eventually(lambda: world.table()["missing_files"] == 1, "the status shows the file")
    store.put(name, content)
    eventually(lambda: world.visible("damaged") == 1, "its message is released when the file is restored")


# ---- another program changes the table ------------------------------------------------------------------------------


def delta(world: World) -> DeltaTable:
    return open_table(world.uri)


def vacuum(table: DeltaTable) -> None:
    """Delete all files that this version of the table does not contain, as another program may do."""
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)


def watch_table(world: World) -> None:
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
    watch_table(world)
    assert world.table()["last_foreign_commit"].startswith("OPTIMIZE") and world.table()["lost_files"] == 0
    live = {entry.path for entry in world.node.broker.scheduling.hour_log.pending.live_entries()}
    assert {uri.partition("/pending/")[2].replace("%3D", "=") for uri in delta(world).file_uris()} == live
    vacuum(delta(world))  # deletes the files that OPTIMIZE has replaced
    assert world.node.run(vacuum_in_broker(world)) == 0
    watch_table(world)
    assert world.table()["lost_files"] == 0
    world.clock.advance(4 * DAY_MS)
    eventually(lambda: world.visible("one") + world.visible("two") == 4, "all are released")


async def vacuum_in_broker(world: World) -> int:
    """Run the broker's own vacuum now. Returns the number of deleted files."""
    return await in_thread(
        world.node.broker.threads.table, world.node.broker.pending_table.catalog._vacuum, 0
    )


def test_files_vacuumed_by_another_program_are_restored_or_delay_no_others(world: World) -> None:
    """The broker restores files of messages due soon from its copies. The operator must restore the others."""
    for name in ("one", "two"):
        world.attach(name, SOON_MS, 3 * DAY_MS)
    lost = [
        entry
        for entry in world.node.broker.scheduling.hour_log.pending.live_entries()
        if "T" not in entry.bucket
    ]
    contents = {entry.path: world.store_bytes(entry.path) for entry in lost}
    table = delta(world)
    table.optimize.compact()
    vacuum(table)
    watch_table(world)
    assert (world.table()["lost_files"], world.table()["lost_rows"]) == (2, 2)
    world.attach("three", SOON_MS)  # the broker continues
    world.clock.advance(SOON_MS)
    eventually(
        lambda: sum(map(world.visible, ("one", "two", "three"))) == 3,
        "the messages of the present files are released",
    )
    world.clock.advance(4 * DAY_MS)
    for path, content in contents.items():
        ObjectStore(world.uri).put(f"{FOLDER}/{path}", pa.py_buffer(content))
    watch_table(world)
    assert world.table()["lost_files"] == 0
    eventually(
        lambda: sum(map(world.visible, ("one", "two"))) == 4,
        "the messages of the restored files are released",
    )
