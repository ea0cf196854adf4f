"""The status of a streaming job: a log line for each micro-batch, and a small file for other processes.

The file lies beside the job's checkpoint, `status/<job>.json`, so `timeball pipeline status` needs neither Spark nor
its ports. It is replaced whole, at most once a second and at least every five, so its age tells whether the job lives.
It is for people and monitoring only: no job reads it, and one that cannot write it goes on without.

    position    where the job stands: a row of the log (seq), or an instant (due_ms)
    lag         how far that is from the end of its source, in the same unit, when the micro-batch was planned
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

from timeball import places
from timeball.errors import SetupError

LOG = logging.getLogger("timeball.pipeline")

FOLDER = "status"
CHANGED_EVERY_NS = 1_000_000_000
ALIVE_EVERY_NS = 5_000_000_000
SILENT_MS = 20_000  # four files that did not come

State = Literal["starting", "running", "waiting", "done", "stopped", "failed"]
UNITS = {"seq": "rows", "due_ms": "ms"}  # name of an offset -> what its differences are


class Epoch(msgspec.Struct, frozen=True):
    """One micro-batch. `rows` are rows of the log, of all kinds; None where start or unit say nothing of them."""

    epoch: int
    unit: str
    position: int
    took_ms: int
    lag: int
    rows: int | None = None

    @property
    def rows_per_s(self) -> int | None:
        """Return rows a second of the micro-batch."""
        return None if self.rows is None or not self.took_ms else self.rows * 1000 // self.took_ms

    def line(self, job: str) -> str:
        """Return one line for the log, name=value."""
        rows = "" if self.rows is None else f" rows={self.rows}"
        rate = "" if self.rows_per_s is None else f" rows_per_s={self.rows_per_s}"
        lag = f"lag_{UNITS[self.unit]}={self.lag}"
        place = f"to_{self.unit}={self.position}"
        return f"epoch done job={job} epoch={self.epoch} {place}{rows} ms={self.took_ms}{rate} {lag}"


def epoch_of(progress: Mapping[str, Any]) -> Epoch | None:
    """Return the micro-batch of a progress report; None for one that moved nothing."""
    source = progress["sources"][0]
    start, end, latest = (_offset(source[key]) for key in ("startOffset", "endOffset", "latestOffset"))
    if end is None:
        return None
    unit, position = end
    took_ms = int(progress["durationMs"].get("triggerExecution", 0))
    lag = 0 if latest is None else max(0, latest[1] - position)
    if start is None:  # the first epoch of a checkpoint: only the sink knows where it began
        return Epoch(progress["batchId"], unit, position, took_ms, lag)
    moved = position - start[1]
    if not moved or not took_ms:
        return None
    return Epoch(progress["batchId"], unit, position, took_ms, lag, moved if unit == "seq" else None)


def _offset(offset: object) -> tuple[str, int] | None:
    """Return unit and position; of several groups the sum of their rows, so that a difference is that of all."""
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
    """The state of a job. `epochs` and `rows` count since this process began; `last` is its latest micro-batch."""

    job: str
    state: State
    updated_ms: int
    started_ms: int
    pid: int = msgspec.field(default_factory=os.getpid)
    host: str = msgspec.field(default_factory=socket.gethostname)
    epochs: int = 0
    rows: int = 0
    last: Epoch | None = None
    last_ms: int | None = None  # when the latest micro-batch was seen to be done
    failures: int = 0
    error: str | None = None

    def shown(self, now_ms: int) -> str:
        """Return the state, or 'silent' when the job has not reported for a while."""
        silent_ms = now_ms - self.updated_ms
        lives = self.state in ("starting", "running", "waiting")
        return f"silent for {silent_ms // 1000} s" if lives and silent_ms > SILENT_MS else self.state


class Board:
    """The statuses of jobs, in a folder beside their checkpoints, on any file system that Arrow can write to."""

    def __init__(self, folder: str) -> None:
        self._written: dict[str, tuple[int, JobStatus]] = {}
        self._files: fs.FileSystem | None = None
        try:
            self._files, root = places.arrow(folder)
            self._root = f"{root.rstrip('/')}/{FOLDER}"
        except SetupError as error:
            self._give_up(error)

    def write_status(self, status: JobStatus, now_ns: int) -> None:
        """Leave the status of one job, if it is time: at once when its state is another."""
        if self._files is None:
            return
        before_ns, before = self._written.get(status.job, (-ALIVE_EVERY_NS, None))
        same = before is not None and before.state == status.state
        idle = before is not None and before.epochs == status.epochs
        if same and now_ns - before_ns < (ALIVE_EVERY_NS if idle else CHANGED_EVERY_NS):
            return
        self._written[status.job] = (now_ns, status)
        target = f"{self._root}/{status.job}.json"
        try:
            if before is None:
                self._files.create_dir(self._root, recursive=True)
            with self._files.open_output_stream(f"{target}.new") as stream:
                stream.write(msgspec.json.encode(status))
            self._files.move(f"{target}.new", target)
        except (pa.ArrowException, OSError) as error:
            self._give_up(error)

    def write_audit(self, report: bytes) -> None:
        """Leave what an audit found, as JSON, for `GET /v1/jobs`."""
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
    """Read the statuses in a folder of checkpoints; SetupError when that is no folder."""
    try:
        files, root = places.arrow(folder)
        found = files.get_file_info(fs.FileSelector(f"{root.rstrip('/')}/{FOLDER}", allow_not_found=True))
        for info in sorted(found, key=lambda each: str(each.path)):
            if info.path.endswith(".json"):
                with files.open_input_stream(info.path) as stream:
                    yield msgspec.json.decode(stream.read(), type=JobStatus)
    except (pa.ArrowException, OSError, msgspec.DecodeError) as error:
        raise SetupError(f"--checkpoint {folder}: {error}") from error
