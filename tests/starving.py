"""Real failures of the operating system for a library that does its own I/O: no descriptors, no room in files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from timeball.io.files import RESERVE


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Have every open of this process fail with EMFILE, those that may use the broker's reserve as well."""
    # So many numbers are in use that the limit can lie the whole reserve below the lowest that is free.
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(RESERVE + 1)]
    free = taken.pop()
    os.close(free)
    try:
        with _limited(resource.RLIMIT_NOFILE, free - RESERVE):
            yield
    finally:
        for number in taken:
            os.close(number)


@contextmanager
def no_room() -> Iterator[None]:
    """Have every write that makes a file longer fail with EFBIG, as a full disk fails it with ENOSPC."""
    with _limited(resource.RLIMIT_FSIZE, 0):
        yield


@contextmanager
def _limited(resource_type: int, soft: int) -> Iterator[None]:
    """Lower the soft limit of a resource for the length of a block."""
    before = resource.getrlimit(resource_type)
    resource.setrlimit(resource_type, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource_type, before)
