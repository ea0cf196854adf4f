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


def refused(data: Path, text: str, **settings: int) -> None:
    """A start that fails so, and leaves neither a claim on the folder nor a thread at work."""

    async def main() -> None:
        # On ports that the system chooses: tests run beside each other, and none may want a port that another has.
        node = Node(RunningNode(data, http_port=0, **settings).settings)
        with pytest.raises(SetupError, match=text):
            await node.start()

    asyncio.run(main())


# Libraries of what clients need; a start releases what is due before it imports them.
LATE = {"deltalake", "google.protobuf", "lark", "prometheus_client", "starlette", "uvicorn"}
PUSHES = "aiohttp"  # a fifth of a start's CPU: imported for the first push subscription


def imported(module: str) -> set[str]:
    """Those of them that a new process has after it has imported a module."""
    code = f"import sys, {module}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {*LATE, PUSHES} & set(done.stdout.split())


def test_the_first_release_waits_for_no_library_of_the_edges() -> None:
    """With a control: the edges import all of them."""
    assert imported("timeball.node.node") == set()
    assert imported("timeball.edges.edges") == LATE
    assert PUSHES in imported("timeball.edges.push.sender")


# ---- start and stop -----------------------------------------------------------------------------------------


def test_sent_messages_survive_a_stop_and_a_start(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path, clock) as node:
        with node.client() as ball:
            ball.send("orders", "now")
            ball.send("orders", "later", at=clock.wall + 5_000)
    with running_node(tmp_path, clock) as node:
        clock.advance(5_000)
        with node.client() as ball:
            eventually(lambda: sum(q.max for q in ball.queues("orders").values()) == 2, "both are visible")


def test_a_node_may_start_and_stop_often_in_one_process(tmp_path: Path) -> None:
    threads = threading.active_count()
    node = RunningNode(tmp_path)
    for number in range(3):
        node.start()
        assert node.run(node.broker.send(batch(1))).first_seq == number + 2
        node.stop()
    eventually(lambda: threading.active_count() <= threads + 1, "its threads have ended")


def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    with running_node(tmp_path / "deep" / "down"):
        pass
    text = (tmp_path / "deep/down" / FORMAT_NAME).read_bytes()
    assert msgspec.json.decode(text) == {"product": "timeball", "format": FORMAT_VERSION}


def test_a_signal_ends_it_in_order(tmp_path: Path) -> None:
    """Those who are part of the process end first, while the broker still answers."""

    async def main() -> list[int]:
        node = Node(Settings(data=tmp_path, port=0))
        await node.start()
        seqs: list[int] = []

        async def last_words() -> None:
            seqs.append((await node.broker.send(batch(1))).first_seq)

        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        await node.run_until_signal(last_words)
        return seqs

    assert asyncio.run(main()) == [2]
    with running_node(tmp_path) as node:
        assert node.broker.status()["log"]["next_seq"] == 3


# ---- starts that cannot be ----------------------------------------------------------------------------------


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_a_port_in_use_is_named_and_the_folder_is_given_back(tmp_path: Path) -> None:
    with taken_port() as port:
        refused(tmp_path, str(port), port=port)
    with running_node(tmp_path) as node:
        assert node.run(node.broker.send(batch(1))).first_seq == 2


def test_a_folder_that_another_node_holds(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        refused(tmp_path, "in use by another Timeball")
        assert node.run(node.broker.send(batch(1))).first_seq == 2, "the other one is undisturbed"
    with running_node(tmp_path):
        pass


def test_a_folder_of_a_newer_timeball(tmp_path: Path) -> None:
    facts = FormatFacts("timeball", FORMAT_VERSION + 1)
    (tmp_path / FORMAT_NAME).write_bytes(msgspec.json.encode(facts))
    refused(tmp_path, f"has format {FORMAT_VERSION + 1}, written by a newer Timeball")


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
def test_a_folder_of_something_else(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / FORMAT_NAME).write_bytes(content)
    refused(tmp_path, text)
    assert (tmp_path / FORMAT_NAME).read_bytes() == content


def test_a_folder_with_somebody_s_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("twenty years of work")
    refused(tmp_path, "holds 'thesis.txt' but no Timeball data")
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_file_as_data_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    refused(tmp_path / "data", "is a file; name a folder")


def test_a_folder_of_ours_passes(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    check_folder(files)  # empty
    write_format(files)
    check_folder(files)
    before = os.stat(tmp_path / FORMAT_NAME).st_mtime_ns
    write_format(files)
    assert os.stat(tmp_path / FORMAT_NAME).st_mtime_ns == before


def test_a_log_alone_is_a_folder_of_ours(tmp_path: Path) -> None:
    """A backup is log and data files."""
    with running_node(tmp_path) as node:
        node.run(node.broker.send(batch(3)))
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".log"]:
        path.unlink()
    with running_node(tmp_path) as node:
        assert sum(high for _, high in node.broker.queues("orders").values()) == 3
    assert (tmp_path / FORMAT_NAME).exists()


def test_a_node_begins_with_a_log_and_caches_that_are_there(tmp_path: Path) -> None:
    """As a follower that takes over does: the folder is claimed by its caller, and stays so."""
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
async def test_the_first_sync_that_fails_is_the_last_one(world: World) -> None:
    """Whoever waits is told, whoever comes later too, and nothing that was not durable is ever acknowledged."""
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
    """What a send does to the disk: the next one does the same."""
    before = len(world.files.trace)
    await world.broker.send(batch(1))
    return world.files.trace[before:]


@pytest.mark.parametrize("call", range(1, 4))
@on_node(failing=True)
async def test_a_node_that_has_failed_stops_and_raises_why(world: World, call: int) -> None:
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


def test_status_has_the_fields_that_clients_are_told_of(tmp_path: Path) -> None:
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


def test_without_the_extra_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "timeball.monitoring.traces", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SetupError, match=r"--traces: .*\[otel\]"):
        open_traces(SystemClock(), "1")
