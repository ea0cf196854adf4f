"""Data files between replicas, over a wire that a test can cut and damage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.bounds import BOUND_S

from timeball.cluster.protocol.messages import BEGINNING, Complete, File, Have, Message, Want
from timeball.cluster.protocol.replica import Lead, Peer, Replica, Role, Rules, Source
from timeball.cluster.transport.data_files import (
    GIVE_UP_MS,
    PIECE_BYTES,
    SUFFIX,
    UNNAMED_MS,
    CommittedFiles,
    DataFiles,
)
from timeball.io.clock import ManualClock
from timeball.io.files import RealFiles
from timeball.model.errors import MissingFile, NotFound, NotLeader
from timeball.table.attachment import FileEntry
from timeball.table.live_files import LIVE_FOLDER, live_name

SET = ("a/1", "b/1", "c/1")
RETENTION_MS = 60_000


class Rows:
    """A replica's rows about data files, and the state after the committed ones."""

    def __init__(self) -> None:
        self.next_seq, self.committed = 1, CommittedFiles()
        self.states = {1: CommittedFiles(1)}  # by the sequence number after the rows that were applied
        self.deleted_before: list[int] = []

    def attach(self, *paths: str, removes: tuple[str, ...] = (), size_bytes: int = 0) -> int:
        """Append a row that adds and removes these files. Returns its number."""
        entries = {**self.states[self.next_seq].entries, **{path: entry(path, size_bytes) for path in paths}}
        return self._append(entries={path: added for path, added in entries.items() if path not in removes})

    def snapshot(self, log_from_seq: int) -> int:
        """Append a snapshot that allows to delete the log below this row. Returns its number."""
        return self._append(log_from_seq=log_from_seq)

    def _append(self, **change: Any) -> int:
        self.next_seq += 1
        self.states[self.next_seq] = self.states[self.next_seq - 1]._replace(seq=self.next_seq, **change)
        return self.next_seq - 1

    def apply(self, seq: int) -> None:
        """Commit the rows below this sequence number."""
        self.committed = self.states[seq]

    def delete_segments_before(self, before_seq: int) -> None:
        self.deleted_before.append(before_seq)


def entry(path: str, size_bytes: int) -> FileEntry:
    """Return the entry of a data file with one row."""
    return FileEntry(
        path=path, bucket=path.split("/")[0].removeprefix("bucket="), rows=1, size_bytes=size_bytes,
        min_due_ms=1, max_due_ms=1, min_seq=1, max_seq=1,
    )  # fmt: skip


class Machine:
    """One replica: its files, the thread of its data files (`work`), and the Link of that thread."""

    def __init__(self, world: World, name: str, folder: Path) -> None:
        self.world, self.name, self.folder = world, name, folder
        self.files, self.log = RealFiles(folder), Rows()
        self.files.make_dir(".")
        self.failures: list[BaseException] = []
        self.state = Replica(Rules(f"{name}/1"), Role.FOLLOWER, promised=1)
        self.work = self.start_work()

    def make_work(self) -> DataFiles:
        """Make the thread of the data files, without a start."""
        self.work = DataFiles(
            self.files, self.log, self, self.world.clock, committed=lambda: self.log.committed,
            retention_ms=RETENTION_MS, on_failure=self.failures.append,
        )  # fmt: skip
        return self.work

    def start_work(self) -> DataFiles:
        """Make and start the thread of the data files."""
        self.make_work().start()
        return self.work

    def send_soon(self, node: str, message: Message, *, answers: bool) -> None:
        assert answers is (self.state.lead is None)
        self.world.send(self.name, node, message)

    def post(self, call: Callable[[], None]) -> None:
        call()

    def write(self, size_bytes: int) -> str:
        """Write a data file of random bytes. Returns its path in the table."""
        path = f"bucket=2026-11-24/{os.urandom(16).hex()}.parquet"
        target = self.folder / "pending" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(os.urandom(size_bytes))
        return path

    def content(self, path: str) -> bytes | None:
        """Read a data file. Returns None if there is none."""
        target = self.folder / "pending" / path
        try:
            return target.read_bytes()
        except FileNotFoundError:  # not checked before the read, because the file may be removed in between
            return None

    def incomplete_files(self) -> list[Path]:
        """List the files that have not arrived as a whole."""
        return list((self.folder / "pending").rglob(f"*{SUFFIX}"))


class World:
    """Three replicas. a leads, and the others know it once they are connected.

    `change` may change or drop each message on its way.
    """

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.sent: list[tuple[str, str, Message]] = []
        self.change: Callable[[Message], Message | None] = lambda message: message
        self.machines: dict[str, Machine] = {}
        for name in "abc":
            self.machines[name] = Machine(self, name, folder / name)
        self.a, self.b, self.c = (self.machines[name] for name in "abc")
        lead = Lead(1, 0, SET, {})
        self.a.state = replace(self.a.state, role=Role.LEADER, lead=lead)

    def connect(self, *names: str) -> None:
        """Connect these replicas with the leader."""
        for name in names:
            self.machines[name].state = replace(self.machines[name].state, source=Source("a", matched=True))
        peers = {name: Peer(f"{name}/1", BEGINNING, acked=BEGINNING) for name in names}
        self._lead(lambda lead: replace(lead, peers={**lead.peers, **peers}))

    def disconnect(self, name: str) -> None:
        """End the connection of a replica with the leader."""
        self._lead(
            lambda lead: replace(
                lead, peers={node: peer for node, peer in lead.peers.items() if node != name}
            )
        )
        self.machines[name].state = replace(self.machines[name].state, source=None)
        self.a.work.closed(name)
        self.machines[name].work.closed("a")

    def _lead(self, change: Callable[[Lead], Lead]) -> None:
        assert self.a.state.lead
        self.a.state = replace(self.a.state, lead=change(self.a.state.lead))

    def send(self, node: str, to: str, message: Message) -> None:
        """Carry a message, unless `change` drops it or the connection has ended."""
        self.sent.append((node, to, message))
        assert self.a.state.lead is not None
        other = to if node == "a" else node
        changed = self.change(message)
        if other in self.a.state.lead.peers and changed is not None:
            self.machines[to].work.received(node, changed)

    def until(self, condition: Callable[[], object]) -> None:
        """Let time pass until the condition is true."""
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < deadline, f"not true in time; the last messages: {self.sent[-8:]}"
            time.sleep(0.005)
            self.clock.advance(20)

    def close(self) -> None:
        for machine in self.machines.values():
            machine.work.stop()
            assert not machine.failures


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_a_file_counts_when_a_majority_has_it_under_its_name(world: World) -> None:
    path = world.a.write(3 * PIECE_BYTES + 17)
    shipped = world.a.work.ship([path])
    world.clock.advance(10_000)
    time.sleep(0.2)
    assert not shipped.done(), "no other replica has it"
    world.connect("b")
    world.until(shipped.done)
    assert shipped.exception() is None
    assert world.b.content(path) == world.a.content(path)
    assert world.c.content(path) is None


def test_all_files_of_an_attach_reach_all_connected_replicas(world: World) -> None:
    paths = [world.a.write(size) for size in (1, PIECE_BYTES, PIECE_BYTES + 1, 500, 70_000)]
    world.connect("b", "c")
    shipped = world.a.work.ship(paths)
    world.until(shipped.done)
    world.until(
        lambda: all(
            machine.content(path) == world.a.content(path) for machine in (world.b, world.c) for path in paths
        )
    )


def test_with_acks_all_a_file_counts_when_every_replica_has_it(world: World) -> None:
    world.a.state = replace(world.a.state, rules=Rules("a/1", acks_all=True))
    path = world.a.write(100)
    world.connect("b")
    shipped = world.a.work.ship([path])
    world.until(lambda: ("b", "a", Have(1, 100, path)) in world.sent)
    world.until(lambda: world.clock.boot_ms() > 1_010_000)
    assert not shipped.done()
    world.connect("c")
    world.until(shipped.done)


def test_a_shipment_of_a_replica_that_leads_no_more_fails(world: World) -> None:
    shipped = world.a.work.ship([world.a.write(100)])
    world.a.state = replace(world.a.state, role=Role.STOPPED)
    world.until(shipped.done)
    with pytest.raises(NotLeader):
        shipped.result()


def test_a_shipment_of_a_missing_file_fails(world: World) -> None:
    shipped = world.a.work.ship([f"bucket=2026-11-24/{'0' * 32}.parquet"])
    world.until(shipped.done)
    with pytest.raises(NotFound):
        shipped.result()


@pytest.mark.parametrize("piece", [0, 1, 3])
def test_a_file_that_was_damaged_on_the_way_is_requested_again(world: World, piece: int) -> None:
    path, damaged = world.a.write(4 * PIECE_BYTES), []

    def damage(message: Message) -> Message:
        if (
            isinstance(message, File)
            and message.chunk
            and message.position == piece * PIECE_BYTES
            and not damaged
        ):
            # The file must not have its final name before it is complete.
            assert world.b.content(path) is None
            damaged.append(message)
            return replace(
                message, chunk=b"\0" + message.chunk[1:] if message.chunk[0] else b"\1" + message.chunk[1:]
            )
        return message

    world.change = damage
    world.connect("b")
    shipped = world.a.work.ship([path])
    world.until(shipped.done)
    assert damaged and world.b.content(path) == world.a.content(path)
    confirmations = [message for *_, message in world.sent if isinstance(message, Have)]
    requests = [message for *_, message in world.sent if message == Want(1, 0, path)]
    assert len(confirmations) == 1
    assert len(requests) == 2, "the file was requested again from its beginning"


def test_a_file_whose_connection_ends_is_dropped_and_requested_on_the_next_one(
    world: World,
) -> None:
    path = world.a.write(4 * PIECE_BYTES)
    dropped: list[Message] = []

    def drop_one(message: Message) -> Message | None:
        if isinstance(message, File) and message.position == 2 * PIECE_BYTES and not dropped:
            dropped.append(message)
            return None
        return message

    world.change = drop_one
    world.connect("b")
    shipped = world.a.work.ship([path])
    world.until(lambda: dropped and world.b.incomplete_files())
    world.disconnect("b")
    world.until(lambda: not world.b.incomplete_files())
    # A late message of the ended connection must do no harm.
    world.b.work.received("a", dropped[0])
    world.connect("b")
    world.until(shipped.done)
    assert world.b.content(path) == world.a.content(path)


def test_a_confirmation_of_an_ended_connection_does_not_count(world: World) -> None:
    world.a.state = replace(world.a.state, rules=Rules("a/1", acks_all=True))
    path = world.a.write(100)
    world.connect("b")
    shipped = world.a.work.ship([path])
    world.until(lambda: world.b.content(path) is not None)
    world.disconnect("b")
    (world.b.folder / "pending" / path).unlink()  # the disk was wiped
    world.connect("b", "c")
    world.until(shipped.done)
    assert world.b.content(path) == world.c.content(path) == world.a.content(path)


def test_a_late_confirmation_does_not_count_for_the_node_s_next_disk(world: World) -> None:
    world.a.work.stop()
    work = world.a.make_work()  # its thread is not started: the test runs its calls
    path = world.a.write(100)
    world.connect("b")
    shipped = work.ship([path])
    work.received("b", Have(1, 100, path))
    wiped = Peer("b/2", BEGINNING, acked=BEGINNING)
    world._lead(lambda lead: replace(lead, replicas=("a/1", "b/2", "c/1"), peers={"b": wiped}))
    while not work._calls.empty():
        work.run_once(0)
    assert not shipped.done()
    work.received("b", Have(1, 100, path))
    work.run_once(0)
    assert shipped.done()
    work.start()


def test_a_path_outside_the_table_is_ignored(world: World) -> None:
    world.connect("b")
    world.b.work.received("a", File(1, 0, 3, "../../etc/passwd", 0, b""))
    world.a.work.received("b", Want(1, 0, "../LOCK"))
    path = world.a.write(10)
    shipped = world.a.work.ship([path])
    world.until(shipped.done)
    assert all(getattr(message, "path", path) == path for *_, message in world.sent)


def test_a_replica_fetches_the_missing_files_that_committed_rows_name(world: World) -> None:
    needed, removed = world.a.write(PIECE_BYTES + 5), world.a.write(70)
    world.b.log.attach(removed, size_bytes=70)
    world.b.log.attach(needed, removes=(removed,), size_bytes=PIECE_BYTES + 5)
    seq = world.b.log.attach("bucket=2026-11-24/" + "f" * 32 + ".parquet", size_bytes=9)  # not committed yet
    world.connect("b")
    world.b.state = replace(world.b.state, role=Role.LEARNER)
    world.b.log.apply(seq)
    world.until(lambda: world.b.content(needed))
    world.until(lambda: any(isinstance(message, Complete) for *_, message in world.sent))
    assert world.b.content(needed) == world.a.content(needed) and world.b.content(removed) is None
    first = next(number for number, (*_, message) in enumerate(world.sent) if isinstance(message, Complete))
    assert world.sent[first] == ("b", "a", Complete(1, seq))
    pieces = [message for *_, message in world.sent[:first] if isinstance(message, File) and message.chunk]
    assert len(pieces) == 2, "COMPLETE follows the last piece"


def test_a_new_leader_is_complete_once_it_has_fetched_its_missing_files(world: World) -> None:
    path = world.b.write(100)
    seq = world.a.log.attach(path, size_bytes=100) + 1
    world.a.state = replace(world.a.state, committed_seq=seq)
    world.a.log.apply(seq)
    complete = world.a.work.complete()
    world.connect("c")  # which does not have the file either
    world.until(lambda: any(message == File(1, 0, 0, path, 0, b"") for *_, message in world.sent))
    assert not complete.done()
    world.connect("b")
    world.until(complete.done)
    assert world.a.content(path) == world.b.content(path)


def test_a_new_leader_gives_up_if_no_replica_has_a_missing_file(world: World) -> None:
    path = "bucket=2026-11-24/" + "f" * 32 + ".parquet"
    seq = world.a.log.attach(path, size_bytes=100) + 1
    world.a.state = replace(world.a.state, committed_seq=seq)
    world.a.log.apply(seq)
    assert not world.a.work.problem
    complete, began_ms = world.a.work.complete(), world.clock.boot_ms()
    world.connect("c")
    world.until(lambda: world.a.work.problem)
    assert path in world.a.work.problem and not complete.done()
    world.until(lambda: complete.done() or world.clock.advance(500))
    with pytest.raises(MissingFile, match=path):
        complete.result()
    assert world.clock.boot_ms() - began_ms > GIVE_UP_MS


@pytest.mark.parametrize("holder", ["a", "b"])
def test_a_file_whose_name_another_program_has_removed_comes_back_from_its_link(
    world: World, holder: str
) -> None:
    """Both at the replica that needs the file and at the one that is asked for it."""
    keeper = world.machines[holder]
    path = keeper.write(100)
    keeper.files.make_dir(LIVE_FOLDER)
    keeper.files.link(f"pending/{path}", live_name(path))
    keeper.files.remove(f"pending/{path}")
    seq = world.a.log.attach(path, size_bytes=100) + 1
    world.a.state = replace(world.a.state, committed_seq=seq)
    world.a.log.apply(seq)
    world.connect("b")
    complete, began_ms = world.a.work.complete(), world.clock.boot_ms()
    world.until(complete.done)
    assert keeper.content(path) == world.a.content(path) is not None
    assert world.clock.boot_ms() - began_ms < GIVE_UP_MS


def test_files_that_left_are_removed_after_the_retention_time(world: World) -> None:
    stays, leaves, unnamed = world.b.write(10), world.b.write(10), world.b.write(10)
    world.b.work.stop()
    world.b.start_work()  # lists the files in the folder
    world.b.log.apply(world.b.log.attach(stays, leaves, size_bytes=10) + 1)
    world.until(lambda: stays in world.b.work._live.entries)
    seq = world.b.log.attach(removes=(leaves,)) + 1
    began_ms = world.clock.boot_ms()
    world.b.log.apply(seq)
    world.until(lambda: world.clock.boot_ms() - began_ms > RETENTION_MS - 10_000 or world.clock.advance(500))
    assert world.b.content(leaves), "its readers have some seconds left"
    world.until(lambda: world.b.content(leaves) is None)
    assert world.b.content(unnamed), "an attach may still name it"
    world.clock.advance(UNNAMED_MS)
    world.until(lambda: world.b.content(unnamed) is None)
    assert world.b.content(stays)


def test_segments_are_deleted_up_to_the_row_in_a_committed_snapshot(world: World) -> None:
    first = world.b.log.snapshot(7)
    second = world.b.log.snapshot(9)
    world.b.log.apply(first + 1)
    world.until(lambda: world.b.log.deleted_before == [7])
    world.b.log.apply(second + 1)
    world.until(lambda: world.b.log.deleted_before == [7, 9])


def test_incomplete_files_of_an_earlier_run_are_removed(world: World) -> None:
    world.c.work.stop()
    path = world.c.write(10)
    incomplete = world.c.folder / "pending" / f"{path}{SUFFIX}"
    incomplete.write_bytes(b"half")
    world.c.start_work()
    world.until(lambda: not incomplete.exists())
    assert world.c.content(path)
