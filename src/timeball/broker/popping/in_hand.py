"""What is in hand across an ordered stop: receipts stay valid, and nothing is handed out twice because of it.

Written when the broker stops and emptied when it starts, so that a crash never finds an old one: after a crash
everything from a group's stored offset on is handed out again. A window whose stored offset is another one by
then (a crash in the middle of the stop, a group that was moved) is forgotten, which is what a crash would do.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from timeball import documents
from timeball.broker.popping.window import Count, Held, Window
from timeball.files import Files

NAME = "in_hand.json"


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


class _Saved(msgspec.Struct):
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
    promised: bool = False  # not said before there was receiving


def encode(windows: Iterable[Window]) -> bytes:
    """The file's content: the windows that are not idle."""
    return documents.encode(
        [
            _Saved(
                window.group, window.topic, window.queue_id, window.next_offset, window.stored_offset,
                window.last_pop_ms, window.attempt_id, [_Row.of(*item) for item in window.held.items()],
                [_Row.of(*item) for item in window.again.items()], sorted(window.done_ahead),
                window.promised,
            )
            for window in windows
            if not window.idle
        ]
    )  # fmt: skip


def take(files: Files, count: Count) -> list[Window]:
    """What the last stop has left, once: the next call finds nothing."""
    kept = documents.load(files, NAME, list[_Saved])
    if not kept:
        return []
    files.replace(NAME, documents.encode([]))
    found = []
    for saved in kept:
        window = Window(
            saved.group, saved.topic, saved.queue_id, saved.next_offset, saved.stored_offset, count,
            last_pop_ms=saved.last_pop_ms, attempt_id=saved.attempt_id, promised=saved.promised,
        )  # fmt: skip
        window.restore(
            {row.offset: row.held() for row in saved.held},
            {row.offset: row.held() for row in saved.again},
            set(saved.done_ahead),
        )
        found.append(window)
    return found
