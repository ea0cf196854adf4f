"""Jobs that follow the log, as loops, and the engines that run their tasks.

Each epoch extends the job's sink up to the end of the log. A job cuts the rows of an epoch into pieces, and an engine
runs the job's task for each piece.

The sink stores its own *mark*: the row (sequence number) before which it is complete. For a Delta table of events or
messages, the commit of an epoch contains the mark. For `compact` the mark is the broker's watermark. No other state
decides where a job continues, and there is no checkpoint. So a job may be killed at any moment, run twice, or continue
with another engine. A repeated epoch adds nothing, and no epoch can leave a gap. A table whose mark is after the end of
the log belongs to another log. It is refused, because the job would skip the rows of this log up to the mark.

In a cluster, one loop follows the logs of all groups at its endpoint, and each group has its own table. A group that is
added later is read from its first row.

The runner treats loops and Spark queries alike. So a loop has the members of a Spark query that the runner uses to
watch and stop it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from timeball.io.clock import Clock, SystemClock
from timeball.model.answers import LogStatus, Status
from timeball.model.errors import OutOfRange, SetupError, TimeballError, Unavailable
from timeball.spark.endpoint import Connections, Endpoint, Group, group_statuses, group_table_uri, query_name
from timeball.spark.source.options import Pace, ReadOptions, divide_rows, encode_offset, read_options

LOG = logging.getLogger("timeball.spark")

TRIGGER_S = 5.0
STOP_S = 20.0
PROGRESS_KEPT = 100  # progress reports of epochs; the runner reads them several times per second


class Sink(NamedTuple):
    """The sink of one group: the group's endpoint, and the URI of its table."""

    endpoint: str
    uri: str


# ---- the definition of a job ----------------------------------------------------------------------------------


class Extend(Protocol):
    """Extend the sink at `uri` up to row `to_seq` (exclusive) of the log, in tasks of `piece_rows` rows.

    Returns the number of rows of the log that were processed. Raises OutOfRange if another process has extended the
    sink meanwhile, or if retention has removed rows that are missing in it.
    """

    def __call__(self, engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int) -> int: ...


@dataclass(frozen=True)
class MarkedJob:
    """The definition of a job: functions that extend its sink and read the sink's mark."""

    name: str
    options: Mapping[str, str]  # defaults of ReadOptions
    extend: Extend
    mark: Callable[[Endpoint, Status, str], int]  # (broker, its status, URI of the sink) -> mark
    default_uri: Callable[[Status], str]  # status of a broker -> default URI of the sink
    is_shared: bool = False  # True if the broker moves the mark too. Then it is read again before each epoch
    trigger_s: float = TRIGGER_S  # interval between two reads of the broker's status

    def start(
        self,
        engine: Engine,
        endpoint: str,
        *,
        uri: str | None = None,
        once: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> Loop:
        """Start the loop. With `once` it ends when the sink has all rows that are durable at the start.

        `uri`, or the option `uri`: the URI of the sink if it is not the default. Raises SetupError for a bad option.
        """
        all_options = {**self.options, **(options or {}), "endpoint": endpoint, "read": "ranges"}
        sink_uri = all_options.pop("uri", uri)
        # Raises for an invalid URI, before the loop starts.
        self.sinks_by_group(group_statuses(endpoint), sink_uri)
        return Loop(self, engine, read_options(all_options), sink_uri, once)

    def sinks_by_group(
        self, statuses: Sequence[tuple[Group, Status]], uri: str | None
    ) -> dict[str | None, Sink]:
        """List the sink of each group, by name. The name is None for a broker that is in no cluster.

        `uri`: of the sinks, with `{group}` in it if there are several groups. None for the default. Raises SetupError.
        """
        return {
            group.name or None: Sink(
                group.endpoint,
                group_table_uri(f"--{self.name}", uri, group.name, len(statuses)) or self.default_uri(status),
            )
            for group, status in statuses
        }


# ---- the loop of a running job --------------------------------------------------------------------------------


class Query(Protocol):
    """A loop or a streaming query of Spark, with the members that the runner uses."""

    @property
    def isActive(self) -> bool: ...  # noqa: N802 - Spark's names
    @property
    def status(self) -> dict[str, Any]: ...
    @property
    def lastProgress(self) -> Any: ...  # noqa: N802
    @property
    def recentProgress(self) -> Any: ...  # noqa: N802
    def exception(self) -> Exception | None: ...
    def stop(self) -> None: ...


class Loop:
    """A running job, in its own thread.

    Only that thread writes the state. Other threads read the properties and call `stop`.
    """

    def __init__(
        self,
        job: MarkedJob,
        engine: Engine,
        options: ReadOptions,
        uri: str | None,
        once: bool,
        clock: Clock | None = None,
    ) -> None:
        """Start the thread. `uri`: of the job's table, None for the default. `once`: stop at the log's current end."""
        self._job, self._engine, self._options, self._uri, self._once = job, engine, options, uri, once
        self._clock = clock or SystemClock()
        self._label = query_name(job.name, options.endpoint)
        self._brokers = Connections(options.endpoint)
        self._pace = Pace(options, self._clock)
        self._marks: dict[str, int] = {}  # group -> mark, as last read or written
        self._final_seqs: dict[str, int] | None = None  # with `once`: group -> end of its log at the start
        self._epochs = 0
        self._is_epoch_running = False  # read by other threads
        self._error: TimeballError | None = None
        self._stopping = threading.Event()
        self._progress: deque[dict[str, Any]] = deque(maxlen=PROGRESS_KEPT)
        self._thread = threading.Thread(target=self._run, name=self._label, daemon=True)
        self._thread.start()

    @property
    def isActive(self) -> bool:  # noqa: N802
        """True until the loop has ended."""
        return self._thread.is_alive()

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        """The progress report of the latest epoch."""
        return self._progress[-1] if self._progress else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:  # noqa: N802
        """A copy of the progress reports of the latest epochs, oldest first."""
        return list(self._progress)

    @property
    def status(self) -> dict[str, Any]:
        """Report whether an epoch is running, in the format of a Spark query."""
        return {"isTriggerActive": self._is_epoch_running}

    def exception(self) -> TimeballError | None:
        """Get the error that ended the loop, or None."""
        return self._error

    def awaitTermination(self) -> None:  # noqa: N802
        """Wait until the loop has ended. Raises the error that ended it, if any."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the loop. Cancels a running epoch, which is safe, and waits for at most STOP_S seconds."""
        self._stopping.set()
        if self._is_epoch_running:
            self._engine.cancel(self._job.name)
        self._thread.join(STOP_S)

    # ---- in the loop's thread

    def _run(self) -> None:
        """Run epochs until the loop is stopped, has ended (`once`) or has failed."""
        try:
            while not self._stopping.is_set():
                started_ns = self._clock.monotonic_ns()
                statuses = self._brokers.statuses()
                new_rows = self._count_new_rows(statuses)
                total = sum(new_rows.values())
                rows = min(total, self._options.max_rows_per_batch)
                if rows and (self._once or self._pace.is_worth_a_batch(rows)):
                    self._pace.begin_batch()
                    self._run_epoch(statuses, divide_rows(new_rows, rows), started_ns)
                elif self._once:
                    return
                # If there are more rows, the next epoch starts without a pause.
                if total <= rows and not self._once:
                    elapsed_s = (self._clock.monotonic_ns() - started_ns) / 1e9
                    self._stopping.wait(max(0.0, self._job.trigger_s - elapsed_s))
        except TimeballError as error:
            self._error = error
        except Exception as error:  # of any type, by a library: the runner reports it and restarts the loop
            self._error = Unavailable(f"{self._label} failed: {type(error).__name__}: {error}")
            LOG.debug("loop failed job=%s", self._label, exc_info=True)
        finally:
            self._brokers.close()

    def _count_new_rows(self, statuses: Sequence[tuple[Group, Status]]) -> dict[str, int]:
        """Count the rows after the mark in the log of each group. With `once`, only rows that existed at the start."""
        if self._once and self._final_seqs is None:
            self._final_seqs = {group.name: status.log.durable_seq for group, status in statuses}
        new_rows = {}
        sinks = self._job.sinks_by_group(statuses, self._uri)
        for group, status in statuses:
            if group.name not in self._marks or self._job.is_shared:
                self._marks[group.name] = self._read_mark(group, status, sinks[group.name or None].uri)
            end = status.log.durable_seq if self._final_seqs is None else self._final_seqs.get(group.name, 0)
            new_rows[group.name] = max(0, end - self._marks[group.name])
        return new_rows

    def _read_mark(self, group: Group, status: Status, uri: str) -> int:
        """Read the mark of a group's sink.

        Raises SetupError if it is after the end of the log: the sink then belongs to another log.
        """
        broker = self._brokers.broker(group.endpoint)
        mark = self._job.mark(broker, status, uri)
        if mark > status.log.durable_seq:  # `status` may be older than the mark, so read it again
            # With to_seq=mark, `check_mark` checks only the end of the log. `extend` checks the whole range.
            check_mark(self._job.name, uri, mark, broker.status().log, to_seq=mark)
        return mark

    def _run_epoch(
        self, statuses: Sequence[tuple[Group, Status]], rows: Mapping[str, int], started_ns: int
    ) -> None:
        """Extend each sink by the given number of rows, and append a progress report.

        `rows`: group -> number of rows. `started_ns`: the start of the epoch on the monotonic clock.
        """
        old_marks, sinks = dict(self._marks), self._job.sinks_by_group(statuses, self._uri)
        self._is_epoch_running = True
        try:
            for name in sorted(name for name, count in rows.items() if count):
                to_seq = old_marks[name] + rows[name]
                self._job.extend(self._engine, *sinks[name or None], to_seq, self._options.rows_per_partition)
                self._marks[name] = to_seq
        finally:
            self._is_epoch_running = False
        latest = {group.name: status.log.durable_seq for group, status in statuses}
        took_ms = (self._clock.monotonic_ns() - started_ns) // 1_000_000
        self._progress.append(
            {
                "batchId": self._epochs,
                "sources": [
                    {
                        "startOffset": encode_offset(old_marks),
                        "endOffset": encode_offset(self._marks),
                        "latestOffset": encode_offset(latest),
                    }
                ],
                "durationMs": {"triggerExecution": max(1, took_ms)},
            }
        )
        self._epochs += 1


def check_mark(name: str, uri: str, mark: int, log: LogStatus, to_seq: int) -> None:
    """Check that the table of a job with this mark can be extended from this log up to row `to_seq`.

    `name`: of the job. Raises OutOfRange if retention has removed rows after the mark. Raises SetupError if the mark is
    after the end of the log.
    """
    if mark < log.first_seq < to_seq:
        raise OutOfRange(
            f"the {name} ends at row {mark} but retention has removed the log up to {log.first_seq}: rows are missing; "
            f"move the {name} at {uri} away to start a new one"
        )
    if mark > log.durable_seq:
        raise SetupError(
            f"the {name} at {uri} has come to row {mark} but the broker's log ends at {log.durable_seq}: it belongs to "
            f"another log; name another with --{name}, or move it away"
        )


# ---- engines: Spark (run/session.py), or this process ---------------------------------------------------------
# A job has one function that processes a piece of the log: its task. A job does not depend on where its tasks run, and
# it writes the same files and marks with every engine. If a task fails, the job plans the epoch again from the mark of
# its sink. The files that other tasks of the failed epoch have written are in no version of a table, and are deleted
# later.

Piece = tuple[int, int]  # (begin, end): the rows begin <= seq < end of the log
Result = TypeVar("Result")


class Engine(Protocol):
    """The interface between a job and the engine that runs its tasks."""

    def run(
        self, job: str, work: str, task: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> list[Result]:
        """Run the task for each piece. Returns the results in order. `work`: a description for people."""

    def is_alive(self) -> bool:
        """Check whether the engine can run tasks."""

    def cancel(self, job: str) -> None:
        """Cancel the running tasks of a job, if the engine can."""


class InProcessEngine:
    """Runs tasks in this process, one after the other, without Java or other processes."""

    def run(
        self, job: str, work: str, task: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> list[Result]:
        """Run the task for each piece."""
        return [task(piece) for piece in pieces]

    def is_alive(self) -> bool:
        """Return True: this process can always run tasks."""
        return True

    def cancel(self, job: str) -> None:
        """Do nothing: the running task ends by itself within seconds."""
