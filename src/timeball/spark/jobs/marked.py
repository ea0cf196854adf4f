"""Jobs that follow the log, as loops. Each epoch reads the end of the log and extends the job's sink up to it.

The sink stores its own *mark*: the row (sequence number) before which it is complete. For a Delta table of events or
messages, the commit of an epoch contains the mark. For `compact` the mark is the broker's watermark. No other state
decides where a job continues, and there is no checkpoint. So a job may be killed at any moment, run twice, or continue
with another engine. A repeated epoch adds nothing, and no epoch can leave a gap. A mark after the end of the log means
that the table belongs to another log. Such a table is refused, because otherwise rows of this log would be skipped up
to the mark.

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
from typing import Any, Protocol

from timeball.io.clock import Clock, SystemClock
from timeball.model.errors import OutOfRange, SetupError, TimeballError, Unavailable
from timeball.model.wire import LogStatus, Status
from timeball.spark.endpoint import Connections, Endpoint, group_statuses
from timeball.spark.groups import Group, place_of, query_name
from timeball.spark.jobs.engine import Engine
from timeball.spark.source.options import ReadOptions, read_options
from timeball.spark.source.pacing import Pace, share

LOG = logging.getLogger("timeball.spark")

TRIGGER_S = 5.0
STOP_S = 20.0
PROGRESS_KEPT = 100  # epochs; the runner reads them several times a second

# Name of a group -> its endpoint, and the URI of its table. The name is None for a broker that is in no cluster.
Places = dict[str | None, tuple[str, str]]


class Extend(Protocol):
    """Extend the table at `uri` up to row `to_seq` (exclusive), in pieces of `piece_rows` rows.

    Returns the number of rows of the log that were processed.
    """

    def __call__(self, engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int) -> int: ...


@dataclass(frozen=True)
class MarkedJob:
    """The definition of a job: functions that extend its sink and read the sink's mark."""

    name: str
    options: Mapping[str, str]
    extend: Extend
    mark: Callable[[Endpoint, Status, str], int]  # (broker, its status, uri) -> row
    place: Callable[[Status], str]  # status of a broker -> default URI of the sink
    is_shared: bool = False  # the broker moves the mark too, so it is read from each status
    trigger_s: float = TRIGGER_S  # from the start of one look at the log to the start of the next

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

        `uri`, or the option `uri`, is the URI of the sink if it is not at its default place. Raises SetupError.
        """
        chosen = {**self.options, **(options or {}), "endpoint": endpoint, "read": "ranges"}
        place = chosen.pop("uri", uri)
        self.places(group_statuses(endpoint), place)  # raises for an invalid URI, before the loop starts
        return Loop(self, engine, read_options(chosen), place, once)

    def places(self, found: Sequence[tuple[Group, Status]], uri: str | None) -> Places:
        """Find the endpoint and the URI of the sink of each group. `uri`: the one that the user gave, if any."""
        return {
            group.name or None: (
                group.endpoint,
                place_of(f"--{self.name}", uri, group.name, len(found)) or self.place(status),
            )
            for group, status in found
        }


class Query(Protocol):
    """A running job: a loop, or a streaming query of Spark. These are the members that the runner uses."""

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
    """A running job with its own thread.

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
        self._job, self._engine, self._options, self._uri, self._once = job, engine, options, uri, once
        self._clock = clock or SystemClock()
        self._label = query_name(job.name, options.endpoint)
        self._brokers = Connections(options.endpoint)
        self._pace = Pace(options, self._clock)
        self._marks: dict[str, int] = {}  # group -> mark, as last seen
        self._final: dict[str, int] | None = None  # with `once`: group -> end of its log at the start
        self._epochs = 0
        self._busy = False  # an epoch is running
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
        """The progress reports of the latest epochs, oldest first: a copy, because the loop goes on meanwhile."""
        return list(self._progress)

    @property
    def status(self) -> dict[str, Any]:
        """States whether an epoch is running, in the form of a Spark query."""
        return {"isTriggerActive": self._busy}

    def exception(self) -> TimeballError | None:
        """Return the error that ended the loop, if any."""
        return self._error

    def awaitTermination(self) -> None:  # noqa: N802
        """Wait until the loop has ended. Raises the error that ended it, if any."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the loop. A running epoch is cancelled, which is safe. Waits for at most STOP_S seconds."""
        self._stopping.set()
        if self._busy:
            self._engine.cancel(self._job.name)
        self._thread.join(STOP_S)

    # ---- in the loop's thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                begun_ns = self._clock.monotonic_ns()
                found = self._brokers.statuses()
                lag = self._lag(found)
                total = sum(lag.values())
                rows = min(total, self._options.max_rows_per_batch)
                if rows and (self._once or self._pace.worth(rows)):
                    self._pace.begin_batch()
                    self._epoch(found, share(lag, rows), begun_ns)
                elif self._once:
                    return
                if total <= rows and not self._once:  # otherwise rows are left, and the next epoch starts now
                    passed_s = (self._clock.monotonic_ns() - begun_ns) / 1e9
                    self._stopping.wait(max(0.0, self._job.trigger_s - passed_s))
        except TimeballError as error:
            self._error = error
        except Exception as error:  # of a library: the runner reports it and starts the loop again
            self._error = Unavailable(f"{self._label} failed: {type(error).__name__}: {error}")
            LOG.debug("loop failed job=%s", self._label, exc_info=True)
        finally:
            self._brokers.close()

    def _lag(self, found: Sequence[tuple[Group, Status]]) -> dict[str, int]:
        """Count, for each group, the rows of its log after the mark. With `once`, only up to the end at the start."""
        if self._once and self._final is None:
            self._final = {group.name: status.log.durable_seq for group, status in found}
        lag = {}
        there = self._job.places(found, self._uri)
        for group, status in found:
            if group.name not in self._marks or self._job.is_shared:
                self._marks[group.name] = self._mark(group, status, there[group.name or None][1])
            end = status.log.durable_seq if self._final is None else self._final.get(group.name, 0)
            lag[group.name] = max(0, end - self._marks[group.name])
        return lag

    def _mark(self, group: Group, status: Status, uri: str) -> int:
        broker = self._brokers.broker(group.endpoint)
        mark = self._job.mark(broker, status, uri)
        if mark > status.log.durable_seq:  # `status` may be older than the mark, so ask for a new one
            check_mark(self._job.name, uri, mark, broker.status().log, mark)
        return mark

    def _epoch(self, found: Sequence[tuple[Group, Status]], rows: Mapping[str, int], begun_ns: int) -> None:
        """Extend each sink by the given number of rows, and append a progress report.

        `rows`: group -> number of rows. `begun_ns`: the start of the epoch on the monotonic clock.
        """
        before, there = dict(self._marks), self._job.places(found, self._uri)
        self._busy = True
        try:
            for name in sorted(name for name, count in rows.items() if count):
                to_seq = before[name] + rows[name]
                self._job.extend(self._engine, *there[name or None], to_seq, self._options.rows_per_partition)
                self._marks[name] = to_seq
        finally:
            self._busy = False
        latest = {group.name: status.log.durable_seq for group, status in found}
        took_ms = (self._clock.monotonic_ns() - begun_ns) // 1_000_000
        self._progress.append(
            {
                "batchId": self._epochs,
                "sources": [
                    {
                        "startOffset": offset(before),
                        "endOffset": offset(self._marks),
                        "latestOffset": offset(latest),
                    }
                ],
                "durationMs": {"triggerExecution": max(1, took_ms)},
            }
        )
        self._epochs += 1


def offset(seqs: Mapping[str, int]) -> dict[str, int]:
    """Format rows by group as an offset of a stream of the log. The key is `seq` for a broker that is in no cluster."""
    return {name or "seq": seq for name, seq in sorted(seqs.items())}


def check_mark(name: str, uri: str, mark: int, log: LogStatus, to_seq: int) -> None:
    """Check that a table with this mark can continue with this log up to row `to_seq`.

    Raises OutOfRange if retention has removed rows after the mark. Raises SetupError if the mark is after the log's
    end.
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
