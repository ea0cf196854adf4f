"""The exit codes of the commands, and the one place where an error becomes a sentence and a code.

    0   done
    1   a check failed: the audit does not balance, a cancel or a reschedule came too late, or no message has
        the id or key
    2   usage: the broker or the command refuses an option, an argument or a request
    3   the broker cannot be reached, or is starting or stopping; or Spark has failed, and a new start may help
    4   set-up: a package that is not installed, port in use, no Java, data folder of a newer format, not ours, or
        in use
    5   storage: disk full, over a limit, corrupt bytes, a failed write
    70  a fault in Timeball itself; TIMEBALL_DEBUG=1 shows where
    130 interrupted

Each code stands for a class of errors in `errors.py`, and each class for the person who must act. A stack trace is
shown only with TIMEBALL_DEBUG=1, because it would hide the sentence that helps a user.
"""

from __future__ import annotations

import errno
from enum import IntEnum

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


class ExitCode(IntEnum):
    """The codes in this module's table. Scripts depend on them, so a number never changes its meaning."""

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
