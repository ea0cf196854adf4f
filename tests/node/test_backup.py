"""Backups of a folder in use: consistent, complete up to their row, usable, and refused when damaged."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from tests.node_fixture import RunningNode, eventually, running_node

from timeball import Timeball
from timeball.cli.sql import count_waiting
from timeball.io.clock import SystemClock
from timeball.io.files import RealFiles
from timeball.model.errors import Corrupt, NotFound, SetupError
from timeball.model.message import Kind
from timeball.node import backup
from timeball.node.backup import Manifest
from timeball.node.data_folder import check_folder


def make_backup(source: Path, target: Path) -> Manifest:
    """Back up a folder. Returns the manifest."""
    return backup.backup(RealFiles(source), RealFiles(target), SystemClock())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@pytest.fixture
def stopped(data: Path) -> Iterator[Path]:
    """A folder with messages in the log and in the pending table."""
    with running_node(data) as node, node.client() as ball:
        ball.send_many(
            [
                {"body": f"{number}", "after": f"{7_200 + number}s", "keys": f"k{number}"}
                for number in range(500)
            ],
            topic="later",
        )
        assert ball.compact() is not None
        ball.send_many(
            [{"body": f"{number}", "after": f"{7_200 + number}s"} for number in range(50)], topic="tail"
        )
    yield data


class DiskPulledOut(Exception):
    """The disk of the target is pulled out during a backup."""


class Load:
    """Sends, cancels and compacts until the end of the block, and records the acknowledged messages and verdicts.

    The kinds of messages: "now" without a delay, "soon" due during the test, and "far" due after it.
    """

    def __init__(self, node: RunningNode) -> None:
        self._node, self._stopping = node, threading.Event()
        self.receipts: dict[str, tuple[int, str]] = {}  # id -> (seq, kind)
        self.cancelled: dict[str, str] = {}  # id -> verdict
        self.rounds = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        """Run rounds until the end of the block. Keeps the error that ends them."""
        try:
            with self._node.client() as ball:
                while not self._stopping.is_set():
                    self._round(ball, random.Random(self.rounds))
                    self.rounds += 1
        except BaseException as error:  # `__exit__` raises it in the thread of the test
            self.failure = error

    def _round(self, ball: Timeball, chance: random.Random) -> None:
        """Send messages of all kinds, cancel some of those due after the test, and compact in each third round."""
        for kind, after in [("now", None), ("soon", 0.02), ("far", 7_200.0), ("far", 90_000.0)] * 5:
            rows = [
                {
                    "body": bytes(200),
                    **({} if after is None else {"after": timedelta(seconds=after + chance.random())}),
                }
            ] * 20
            summary = ball.send_many(rows, topic="load")
            first_seq = summary.ranges[0][0]
            ids = list(summary.ids)
            self.receipts |= {id: (seq, kind) for seq, id in enumerate(ids, first_seq)}
            if kind == "far":
                ids_to_cancel = chance.sample(ids, 5)
                self.cancelled |= {
                    verdict.subject: verdict.verdict for verdict in ball.cancel(ids=ids_to_cancel)
                }
        if self.rounds % 3 == 2:
            ball.compact()


def test_a_backup_ends_although_rows_are_written_faster_than_it_reads(
    data: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the backup looks for frames after the last whole one, the broker has written more."""
    with running_node(data) as node, node.client() as ball:
        before = ball.send("load", "before")

        def send_and_find(buffer: pa.Buffer, end: int, next_seq: int) -> object:
            ball.send("load", "behind the last frame")
            ball.send("load", "and states that it is on disk")
            return find_later_proof(buffer, end, next_seq)

        find_later_proof = backup.find_later_proof
        monkeypatch.setattr(backup, "find_later_proof", send_and_find)
        manifest = make_backup(data, copy)
    assert manifest.row > before.seq


def test_a_restored_backup_has_each_message_acknowledged_before_it_exactly_once(
    data: Path, copy: Path
) -> None:
    with running_node(data) as node, Load(node) as load:
        eventually(lambda: load.rounds >= 4 or load.failure, "some compactions")
        before = dict(load.receipts)
        cancelled_before = dict(load.cancelled)
        manifest = make_backup(data, copy)
        rounds_before = load.rounds
        eventually(lambda: load.rounds > rounds_before or load.failure, "another round")
    assert max(seq for seq, _ in before.values()) < manifest.row and len(load.receipts) > len(before)
    restored = data.with_name("restored")
    backup.restore(RealFiles(copy), RealFiles(restored))
    with running_node(restored) as node, node.client() as ball:
        acknowledged = {id: kind for id, (seq, kind) in load.receipts.items() if seq < manifest.row}
        assert before.keys() <= acknowledged.keys()
        # Messages that became due meanwhile are released now. Then each message is pending, cancelled, or visible once.
        due_ids = {id for id, kind in acknowledged.items() if kind != "far"}
        visible: list[str] = []

        def all_are_visible() -> bool:
            visible.extend(ball.browse_batch("load").column("unique_key").to_pylist())
            return due_ids <= set(visible)

        eventually(all_are_visible, "released")
        assert sorted(visible) == sorted(due_ids), "exactly once"
        far = [id for id, kind in acknowledged.items() if kind == "far"]
        states = {id: ball.get(id).state for id in sample_of(far, 400) + list(cancelled_before)}
        for id, verdict in cancelled_before.items():
            assert (verdict, states[id]) == ("cancelled", "cancelled")
        assert {states[id] for id in sample_of(far, 400) if id not in load.cancelled} == {"waiting"}
        check_balance(ball, node.endpoint)


def sample_of(ids: list[str], count: int) -> list[str]:
    """Choose up to `count` of the ids, always the same ones."""
    return random.Random(1).sample(ids, min(count, len(ids)))


def check_balance(ball: Timeball, endpoint: str) -> None:
    """Check in the log that each accepted message is either released, cancelled or pending."""
    status = ball.status()
    kinds: dict[int, set[int]] = {Kind.SCHEDULED: set(), Kind.RELEASE: set(), Kind.CANCEL: set()}
    rows = ball.read_log(
        status["log"]["first_seq"],
        status["log"]["durable_seq"],
        kinds=list(kinds),
        columns=["seq", "kind", "source_seq"],
    )
    for batch in rows:
        for row in batch.to_pylist():
            number = row["seq"] if row["kind"] == Kind.SCHEDULED else row["source_seq"]
            assert number not in kinds[row["kind"]], f"{number} has two rows of this kind"
            kinds[row["kind"]].add(number)
    accepted, released, cancelled = kinds.values()
    assert not released & cancelled and released | cancelled <= accepted
    waiting = count_waiting(endpoint)
    assert len(accepted) == len(released) + len(cancelled) + sum(waiting.hours.values())


def test_an_interrupted_backup_continues_without_copying_finished_files_again(
    stopped: Path, copy: Path
) -> None:
    done: list[int] = []

    def pull_out(done_bytes: int, _all: int) -> None:
        done.append(done_bytes)
        if len(done) == 3:
            raise DiskPulledOut

    with pytest.raises(DiskPulledOut):
        backup.backup(RealFiles(stopped), RealFiles(copy), SystemClock(), pull_out)
    with pytest.raises(SetupError, match="not finished"):
        backup.restore(RealFiles(copy), RealFiles(copy.with_name("early")))
    times_ns = {path: path.stat().st_mtime_ns for path in copy.rglob("*.parquet")}
    assert times_ns
    manifest = make_backup(stopped, copy)
    assert not (copy / backup.PARTIAL).exists()
    finished = list(times_ns)[: len(done) - 1]
    assert any(path.stat().st_mtime_ns == times_ns[path] for path in finished), (
        "a finished file is not copied again"
    )
    assert {file.name for file in manifest.files} >= {"FORMAT", "log/0000000001.log"}


def interrupt_at_the_end(source: Path, target: Path) -> None:
    """Stop a backup after it has copied its last file, and before it writes its manifest."""

    def pull_out(done_bytes: int, all_bytes: int) -> None:
        if done_bytes == all_bytes and any(target.glob("FORMAT")):
            raise DiskPulledOut

    with pytest.raises(DiskPulledOut):
        backup.backup(RealFiles(source), RealFiles(target), SystemClock(), pull_out)


def check_copies(manifest: Manifest, source: Path, copy: Path) -> None:
    """Check that each file of the manifest equals the used part of its source."""
    for file in manifest.files:
        assert (copy / file.name).read_bytes() == (source / file.name).read_bytes()[: file.used_bytes]


def test_a_continued_backup_copies_a_segment_that_has_grown_since_again(data: Path, copy: Path) -> None:
    with running_node(data) as node, node.client() as ball:
        ball.send("t", "before the backup")
        interrupt_at_the_end(data, copy)
        ball.send("t", "in the same segment")
        node.run(node.node.broker.log.writer.roll())
        ball.send("t", "in the next one")
        manifest = make_backup(data, copy)
        check_copies(manifest, data, copy)
    restored = copy.with_name("restored")
    backup.restore(RealFiles(copy), RealFiles(restored))
    with running_node(restored) as node, node.client() as ball:
        assert len(ball.browse_batch("t")) == 3


def test_a_continued_backup_copies_the_files_of_a_replaced_source_again(data: Path, copy: Path) -> None:
    for body in ("old", "new"):
        if data.exists():
            interrupt_at_the_end(data, copy)
            data.rename(data.with_name("former"))
        with running_node(data) as node, node.client() as ball:
            ball.send("t", body)
            node.run(node.node.broker.log.writer.roll())
            ball.send("t", body)
    check_copies(make_backup(data, copy), data, copy)


def test_a_continued_backup_copies_a_file_again_that_cannot_be_read(stopped: Path, copy: Path) -> None:
    class UnreadableOnce(RealFiles):
        """A target whose disk cannot read the first segment that it is asked for."""

        failed = ""

        def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
            if not self.failed and name.endswith(".log"):
                self.failed = name
                raise Corrupt(f"{name}: not readable")
            return super().map_readonly(name, at_random=at_random)

    interrupt_at_the_end(stopped, copy)
    target = UnreadableOnce(copy)
    manifest = backup.backup(RealFiles(stopped), target, SystemClock())
    assert target.failed in {file.name for file in manifest.files}
    check_copies(manifest, stopped, copy)


def test_the_folder_of_an_interrupted_restore_is_refused_until_it_is_finished(
    stopped: Path, copy: Path
) -> None:
    make_backup(stopped, copy)
    restored = RealFiles(copy.with_name("restored"))

    def pull_out(_done: int, _all: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup.restore(RealFiles(copy), restored, pull_out)
    with pytest.raises(SetupError, match="restore was not finished"):
        check_folder(restored)
    reports: list[tuple[int, int]] = []
    backup.restore(RealFiles(copy), restored, lambda done, of: reports.append((done, of)))
    assert reports[-1][0] == reports[-1][1] > 0
    check_folder(restored)
    with running_node(restored.root) as node, node.client() as ball:
        assert [verdict.verdict for verdict in ball.cancel(key="k7")] == ["cancelled"]
        schedule = ball.status()["schedule"]
        assert (schedule["table_rows"], schedule["tail_rows"]) == (500, 50)


def test_an_unfinished_restore_continues_with_the_same_backup_only(data: Path, copy: Path) -> None:
    tuesday, restored = copy.with_name("tuesday"), copy.with_name("restored")
    with running_node(data) as node, node.client() as ball:
        ball.send("t", "on Monday")
        make_backup(data, copy)
        node.run(node.node.broker.log.writer.roll())
        ball.send("t", "on Tuesday")
        make_backup(data, tuesday)
    first, last = sorted(tuesday.glob("log/*.log"))
    last.rename(tuesday / "lost")
    with pytest.raises(Corrupt, match="use another backup"):
        backup.restore(RealFiles(tuesday), RealFiles(restored))
    with pytest.raises(SetupError, match="another backup"):
        backup.restore(RealFiles(copy), RealFiles(restored))
    assert (restored / "log" / first.name).read_bytes()[: first.stat().st_size] == first.read_bytes()
    (tuesday / "lost").rename(last)
    backup.restore(RealFiles(tuesday), RealFiles(restored))
    with running_node(restored) as node, node.client() as ball:
        assert len(ball.browse_batch("t")) == 2


@pytest.mark.parametrize("pattern", ["**/*.parquet", "log/*.log"])
@pytest.mark.parametrize("fault", ["changed", "cut", "missing"])
def test_a_restore_refuses_a_damaged_file_by_its_name(
    stopped: Path, copy: Path, pattern: str, fault: str
) -> None:
    make_backup(stopped, copy)
    damaged = next(iter(copy.glob(pattern)))
    content = bytearray(damaged.read_bytes())
    if fault == "missing":
        damaged.unlink()
    elif fault == "cut":
        damaged.write_bytes(content[: len(content) // 100])
    else:
        content[100] ^= 1
        damaged.write_bytes(content)
    with pytest.raises(Corrupt, match=damaged.name):
        backup.restore(RealFiles(copy), RealFiles(copy.with_name("restored")))


def test_backup_and_restore_refuse_folders_with_other_files(
    stopped: Path, copy: Path, tmp_path: Path
) -> None:
    make_backup(stopped, copy)
    with pytest.raises(SetupError, match="holds a whole backup"):
        make_backup(stopped, copy)
    with pytest.raises(SetupError, match="empty folder only"):
        backup.restore(RealFiles(copy), RealFiles(stopped))
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter").write_text("dear")
    with pytest.raises(SetupError, match="not empty"):
        make_backup(stopped, other)
    with pytest.raises(SetupError, match="no backup"):
        backup.restore(RealFiles(other), RealFiles(tmp_path / "new"))
    with pytest.raises(NotFound, match="no log"):
        make_backup(other, tmp_path / "new")
