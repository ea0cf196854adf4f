"""The output and the exit codes of commands: results go to stdout, and progress, notes and errors to stderr.

With --json, stdout has only JSON documents, one per line, so that a pipe can rely on it. Progress bars appear on a
terminal only.

Only this file turns an error into a sentence and an exit code:

    0   done
    1   a check failed: the audit does not balance, a cancel or a reschedule came too late, or no message has
        the id or key
    2   usage: the broker or the command refuses an option, an argument or a request
    3   the broker cannot be reached, or is starting or stopping, or Spark has failed and a new start may help
    4   set-up: a package that is not installed, port in use, no Java, data folder of a newer format, not ours, or
        in use
    5   storage: disk full, over a limit, corrupt bytes, a failed write
    70  a fault in Timeball itself (TIMEBALL_DEBUG=1 shows where)
    130 interrupted

Each code stands for a class of errors in model/errors.py, and each class for the person who must act. A stack trace is
shown only with TIMEBALL_DEBUG=1, because it would hide the sentence that helps a user.
"""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from timeball.cli.options import BROKER, is_third_party, not_installed
from timeball.model.errors import (
    OverLimit,
    PeerError,
    RequestError,
    SetupError,
    StorageError,
    TimeballError,
    Unavailable,
)

# ---- results, notes and progress ------------------------------------------------------------------------------
# Rich is imported on its first use: a broker does not print with it, and starts sooner without the import.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@functools.cache
def out() -> Console:
    """Get the console for results, on stdout."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


@functools.cache
def err() -> Console:
    """Get the console for progress and notes, on stderr."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)


def print_json(document: object) -> None:
    """Print one line of JSON on stdout, flushed at once even when stdout is a pipe."""
    sys.stdout.write(msgspec.json.encode(document, enc_hook=str).decode() + "\n")
    sys.stdout.flush()


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
    prefix = f"{error.filename}: " if error.filename else ""
    reason = f"{prefix}{error.strerror or _sentence(error)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full: {reason}; free some space, then go on", ExitCode.STORAGE
    if error.errno == errno.EADDRINUSE:
        return f"{reason}; another program has this port, choose one with --port", ExitCode.SETUP
    return reason, ExitCode.SETUP
