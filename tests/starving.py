"""Real failures of the operating system for a library that does its own I/O: no descriptors, no room in files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Have every open of this process fail with EMFILE."""
    free = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
    os.close(free)
    with _limited(resource.RLIMIT_NOFILE, free):
        yield


@contextmanager
def no_room() -> Iterator[None]:
    """Have every write that makes a file longer fail with EFBIG, as a full disk fails it with ENOSPC."""
    with _limited(resource.RLIMIT_FSIZE, 0):
        yield


@contextmanager
def _limited(which: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)
