"""Run the continuous jobs, several in one Spark session, until they are done or stopped.

    start     start each job; the mark in its sink decides which rows it still has to process
    watch     write one log line per epoch (rows of the log, rows/s, lag behind the log's end) and a status file
    restart   start a failed job again, with growing pauses, while the other jobs continue
    end       end a job that has nothing to do for this broker, before it starts or when the broker refuses its work
    give up   if Spark itself is lost, for example because its JVM was killed: `timeball up` starts a new process.
              With `once` also on an error that is not TRANSIENT, and after TRIES_ONCE failures
    stop      on SIGTERM or SIGINT, after the current epoch, or during it if it takes more than 20 s: both are safe

compact, ledger and archive are loops (jobs/marked.py). An engine runs their tasks: Spark, or with `with_spark=False`
this process, which then needs neither Java nor pyspark. dispatch is a streaming query of Spark. In this module, "query"
means a loop or a streaming query.

No message is late if Spark lags or dies. The broker serves pending messages from the log's tail, and compacts by itself
when the lease of the job has expired.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.fs as fs

from timeball.io.clock import Clock, SystemClock
from timeball.model import storage_uris
from timeball.model.errors import OutOfRange, OverLimit, RequestError, SetupError, TimeballError, Unavailable
from timeball.spark.endpoint import Endpoint, query_name, read_groups
from timeball.spark.jobs import archive, compact, ledger
from timeball.spark.jobs.marked import Engine, InProcessEngine, MarkedJob, Query
from timeball.spark.table_store import sibling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# ---- the status of jobs, for other processes ------------------------------------------------------------------
# An epoch is one micro-batch of a Spark query, or one step of a loop (jobs/marked.py). The status of a job is the file
# `status/<job>.json` in the folder of the jobs' checkpoints, so `timeball pipeline status` needs neither Spark nor its
# ports. The file is replaced as a whole, at most once per second and at least every 5 s. So a running job whose file is
# older than SILENT_MS has died. The file is for people and monitoring only. No job reads it, and a job that cannot
# write it continues without it.
#
#     position    the point that the job has reached: a row of the log (seq), or a due time (due_ms)
#     lag         the distance from the position to the end of the source, in the same unit, when the epoch was planned


FOLDER = "status"
CHANGED_EVERY_NS = 1_000_000_000  # shortest interval between two files, if there is a new epoch
ALIVE_EVERY_NS = 5_000_000_000  # interval between two files without a new epoch
SILENT_MS = 20_000  # the time of four status files

State = Literal["starting", "running", "waiting", "done", "stopped", "failed"]
UNITS = {"seq": "rows", "due_ms": "ms"}  # name of an offset -> unit of its differences


class Epoch(msgspec.Struct, frozen=True):
    """One epoch of a job."""

    epoch: int
    unit: str  # a key of UNITS: the unit of `position` and `lag`
    position: int
    took_ms: int
    lag: int
    rows: int | None = None  # rows of the log, of all kinds. None for other units, or if the start is unknown

    @property
    def rows_per_s(self) -> int | None:
        """The rate of the epoch in rows per second. None if its rows or its duration are unknown."""
        return None if self.rows is None or not self.took_ms else self.rows * 1000 // self.took_ms

    def line(self, job: str) -> str:
        """Format the epoch as one line for the log, in the form name=value."""
        rows = "" if self.rows is None else f" rows={self.rows}"
        rate = "" if self.rows_per_s is None else f" rows_per_s={self.rows_per_s}"
        lag = f"lag_{UNITS[self.unit]}={self.lag}"
        position = f"to_{self.unit}={self.position}"
        return f"epoch done job={job} epoch={self.epoch} {position}{rows} ms={self.took_ms}{rate} {lag}"


def parse_progress(progress: Mapping[str, Any]) -> Epoch | None:
    """Convert a progress report of a query, in Spark's format, to an epoch.

    Returns None if the report has no end offset, or if it has a start offset but no new rows or no duration.
    """
    source = progress["sources"][0]
    start, end, latest = (_parse_offset(source[key]) for key in ("startOffset", "endOffset", "latestOffset"))
    if end is None:
        return None
    unit, position = end
    took_ms = int(progress["durationMs"].get("triggerExecution", 0))
    lag = 0 if latest is None else max(0, latest[1] - position)
    if start is None:
        # The first epoch of a checkpoint has no start offset, so the number of its rows is unknown.
        return Epoch(progress["batchId"], unit, position, took_ms, lag)
    rows = position - start[1]
    if not rows or not took_ms:
        return None
    return Epoch(progress["batchId"], unit, position, took_ms, lag, rows if unit == "seq" else None)


def _parse_offset(offset: object) -> tuple[str, int] | None:
    """Read (unit, position) from an offset of a query: of dispatch, or of the log. Returns None for any other offset.

    The positions of several groups are added: the difference of two sums is the number of rows of all groups.
    """
    if isinstance(offset, str):
        offset = json.loads(offset)
    if not isinstance(offset, dict):
        return None
    for unit in UNITS:
        if isinstance(position := offset.get(unit), int):
            return unit, position
    # {group: row}. The keys of a topic's offset are numbers of queues.
    if all(key.isdecimal() for key in offset) or not all(isinstance(row, int) for row in offset.values()):
        return None
    return "seq", sum(offset.values())


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a job's status file. All times are in milliseconds since 1970."""

    job: str
    state: State
    updated_ms: int
    started_ms: int
    pid: int = msgspec.field(default_factory=os.getpid)
    host: str = msgspec.field(default_factory=socket.gethostname)
    epochs: int = 0  # since the start of this process
    rows: int = 0  # since the start of this process
    last: Epoch | None = None  # the latest epoch
    last_ms: int | None = None  # when the runner saw that the latest epoch was done
    failures: int = 0  # in succession: a failure after more than a minute of work counts as the first
    error: str | None = None  # of the latest failure

    def shown(self, now_ms: int) -> str:
        """Format the state for people. If a running job has written no status for SILENT_MS: 'silent for … s'."""
        silent_ms = now_ms - self.updated_ms
        should_report = self.state in ("starting", "running", "waiting")
        return f"silent for {silent_ms // 1000} s" if should_report and silent_ms > SILENT_MS else self.state


class Board:
    """Writes the status files of jobs beside their checkpoints, to any file system that Arrow can write to.

    The first error is logged and ends all writing, because the jobs do not need these files.
    """

    def __init__(self, folder: str) -> None:
        """`folder`: of the checkpoints."""
        self._written: dict[
            str, tuple[int, JobStatus]
        ] = {}  # job -> (time of its last file in ns, status in it)
        self._files: fs.FileSystem | None = None
        try:
            self._files, root = storage_uris.arrow(folder)
            self._root = f"{root.rstrip('/')}/{FOLDER}"
        except SetupError as error:
            self._stop_writing(error)

    def write_status(self, status: JobStatus, now_ns: int) -> None:
        """Write the status of a job, unless its last file is recent enough (CHANGED_EVERY_NS, ALIVE_EVERY_NS).

        A new state is written at once. `now_ns`: the time on the monotonic clock.
        """
        if self._files is None:
            return
        last_ns, last_status = self._written.get(status.job, (0, None))
        if last_status is not None and last_status.state == status.state:
            has_new_epoch = last_status.epochs != status.epochs
            if now_ns - last_ns < (CHANGED_EVERY_NS if has_new_epoch else ALIVE_EVERY_NS):
                return
        self._written[status.job] = (now_ns, status)
        path = f"{self._root}/{status.job}.json"
        self._replace_file(path, msgspec.json.encode(status), has_folder=last_status is not None)

    def write_audit(self, report: bytes) -> None:
        """Write the JSON report of an audit to `audit.json` beside the checkpoints, for `GET /v1/jobs`."""
        self._replace_file(f"{self._root.removesuffix(FOLDER)}audit.json", report)

    def _replace_file(self, path: str, content: bytes, *, has_folder: bool = False) -> None:
        """Write a file in one step. Creates the folder of the status files, unless `has_folder`."""
        if self._files is None:
            return
        try:
            if not has_folder:
                self._files.create_dir(self._root, recursive=True)
            with self._files.open_output_stream(f"{path}.new") as stream:
                stream.write(content)
            self._files.move(f"{path}.new", path)
        except (pa.ArrowException, OSError) as error:
            self._stop_writing(error)

    def _stop_writing(self, error: Exception) -> None:
        self._files, self._root = None, ""
        LOG.warning("status files not written reason=%s", error)


def read_statuses(folder: str) -> Iterator[JobStatus]:
    """Read all status files in a folder of checkpoints. Raises SetupError if it or a file cannot be read."""
    try:
        files, root = storage_uris.arrow(folder)
        infos = files.get_file_info(fs.FileSelector(f"{root.rstrip('/')}/{FOLDER}", allow_not_found=True))
        for info in sorted(infos, key=lambda each: str(each.path)):
            if info.path.endswith(".json"):
                with files.open_input_stream(info.path) as stream:
                    yield msgspec.json.decode(stream.read(), type=JobStatus)
    except (pa.ArrowException, OSError, msgspec.DecodeError) as error:
        raise SetupError(f"--checkpoint {folder}: {error}") from error


# ---- the runner -----------------------------------------------------------------------------------------------


LOG = logging.getLogger("timeball.spark")

# After these errors a later try may succeed: the broker or Spark is back, the epoch is planned from the new mark, or
# the disk has more space.
TRANSIENT = (Unavailable, OutOfRange, OverLimit)
PAUSE_S = (1.0, 30.0)  # pause before a restart: after the first failure, and the longest one
HEALTHY_S = 60.0  # a query that has run for longer is restarted after the shortest pause
TRIES_ONCE = 5  # failures in succession after which a job gives up, with `once`
WATCH_EVERY_S = 0.25
STOP_PATIENCE_S = 20.0
STOP_CHECK_S = 0.02
LOST = "Spark's JVM has ended or was killed: it needs a new process"

DISPATCH = "dispatch"
LOOPS: dict[str, MarkedJob] = {job.name: job for job in (compact.JOB, ledger.JOB, archive.JOB)}
JOBS = (*LOOPS, DISPATCH)
NO_WORK_REASONS = {compact.NAME: compact.no_work_reason}
BY_GROUP = (compact.NAME, DISPATCH)  # one query per group; the other jobs read all groups in one loop


@dataclass
class Job:
    """A continuous job with its current query, over all restarts. Used only by the thread of `run`."""

    name: str  # with the group, if the job has a query for each group
    start: Callable[[], Query]
    query: Query | None = None  # None before the start, after a failure and at the end
    last_epoch: int = -1  # the latest epoch of this query that was reported
    failures: int = 0  # in succession
    started_ns: int = 0
    wake_ns: int = 0  # the query is not started before this time
    done: bool = False  # True when the job has ended: no query is started any more
    report: Callable[[str], None] = field(default=LOG.info)
    # Makes the lease of the job. The lease is held while the given function returns True.
    hold_lease: Callable[[Callable[[], bool]], contextlib.AbstractContextManager[object]] | None = None
    no_work_reason: Callable[[], str | None] = lambda: (
        None
    )  # the reason why the job has nothing to do, or None
    engine_is_alive: Callable[[], bool] = lambda: True
    last: Epoch | None = None
    last_ms: int | None = None
    epochs: int = 0
    rows: int = 0
    error: str | None = None  # of the latest failure
    ended: State | None = None  # final state, set when the runner ends

    @property
    def running(self) -> bool:
        """True while a query is active."""
        return self.query is not None and bool(self.query.isActive)

    def tick(self, now_ns: int, *, once: bool) -> None:
        """Start the query, report its new epochs, or handle its end. Call this often.

        Raises Unavailable if Spark is lost. With `once`, also raises errors that are not TRANSIENT.
        """
        if self.done:
            return
        if self.query is None:
            if now_ns >= self.wake_ns:
                self._start_query(now_ns, once)
            return
        if not self.engine_is_alive():  # a loop that waits for new rows does not notice a lost JVM
            raise Unavailable(LOST)
        self._report()
        if self.query.isActive:
            return
        failure = self.query.exception()
        self.query = None
        if failure is not None:
            self._handle_failure(_to_timeball_error(failure), failure, now_ns, once)
        elif once:
            self.done = True
        else:
            self._handle_failure(Unavailable("the query ended by itself"), None, now_ns, once)

    def _start_query(self, now_ns: int, once: bool) -> None:
        """Start the query, or end the job if it has nothing to do for this broker."""
        self.last_epoch, self.started_ns = -1, now_ns
        try:
            with _spark_errors():
                if not self._end_if_no_work():
                    self.query = self.start()
        except TimeballError as error:
            self._handle_failure(error, error, now_ns, once)

    def _handle_failure(self, error: TimeballError, cause: Exception | None, now_ns: int, once: bool) -> None:
        """Schedule a restart after a pause, end the job if it has nothing to do, or raise `error` to give up."""
        if now_ns - self.started_ns > HEALTHY_S * 1e9:
            self.failures = 0
        self.failures += 1
        self.error = str(error)
        if isinstance(error, RequestError) and not isinstance(error, TRANSIENT):
            # The broker may have been restarted with another strategy, for which the job has nothing to do.
            with contextlib.suppress(TimeballError):
                if self._end_if_no_work():
                    return
        gives_up = once and (not isinstance(error, TRANSIENT) or self.failures >= TRIES_ONCE)
        if gives_up or not self.engine_is_alive():
            raise error from cause
        pause_s = min(PAUSE_S[0] * 2 ** (self.failures - 1), PAUSE_S[1])
        self.wake_ns = now_ns + int(pause_s * 1e9)
        LOG.warning(
            "job failed, it is restarted job=%s failed=%d restart_s=%.0f reason=%s",
            self.name,
            self.failures,
            pause_s,
            error,
        )

    def _end_if_no_work(self) -> bool:
        """End the job if it has nothing to do for this broker. Returns whether it has ended."""
        reason = self.no_work_reason()
        if reason is not None:
            self.done = True
            LOG.warning("job ended job=%s reason=%s", self.name, reason)
        return self.done

    def _report(self) -> None:
        """Log the epochs that the query has finished since the last call."""
        assert self.query is not None
        newest = self.query.lastProgress
        if newest is None or newest["batchId"] <= self.last_epoch:
            return
        for progress in self.query.recentProgress:
            if progress["batchId"] > self.last_epoch:
                self.last_epoch = progress["batchId"]
                epoch = parse_progress(progress)
                if epoch is not None:
                    self._record_epoch(epoch)
                    self.report(epoch.line(self.name))

    def _record_epoch(self, epoch: Epoch) -> None:
        self.last, self.last_ms, self.epochs = epoch, SystemClock().wall_ms(), self.epochs + 1
        self.rows += epoch.rows or 0

    def status(self, started_ms: int) -> JobStatus:
        """Build the content of the job's status file. `started_ms`: the start of the runner."""
        return JobStatus(
            job=self.name,
            state=self.state,
            updated_ms=SystemClock().wall_ms(),
            started_ms=started_ms,
            epochs=self.epochs,
            rows=self.rows,
            last=self.last,
            last_ms=self.last_ms,
            failures=self.failures,
            error=self.error,
        )

    @property
    def state(self) -> State:
        """The current state of the job. Only the runner sets `stopped` and `failed`, by `ended`."""
        if self.ended is not None:
            return self.ended
        if self.done:
            return "done"
        return "running" if self.running else "waiting" if self.failures else "starting"


def run(
    jobs: Sequence[str],
    *,
    master: str | None = None,
    endpoint: str = "grpc://127.0.0.1:7400",
    once: bool = False,
    checkpoint: str | None = None,
    conf: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, str]] | None = None,
    stop: threading.Event | None = None,
    spark: SparkSession | None = None,
    with_spark: bool = True,
    clock: Clock | None = None,
) -> None:
    """Run jobs, by name, until SIGTERM, SIGINT or `stop`. With `once`, until they have processed all present rows.

    `master`, `conf`: of the Spark session. `checkpoint`: folder for the status files and the checkpoint of dispatch, by
    default `pipeline` beside the pending table. `options`: name of a job -> its options. `spark`: a session to use,
    which is left running. Without `with_spark`, this process runs the tasks. Raises the error that made a job give up,
    and SetupError for bad arguments.
    """
    check_names(jobs, with_spark=with_spark)
    stop = stop or threading.Event()
    # py4j logs each failure of an epoch with the stacks of Java and Python. The runner reports it in one line.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    folder = checkpoint or default_folder(endpoint)  # asks the broker: without one, fail before Spark starts
    if checkpoint is None and DISPATCH in jobs and storage_uris.in_object_store(folder):
        raise SetupError(
            f"--checkpoint: dispatch needs a checkpoint folder of Spark, which cannot be at {folder}; name "
            "another folder"
        )
    with (
        _open_engine(jobs, spark, master, conf, with_spark=with_spark) as engine,
        _stop_on_signals(stop),
        _spark_errors(),
    ):
        running = [
            _make_job(name, engine, group_endpoint, folder, once, (options or {}).get(name))
            for name in jobs
            for group_endpoint in job_endpoints(name, endpoint)
        ]
        _run_until_done(running, stop, once, clock or SystemClock(), Board(folder))


@contextlib.contextmanager
def _open_engine(
    jobs: Sequence[str],
    spark: SparkSession | None,
    master: str | None,
    conf: Mapping[str, str] | None,
    *,
    with_spark: bool,
) -> Iterator[Engine]:
    """Choose the engine for the tasks: this process, a given session, or a new one that is closed after the block."""
    if not with_spark:
        yield InProcessEngine()
        return
    from timeball.spark.run.session import (
        LOCAL_MASTER,
        SparkEngine,
        build_session,
        close,
        continuous,
        make_active,
    )

    session_master = master or LOCAL_MASTER
    session = spark or build_session(
        session_master, "timeball " + " ".join(jobs), continuous(session_master, conf)
    )
    try:
        if DISPATCH in jobs:
            make_active(session)
        yield SparkEngine(session)
    finally:
        if spark is None:
            close(session)


def check_names(jobs: Sequence[str], *, with_spark: bool = True) -> None:
    """Check names of jobs. Raises SetupError for no job, an unknown or repeated name, or dispatch without Spark."""
    for name in jobs:
        if name not in JOBS:
            raise SetupError(f"no job {name!r}; there are {', '.join(JOBS)}")
    if not jobs or len(set(jobs)) != len(jobs):
        raise SetupError("name at least one job, each once")
    if DISPATCH in jobs and not with_spark:
        raise SetupError(
            "dispatch is a query of Spark's: leave --no-spark out, or the job; the broker does its work"
        )


def job_endpoints(name: str, endpoint: str) -> list[str]:
    """List the endpoints of a job's queries: one for each group if the job is in BY_GROUP, else one for all groups."""
    groups = read_groups(endpoint) if name in BY_GROUP else []
    return [group.endpoint for group in groups] if len(groups) > 1 else [endpoint]


def default_folder(endpoint: str) -> str:
    """Find the default folder for checkpoints, beside the pending table. Raises Forbidden and Unavailable."""
    with Endpoint(endpoint) as broker:
        # This call changes nothing and needs the same permission as the jobs, so a missing permission is found here.
        broker.starts(0, 0)
        return sibling(broker.status().table.uri, "pipeline")


def _make_job(
    name: str, engine: Engine, endpoint: str, folder: str, once: bool, options: Mapping[str, str] | None
) -> Job:
    """Make the job `name` for the groups at `endpoint`, with its lease and its check for work."""
    label = query_name(name, endpoint) if name in BY_GROUP else name
    no_work_reason = NO_WORK_REASONS.get(name, lambda _: None)
    start: Callable[[], Query]
    lease: Callable[[Callable[[], bool]], contextlib.AbstractContextManager[object]] | None
    if name == DISPATCH:
        from timeball.spark import dispatch as dispatch
        from timeball.spark.run.session import SparkEngine

        assert isinstance(engine, SparkEngine)
        checkpoint = f"{folder.rstrip('/')}/{label}"
        start = partial(
            dispatch.start, engine.session, endpoint, checkpoint, once=once, options=dict(options or {})
        )
        lease = partial(dispatch.lease, endpoint)
    else:
        start = partial(LOOPS[name].start, engine, endpoint, once=once, options=options)
        lease = partial(compact.lease, endpoint) if name == compact.NAME else None
    return Job(
        label,
        start,
        hold_lease=lease,
        no_work_reason=lambda: no_work_reason(endpoint),
        engine_is_alive=engine.is_alive,
    )


def _spark_errors() -> contextlib.AbstractContextManager[None]:
    """Make a context that raises Spark's failures as Timeball's errors. It does not import Spark."""
    if "pyspark" not in sys.modules:
        return contextlib.nullcontext()
    from timeball.spark.source.spark_api import spark_errors

    return spark_errors()


def _to_timeball_error(failure: Exception) -> TimeballError:
    """Convert the failure of a query to one of Timeball's errors."""
    if isinstance(failure, TimeballError):
        return failure
    from timeball.spark.source.spark_api import to_timeball_error

    return to_timeball_error(failure)


def _stop_job(job: Job, query: Query) -> None:
    """Stop the query of a job. An error is only logged: a lost JVM has been reported before."""
    try:
        with _spark_errors():
            stop_query(query)
        LOG.info("job stopped job=%s", job.name)
    except TimeballError as error:
        LOG.warning("job not stopped job=%s reason=%s", job.name, error)


def _run_until_done(jobs: list[Job], stop: threading.Event, once: bool, clock: Clock, board: Board) -> None:
    """Run the jobs until `stop` is set, all are done, or one gives up. Then stop all queries."""
    started_ms = clock.wall_ms()
    with contextlib.ExitStack() as leases:
        for job in jobs:
            if job.hold_lease is not None:
                leases.enter_context(job.hold_lease(partial(attrgetter("running"), job)))
        try:
            while not stop.is_set() and not all(job.done for job in jobs):
                for job in jobs:
                    with _spark_errors():
                        job.tick(clock.monotonic_ns(), once=once)
                    board.write_status(job.status(started_ms), clock.monotonic_ns())
                stop.wait(WATCH_EVERY_S)
        except TimeballError as error:
            # `job` has raised the error. A lost Spark is the failure of all jobs.
            is_spark_lost = not job.engine_is_alive()
            failure = Unavailable(LOST) if is_spark_lost else error
            for failed_job in jobs if is_spark_lost else [job]:
                failed_job.ended, failed_job.error = "failed", str(failure)
            raise failure from error
        finally:
            for job in jobs:
                if job.query is not None:
                    _stop_job(job, job.query)
                job.ended = job.ended or ("done" if job.done else "stopped")
                board.write_status(job.status(started_ms), clock.monotonic_ns())


def stop_query(query: Query, patience_s: float = STOP_PATIENCE_S) -> None:
    """Stop a query between two epochs, or after `patience_s` seconds during one, which is safe but may log errors."""
    if not query.isActive:
        return
    pause = threading.Event()
    for _ in range(int(patience_s / STOP_CHECK_S)):
        if not query.isActive or not query.status["isTriggerActive"]:
            break
        pause.wait(STOP_CHECK_S)
    query.stop()


@contextlib.contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Make SIGTERM and SIGINT set `stop` within the block, if this is the main thread.

    Enter it after the start of Spark, whose own handler would replace these handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(_: int, __: FrameType | None) -> None:
        stop.set()

    old_handlers = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
