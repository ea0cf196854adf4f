"""Log lines on stderr: one per record, with time, level and logger. Repeats are counted.

    2030-01-31T08:00:00.123Z WARNING timeball.log.writer: no room for the next segment: …
    {"time":"2030-01-31T08:00:00.123Z","level":"WARNING","logger":"timeball.log.writer","message":"…"}

A lasting fault logs the same line many times a second, and hides the lines that name its cause. So a line that was
written less than `REPEAT_S` ago is only counted. The count is written with the first line that comes after that time,
or when the process ends. Times are UTC, so lines of several machines can be merged by sorting.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from timeball.model.config import LogFormat, LogLevel

REPEAT_S = 60.0
# Distinct lines that are remembered. When the limit is reached, the oldest is forgotten and its count written.
LINES_MAX = 256


def configure(level: LogLevel, line_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send all log records of `level` and above to `stream` (default: stderr), as text or JSON lines."""
    handler = CountingHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if line_format == "json" else TextLines())
    root = logging.getLogger()
    for earlier in root.handlers[:]:
        if isinstance(earlier, CountingHandler):
            root.removeHandler(earlier)
            earlier.close()
    root.addHandler(handler)
    root.setLevel(level.upper())


class TextLines(logging.Formatter):
    """Format a record as a line for people. A stack trace follows on further lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Join time, level, logger and message."""
        line = f"{_time(record)} {record.levelname} {record.name}: {_message(record)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """Format a record as one JSON document on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Encode the fields of the module's example, plus `repeated` and `exception` if the record has them."""
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if repeats := getattr(record, "repeats", 0):
            fields["repeated"] = repeats
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


@dataclass(slots=True)
class _Written:
    """A line in the log, and the number of its repeats since it was written."""

    record: logging.LogRecord
    repeats: int = 0


class CountingHandler(logging.StreamHandler[TextIO]):
    """Writes each line once in `REPEAT_S` seconds, by the times of the records, and counts its repeats."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._written: OrderedDict[tuple[str, int, str], _Written] = OrderedDict()  # oldest first

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it as a repeat. `logging` calls this with the handler's lock held."""
        self._write_counts(record.created)
        key = (record.name, record.levelno, record.getMessage())
        if (earlier := self._written.get(key)) is not None:
            earlier.repeats += 1
            return
        self._written[key] = _Written(record)
        super().emit(record)

    def close(self) -> None:
        """Write all counts, and close the handler."""
        self.acquire()
        try:
            self._write_counts(None)
        finally:
            self.release()
        super().close()

    def _write_counts(self, now_s: float | None) -> None:
        """Forget the lines that are at least `REPEAT_S` before or after `now_s`, and write their counts.

        With None, forget all lines. If `LINES_MAX` lines are remembered, forget the oldest too.
        """
        while self._written:
            oldest = next(iter(self._written.values()))
            # abs(): if the clock was set back, a line must not be suppressed until the clock reaches its time again.
            is_recent = now_s is not None and abs(now_s - oldest.record.created) < REPEAT_S
            if is_recent and len(self._written) < LINES_MAX:
                return
            self._written.popitem(last=False)
            if oldest.repeats:
                summary = copy.copy(oldest.record)
                summary.repeats = oldest.repeats
                summary.exc_info = None  # the stack trace was written with the first one
                super().emit(summary)


def _time(record: logging.LogRecord) -> str:
    created = datetime.fromtimestamp(record.created, UTC)
    return created.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    repeats = getattr(record, "repeats", 0)
    return f"{record.getMessage()} (repeated {repeats} times)" if repeats else record.getMessage()
