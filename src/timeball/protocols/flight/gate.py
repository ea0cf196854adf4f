"""How many calls may be inside at once. A gate never waits: beyond its limit a caller is told so at once.

Each call holds a thread of gRPC's; without a limit, a client that opens long polls in a loop would take all
the memory there is. A pass goes back exactly once, however often it is given back.
"""

from __future__ import annotations

import threading
from types import TracebackType

from timeball.errors import OverLimit

CALLS_MAX = 1_024  # actions, reads and long polls
STREAMS_MAX = 48  # each has two threads, a window, and one message of BATCH_BYTES_MAX half received


class Pass:
    """The right to be inside; a context manager, or given back by hand."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate: Gate | None = gate

    def give_back(self) -> None:
        """Leave; does nothing the second time."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate._leave()

    def __enter__(self) -> Pass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


class Gate:
    """Counts who is inside."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._inside = 0
        self._lock = threading.Lock()

    @property
    def inside(self) -> int:
        """How many are inside now."""
        return self._inside

    def enter(self) -> Pass:
        """A pass, or OverLimit."""
        with self._lock:
            if self._inside >= self._limit:
                raise OverLimit(f"{self._limit} {self._what} are open; close some, or try again later")
            self._inside += 1
        return Pass(self)

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
