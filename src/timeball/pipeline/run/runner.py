"""Run the continuous jobs: several in one Spark session, until they are done or told to stop.

    start     start each job; its sink's own mark decides which rows are left to do
    watch     write one log line an epoch (rows of the log, rows/s, lag behind the log's end) and a status file
    restart   start a failed query again, with growing pauses; the other jobs go on
    end       end a job that has nothing to do for this broker, before it starts or when the broker refuses its work
    give up   when Spark itself is lost, as after a kill of its JVM: `timeball up` starts a new process.
              With `once` also on an error that does not pass by itself, and after TRIES_ONCE tries
    stop      on SIGTERM or SIGINT, after the micro-batch at hand, or after 20 s in the midst of it: both are safe

compact, ledger and archive are loops whose tasks an engine runs: Spark, or with `with_spark=False` this process, which
then needs neither Java nor pyspark. dispatch is a streaming query of Spark's.

When Spark lags or dies no message is late: the broker serves from its own tail, and compacts by itself once the lease
has run out.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING

from timeball import places
from timeball.clock import Clock, SystemClock
from timeball.errors import OutOfRange, OverLimit, RequestError, SetupError, TimeballError, Unavailable
from timeball.pipeline.endpoint import Endpoint, read_groups
from timeball.pipeline.groups import query_name
from timeball.pipeline.jobs import archive, compact, ledger
from timeball.pipeline.jobs.engine import Engine, InProcess
from timeball.pipeline.jobs.marked import MarkedJob, Query
from timeball.pipeline.run.job_status import Board, Epoch, JobStatus, State, epoch_of
from timeball.pipeline.table_store import sibling

if TYPE_CHECKING:  # a run without Spark imports none of it
    from pyspark.sql import SparkSession

LOG = logging.getLogger("timeball.pipeline")

# These pass: the broker or Spark comes back, the epoch is planned again from the new watermark, the disk is given room.
PASSING = (Unavailable, OutOfRange, OverLimit)
PAUSE_S = (1.0, 30.0)
HEALTHY_S = 60.0  # a query that lived so long starts again with the shortest pause
TRIES_ONCE = 5
WATCH_EVERY_S = 0.25
STOP_PATIENCE_S = 20.0
STOP_LOOK_S = 0.02
LOST = "Spark's JVM has ended or was killed: it needs a new process"

DISPATCH = "dispatch"
LOOPS: dict[str, MarkedJob] = {job.name: job for job in (compact.JOB, ledger.JOB, archive.JOB)}
JOBS = (*LOOPS, DISPATCH)
SUPERFLUOUS = {compact.NAME: compact.superfluous}
BY_GROUP = (compact.NAME, DISPATCH)  # what they read is one group's; the others read all groups together


@dataclass
class Job:
    """One streaming job over its restarts. `superfluous` says why it has nothing to do, if that is so."""

    name: str
    start: Callable[[], Query]
    query: Query | None = None
    last_epoch: int = -1
    failures: int = 0
    started_ns: int = 0
    wake_ns: int = 0
    done: bool = False
    report: Callable[[str], None] = field(default=LOG.info)
    hold_lease: Callable[[Callable[[], bool]], contextlib.AbstractContextManager[object]] | None = None
    superfluous: Callable[[], str | None] = lambda: None
    spark_lives: Callable[[], bool] = lambda: True
    last: Epoch | None = None
    last_ms: int | None = None
    epochs: int = 0
    rows: int = 0
    error: str | None = None
    ended: State | None = None

    @property
    def running(self) -> bool:
        """Return whether a query is at work now."""
        return self.query is not None and bool(self.query.isActive)

    def tick(self, now_ns: int, *, once: bool) -> None:
        """Start, report or restart the query. Raises when Spark is lost; with `once`, also what does not pass."""
        if self.done:
            return
        if self.query is None:
            if now_ns >= self.wake_ns:
                self._begin(now_ns, once)
            return
        if not self.spark_lives():  # a job that waits for rows would not notice
            raise Unavailable(LOST)
        self._report()
        if self.query.isActive:
            return
        failure = self.query.exception()
        self.query = None
        if failure is not None:
            self._failed(_told(failure), failure, now_ns, once)
        elif once:
            self.done = True
        else:
            self._failed(Unavailable("the query ended by itself"), None, now_ns, once)

    def _begin(self, now_ns: int, once: bool) -> None:
        self.last_epoch, self.started_ns = -1, now_ns
        try:
            with _spark_errors():
                if not self._end_if_superfluous():
                    self.query = self.start()
        except TimeballError as error:
            self._failed(error, error, now_ns, once)

    def _failed(self, error: TimeballError, cause: Exception | None, now_ns: int, once: bool) -> None:
        if now_ns - self.started_ns > HEALTHY_S * 1e9:
            self.failures = 0
        self.failures += 1
        self.error = str(error)
        if isinstance(error, RequestError) and not isinstance(error, PASSING):
            # The broker may have been started again with another schedule since.
            with contextlib.suppress(TimeballError):
                if self._end_if_superfluous():
                    return
        gives_up = once and (not isinstance(error, PASSING) or self.failures >= TRIES_ONCE)
        if gives_up or not self.spark_lives():
            raise error from cause
        pause_s = min(PAUSE_S[0] * 2 ** (self.failures - 1), PAUSE_S[1])
        self.wake_ns = now_ns + int(pause_s * 1e9)
        LOG.warning(
            "job failed, it is started again job=%s failed=%d restart_s=%.0f reason=%s",
            self.name,
            self.failures,
            pause_s,
            error,
        )

    def _end_if_superfluous(self) -> bool:
        reason = self.superfluous()
        if reason is not None:
            self.done = True
            LOG.warning("job ended job=%s reason=%s", self.name, reason)
        return self.done

    def _report(self) -> None:
        assert self.query is not None
        newest = self.query.lastProgress
        if newest is None or newest["batchId"] <= self.last_epoch:
            return
        for progress in self.query.recentProgress:
            if progress["batchId"] > self.last_epoch:
                self.last_epoch = progress["batchId"]
                epoch = epoch_of(progress)
                if epoch is not None:
                    self._note(epoch)
                    self.report(epoch.line(self.name))

    def _note(self, epoch: Epoch) -> None:
        self.last, self.last_ms, self.epochs = epoch, SystemClock().wall_ms(), self.epochs + 1
        self.rows += epoch.rows or 0

    def status(self, started_ms: int) -> JobStatus:
        """Return the job's status."""
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
        """Return the state; only the runner says `stopped` and `failed`."""
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
    """Run `jobs` by name until SIGTERM, SIGINT or `stop`; with `once`, until they have done what there is now.

    `checkpoint` is a folder for the jobs' statuses and the checkpoint of dispatch, by default `pipeline` beside the
    pending table; `options` are options of one job. A given `spark` is used and left running; without Spark the tasks
    run here. Raises what made a job give up.
    """
    check_names(jobs, with_spark=with_spark)
    stop = stop or threading.Event()
    # py4j logs every failure of an epoch with both stacks; the runner reports it as one line.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    folder = checkpoint or default_folder(endpoint)  # first: without a broker, do not wait for Spark
    if checkpoint is None and DISPATCH in jobs and places.in_object_store(folder):
        raise SetupError(
            f"--checkpoint: dispatch keeps a checkpoint of Spark's, which would be at {folder}; name a folder for it"
        )
    with _engine(jobs, spark, master, conf, with_spark=with_spark) as engine, _signals(stop), _spark_errors():
        running = [
            _job(name, engine, where, folder, once, (options or {}).get(name))
            for name in jobs
            for where in job_endpoints(name, endpoint)
        ]
        _watch(running, stop, once, clock or SystemClock(), Board(folder))


@contextlib.contextmanager
def _engine(
    jobs: Sequence[str],
    spark: SparkSession | None,
    master: str | None,
    conf: Mapping[str, str] | None,
    *,
    with_spark: bool,
) -> Iterator[Engine]:
    """Bring what runs the tasks: this process, a given session, or one that ends with the block."""
    if not with_spark:
        yield InProcess()
        return
    from timeball.pipeline.run.on_spark import OnSpark
    from timeball.pipeline.run.session import LOCAL_MASTER, build_session, close, continuous, make_active

    chosen = master or LOCAL_MASTER
    session = spark or build_session(chosen, "timeball " + " ".join(jobs), continuous(chosen, conf))
    try:
        if DISPATCH in jobs:
            make_active(session)
        yield OnSpark(session)
    finally:
        if spark is None:
            close(session)


def check_names(jobs: Sequence[str], *, with_spark: bool = True) -> None:
    """Raise SetupError for a name that is no continuous job, is there twice, or needs the Spark that there is not."""
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
    """Return where a job's queries read: of several groups one for each, if the job has a query for each group."""
    groups = read_groups(endpoint) if name in BY_GROUP else []
    return [group.endpoint for group in groups] if len(groups) > 1 else [endpoint]


def default_folder(endpoint: str) -> str:
    """Return the folder of the jobs' checkpoints, beside the pending table; raise Forbidden, Unavailable."""
    with Endpoint(endpoint) as broker:
        # A question that changes nothing, and that only those may ask who may do what jobs do.
        broker.starts(0, 0)
        return sibling(broker.status().table.uri, "pipeline")


def _job(
    name: str, engine: Engine, endpoint: str, folder: str, once: bool, options: Mapping[str, str] | None
) -> Job:
    label = query_name(name, endpoint) if name in BY_GROUP else name
    reason = SUPERFLUOUS.get(name, lambda _: None)
    start: Callable[[], Query]
    lease: Callable[[Callable[[], bool]], contextlib.AbstractContextManager[object]] | None
    if name == DISPATCH:
        from timeball.pipeline.dispatch import job as dispatch
        from timeball.pipeline.run.on_spark import OnSpark

        assert isinstance(engine, OnSpark)
        place = f"{folder.rstrip('/')}/{label}"
        start = partial(
            dispatch.start, engine.session, endpoint, place, once=once, options=dict(options or {})
        )
        lease = partial(dispatch.lease, endpoint)
    else:
        start = partial(LOOPS[name].start, engine, endpoint, once=once, options=options)
        lease = partial(compact.lease, endpoint) if name == compact.NAME else None
    return Job(label, start, hold_lease=lease, superfluous=lambda: reason(endpoint), spark_lives=engine.lives)


def _spark_errors() -> contextlib.AbstractContextManager[None]:
    """Raise Spark's failures as ours, if Spark is there."""
    if "pyspark" not in sys.modules:
        return contextlib.nullcontext()
    from timeball.pipeline.spark_errors import spark_errors

    return spark_errors()


def _told(failure: Exception) -> TimeballError:
    """Return our error for what a query ended with."""
    if isinstance(failure, TimeballError):
        return failure
    from timeball.pipeline.spark_errors import plain

    return plain(failure)


def _finish(job: Job, query: Query) -> None:
    """End a query; one that is lost with its JVM is no failure of its own."""
    try:
        with _spark_errors():
            finish(query)
        LOG.info("job stopped job=%s", job.name)
    except TimeballError as error:
        LOG.warning("job not stopped job=%s reason=%s", job.name, error)


def _watch(jobs: list[Job], stop: threading.Event, once: bool, clock: Clock, board: Board) -> None:
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
            lost = not job.spark_lives()
            told = Unavailable(LOST) if lost else error
            for each in jobs if lost else [job]:
                each.ended, each.error = "failed", str(told)
            raise told from error
        finally:
            for job in jobs:
                if job.query is not None:
                    _finish(job, job.query)
                job.ended = job.ended or ("done" if job.done else "stopped")
                board.write_status(job.status(started_ms), clock.monotonic_ns())


def finish(query: Query, patience_s: float = STOP_PATIENCE_S) -> None:
    """Stop a query between two epochs; after `patience_s` in the midst of one, which is safe but loud."""
    if not query.isActive:
        return
    pause = threading.Event()
    for _ in range(int(patience_s / STOP_LOOK_S)):
        if not query.isActive or not query.status["isTriggerActive"]:
            break
        pause.wait(STOP_LOOK_S)
    query.stop()


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT set `stop`, after Spark's own handler is in place; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(_: int, __: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
