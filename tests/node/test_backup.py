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


def backed_up(source: Path, target: Path) -> Manifest:
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
            [{"body": f"{i}", "after": f"{7_200 + i}s", "keys": f"k{i}"} for i in range(500)], topic="later"
        )
        assert ball.compact() is not None
        ball.send_many([{"body": f"{i}", "after": f"{7_200 + i}s"} for i in range(50)], topic="tail")
    yield data


class Load:
    """Sends, short delays, cancels and compactions, until stopped. Knows what was acknowledged, and its verdicts."""

    def __init__(self, node: RunningNode) -> None:
        self._node, self._stopping = node, threading.Event()
        self.receipts: dict[str, tuple[int, str]] = {}  # id -> (seq, sort)
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
        try:
            with self._node.client() as ball:
                while not self._stopping.is_set():
                    self._round(ball, random.Random(self.rounds))
                    self.rounds += 1
        except BaseException as error:  # told by the test that waits
            self.failure = error

    def _round(self, ball: Timeball, chance: random.Random) -> None:
        for sort, after in [("now", None), ("soon", 0.02), ("far", 7_200.0), ("far", 90_000.0)] * 5:
            rows = [
                {
                    "body": bytes(200),
                    **({} if after is None else {"after": timedelta(seconds=after + chance.random())}),
                }
            ] * 20
            summary = ball.send_many(rows, topic="load")
            first = summary.ranges[0][0]
            ids = list(summary.ids)
            self.receipts |= {id: (first + at, sort) for at, id in enumerate(ids)}
            if sort == "far":
                wanted = chance.sample(ids, 5)
                self.cancelled |= {v.subject: v.verdict for v in ball.cancel(ids=wanted)}
        if self.rounds % 3 == 2:
            ball.compact()


def test_a_backup_ends_while_rows_are_written_faster_than_it_reads(
    data: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each look behind the last whole frame, more whole frames are there."""
    with running_node(data) as node, node.client() as ball:
        before = ball.send("load", "before")

        def look(buffer: pa.Buffer, end: int, next_seq: int) -> object:
            ball.send("load", "behind the last frame")
            ball.send("load", "and states that it is on disk")
            return find_later_proof(buffer, end, next_seq)

        find_later_proof = backup.find_later_proof
        monkeypatch.setattr(backup, "find_later_proof", look)
        made = backed_up(data, copy)
    assert made.row > before.seq


def test_a_backup_under_load_has_all_that_was_acknowledged_before_it_once(data: Path, copy: Path) -> None:
    with running_node(data) as node, Load(node) as load:
        eventually(lambda: load.rounds >= 4 or load.failure, "some compactions")
        before = dict(load.receipts)
        cancelled_before = dict(load.cancelled)
        made = backed_up(data, copy)
        at = load.rounds
        eventually(lambda: load.rounds > at or load.failure, "it went on")
    assert max(seq for seq, _ in before.values()) < made.row and len(load.receipts) > len(before)
    back = data.with_name("restored")
    backup.restore(RealFiles(copy), RealFiles(back))
    with running_node(back) as node, node.client() as ball:
        acknowledged = {id: sort for id, (seq, sort) in load.receipts.items() if seq < made.row}
        assert before.keys() <= acknowledged.keys()
        # What was due meanwhile is released now: then each message that is not cancelled is waiting, or visible once.
        wanted = {id for id, sort in acknowledged.items() if sort != "far"}
        visible: list[str] = []

        def all_are_visible() -> bool:
            visible.extend(ball.browse_batch("load").column("unique_key").to_pylist())
            return wanted <= set(visible)

        eventually(all_are_visible, "released")
        assert sorted(visible) == sorted(wanted), "exactly once"
        far = [id for id, sort in acknowledged.items() if sort == "far"]
        states = {id: ball.get(id).state for id in chosen(far, 400) + list(cancelled_before)}
        for id, verdict in cancelled_before.items():
            assert (verdict, states[id]) == ("cancelled", "cancelled")
        assert {states[id] for id in chosen(far, 400) if id not in load.cancelled} == {"waiting"}
        check_balance(ball, node.endpoint)


def chosen(ids: list[str], count: int) -> list[str]:
    return random.Random(1).sample(ids, min(count, len(ids)))


def check_balance(ball: Timeball, endpoint: str) -> None:
    """Accepted = released + cancelled + waiting, as the audit counts."""
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
            assert number not in kinds[row["kind"]], f"{number} twice"
            kinds[row["kind"]].add(number)
    accepted, released, cancelled = kinds.values()
    assert not released & cancelled and released | cancelled <= accepted
    waiting = count_waiting(endpoint)
    assert len(accepted) == len(released) + len(cancelled) + sum(waiting.hours.values())


def test_a_backup_that_was_interrupted_is_gone_on_with(stopped: Path, copy: Path) -> None:
    class PulledOut(Exception):
        pass

    done: list[int] = []

    def pull_out(done_bytes: int, _all: int) -> None:
        done.append(done_bytes)
        if len(done) == 3:
            raise PulledOut

    with pytest.raises(PulledOut):
        backup.backup(RealFiles(stopped), RealFiles(copy), SystemClock(), pull_out)
    with pytest.raises(SetupError, match="not finished"):
        backup.restore(RealFiles(copy), RealFiles(copy.with_name("early")))
    kept = {path: path.stat().st_mtime_ns for path in copy.rglob("*.parquet")}
    assert kept
    made = backed_up(stopped, copy)
    assert not (copy / backup.PARTIAL).exists()
    finished = list(kept)[: len(done) - 1]
    assert any(path.stat().st_mtime_ns == kept[path] for path in finished), (
        "what was copied is not copied again"
    )
    assert {file.name for file in made.files} >= {"FORMAT", "log/0000000001.log"}


class Pulled(Exception):
    """The target disk is pulled out."""


def interrupt_at_the_end(source: Path, target: Path) -> None:
    """Stop a backup after it has copied its last file, and before it writes its manifest."""

    def pull_out(done_bytes: int, all_bytes: int) -> None:
        if done_bytes == all_bytes and any(target.glob("FORMAT")):
            raise Pulled

    with pytest.raises(Pulled):
        backup.backup(RealFiles(source), RealFiles(target), SystemClock(), pull_out)


def check_copies(made: Manifest, source: Path, copy: Path) -> None:
    for file in made.files:
        assert (copy / file.name).read_bytes() == (source / file.name).read_bytes()[: file.used_bytes]


def test_a_backup_that_goes_on_after_the_log_has_rolled_copies_the_last_segment_again(
    data: Path, copy: Path
) -> None:
    with running_node(data) as node, node.client() as ball:
        ball.send("t", "before the backup")
        interrupt_at_the_end(data, copy)
        ball.send("t", "in the same segment")
        node.run(node.node.broker.log.writer.roll())
        ball.send("t", "in the next one")
        made = backed_up(data, copy)
        check_copies(made, data, copy)
    back = copy.with_name("restored")
    backup.restore(RealFiles(copy), RealFiles(back))
    with running_node(back) as node, node.client() as ball:
        assert len(ball.browse_batch("t")) == 3


def test_a_backup_that_goes_on_copies_the_files_of_a_replaced_folder_again(data: Path, copy: Path) -> None:
    for body in ("old", "new"):
        if data.exists():
            interrupt_at_the_end(data, copy)
            data.rename(data.with_name("former"))
        with running_node(data) as node, node.client() as ball:
            ball.send("t", body)
            node.run(node.node.broker.log.writer.roll())
            ball.send("t", body)
    check_copies(backed_up(data, copy), data, copy)


def test_a_restore_that_was_interrupted_is_no_data_folder_until_it_is_finished(
    stopped: Path, copy: Path
) -> None:
    backed_up(stopped, copy)
    back = RealFiles(copy.with_name("restored"))

    def pull_out(_done: int, _all: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup.restore(RealFiles(copy), back, pull_out)
    with pytest.raises(SetupError, match="restore was not finished"):
        check_folder(back)
    told: list[tuple[int, int]] = []
    backup.restore(RealFiles(copy), back, lambda done, of: told.append((done, of)))
    assert told[-1][0] == told[-1][1] > 0
    check_folder(back)
    with running_node(back.root) as node, node.client() as ball:
        assert [v.verdict for v in ball.cancel(key="k7")] == ["cancelled"]
        schedule = ball.status()["schedule"]
        assert (schedule["table_rows"], schedule["tail_rows"]) == (500, 50)


def test_a_restore_that_was_not_finished_goes_on_with_the_same_backup_only(data: Path, copy: Path) -> None:
    tuesday, back = copy.with_name("tuesday"), copy.with_name("restored")
    with running_node(data) as node, node.client() as ball:
        ball.send("t", "on Monday")
        backed_up(data, copy)
        node.run(node.node.broker.log.writer.roll())
        ball.send("t", "on Tuesday")
        backed_up(data, tuesday)
    first, last = sorted(tuesday.glob("log/*.log"))
    last.rename(tuesday / "lost")
    with pytest.raises(Corrupt, match="use another backup"):
        backup.restore(RealFiles(tuesday), RealFiles(back))
    with pytest.raises(SetupError, match="another backup"):
        backup.restore(RealFiles(copy), RealFiles(back))
    assert (back / "log" / first.name).read_bytes()[: first.stat().st_size] == first.read_bytes()
    (tuesday / "lost").rename(last)
    backup.restore(RealFiles(tuesday), RealFiles(back))
    with running_node(back) as node, node.client() as ball:
        assert len(ball.browse_batch("t")) == 2


@pytest.mark.parametrize("pattern", ["**/*.parquet", "log/*.log"])
@pytest.mark.parametrize("fault", ["changed", "cut", "missing"])
def test_a_damaged_backup_is_refused_by_name(stopped: Path, copy: Path, pattern: str, fault: str) -> None:
    backed_up(stopped, copy)
    hurt = next(iter(copy.glob(pattern)))
    content = bytearray(hurt.read_bytes())
    if fault == "missing":
        hurt.unlink()
    elif fault == "cut":
        hurt.write_bytes(content[: len(content) // 100])
    else:
        content[100] ^= 1
        hurt.write_bytes(content)
    with pytest.raises(Corrupt, match=hurt.name):
        backup.restore(RealFiles(copy), RealFiles(copy.with_name("restored")))


def test_a_folder_with_something_else_is_left_alone(stopped: Path, copy: Path, tmp_path: Path) -> None:
    backed_up(stopped, copy)
    with pytest.raises(SetupError, match="holds a whole backup"):
        backed_up(stopped, copy)
    with pytest.raises(SetupError, match="empty folder only"):
        backup.restore(RealFiles(copy), RealFiles(stopped))
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter").write_text("dear")
    with pytest.raises(SetupError, match="not empty"):
        backed_up(stopped, other)
    with pytest.raises(SetupError, match="no backup"):
        backup.restore(RealFiles(other), RealFiles(tmp_path / "new"))
    with pytest.raises(NotFound, match="no log"):
        backed_up(other, tmp_path / "new")
