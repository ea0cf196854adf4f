"""One reader of bytes that the fuzzer calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Target:
    """A reader of bytes from outside, and the rules that it must keep for any bytes.

    `check` raises an error if the reader breaks a rule. The rules of all targets: only the documented error leaves, a
    compiled reader gives what its reference gives, and an encoder gives back the bytes or values that were read.
    `seeds` are inputs that our own encoders write. `break_it` is the negative control: it makes a fault on purpose.
    """

    name: str
    reads: str  # the input in a few words, for the page
    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    break_it: Callable[[pytest.MonkeyPatch], None]
