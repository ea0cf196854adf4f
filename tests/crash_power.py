"""The switch and the fault box of the crash model: counts calls that change something, ends or fails them.

A call is `begin` (it is counted; a planned fault is raised), its effect, `end` (the planned cut happens). A sync
calls `end` before its effect: a cut during a sync leaves it undone, which is the worst case.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from timeball.model.errors import OverLimit, TimeballError


class PowerCut(BaseException):
    """The power is cut. Not an Exception: no handler of the code under test may take it for a fault."""


@dataclass(slots=True)
class _Fault:
    at: int
    error: TimeballError
    forever: bool


class Power:
    """Decides at each counted call whether it works, fails or is the last one."""

    def __init__(self, crash_at: int | None) -> None:
        self.crash_at = crash_at
        self.calls = 0
        self.trace: list[tuple[str, str]] = []
        self.cut = False
        self.lock = threading.RLock()
        self._faults: list[_Fault] = []

    def fail_at(self, call: int, error: TimeballError, *, forever: bool = False) -> None:
        """Raise `error` at the call with this number (counted as `calls`), and at all later ones if `forever`.

        OverLimit waits for a call that takes space. A failing write has written its first half. A failing sync
        makes the file's unsynced bytes undurable for good: a later sync of it succeeds and does nothing, as on
        Linux, and is noted in `syncs_after_failure`.
        """
        with self.lock:
            self._faults.append(_Fault(call, error, forever))

    def heal(self) -> None:
        """Inject no more faults, as if space was freed or the disk was replaced."""
        with self.lock:
            self._faults.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the lock, with the power on."""
        with self.lock:
            self.check_power()
            yield

    def begin(self, call: str, name: str, *, takes_space: bool = False) -> None:
        """Count one call. Raises the fault that is planned for it, before any effect."""
        self.check_power()
        self.calls += 1
        self.trace.append((call, name))
        for fault in self._faults:
            if self.calls >= fault.at and (takes_space or not isinstance(fault.error, OverLimit)):
                if not fault.forever:
                    self._faults.remove(fault)
                raise type(fault.error)(*fault.error.args)

    def end(self) -> None:
        """Cut the power if it is planned for this call."""
        if self.crash_at is not None and self.calls >= self.crash_at:
            self.about_to_cut()
            self.cut = True
            self.check_power()

    def about_to_cut(self) -> None:
        """Called just before the cut, the last moment in which a subclass can record something."""

    def check_power(self) -> None:
        """Raise PowerCut if the power is cut."""
        if self.cut:
            call, name = self.trace[-1]
            raise PowerCut(f"power cut at call {self.calls}: {call} {name}")
