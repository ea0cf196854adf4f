"""The limit of file descriptors, with a reserve for the broker's own files.

Libraries accept connections without a limit of their own, so clients could use up all descriptors. If the log then gets
no descriptor for its next segment, it stops for good. Therefore the process's soft limit, at which accepting fails, is
`RESERVE` below the hard limit. It is raised only for the moment in which the broker opens a file.
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
# The part of the reserve for library calls that open files. Such a call lasts longer than one open, so connections may
# take descriptors of this part meanwhile.
RESERVE_OF_LIBRARIES = 16

_lock = threading.Lock()  # guards the limit, `_loans` and `_base_limit`
_loans: list[int] = []  # the sizes of all current loans
_base_limit = 0  # the soft limit without loans


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the system's maximum minus the reserve.

    The usual 1,024 are fewer than the connections that an edge accepts. Raises SetupError if the system allows too few
    for a broker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_limit = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    soft_limit = max(soft_limit, soft)
    if soft_limit < OPEN_FILES_MIN:
        raise SetupError(
            f"this process may open {soft_limit} files and a broker needs {OPEN_FILES_MIN}: raise the limit "
            "(ulimit -n, or LimitNOFILE= of the service)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit - RESERVE, hard))


def open_files_max() -> int:
    """Read the current soft limit: the number of descriptors without the reserve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else soft


def in_use() -> Iterable[int]:
    """List the descriptors in use. If no descriptor is free for listing them, returns all numbers up to the limit."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(open_files_max() + RESERVE)


@contextmanager
def lent(count: int = RESERVE) -> Iterator[None]:
    """Lend `count` descriptors of the reserve: raise the soft limit while the body runs.

    Concurrent loans share the reserve: the largest one counts.
    """
    _change_loans([count], [])
    try:
        yield
    finally:
        _change_loans([], [count])


def _change_loans(added: list[int], ended: list[int]) -> None:
    """Add and end loans (numbers of descriptors), and set the soft limit to that without loans plus the largest."""
    global _base_limit
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not _loans:
            _base_limit = soft
        _loans.extend(added)
        for count in ended:
            _loans.remove(count)
        new_limit = _base_limit + max(_loans, default=0)
        if soft != resource.RLIM_INFINITY:
            capped_limit = new_limit if hard == resource.RLIM_INFINITY else min(new_limit, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (capped_limit, hard))
