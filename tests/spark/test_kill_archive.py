"""kill -9 of archive and replay, at any moment, two at a time: every message that passed is there once.

KILL_SEED makes other moments.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from tests.cli.processes import COMMAND, environment
from tests.node_fixture import RunningNode, running_node
from tests.rounds import only_in_a_siege, rounds
from tests.spark.test_kill_spark import BOUND_S, data_files, eventually, kill_tree

from timeball.model.message import Kind

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

SEED = int(os.environ.get("KILL_SEED", "1"))
WHOLE_COMMAND_S = 300  # from its start to its last step, beside other work
TOPICS = ["orders", "news", "%DLQ%billing", "audit"]
# Epochs of many small files, so that there is time to die between the first one and the commit.
ARCHIVE = """
import dataclasses, sys
from timeball.spark.jobs import archive, joining
from timeball.spark.run import runner
joining.TIDY_EVERY = 5
runner.LOOPS["archive"] = dataclasses.replace(archive.JOB, trigger_s=0.1)
options = {"archive": {"min_rows_per_batch": "1", "max_rows_per_batch": "2000", "rows_per_partition": "200"}}
runner.run(["archive"], endpoint=sys.argv[1], checkpoint=sys.argv[2], options=options)
"""


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process, which is killed when the block ends."""
    child = subprocess.Popen(
        list(command), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield child
    finally:
        kill_tree(child.pid)
        child.wait(BOUND_S)


@contextmanager
def sending(node: RunningNode) -> Iterator[None]:
    """Send immediate messages and messages due soon, a hundred at a time, until the block ends."""
    stop, failed = threading.Event(), list[BaseException]()

    def send() -> None:
        try:
            with node.client() as ball:
                while not stop.wait(0.3):
                    ball.send_many(
                        [
                            {"topic": TOPICS[n % 4], "body": b"x" * n, "delay_ms": (n % 3) * 20}
                            for n in range(100)
                        ]
                    )
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(BOUND_S)
    assert not failed, failed


class Archive:
    """Reads the table directly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> set[str]:
        return {path.name for path in self.folder.glob("day=*/*.parquet")}

    def version(self) -> int:
        try:
            return DeltaTable(str(self.folder)).version()
        except TableNotFoundError:
            return -1

    def known(self) -> set[str]:
        """List the files that some version names."""
        named = set()
        table = DeltaTable(str(self.folder))
        for version in range(table.version() + 1):
            table.load_as_version(version)
            named |= {uri.rpartition("/")[2] for uri in table.file_uris()}
        return named

    def rows(self) -> list[tuple[int, int, str, bytes]]:
        table = DeltaTable(str(self.folder)).to_pyarrow_table(columns=["seq", "kind", "topic", "body"])
        return sorted(zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True))


def passed(node: RunningNode) -> list[tuple[int, int, str, bytes]]:
    with node.client() as ball:
        end = ball.status()["log"]["durable_seq"]
        rows = ball.read_log(1, end, kinds=[Kind.MESSAGE, Kind.RELEASE]).read_all()
    return [(r["seq"], r["kind"], r["topic"], r["body"]) for r in rows.to_pylist()]


@pytest.mark.siege
@only_in_a_siege
def test_killed_and_concurrent_archive_jobs_archive_each_message_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    table = Archive(tmp_path / "data" / "archive")
    with running_node(tmp_path / "data", compact_rows=0) as node:

        def archiving(checkpoint: str) -> list[str]:
            return [sys.executable, "-c", ARCHIVE, node.endpoint, str(tmp_path / checkpoint)]

        def dies(moment: Callable[[], None], checkpoint: str) -> None:
            with process(*archiving(checkpoint)) as child:
                moment()
                assert child.poll() is None, "it ended before it was killed"

        def on_file() -> None:
            before = table.files()
            eventually(lambda: table.files() - before, "a task has written a file")

        def on_commit() -> None:
            for _ in range(int(rng.integers(1, 4))):
                before = table.version()
                eventually(lambda: table.version() > before, "a commit")  # noqa: B023

        with sending(node):
            for moment in (on_file, on_commit)[: rounds(1, 2)]:
                dies(moment, "checkpoint" if rng.integers(2) else "another")
            unnamed = table.files() - table.known()
            with process(*archiving("a")), process(*archiving("b")):
                for _ in range(rounds(1, 3)):
                    on_commit()
        final = [
            *COMMAND,
            "pipeline",
            "run",
            "archive",
            "--once",
            "--log-level=warning",
            "--endpoint",
            node.endpoint,
        ]
        assert subprocess.run(final, env=environment(), check=False).returncode == 0
        assert table.rows() == passed(node)
        assert len(table.rows()) > 1_000 and unnamed, "no kill left a file that nobody names"


@pytest.mark.siege
@only_in_a_siege
def test_killed_and_repeated_replay_schedules_its_messages_once(tmp_path: Path) -> None:
    table = tmp_path / "data" / "pending"
    with running_node(tmp_path / "data", compact_rows=0) as node, node.client() as ball:
        ball.send_many([{"topic": "orders", "body": b"%d" % n} for n in range(5_000)])
        now_ms = ball.status()["now_ms"]
        eventually(lambda: ball.status()["now_ms"] > now_ms + 1, "the window is over")
        # Over a month, so that there are many files.
        window = [
            "--from",
            str(now_ms - 10**6),
            "--until",
            str(now_ms + 1),
            "--shift",
            "30d",
            "--stretch",
            "2000",
        ]
        replay = [*COMMAND, "replay", *window, "--yes", "--endpoint", node.endpoint]

        def version() -> int:
            return int(ball.status()["table"]["version"])

        def bodies() -> list[bytes]:
            rows = DeltaTable(str(table)).to_pyarrow_table(columns=["body"])
            return sorted(rows.column("body").to_pylist())

        empty = version()
        with process(*replay) as child:
            eventually(lambda: data_files(table) or child.poll() is not None, "a file", WHOLE_COMMAND_S)
            assert child.poll() is None, "it ended before it was killed"
        killed_before = version() == empty
        with process(*replay) as child:
            eventually(lambda: version() > empty or child.poll() is not None, "the attach", WHOLE_COMMAND_S)
        done = subprocess.run(replay, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("done before"), done.stdout
        assert bodies() == sorted(b"%d" % n for n in range(5_000)) and version() == empty + 1
        assert killed_before, "the first kill came too late to mean anything"
        # Control: another name is another replay.
        subprocess.run(
            [*replay, "--job-id", "twice"], env=environment(), stdout=subprocess.DEVNULL, check=True
        )
        assert len(bodies()) == 10_000
