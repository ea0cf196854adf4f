"""What a soak run has sent, and what became of it: one record a message and group, in arrays."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BODY_BYTES = 128
_NUMBER = struct.Struct(">q")
_GROWTH = 65_536


def body_of(number: int) -> bytes:
    """The body of message `number`: its number, then filling."""
    return _NUMBER.pack(number).ljust(BODY_BYTES, b"\x5a")


class Book:
    """The messages of one topic and how often each has come to each group. Thread safe."""

    def __init__(self, topic: str, groups: Sequence[str]) -> None:
        self.topic, self.groups = topic, list(groups)
        self.sent = self.early = self.unknown = self.unsure = 0
        self.late_ms: list[npt.NDArray[np.int64]] = []
        self._lock = threading.Lock()
        self._due_ms = np.empty(0, np.int64)
        self._is_sure = np.empty(0, np.bool_)
        self._times = {group: np.empty(0, np.uint8) for group in groups}

    def begin(self, due_ms: Sequence[int]) -> list[int]:
        """Number messages that are about to be sent, each due at this instant."""
        with self._lock:
            first, self.sent = self.sent, self.sent + len(due_ms)
            if self.sent > len(self._due_ms):
                more = max(_GROWTH, self.sent - len(self._due_ms))
                self._due_ms = np.concatenate([self._due_ms, np.zeros(more, np.int64)])
                self._is_sure = np.concatenate([self._is_sure, np.ones(more, np.bool_)])
                for group, times in self._times.items():
                    self._times[group] = np.concatenate([times, np.zeros(more, np.uint8)])
            self._due_ms[first : self.sent] = due_ms
        return list(range(first, self.sent))

    def doubt(self, numbers: Sequence[int]) -> None:
        """Note that sending these was not answered with success: they may come, or not."""
        with self._lock:
            self._is_sure[list(numbers)] = False
            self.unsure += len(numbers)

    def came(self, group: str, bodies: Sequence[bytes], now_ms: int) -> None:
        """Note messages that a group has received."""
        numbers = np.array([_NUMBER.unpack_from(body)[0] for body in bodies], np.int64)
        with self._lock:
            known = (numbers >= 0) & (numbers < self.sent)
            self.unknown += int((~known).sum())
            numbers = numbers[known]
            np.add.at(self._times[group], numbers, 1)
            late_ms = now_ms - self._due_ms[numbers]
            self.early += int((late_ms < 0).sum())
            self.late_ms.append(late_ms)

    def missing(self, due_before_ms: int) -> int:
        """How many messages due before this instant have not come to a group that should have them."""
        with self._lock:
            due = (self._due_ms[: self.sent] < due_before_ms) & self._is_sure[: self.sent]
            return sum(int((due & (times[: self.sent] == 0)).sum()) for times in self._times.values())

    @property
    def received(self) -> int:
        """Messages that have come, each counted once a group."""
        with self._lock:
            return sum(int((times > 0).sum()) for times in self._times.values())

    @property
    def doubled(self) -> int:
        """Messages that have come more than once to a group."""
        with self._lock:
            return sum(int((times > 1).sum()) for times in self._times.values())

    def drain_late_ms(self) -> npt.NDArray[np.int64]:
        """Arrival minus due of what has come since the last call."""
        with self._lock:
            found, self.late_ms = self.late_ms, []
        return np.concatenate(found) if found else np.empty(0, np.int64)
