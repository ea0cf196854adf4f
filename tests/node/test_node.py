"""One node: a start that works or leaves nothing behind, a stop that keeps everything, a failure that is reported."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import SECOND_MS, World
from tests.node_fixture import RunningNode, eventually, running_node

from timeball import __version__
from timeball.broker.recovery import apply_log, starting_point
from timeball.broker.registry.tables import Tables
from timeball.io.clock import ManualClock, SystemClock
from timeball.io.files import RealFiles
from timeball.log.format import FORMAT_VERSION
from timeball.log.reader import LogReader
from timeball.log.recovery import open_log
from timeball.model.config import Settings
from timeball.model.errors import DiskFailed, SetupError, StorageError
from timeball.node.data_folder import FORMAT_NAME, FormatFacts, check_folder, write_format
from timeball.node.node import Node, open_traces


def assert_start_refused(data: Path, text: str, **settings: int) -> None:
    """Assert that a start with these settings raises SetupError with this text."""

    async def main() -> None:
        # The system chooses the ports, so that tests that run at the same time do not need the same port.
        node = Node(RunningNode(data, http_port=0, **settings).settings)
        with pytest.raises(SetupError, match=text):
            await node.start()

    asyncio.run(main())


# Libraries of the edges. A start imports them after it has released the due messages.
LATE_IMPORTS = {"deltalake", "google.protobuf", "lark", "prometheus_client", "starlette", "uvicorn"}
PUSHES = "aiohttp"  # a fifth of a start's CPU: imported for the first push subscription


def libraries_imported_by(module: str) -> set[str]:
    """Find which of these libraries a new process has after it has imported a module."""
    code = f"import sys, {module}\nprint(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {*LATE_IMPORTS, PUSHES} & set(process.stdout.split())


def test_a_start_imports_the_libraries_of_the_edges_after_the_first_release() -> None:
    """The control: the edges import all of these libraries."""
    assert libraries_imported_by("timeball.node.node") == set()
    assert libraries_imported_by("timeball.edges.edges") == LATE_IMPORTS
    assert PUSHES in libraries_imported_by("timeball.edges.push.sender")


# ---- start and stop -----------------------------------------------------------------------------------------


def test_visible_and_scheduled_messages_survive_a_stop_and_a_start(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path, clock) as node:
        with node.client() as ball:
            ball.send("orders", "now")
            ball.send("orders", "later", at=clock.wall + 5_000)
    with running_node(tmp_path, clock) as node:
        clock.advance(5_000)
        with node.client() as ball:
            eventually(
                lambda: sum(queue.max for queue in ball.queues("orders").values()) == 2, "both are visible"
            )


def test_a_node_that_starts_and_stops_several_times_leaves_no_threads(tmp_path: Path) -> None:
    threads = threading.active_count()
    node = RunningNode(tmp_path)
    for number in range(3):
        node.start()
        assert node.run(node.broker.send(batch(1))).first_seq == number + 2
        node.stop()
    eventually(lambda: threading.active_count() <= threads + 1, "its threads have ended")


def test_a_start_creates_the_data_folder_with_its_format_file(tmp_path: Path) -> None:
    with running_node(tmp_path / "deep" / "down"):
        pass
    text = (tmp_path / "deep/down" / FORMAT_NAME).read_bytes()
    assert msgspec.json.decode(text) == {"product": "timeball", "format": FORMAT_VERSION}


def test_after_sigterm_the_broker_still_answers_while_before_stop_runs(tmp_path: Path) -> None:
    """Clients in the same process end in an orderly way there."""

    async def main() -> list[int]:
        node = Node(Settings(data=tmp_path, port=0))
        await node.start()
        seqs: list[int] = []

        async def send_before_stop() -> None:
            seqs.append((await node.broker.send(batch(1))).first_seq)

        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        await node.run_until_signal(send_before_stop)
        return seqs

    assert asyncio.run(main()) == [2]
    with running_node(tmp_path) as node:
        assert node.broker.status()["log"]["next_seq"] == 3


# ---- starts that are refused ---------------------------------------------------------------------------------


@contextmanager
def port_in_use() -> Iterator[int]:
    """Listen on a port, so that a node cannot. Yields the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_a_start_with_a_port_in_use_names_it_and_unlocks_the_folder(tmp_path: Path) -> None:
    with port_in_use() as port:
        assert_start_refused(tmp_path, str(port), port=port)
    with running_node(tmp_path) as node:
        assert node.run(node.broker.send(batch(1))).first_seq == 2


def test_a_folder_that_another_node_has_locked_is_refused(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        assert_start_refused(tmp_path, "in use by another Timeball")
        assert node.run(node.broker.send(batch(1))).first_seq == 2, "the other one is undisturbed"
    with running_node(tmp_path):
        pass


def test_a_folder_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    facts = FormatFacts("timeball", FORMAT_VERSION + 1)
    (tmp_path / FORMAT_NAME).write_bytes(msgspec.json.encode(facts))
    assert_start_refused(tmp_path, f"has format {FORMAT_VERSION + 1}, written by a newer Timeball")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not Timeball's"),
        (b"not json", "not Timeball's"),
        (b'{"product":"timeball"}', "not Timeball's"),
        (b'{"product":"timeball","format":"1"}', "not Timeball's"),
        (b'{"product":"kettle","format":1}', "belongs to 'kettle'"),
    ],
)
def test_a_folder_with_another_format_file_is_refused_and_not_changed(
    tmp_path: Path, content: bytes, text: str
) -> None:
    (tmp_path / FORMAT_NAME).write_bytes(content)
    assert_start_refused(tmp_path, text)
    assert (tmp_path / FORMAT_NAME).read_bytes() == content


def test_a_folder_with_other_files_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("twenty years of work")
    assert_start_refused(tmp_path, "holds 'thesis.txt' but no Timeball data")
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_file_as_data_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    assert_start_refused(tmp_path / "data", "is a file; name a folder")


def test_a_data_folder_is_accepted_and_its_format_file_is_written_once(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    check_folder(files)  # empty
    write_format(files)
    check_folder(files)
    before = os.stat(tmp_path / FORMAT_NAME).st_mtime_ns
    write_format(files)
    assert os.stat(tmp_path / FORMAT_NAME).st_mtime_ns == before


def test_a_folder_with_the_log_alone_is_accepted(tmp_path: Path) -> None:
    """A backup is log and data files."""
    with running_node(tmp_path) as node:
        node.run(node.broker.send(batch(3)))
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".log"]:
        path.unlink()
    with running_node(tmp_path) as node:
        assert sum(high for _, high in node.broker.queues("orders").values()) == 3
    assert (tmp_path / FORMAT_NAME).exists()


def test_a_node_starts_with_the_open_log_and_the_caches_of_a_follower(tmp_path: Path) -> None:
    """As a follower does that becomes the leader. The caller has locked the folder, and it stays locked."""
    with running_node(tmp_path) as running:
        running.run(running.broker.send(batch(3)))
    files, settings = RealFiles(tmp_path), Settings(data=tmp_path)
    files.lock()
    opened = open_log(files, segment_bytes=settings.segment_bytes, now_ms=0)
    reader, tables = LogReader(opened.segments), Tables(files, settings.queues_per_topic)
    applying = apply_log(starting_point(None, opened.segments), reader, tables)

    async def main() -> None:
        node = Node(settings, files=files)
        await node.start(listen=False, hot=(opened, applying))
        await node.broker.send(batch(2))
        assert sum(high for _, high in node.broker.queues("orders").values()) == 5
        assert node.broker.log.reader is reader and node.broker.tables.topics is tables.topics
        await node.stop()

    asyncio.run(main())
    with pytest.raises(SetupError, match="in use"):
        RealFiles(tmp_path).lock()
    files.unlock()
    with running_node(tmp_path) as running:
        assert sum(high for _, high in running.broker.queues("orders").values()) == 5


# ---- fail-stop ----------------------------------------------------------------------------------------------


@on_node(failing=True)
async def test_after_a_failed_sync_all_sends_fail_and_no_further_sync_is_made(world: World) -> None:
    """Waiting sends and later ones fail, so nothing that is not durable is acknowledged."""
    await world.send("orders", [None, SECOND_MS])
    calls = [name for name, _ in await calls_of_a_send(world)]
    call = world.files.calls + 1 + calls.index("sync")
    world.files.fail_at(call, DiskFailed("the disk is gone"))
    waiting = [asyncio.ensure_future(world.broker.send(batch(1))) for _ in range(3)]
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, StorageError), outcome
    assert "disk is gone" in str(world.failure)
    with pytest.raises(StorageError, match="the log has stopped"):
        await world.broker.send(batch(1))
    assert world.files.syncs_after_failure == []


async def calls_of_a_send(world: World) -> list[tuple[str, str]]:
    """List the calls that a send makes to the disk. The next send makes the same calls."""
    before = len(world.files.trace)
    await world.broker.send(batch(1))
    return world.files.trace[before:]


@pytest.mark.parametrize("call", range(1, 4))
@on_node(failing=True)
async def test_a_node_with_a_failed_disk_stops_with_the_error_and_recovers_at_the_next_start(
    world: World, call: int
) -> None:
    assert world.node is not None
    await world.send("a", [SECOND_MS])
    world.files.fail_at(world.files.calls + call, DiskFailed("the disk is gone"), forever=True)
    running = asyncio.ensure_future(world.node.run_until_signal())
    for _ in range(call):
        await asyncio.gather(world.broker.send(batch(1)), return_exceptions=True)
    with pytest.raises(StorageError, match="disk is gone"):
        await running
    world.node = None
    world.files.heal()
    await world.start()
    await world.advance(SECOND_MS)
    assert [row.key for row in (await world.outcome()).rows if row.source_seq] == ["k00000"]
    await world.stop()


# ---- status -------------------------------------------------------------------------------------------------


def test_the_status_has_its_documented_fields_and_is_json(tmp_path: Path) -> None:
    with running_node(tmp_path, ManualClock()) as node:
        node.run(node.broker.send(batch(2, delay_ms=[None, 3_600_000])))
        status = node.node.status()
        assert status["version"] == __version__
        assert status["format"] == FORMAT_VERSION
        assert status["pid"] == os.getpid()
        assert 0 < status["anon_bytes"] < status["rss_bytes"]  # type: ignore[operator]
        assert status["log"]["durable_seq"] == 4  # type: ignore[index]
        assert Path(status["table"]["uri"]) == tmp_path / "pending"  # type: ignore[index]
        with node.client() as ball:
            assert set(ball.status()) == {*status, "may_admin"}
        assert msgspec.json.decode(msgspec.json.encode(status)) == status


def test_the_option_traces_without_its_extra_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "timeball.monitoring.traces", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SetupError, match=r"--traces: .*\[otel\]"):
        open_traces(SystemClock(), "1")
