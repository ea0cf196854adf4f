"""The output and the exit codes of commands: results go to stdout; progress, notes, errors and log lines to stderr.

With --json, stdout has only JSON documents, one per line, so that a pipe can rely on it. Progress bars appear on a
terminal only.

Only this file turns an error into a sentence and an exit code:

    0   done
    1   a check failed, or not everything was done: the audit does not balance, a cancel or a reschedule came too late,
        no message has the id or key, rows of a bulk write were rejected
    2   usage: the broker or the command refuses an option, an argument or a request
    3   the broker cannot be reached, or is starting or stopping, or Spark has failed and a new start may help
    4   set-up: a package that is not installed, port in use, no Java, data folder of a newer format, not ours, or
        in use
    5   storage: disk full, over a limit, corrupt bytes, a failed write
    6   of `cluster status`: etcd does not answer, but the group's leader serves
    70  a fault in Timeball itself (TIMEBALL_DEBUG=1 shows where)
    130 interrupted

Each code stands for a class of errors in model/errors.py, and each class for the person who must act. A stack trace is
shown only with TIMEBALL_DEBUG=1, because it would hide the sentence that helps a user.
"""

from __future__ import annotations

import base64
import copy
import errno
import functools
import logging
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from timeball.cli.options import BROKER, is_third_party, not_installed
from timeball.model.config import LogFormat, LogLevel
from timeball.model.errors import (
    OverLimit,
    PeerError,
    RequestError,
    SetupError,
    StorageError,
    TimeballError,
    Unavailable,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


# ---- results, notes and progress ------------------------------------------------------------------------------
# Rich is imported on its first use: a broker does not print with it, and starts sooner without the import. Without
# `emoji=False` it would replace a part of a name or address such as `:x:` by an emoji.


@functools.cache
def out() -> Console:
    """Get the console for results, on stdout."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False, emoji=False)


@functools.cache
def err() -> Console:
    """Get the console for progress and notes, on stderr."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def print_json(document: object) -> None:
    """Print one line of JSON on stdout, flushed at once even when stdout is a pipe."""
    sys.stdout.write(msgspec.json.encode(document, enc_hook=str).decode() + "\n")
    sys.stdout.flush()


def decode_text(body: bytes) -> str | None:
    """Decode a message body as UTF-8. None if it is not UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def body_fields(body: bytes) -> dict[str, str]:
    """Build the JSON field of a message body: `body`, or `body_base64` if it is not UTF-8."""
    text = decode_text(body)
    return {"body": text} if text is not None else {"body_base64": base64.b64encode(body).decode()}


def print_line(text: str) -> None:
    """Print one line of text on stdout, flushed at once even when stdout is a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show(document: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: as one document with --json, else line by line for people."""
    if as_json:
        print_json(document)
        return
    for line in lines:
        print_line(line)


def print_note(text: str) -> None:
    """Print one line for the person at the terminal, on stderr. It is never part of a result."""
    err().print(text, markup=False)


def progress_bar(*, quiet: bool = False) -> Progress:
    """Create a progress display on stderr, silent when stderr is no terminal or `quiet` is set."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err(),
        disable=quiet or not err().is_terminal,
        transient=True,
    )


def bars(counts: Mapping[str, int], width: int = 40) -> list[str]:
    """Draw a bar chart, one line per entry: label, bar, count.

    The longest bar has `width` characters. A count above 0 has at least one.
    """
    if not counts:
        return []
    largest = max(counts.values())
    label_width = max(map(len, counts))
    number_width = max(len(f"{count:,}") for count in counts.values())
    lines = []
    for label, count in counts.items():
        length = max(1, round(width * count / largest)) if count else 0
        lines.append(f"{label:<{label_width}}  {'█' * length:<{width}}  {count:>{number_width},}")
    return lines


# ---- exit codes -----------------------------------------------------------------------------------------------


class ExitCode(IntEnum):
    """The codes of the module's table. Scripts depend on them, so a number never changes its meaning."""

    OK = 0
    CHECK_FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    SETUP = 4
    STORAGE = 5
    ETCD_LOST = 6
    FAULT = 70
    INTERRUPTED = 130


_BY_CLASS: tuple[tuple[type[TimeballError], ExitCode], ...] = (
    (RequestError, ExitCode.USAGE),
    (Unavailable, ExitCode.UNREACHABLE),
    (SetupError, ExitCode.SETUP),
    (PeerError, ExitCode.SETUP),
    (OverLimit, ExitCode.STORAGE),
    (StorageError, ExitCode.STORAGE),
)


def explain(error: BaseException) -> tuple[str, ExitCode]:
    """Convert an error into one sentence for stderr and the exit code."""
    if isinstance(error, TimeballError):
        return _sentence(error), _code_of(error)
    if isinstance(error, OSError):
        return _explain_os(error)
    # The commands themselves report missing packages of the other extras. Any other package is in the broker's extra.
    if isinstance(error, ModuleNotFoundError) and is_third_party(error):
        return explain(not_installed(error, BROKER))
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ExitCode.INTERRUPTED
    return (
        f"{type(error).__name__}: {_sentence(error)}. This is a fault in Timeball; "
        "TIMEBALL_DEBUG=1 shows where it happened",
        ExitCode.FAULT,
    )


def _code_of(error: TimeballError) -> ExitCode:
    return next((code for error_class, code in _BY_CLASS if isinstance(error, error_class)), ExitCode.FAULT)


def _sentence(error: BaseException) -> str:
    """Take the first line of an error's text: a remote call may have added lines of context after it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _explain_os(error: OSError) -> tuple[str, ExitCode]:
    """Explain an error of the operating system: its file and reason, and advice for a full disk and a used port."""
    prefix = f"{error.filename}: " if error.filename else ""
    reason = f"{prefix}{error.strerror or _sentence(error)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full: {reason}; free some space, then go on", ExitCode.STORAGE
    if error.errno == errno.EADDRINUSE:
        return f"{reason}; another program has this port, choose one with --port", ExitCode.SETUP
    return reason, ExitCode.SETUP


# ---- log lines ------------------------------------------------------------------------------------------------
#     2030-01-31T08:00:00.123Z WARNING timeball.log.writer: no room for the next segment: …
#     {"time":"2030-01-31T08:00:00.123Z","level":"WARNING","logger":"timeball.log.writer","message":"…"}
#
# A lasting fault logs the same line many times a second, and hides the lines that name its cause. So a line that was
# written less than `REPEAT_S` ago is only counted. The count is written with the first line that comes after that time,
# or when the process ends. Times are UTC, so lines of several machines can be merged by sorting.


REPEAT_S = 60.0
# Distinct lines that are remembered. When the limit is reached, the oldest is forgotten and its count written.
LINES_MAX = 256


def configure_logging(level: LogLevel, line_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send all log records of `level` and above to `stream` (default: stderr), as text or JSON lines.

    Replaces the handler of an earlier call, which then writes its counts.
    """
    handler = CountingHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if line_format == "json" else TextLines())
    root = logging.getLogger()
    for old_handler in root.handlers[:]:
        if isinstance(old_handler, CountingHandler):
            root.removeHandler(old_handler)
            old_handler.close()
    root.addHandler(handler)
    root.setLevel(level.upper())


class TextLines(logging.Formatter):
    """Format a record as a line for people. A stack trace follows on further lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Join time, level, logger and message."""
        line = f"{_record_time(record)} {record.levelname} {record.name}: {_record_message(record)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """Format a record as one JSON document on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Encode the fields of the module's example, plus `repeated` and `exception` if the record has them."""
        fields: dict[str, Any] = {
            "time": _record_time(record),
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
        if (written_line := self._written.get(key)) is not None:
            written_line.repeats += 1
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

        With None, forget all lines. If `LINES_MAX` lines are remembered, forget the oldest line too.
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
                summary.exc_info = None  # the stack trace was written with the line itself
                super().emit(summary)


def _record_time(record: logging.LogRecord) -> str:
    created = datetime.fromtimestamp(record.created, UTC)
    return created.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _record_message(record: logging.LogRecord) -> str:
    repeats = getattr(record, "repeats", 0)
    return f"{record.getMessage()} (repeated {repeats} times)" if repeats else record.getMessage()
