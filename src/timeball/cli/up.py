"""`timeball up`: run a broker and its pipeline, started and stopped together.

The broker serves at once. Spark starts after it and takes some seconds, for which no request waits. On SIGTERM or
Ctrl-C the pipeline ends first, because it is a client of the broker. Only the strategy `hour_log` has rows to compact:
with another strategy, the pipeline runs without the job compact.

With `--no-spark`, the pipeline is the ledger (and the archive with `--archive`) in one process without Java. It writes
the same files with the same functions, and the broker compacts by itself. `--archive` also stores the messages that
became visible.

Spark must never delay a release. So the pipeline runs in a separate process, which starts once the broker serves. If
this child process ends, it is started again after a growing pause, and the broker continues. If a new start cannot help
(no Java, no pyspark: exit code 4), this is reported once, and the broker continues alone. The child holds the read end
of a pipe, and this process holds the other end: if this process is killed, the child ends as well.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from timeball.cli import serve
from timeball.cli.options import (
    SPARK_AS_IT_IS,
    JsonOption,
    NoSparkOption,
    SparkOptions,
    settings_options,
    spark_options,
)
from timeball.cli.output import ExitCode, print_json, print_note
from timeball.cli.serve import local_endpoint, run_broker
from timeball.io.clock import Clock, SystemClock
from timeball.model.config import Settings

if TYPE_CHECKING:
    from timeball.node.node import Node

PAUSE_S_MIN = 1.0
PAUSE_S_MAX = 60.0
STEADY_S = 60.0  # after a run of this length, the next pause is PAUSE_S_MIN again
STOP_S = 20.0  # Spark's own shutdown takes about 1 s; after this time, the child is killed

# (state, sentence); states: started, ended, given_up, stopped, ledger_only
Say = Callable[[str, str], None]


@settings_options
@spark_options
def up(
    settings: Settings,
    spark: SparkOptions = SPARK_AS_IT_IS,
    archive: Annotated[
        bool, typer.Option("--archive", help="Also run the job archive, which stores every visible message.")
    ] = False,
    no_spark: NoSparkOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the broker with its Spark pipeline (jobs compact and ledger), until Ctrl-C.

    The broker serves at once. The pipeline follows some seconds later in a
    separate process, which is started again if it dies. Without Java or
    pyspark, the broker reports this, continues, and compacts by itself. With
    --no-spark, the ledger is written without Java and Spark. With another
    --strategy than hour_log there is nothing to compact.

    \b
    Examples:
      timeball up
      timeball up --data /var/lib/timeball --durability sync
      timeball up --strategy timer_wheel
      timeball up --no-spark --archive
      timeball up --port 0 --json | jq -c .
      timeball up --master spark://head:7077
    """

    def start_pipeline(node: Node) -> Callable[[], Awaitable[None]]:
        """Start the pipeline as a client of `node`. Returns the function that ends it."""
        endpoint = local_endpoint(settings, node.port)
        jobs = pipeline_jobs(settings, archive=archive, no_spark=no_spark)
        command = pipeline_command(settings, endpoint, None if no_spark else spark, jobs)
        return _start_pipeline(settings, command, _make_reporter(as_json), no_spark=no_spark)

    with serve.runner() as loop_runner:
        loop_runner.run(run_broker(settings, as_json, start_pipeline))


def _start_pipeline(
    settings: Settings, command: list[str], report: Say, *, no_spark: bool
) -> Callable[[], Awaitable[None]]:
    """Keep the pipeline running from now on, and return a function that ends it."""
    has_compaction = settings.strategy == "hour_log"
    if not has_compaction:
        reason = f"with the strategy {settings.strategy} messages wait in the log"
        report("ledger_only", f"nothing to compact: {reason}; the pipeline keeps the ledger")
    broker_alone = "goes on and compacts by itself" if has_compaction else "goes on"
    if not no_spark:
        broker_alone += "; with --no-spark the ledger is kept without Java"
    pipeline = Supervisor(command, report, alone=broker_alone)
    supervising = asyncio.create_task(pipeline.run())

    async def stop_pipeline() -> None:
        await pipeline.stop()
        await supervising

    return stop_pipeline


def pipeline_jobs(settings: Settings, *, archive: bool = False, no_spark: bool = False) -> list[str]:
    """Choose the child's jobs: the ledger, compact (for `hour_log` on Spark only), and archive on request."""
    has_compaction = settings.strategy == "hour_log" and not no_spark
    return [*(["compact"] if has_compaction else []), "ledger", *(["archive"] if archive else [])]


def pipeline_command(
    settings: Settings, endpoint: str, spark: SparkOptions | None, jobs: Sequence[str]
) -> list[str]:
    """Build the child's command line, with the broker's own compaction settings. `spark` is None for --no-spark."""
    compact = {"max_trigger_delay_ms": settings.compact_interval_ms}
    # 0 keeps only the broker from compacting: the job then has its own defaults.
    if settings.compact_rows:
        compact |= {
            "min_rows_per_batch": settings.compact_rows,
            "few_rows": settings.compact_early_rows,
        }
    command = [sys.executable, "-m", "timeball", "pipeline", "run", *jobs]
    command += ["--log-level", settings.log_level, "--log-format", settings.log_format]
    command += ["--endpoint", endpoint, "--stop-on-eof"]
    command += ["--no-spark"] if spark is None else spark.words()
    for name, value in compact.items() if "compact" in jobs else ():
        command += ["--option", f"compact.{name}={value}"]
    return command


def _make_reporter(as_json: bool) -> Say:
    """Create a function that reports on the pipeline: a note on stderr for people, or a JSON line on stdout."""
    if not as_json:
        return lambda state, sentence: print_note(f"timeball: {sentence}")
    return lambda state, sentence: print_json({"event": "pipeline", "state": state, "text": sentence})


# ---- the pipeline's process -------------------------------------------------------------------------------


class Supervisor:
    """Keeps one child process running. `say` receives each change of its state.

    `alone` ends the sentence "the broker …" about a broker without the child.
    """

    def __init__(
        self, command: list[str], say: Say, clock: Clock | None = None, *, alone: str = "goes on"
    ) -> None:
        self._command = command
        self._alone = alone
        self._say = say
        self._clock = clock or SystemClock()
        self._child: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Start the child again and again, until `stop` or until a new start cannot help."""
        pause_s = PAUSE_S_MIN
        while not self._stopping.is_set():
            started_ns = self._clock.monotonic_ns()
            code = await self._run_once()
            if self._stopping.is_set():
                break
            if code == ExitCode.SETUP:
                self._say("given_up", f"the pipeline cannot run here; the broker {self._alone}")
                return
            if self._clock.monotonic_ns() - started_ns >= STEADY_S * 1e9:
                pause_s = PAUSE_S_MIN
            self._say(
                "ended",
                f"the pipeline {_describe_exit(code)}; the broker goes on, next start in {pause_s:.0f} s",
            )
            await self._wait_or_stop(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        self._say("stopped", "the pipeline has stopped")

    async def stop(self) -> None:
        """End the child with SIGTERM, and with SIGKILL after `STOP_S`. Then `run` returns."""
        self._stopping.set()
        child = self._child
        if child is None or child.returncode is not None:
            return
        _send_signal(child, signal.SIGTERM)
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
        except TimeoutError:
            _send_signal(child, signal.SIGKILL)

    async def _run_once(self) -> int:
        """Start the child, and wait for its end. Returns its exit code, or a signal's number as a negative one."""
        # In a new session, so that Ctrl-C reaches this process only, which then ends the child before the broker. The
        # child writes to stderr, because stdout is for the broker's ready line and JSON documents.
        self._child = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=sys.stderr, start_new_session=True
        )
        self._say("started", f"the pipeline starts (pid {self._child.pid})")
        return await self._child.wait()

    async def _wait_or_stop(self, pause_s: float) -> None:
        """Wait `pause_s` seconds, or until `stop` is called."""
        try:
            await asyncio.wait_for(self._stopping.wait(), pause_s)
        except TimeoutError:
            pass


def _send_signal(child: asyncio.subprocess.Process, signal_number: signal.Signals) -> None:
    """Send a signal to the child, unless it has ended."""
    try:
        child.send_signal(signal_number)
    except ProcessLookupError:
        pass  # it ended by itself in between


def _describe_exit(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
