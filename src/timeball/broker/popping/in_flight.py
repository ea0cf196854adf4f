"""Positions in flight across an ordered stop: receipts stay valid, and nothing is handed out twice because of it.

A META row a window, written when the broker stops and deleted before the next start serves, so that a crash never finds
an old one: after a crash everything from a group's stored offset on is handed out again. A window whose stored offset
is another one by then (a crash in the middle of the stop, a group that was moved) is forgotten, which is what a crash
would do.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from timeball.broker.popping.window import Count, Held, Window
from timeball.broker.registry.meta import MetaLog, MetaTable


class _Row(msgspec.Struct, array_like=True):
    offset: int
    seq: int
    size_bytes: int
    pop_ms: int
    deadline_ms: int
    in_order: bool
    times: int

    @classmethod
    def of(cls, offset: int, held: Held) -> _Row:
        return cls(
            offset, held.seq, held.size_bytes, held.pop_ms, held.deadline_ms, held.in_order, held.times
        )

    def held(self) -> Held:
        return Held(self.seq, self.size_bytes, self.pop_ms, self.deadline_ms, self.in_order, self.times)


class SavedWindow(msgspec.Struct):
    """A window that was not idle."""

    group: str
    topic: str
    queue_id: int
    next_offset: int
    stored_offset: int
    last_pop_ms: int
    attempt_id: str
    held: list[_Row]
    again: list[_Row]
    done_ahead: list[int]
    promised: bool


class InFlight:
    """What the last stop has left in the log. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "in_flight", SavedWindow)

    def save(self, windows: Iterable[Window]) -> None:
        """Append the windows that are not idle."""
        named = ((f"{w.group}@{w.topic}@{w.queue_id}", w) for w in windows if not w.idle)
        self._kept.put((name, saved(window)) for name, window in named)

    def pop_windows(self, count: Count) -> list[Window]:
        """Return what the last stop has left, and delete it from the log: the next start finds nothing."""
        found = [_window(one, count) for one in self._kept.values.values()]
        self._kept.put([(name, None) for name in self._kept.values])
        return found


def saved(window: Window) -> SavedWindow:
    """Return what is kept of a window."""
    return SavedWindow(
        window.group, window.topic, window.queue_id, window.next_offset, window.stored_offset,
        window.last_pop_ms, window.attempt_id, [_Row.of(*item) for item in window.held.items()],
        [_Row.of(*item) for item in window.again.items()], sorted(window.done_ahead), window.promised,
    )  # fmt: skip


def _window(kept: SavedWindow, count: Count) -> Window:
    window = Window(
        kept.group, kept.topic, kept.queue_id, kept.next_offset, kept.stored_offset, count,
        last_pop_ms=kept.last_pop_ms, attempt_id=kept.attempt_id, promised=kept.promised,
    )  # fmt: skip
    held, again = ({row.offset: row.held() for row in rows} for rows in (kept.held, kept.again))
    window.restore(held, again, set(kept.done_ahead))
    return window
