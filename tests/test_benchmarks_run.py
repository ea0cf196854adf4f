"""Every benchmark runs, with a load that takes seconds, and reports plausible figures.

The figures themselves are not tested: those of a shared machine with a small load mean nothing, and say so.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
from benchmarks import NAMES
from benchmarks.profiled import OUTSIDE, PACKAGE, stage_of
from benchmarks.report import NO_TICK, Report, Spent
from benchmarks.up import kind_of
from tests.cli.in_process import run_here
from tests.cli.processes import timeball
from tests.interop.stock_clients import command
from tests.rounds import only_in_a_siege

from timeball.cli.serve import runner

# Benchmarks that start Spark or wait for a schedule take longer than a fast test may.
SLOW = {
    "soak",
    "remoting",
    "pop",
    "grpc",
    "flight",
    "http",
    "beside",
    "burst",
    "restart",
    "keys",
    "memory",
    "compact",
    "pipeline",
    "up",
    "cluster",
    "add_replica",
    "schedules",
}
SPARK = {"compact", "pipeline", "up"}
# Benchmarks of minutes run in a siege only.
MINUTES = {*SPARK, "beside", "memory", "keys", "cluster", "add_replica"}
INTEROP = {"kafka"}
COMPARED = {"designs"}  # a table: tests/test_designs_run.py

WANTED = {
    "add_replica": [
        "waiting messages",
        "from an empty disk to full redundancy",
        "before: ack p99",
        "while it is added: late p99",
        "while it is added: failed",
    ],
    "append": [
        "1 row, 1 in flight: ack p99",
        "1 row, 64 in flight: rate",
        "10,000 rows, 8 in flight: rate",
        "10,000 rows, 8 in flight: server CPU",
    ],
    "remoting": [
        "send JSON 8x512: rate",
        "send JSON 64x1: ack p99",
        "send binary 1x1: server CPU",
        "batches of 128: load's own CPU",
        "pulls of 32, first read: server CPU",
        "pulls of 32, second read: rate",
        "pulls of 256, second read: failed, missing",
    ],
    "pop": [
        "pop 32 and ack each, 8x1: rate",
        "pop 32 and ack each, 8x1: server CPU",
        "pop 32 and ack each, 8x1: failed, missing",
    ],
    "grpc": [
        "send 1 a call, 8x8: rate",
        "send 1 a call, 8x8: server CPU",
        "send 1 a call, 8x8: server CPU a call",
        "send 32 a call, 8x8: rate",
        "send 32 a call, 8x8: load's own CPU",
        "send 1 a call, 1x1: answer p99",
        "receive 32 and ack, 8x1: rate",
        "receive 32 and ack, 8x1: failed, missing",
    ],
    "flight": [
        "send of one: server CPU",
        "call that does nothing: rate",
        "read of one: answer p50",
        "pull of one and ack: server CPU",
        "trickle: missing or twice",
        "trickle: server CPU",
        "read the log: rate",
    ],
    "http": [
        "send 1 a request, 64x1: rate",
        "send 1 a request, 64x1: server CPU",
        "send 1 a request, 64x1: answer p99",
        "send NDJSON 100 a request, 8x1: rate",
        "send NDJSON 100 a request, 8x1: server CPU",
        "send Arrow 10,000 a request, 4x1: rate",
        "gRPC, send 1 a call, 64x1: server CPU",
        "Flight, 10,000 a batch, 4 on their way: rate",
        "receive 32 and ack, 8x1: failed, missing",
    ],
    "beside": [
        "beside nothing: lateness p50",
        "beside 50 polls: lateness max",
        "beside 10 tails: held",
        "beside 60 fuzzed requests: lateness max",
        "beside 60 fuzzed requests: machine max",
        "beside 60 fuzzed requests: guests that found a fault",
        "beside 60 fuzzed requests: server CPU",
    ],
    "schedules": [
        "equal rules: memory",
        "different rules: start",
        "one time: missing or doubled",
        "one time: last release",
        "one time: server CPU",
        "a minute: early",
        "a minute: lateness p99",
    ],
    "punctual": [
        "lateness p50",
        "lateness p99",
        "lateness max",
        "early",
        "at the consumer p99",
        "early at the consumer",
        "server CPU (schedule, release, pull)",
    ],
    "burst": [
        "spread, in the tail: last release",
        "one instant, compacted: last release",
        "one instant, compacted: missing or doubled",
        "one instant, compacted: server CPU",
        "one instant, bodies of 1 KiB: last release",
    ],
    "memory": ["at 2,000", "at 10,000", "slope between them", "server CPU (schedule, compact)"],
    "restart": ["process start to first on-time release", "missing or doubled", "server CPU since its start"],
    "keys": [
        "scheduled messages in the table",
        "runs of keys",
        "memory",
        "cancel by key, 8 at a time: rate",
        "cancel by key, 8 at a time: p99",
        "kill -9 to ready",
        "kill -9 to the first cancel by key",
        "missing or failed",
        "missing or doubled",
    ],
    "kafka": [
        "5,000/s: lateness p99",
        "5,000/s: early",
        "5,000/s: missing or doubled",
        "20,000/s: in and out, sustained",
        "20,000/s: missing or doubled",
        "20,000/s: server CPU",
        "20,000/s: bridge CPU",
        "20,000/s: Kafka CPU",
    ],
    "cluster": [
        "one machine 8x512: rate",
        "one machine 64x1: broker's CPU",
        "majority 8x512: leader's CPU",
        "majority 64x1: ack p99",
        "majority 64x1: failed",
        "majority of one machine 64x1",
    ],
    "compact": [
        "broker: rate",
        "broker: CPU",
        "spark: the whole job, Java's start included",
        "spark: CPU of the job, start included",
    ],
    "soak": [
        "missing",
        "more than once: missing acknowledgements",
        "early",
        "failed requests",
        "held, growth after the first quarter",
        "descriptors, most",
        "server CPU",
    ],
    "pipeline": [
        "session: ready",
        "memory, after the work: Java",
        "read log, all columns: rate",
        "read pending, seq and due_ms: rate",
        "ledger: rate",
        "bulk: rate",
        "bulk: bytes written for a byte of payload",
        "missing or doubled",
        "dispatch, steady: lateness p50",
        "dispatch, steady: early",
        "dispatch, burst: left to Spark, most at once",
        "dispatch, burst: last release after it began",
        "dispatch, burst: missing or doubled",
    ],
    "up": [
        "broker: ready",
        "pipeline: has worked off the first messages",
        "running: all, PSS",
        "idle: JVM",
        "CPU of all",
    ],
}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    """Return the markers of a benchmark's test."""
    marks = [
        getattr(pytest.mark, mark)
        for mark, names in (("slow", SLOW), ("spark", SPARK), ("interop", INTEROP))
        if name in names
    ]
    if name in MINUTES:
        marks.append(only_in_a_siege)
    return [*marks, pytest.mark.timeout(600)] if name in SPARK else marks


def module(name: str) -> ModuleType:
    """Import a benchmark."""
    return importlib.import_module(f"benchmarks.{name}")


@pytest.mark.siege
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_marks(name)) for name in NAMES if name not in COMPARED]
)
def test_a_benchmark_runs_small_and_its_figures_can_be_true(name: str) -> None:
    """Rates above zero, nothing early, nothing missing or doubled, and a cost for each message."""
    if name in INTEROP:
        command(name)  # skips where its packages cannot be had
    report: Report = module(name).run(small=True)
    assert (report.name, report.small) == (name, True)
    values = {figure.name: figure.value for figure in report.figures}
    assert [figure for figure in WANTED[name] if figure not in values] == []
    faults = [
        fault for figure in report.figures for fault in faults_of(figure.name, figure.unit, figure.value)
    ]
    assert faults == []
    assert any(figure.unit in ("us/msg", "us/message") for figure in report.figures)
    shown = "\n".join(report.lines())
    assert "the figures mean nothing" in shown
    assert re.search(r"bar [<>]= [\d,.e+]+: (holds|MISSED)", shown)
    document = json.loads(json.dumps(report.as_dict()))
    assert {"name", "value", "unit", "bar", "ratio"} == document["figures"][0].keys()


def faults_of(name: str, unit: str, value: float) -> list[str]:
    """Describe a value that cannot be true of a run without a fault."""
    faults = []
    if not math.isfinite(value):
        faults.append(f"{name} is {value}")
    # A small load can be released in the millisecond in which it is due, so this duration may be zero.
    value_min = 0.0 if "last release" in name else math.ulp(0.0)
    if unit in ("msg/s", "rows/s", "us/msg", "us/message", "s", "MiB", "B/B") and value < value_min:
        faults.append(f"{name} is {value}")
    if re.search(r"early|missing", name) and value != 0:
        faults.append(f"{name} is {value}")
    return faults


def test_a_faulty_figure_is_noticed() -> None:
    """The control of the check above."""
    assert faults_of("early", "messages", 1)
    assert faults_of("spread: missing or doubled", "messages", 2)
    assert faults_of("rate", "msg/s", 0)
    assert faults_of("lateness p50", "ms", float("nan"))
    assert faults_of("one instant: last release", "s", -0.001)
    assert faults_of("the whole job", "s", 0)
    assert not faults_of("one instant: last release", "s", 0)
    assert not faults_of("lateness p50", "ms", 0)


def test_a_process_is_known_by_its_command_and_its_parents() -> None:
    java, up = ["/usr/bin/java", "-cp"], ["python", "-m", "timeball", "up"]
    run = ["python", "-m", "timeball", "pipeline", "run"]
    daemon = ["python", "-m", "timeball.spark.run.worker_daemon", "pyspark.worker"]
    assert kind_of(up, is_root=True, parents=[["bash"]]) == "broker"
    assert kind_of(run, is_root=False, parents=[up]) == "pipeline"
    assert kind_of(java, is_root=False, parents=[run, up]) == "JVM"
    assert kind_of(daemon, is_root=False, parents=[java, run, up]) == "Python daemons"
    assert kind_of(daemon, is_root=False, parents=[daemon, java, run, up]) == "Python workers"
    planner = ["python", "-m", "pyspark.sql.streaming.python_streaming_source_runner"]
    assert kind_of(planner, is_root=False, parents=[java, run, up]) == "Python workers"


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_states_its_limits(name: str) -> None:
    """It is in its docstring, and on the screen beside the figures."""
    docstring = module(name).__doc__ or ""
    assert "Not measured: " in docstring
    assert callable(module(name).run)


def test_a_ratio_states_how_many_times_better_than_the_bar_a_figure_is() -> None:
    """A bar is held from 1 on, whichever direction is better."""
    report = Report("x", small=False)
    report.add("rate", 300, "msg/s", bar=200)
    report.add("lateness", 40, "ms", bar=20, better="lower")
    report.add("early", 0, "messages", bar=0, better="lower")
    report.add("lost", 3, "messages", bar=0, better="lower")
    rate, lateness, early, lost = report.lines()[1:5]
    assert "holds, 1.50 times" in rate
    assert "MISSED, 0.50 times" in lateness
    assert early.endswith("holds")
    assert lost.endswith("MISSED")
    assert [figure["ratio"] for figure in report.as_dict()["figures"]] == [1.5, 0.5, None, 0.0]  # type: ignore[attr-defined]


def test_the_command_lists_and_runs_benchmarks() -> None:
    """Each benchmark is one JSON document, with its limits."""
    listing = run_here("bench", "--list", "--json")
    assert [json.loads(line)["name"] for line in listing.stdout.splitlines()] == NAMES
    result = run_here("bench", "append", "--size", "small", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["benchmark"] == "append" and document["small"] is True
    assert "the network (loopback)" in document["not_measured"]


@pytest.mark.slow
def test_the_screen_shows_the_limits_of_a_benchmark() -> None:
    """It is below the figures."""
    result = timeball("bench", "append", "--size", "small")
    assert result.returncode == 0, result.stderr
    assert "not measured: the network (loopback)" in result.stdout


def test_a_profiled_row_is_divided_into_stages() -> None:
    """The sum of the stages is the cost of the row."""
    row = "1,000 rows, 8 in flight"
    result = run_here("bench", "append", "--size", "small", "--json", "--profile", row)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    cost = next(figure["value"] for figure in document["figures"] if figure["name"] == f"{row}: server CPU")
    assert math.isclose(sum(document["stages"][row].values()), cost)


def test_a_tick_counts_for_the_package_s_innermost_function_below_the_event_loop() -> None:
    frames: dict[str, object] = {"stage": lambda: stage_of(sys._getframe())}
    for name, file in (("handler", PACKAGE + "edge.py"), ("elsewhere", "/elsewhere.py")):
        exec(compile(f"def {name}(call): return call()", file, "exec"), frames)
    stage, handler, elsewhere = (frames[name] for name in ("stage", "handler", "elsewhere"))
    assert handler(partial(elsewhere, stage)) == "edge.py handler"  # type: ignore[operator]

    async def in_loop(call: Callable[[], str]) -> str:
        return call()

    def run(call: Callable[[], str]) -> str:
        with runner() as running:
            return running.run(in_loop(call))

    # Functions outside of the loop do not count: the command that runs the loop is of the package, too.
    assert handler(partial(run, stage)) == OUTSIDE  # type: ignore[operator]
    assert handler(partial(run, partial(handler, stage))) == "edge.py handler"  # type: ignore[operator]


def test_a_row_that_is_not_there_is_refused_by_name() -> None:
    result = run_here("bench", "append", "--size", "small", "--json", "--profile", "2 rows")
    assert (
        result.returncode == 2 and "no row is named '2 rows': there are 1 row, 1 in flight," in result.stderr
    )


def test_the_screen_shows_the_large_stages_and_the_sum_of_the_others() -> None:
    report = Report("x", small=False)
    report.add_cost(Spent("r", cpu_s=1e-3, ticks={"a": 300, "b": 96, "c": 3, "d": 1}), 100)
    assert [line.split() for line in report.lines()[-3:]] == [
        ["7.50", "75%", "a"],
        ["2.40", "24%", "b"],
        ["0.10", "1%", "2", "more"],
    ]


def test_a_row_without_a_tick_is_one_stage() -> None:
    report = Report("x", small=False)
    report.add_cost(Spent("r", cpu_s=1e-3, ticks={}), 100)
    report.add_cost(Spent("not profiled", cpu_s=1e-3), 100)
    assert report.as_dict()["stages"] == {"r": {NO_TICK: 10.0}}
