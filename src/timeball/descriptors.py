"""How many descriptors this process may have, and some that are held back for the broker's own files.

Connections are accepted in libraries that have no bound of their own, so strangers can take every descriptor; and a
log that gets none for its next segment has failed for good. Accepting fails at the soft limit. It is kept `RESERVE`
below the hard one, and raised for the moment in which a file of the broker's own is opened.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from timeball.errors import SetupError

OPEN_FILES_MAX = (
    1 << 20
)  # some systems allow a billion, and programs that a child may start close each number
OPEN_FILES_MIN = 256  # some 50 for the broker itself, the reserve, and connections
RESERVE = 64
RESERVE_OF_LIBRARIES = 16  # of these, what is lent for longer than one open: strangers may come by then, too
RESERVE_STEPS = (
    4,
    16,
    RESERVE,
)  # no more is lent than is needed, since one that strangers get is lent no more

_changing = threading.Lock()
_lent: list[int] = []  # by those who open something now
_base = 0  # the soft limit while nothing is lent


def allow_many() -> None:
    """Have this process open as many files as the system lets it; raises SetupError if that is too few for a broker.

    The usual 1,024 are fewer than the connections an edge takes.
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
    """Return how many descriptors there are for everything but the reserve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else soft


def in_use() -> Iterable[int]:
    """Return the descriptors that are in use, or that may be: to look needs one, too."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(open_files_max() + RESERVE)


@contextmanager
def lent(count: int = RESERVE) -> Iterator[None]:
    """Let this process open so many more files while the body runs."""
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
