"""The limit of file descriptors, with a reserve for the broker's own files.

Libraries accept connections without a limit of their own, so clients could use up all descriptors. If the log then gets
no descriptor for its next segment, it has failed for good. The remedy: accepting fails at the process's soft limit,
which is kept `RESERVE` below the hard limit, and is raised only for the moment in which the broker opens a file.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from timeball.model.errors import SetupError

# Some systems allow a billion, but some programs close every possible number when they start as a child process.
OPEN_FILES_MAX = 1 << 20
OPEN_FILES_MIN = 256  # about 50 for the broker itself, the reserve, and connections
RESERVE = 64
# The part of the reserve that is lent for calls of libraries. These last longer than one open, so connections may take
# descriptors of it meanwhile.
RESERVE_OF_LIBRARIES = 16
# Descriptors to lend for one open, try by try. Few first: a descriptor that a connection takes is lost for the reserve.
RESERVE_STEPS = (
    4,
    16,
    RESERVE,
)

_changing = threading.Lock()  # guards the limit, `_lent` and `_base`
_lent: list[int] = []  # the sizes of all current loans
_base = 0  # the soft limit without loans


def allow_many() -> None:
    """Raise the soft limit to the most that the system allows, less the reserve.

    The usual 1,024 are fewer than the connections that an edge accepts. Raises SetupError if the system allows too few
    for a broker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    most = max(most, soft)
    if most < OPEN_FILES_MIN:
        raise SetupError(
            f"this process may open {most} files and a broker needs {OPEN_FILES_MIN}: raise the limit "
            "(ulimit -n, or LimitNOFILE= of the service)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - RESERVE, hard))


def open_files_max() -> int:
    """Return the current soft limit: the number of descriptors without the reserve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else soft


def in_use() -> Iterable[int]:
    """List the descriptors in use. If none is free to list them with, returns all that may be in use."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(open_files_max() + RESERVE)


@contextmanager
def lent(count: int = RESERVE) -> Iterator[None]:
    """Lend `count` descriptors of the reserve: raise the soft limit while the body runs.

    Concurrent loans share the reserve: the largest one counts.
    """
    _set([count], [])
    try:
        yield
    finally:
        _set([], [count])


def _set(more: list[int], done: list[int]) -> None:
    global _base
    with _changing:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not _lent:
            _base = soft
        _lent.extend(more)
        for count in done:
            _lent.remove(count)
        wanted = _base + max(_lent, default=0)
        if soft != resource.RLIM_INFINITY:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
