"""The status of a continuous job: a log line for each epoch, and a small file for other processes.

An epoch is one micro-batch of a Spark query, or one step of a loop (jobs/marked.py). The file is `status/<job>.json` in
the folder of the jobs' checkpoints, so `timeball pipeline status` needs neither Spark nor its ports. It is replaced as
a whole, at most once per second and at least every 5 s. So a running job whose file is older than SILENT_MS has died.
The file is for people and monitoring only. No job reads it, and a job that cannot write it continues without it.

    position    the point that the job has reached: a row of the log (seq), or a due time (due_ms)
    lag         the distance to the end of the source, in the same unit, when the epoch was planned
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.fs as fs

from timeball.model import storage_uris
from timeball.model.errors import SetupError

LOG = logging.getLogger("timeball.spark")

FOLDER = "status"
CHANGED_EVERY_NS = 1_000_000_000  # shortest interval between two files, if there is a new epoch
ALIVE_EVERY_NS = 5_000_000_000  # interval between two files without a new epoch
SILENT_MS = 20_000  # the time of four status files

State = Literal["starting", "running", "waiting", "done", "stopped", "failed"]
UNITS = {"seq": "rows", "due_ms": "ms"}  # name of an offset -> unit of its differences


class Epoch(msgspec.Struct, frozen=True):
    """One epoch of a job."""

    epoch: int
    unit: str  # a key of UNITS, for `position` and `lag`
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
    """Convert a progress report of a query to an epoch. Returns None if it has no end, no progress or no duration."""
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
    """Read (unit, position) from an offset. Returns None if the offset has another form.

    The positions of several groups are added: the difference of two sums is the number of rows of all groups.
    """
    if isinstance(offset, str):
        offset = json.loads(offset)
    for unit in UNITS if isinstance(offset, dict) else ():
        value = offset.get(unit) if isinstance(offset, dict) else None
        if isinstance(value, int):
            return unit, value
    if isinstance(offset, dict) and not all(key.isdecimal() for key in offset):
        rows = [value for value in offset.values() if isinstance(value, int)]
        return ("seq", sum(rows)) if len(rows) == len(offset) else None
    return None


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
        """Format the state for people. A running job without a report for SILENT_MS is 'silent for … s'."""
        silent_ms = now_ms - self.updated_ms
        should_report = self.state in ("starting", "running", "waiting")
        return f"silent for {silent_ms // 1000} s" if should_report and silent_ms > SILENT_MS else self.state


class Board:
    """Writes the status files of jobs beside their checkpoints, to any file system that Arrow can write to.

    The first error is logged and ends all writing, because the jobs do not need these files.
    """

    def __init__(self, folder: str) -> None:
        self._written: dict[str, tuple[int, JobStatus]] = {}
        self._files: fs.FileSystem | None = None
        try:
            self._files, root = storage_uris.arrow(folder)
            self._root = f"{root.rstrip('/')}/{FOLDER}"
        except SetupError as error:
            self._give_up(error)

    def write_status(self, status: JobStatus, now_ns: int) -> None:
        """Write the status of a job, unless its last file is recent enough (CHANGED_EVERY_NS, ALIVE_EVERY_NS).

        A new state is written at once.
        """
        if self._files is None:
            return
        last_ns, last_status = self._written.get(status.job, (-ALIVE_EVERY_NS, None))
        is_same_state = last_status is not None and last_status.state == status.state
        has_no_new_epoch = last_status is not None and last_status.epochs == status.epochs
        if is_same_state and now_ns - last_ns < (ALIVE_EVERY_NS if has_no_new_epoch else CHANGED_EVERY_NS):
            return
        self._written[status.job] = (now_ns, status)
        target = f"{self._root}/{status.job}.json"
        try:
            if last_status is None:
                self._files.create_dir(self._root, recursive=True)
            with self._files.open_output_stream(f"{target}.new") as stream:
                stream.write(msgspec.json.encode(status))
            self._files.move(f"{target}.new", target)
        except (pa.ArrowException, OSError) as error:
            self._give_up(error)

    def write_audit(self, report: bytes) -> None:
        """Write the JSON report of an audit to `audit.json` beside the checkpoints, for `GET /v1/jobs`."""
        if self._files is None:
            return
        target = f"{self._root.removesuffix(FOLDER)}audit.json"
        try:
            self._files.create_dir(self._root, recursive=True)
            with self._files.open_output_stream(f"{target}.new") as stream:
                stream.write(report)
            self._files.move(f"{target}.new", target)
        except (pa.ArrowException, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._files = None
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
