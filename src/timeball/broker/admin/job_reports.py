"""Read the status files of the Spark jobs and the result of the last audit.

    pipeline/status/<job>.json    written by each job every few seconds (spark/run/job_status.py)
    pipeline/audit.json           written by `timeball audit`

Jobs with another folder for their checkpoints, or with a table in an object store, write elsewhere and are not visible
here. The files are for people: no decision of the broker depends on them.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from timeball.broker.policy import Policy
from timeball.broker.registry.attach import AttachState
from timeball.io.clock import SchedulerClock
from timeball.io.files import Files
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model.access import Caller, Verb

logger = logging.getLogger(__name__)

STATUS, AUDIT = "pipeline/status", "pipeline/audit.json"
# Jobs write into this folder. If one of them fills it, reading it must not become slow.
FILES_MAX = 100
FILE_BYTES_MAX = 64 * 1024

Report = dict[str, object]


class Batch(msgspec.Struct, frozen=True):
    """The latest micro-batch of a job. `position` is its end: a sequence number (seq) or a due time in ms (due_ms)."""

    unit: Literal["seq", "due_ms"]
    position: int
    took_ms: int


class JobFigures(msgspec.Struct, frozen=True):
    """The fields of a job's report that metrics need."""

    # The lengths are limited, because any program may have written the file.
    job: Annotated[str, Meta(max_length=100)]
    state: Annotated[str, Meta(max_length=20)]
    updated_ms: int
    epochs: int = 0
    rows: int = 0
    last: Batch | None = None
    failures: int = 0


class JobState(NamedTuple):
    """A job's figures, and its lag behind the broker now.

    A lag is None if the job's kind of position has no such lag.
    """

    figures: JobFigures
    lag_rows: int | None
    lag_ms: int | None


class JobReports:
    """Reads the reports of jobs. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        *,
        files: Files,
        clock: SchedulerClock,
        reader: LogReader,
        attach_state: AttachState,
        reader_thread: Executor,
    ) -> None:
        self._policy = policy
        self._files, self._clock, self._reader = files, clock, reader
        self._attach_state, self._reader_thread = attach_state, reader_thread

    async def all(self, caller: Caller) -> tuple[list[Report], Report | None]:
        """Read the reports of the jobs, sorted by name, and of the last audit. Raises Forbidden."""
        # Errors in them may contain topics and URIs that not every account may see.
        self._policy.allow(caller, Verb.ADMIN)
        return await in_thread(self._reader_thread, self._read_all)

    async def states(self) -> list[JobState]:
        """Read the states of the jobs for metrics, sorted by name. Invalid reports are left out."""
        return await in_thread(self._reader_thread, self._states, self._reader.next_seq, self._clock.now_ms())

    async def compaction_lag_ms(self) -> int:
        """Compute the age in ms of the oldest row that compaction has not read. 0 if there is none."""
        return await in_thread(
            self._reader_thread,
            self._age_of_row_ms,
            self._attach_state.watermark,
            self._reader.next_seq,
            self._clock.now_ms(),
        )

    def _states(self, next_seq: int, now_ms: int) -> list[JobState]:
        states = []
        for report in self._read_all()[0]:
            try:
                figures = msgspec.convert(report, JobFigures)
            except msgspec.ValidationError as error:
                logger.warning("report of a job not understood reason=%s", error)
                continue
            last_batch = figures.last
            if last_batch is None:
                states.append(JobState(figures, None, None))
            elif last_batch.unit == "due_ms":
                states.append(JobState(figures, None, max(0, now_ms - last_batch.position)))
            else:
                # Relative to the current end of the log, so the lag of a dead job grows.
                lag_ms = self._age_of_row_ms(last_batch.position, next_seq, now_ms)
                states.append(JobState(figures, max(0, next_seq - last_batch.position), lag_ms))
        return states

    def _age_of_row_ms(self, seq: int, next_seq: int, now_ms: int) -> int:
        """Compute the age in ms of the first row at or after `seq`. 0 if there is none."""
        reader = self._reader
        first = max(seq, reader.first_seq)
        # One frame at a time. Reserved numbers have no rows.
        for rows in reader.coalesced(first, next_seq, None, 1, ["store_ms"]) if first < next_seq else ():
            if rows.num_rows:
                return max(0, now_ms - int(rows.column("store_ms")[0].as_py() or now_ms))
        return 0

    def _read_all(self) -> tuple[list[Report], Report | None]:
        files = self._files
        # Jobs replace a file through a temporary file with another suffix, which is skipped here.
        names = (
            [name for name in files.list_dir(STATUS) if name.endswith(".json")]
            if files.exists(STATUS)
            else []
        )
        reports = [self._read(f"{STATUS}/{name}") for name in sorted(names)[:FILES_MAX]]
        return [report for report in reports if report is not None], self._read(AUDIT)

    def _read(self, name: str) -> Report | None:
        files = self._files
        try:
            # Another process may remove the file, or write any content into it.
            if not files.exists(name) or files.size(name) > FILE_BYTES_MAX:
                return None
            return msgspec.json.decode(memoryview(files.map_readonly(name)), type=Report)
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("report of a job not read file=%s reason=%s", name, error)
            return None
