"""Jobs whose sink knows its own mark, as a loop: look how far the log is, bring the sink there, epoch by epoch.

The mark is the truth: the row up to which a Delta table has events or messages, or the broker's watermark. There is no
checkpoint beside it. So a job may be killed at any moment, started twice, or go on with another engine: a repeated
epoch adds nothing, and none opens a hole. A mark behind the log's end belongs to another log: such a table is refused,
or this log's rows would be skipped up to the mark.

Of a cluster one loop follows the logs of all groups, and each group has a table of its own; a group that is added is
read from its first row.

A loop can be watched and stopped as a Spark query can, because the runner has both.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from timeball.clock import Clock, SystemClock
from timeball.errors import OutOfRange, SetupError, TimeballError, Unavailable
from timeball.pipeline.endpoint import Connections, Endpoint, group_statuses
from timeball.pipeline.groups import Group, place_of, query_name
from timeball.pipeline.jobs.engine import Engine
from timeball.pipeline.source.options import ReadOptions, read_options
from timeball.pipeline.source.pacing import Pace, share
from timeball.wire import LogStatus, Status

LOG = logging.getLogger("timeball.pipeline")

TRIGGER_S = 5.0
STOP_S = 20.0
PROGRESS_KEPT = 100  # epochs, until the runner has seen them

# Group (None: of a broker that is in no cluster) -> its endpoint, and the URI of its table.
Places = dict[str | None, tuple[str, str]]


class Extend(Protocol):
    """Bring the table at `uri` up to row `to_seq`, in pieces of `piece_rows` rows; return how many rows that took."""

    def __call__(self, engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int) -> int: ...


@dataclass(frozen=True)
class MarkedJob:
    """A job: how its sink is brought up to a row, and where the sink stands."""

    name: str
    options: Mapping[str, str]
    extend: Extend
    mark: Callable[[Endpoint, Status, str], int]  # (broker, its status, uri) -> row
    place: Callable[[Status], str]  # status of a broker -> URI of the sink, unless it is said otherwise
    is_shared: bool = False  # the broker moves the mark too, and says in its status where it stands
    trigger_s: float = TRIGGER_S

    def start(
        self,
        engine: Engine,
        endpoint: str,
        *,
        uri: str | None = None,
        once: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> Loop:
        """Start the loop; with `once` it ends when all rows that are durable now are in the sink.

        `uri`, or `uri` among the options, is where the table lies if not beside the pending table.
        """
        chosen = {**self.options, **(options or {}), "endpoint": endpoint, "read": "ranges"}
        place = chosen.pop("uri", uri)
        self.places(group_statuses(endpoint), place)  # a place that is none is said before the loop begins
        return Loop(self, engine, read_options(chosen), place, once)

    def places(self, found: Sequence[tuple[Group, Status]], uri: str | None) -> Places:
        """Return the endpoint and the URI of the table by group; `uri`: where it lies if it is said."""
        return {
            group.name or None: (
                group.endpoint,
                place_of(f"--{self.name}", uri, group.name, len(found)) or self.place(status),
            )
            for group, status in found
        }


class Query(Protocol):
    """A job at work: a loop, or a streaming query of Spark's. This is the part of it that the runner uses."""

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
    """A job at work, in a thread of its own."""

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
        self._marks: dict[str, int] = {}  # of each group, as last seen
        self._final: dict[str, int] | None = None
        self._epochs = 0
        self._busy = False
        self._error: TimeballError | None = None
        self._stopping = threading.Event()
        self.recentProgress: deque[dict[str, Any]] = deque(maxlen=PROGRESS_KEPT)
        self._thread = threading.Thread(target=self._run, name=self._label, daemon=True)
        self._thread.start()

    @property
    def isActive(self) -> bool:  # noqa: N802
        """Return whether the loop has not ended."""
        return self._thread.is_alive()

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        """Return what the latest epoch did."""
        return self.recentProgress[-1] if self.recentProgress else None

    @property
    def status(self) -> dict[str, Any]:
        """Return whether an epoch is at work."""
        return {"isTriggerActive": self._busy}

    def exception(self) -> TimeballError | None:
        """Return what ended the loop, if it did not end in order."""
        return self._error

    def awaitTermination(self) -> None:  # noqa: N802
        """Wait for the end; raise what ended the loop."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the loop; an epoch at work is cut off, which is safe."""
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
                if total <= rows and not self._once:  # else it is behind, and goes on at once
                    passed_s = (self._clock.monotonic_ns() - begun_ns) / 1e9
                    self._stopping.wait(max(0.0, self._job.trigger_s - passed_s))
        except TimeballError as error:
            self._error = error
        except Exception as error:  # a library's own: the runner tells it, and starts the loop again
            self._error = Unavailable(f"{self._label} failed: {type(error).__name__}: {error}")
            LOG.debug("loop failed job=%s", self._label, exc_info=True)
        finally:
            self._brokers.close()

    def _lag(self, found: Sequence[tuple[Group, Status]]) -> dict[str, int]:
        """Return how many rows each group is ahead of its sink; with `once`, of those at the start."""
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
        if mark > status.log.durable_seq:  # asked again, since another process may have moved it since
            check_mark(self._job.name, uri, mark, broker.status().log, mark)
        return mark

    def _epoch(self, found: Sequence[tuple[Group, Status]], rows: Mapping[str, int], begun_ns: int) -> None:
        """Bring each sink so many rows further, and say what was done."""
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
        self.recentProgress.append(
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
    """Return rows by group as an offset of the log names them: `seq` of a broker that is in no cluster."""
    return {name or "seq": seq for name, seq in sorted(seqs.items())}


def check_mark(name: str, uri: str, mark: int, log: LogStatus, to_seq: int) -> None:
    """Raise unless a table that ends at row `mark` can go on with this log up to `to_seq`."""
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
