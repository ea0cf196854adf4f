"""`make versus` with a small load, with a real RocketMQ. Its load generator notices a wrong answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from shutil import which

import psutil
import pytest
from benchmarks.harness import wait_until
from benchmarks.remoting import pull_request, send_request
from benchmarks.versus import delivery, small_calls
from benchmarks.versus.load import Generator
from benchmarks.versus.peers import Peer
from benchmarks.versus.work import Bench
from tests.interop.environments import Missing
from tests.interop.stock_clients import command

from timeball.edges.remoting.codec.frame import JSON, Command, Splitter, decode, encode

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
RUN_S = 240
NAMES = ["batches of 32, 8x8", "pulls of 32, 8x4, first read", "pulls of 32, 8x4, second read"]


@pytest.fixture
def generator(tmp_path: Path) -> Generator:
    """The load generator. Skips the test without the tools of `make versus`."""
    command("versus")
    return Generator(tmp_path)


def processes_in(folder: Path, word: str = "") -> list[int]:
    """Return the ids of the processes whose command contains the path of a folder, and a word."""
    commands = {each.pid: " ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])}
    return [process for process, text in commands.items() if str(folder) in text and word in text]


def test_ctrl_c_ends_each_process_of_a_comparison(tmp_path: Path) -> None:
    command("versus")
    running = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.versus", "--small", "--rows", "batch"],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: len(processes_in(tmp_path, "rocketmq")) == 2, RUN_S, "name server and broker")
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=RUN_S)
    assert running.returncode == 130 and "interrupted" in said
    assert processes_in(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_a_small_comparison_runs_and_leaves_no_process(tmp_path: Path) -> None:
    command("versus")
    page = tmp_path / "versus.md"
    words = ["--small", "--rounds", "1", "--rows", "batch,pull", "--json", "--page", str(page)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.versus", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert [row["name"] for row in document["rows"]] == NAMES
    for row in document["rows"]:
        assert row["ratios"]["RocketMQ"] > 0
        assert row["medians"]["Timeball"]["failures"] == 0  # RocketMQ refuses what waits for 200 ms
        for cell in row["medians"].values():
            assert cell["value"] > 0 and cell["cpu_us"] > 0
            assert 0 < cell["p50_ms"] <= cell["p99_ms"]
    assert "the figures mean nothing" in page.read_text()
    assert processes_in(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["versus.md"]


@contextmanager
def started(start: delivery.Start, folder: Path) -> Iterator[Peer]:
    """Run a broker. Skip the test if it is not installed here."""
    try:
        peer = start.make(folder, "sync")
        peer.start()
    except Missing as error:
        pytest.skip(str(error))
    try:
        yield peer
    finally:
        peer.stop()


SMALL_BENCH = Bench(None, small=True, waiting=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", delivery.STARTS, ids=lambda start: start.name)
def test_each_broker_delivers_to_a_consumer(start: delivery.Start, tmp_path: Path) -> None:
    with started(start, tmp_path) as peer:
        sample = delivery.steady(start.client, peer, SMALL_BENCH)
    assert sample.failures == 0 and sample.value > 0
    assert sample.p50_ms is not None and sample.p99_ms is not None and 0 <= sample.p50_ms <= sample.p99_ms
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize(
    "start",
    [start for start in delivery.STARTS if start.client in small_calls.WIRES],
    ids=lambda start: start.name,
)
def test_each_broker_answers_small_calls(start: delivery.Start, tmp_path: Path) -> None:
    with started(start, tmp_path) as peer:
        for measure in (small_calls.single_sends, small_calls.cancels):
            sample = measure(start.client, peer, SMALL_BENCH)
            assert sample.failures == 0 and sample.value > 0
            assert sample.p50_ms is not None and sample.p99_ms is not None
            assert 0 < sample.p50_ms <= sample.p99_ms
        assert not isnan(small_calls.pending_bytes(start.client, peer, SMALL_BENCH).value)


@contextmanager
def answering(answer: Callable[[Command], Command]) -> Iterator[str]:
    """Run a server of one connection, which answers each command with the result of `answer`. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            splitter = Splitter()
            with connection:
                while data := connection.recv(65_536):
                    answers = [answer(decode(frame)) for frame in splitter.feed(data)]
                    # In reverse order, because the opaque tells to which request an answer belongs.
                    connection.sendall(b"".join(encode(each) for each in reversed(answers)))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(RUN_S)


SENDS = [send_request(number, JSON) for number in range(40)]


def test_an_answer_with_a_wrong_code_is_counted_and_noticed(generator: Generator) -> None:
    """The control of each row: the messages that a broker refuses are not counted as sent."""
    with answering(lambda asked: Command(2 if asked.opaque % 4 == 0 else 0, asked.opaque, flag=1)) as address:
        outcome = generator.run(address, SENDS, (1, 8), 30.0, limit=40)
    assert (outcome.answers, outcome.messages, outcome.failures) == (40, 30, 10)
    assert outcome.codes == {"2": 10}


def test_a_pull_with_too_few_messages_is_counted_and_noticed(generator: Generator) -> None:
    """The control of pulls: an answer with code 0 and 31 of 32 messages is a failure."""
    pulls = [pull_request(0, 32 * number, 32, number + 1) for number in range(4)]
    stored = (100).to_bytes(4, "big") + bytes(96)

    def answer(asked: Command) -> Command:
        return Command(0, asked.opaque, flag=1, body=stored * (31 if asked.opaque == 2 else 32))

    with answering(answer) as address:
        outcome = generator.run(address, pulls, (1, 2), 30.0, limit=4, rows=32, stored=1)
    assert (outcome.answers, outcome.messages, outcome.failures) == (4, 96, 1)


def test_an_answer_to_another_request_ends_the_load(generator: Generator) -> None:
    with answering(lambda asked: Command(0, 99, flag=1)) as address:
        with pytest.raises(RuntimeError, match="no request in flight"):
            generator.run(address, SENDS, (1, 1), 30.0)


def test_missing_data_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Missing, match="there is no cc here"):
        Generator(tmp_path)
    assert which("cc") is None
