"""Which dead letters operators have dealt with, as META rows: positions in the queues of `%DLQ%<group>`.

dead/<group>    {queue: [[begin, end], …]}, disjoint and in order, end exclusive
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from timeball import limits
from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.errors import OverLimit

Span = tuple[int, int]  # positions [begin, end)
Position = tuple[int, int]  # queue, offset


class ResolvedDeadLetters:
    """Positions that need no operator any more. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "dead", dict[int, list[Span]])

    def spans(self, group: str, queue: int) -> list[Span]:
        """Return the resolved positions of a queue."""
        return self._kept.values.get(group, {}).get(queue, [])

    def open_spans(self, group: str, queue: int, begin: int, end: int) -> Iterator[Span]:
        """Yield the open spans of a queue's positions [begin, end), in order."""
        for done_begin, done_end in self.spans(group, queue):  # disjoint and in order
            if done_end <= begin:
                continue
            if done_begin >= end:
                break
            if done_begin > begin:
                yield begin, done_begin
            begin = done_end
        if begin < end:
            yield begin, end

    def changed(self, group: str, positions: Iterable[Position], kept_from: dict[int, int]) -> Change:
        """Return the row that says that these are dealt with too; raise OverLimit.

        `kept_from`: the first position of each queue that the log still has; spans before it are forgotten.
        """
        # Copied: an append that is refused must leave memory as the log is.
        by_queue: dict[int, list[Span]] = {
            queue: [span for span in spans if span[1] > kept_from.get(queue, 0)]
            for queue, spans in self._kept.values.get(group, {}).items()
        }
        for queue, offset in positions:
            by_queue.setdefault(queue, []).append((offset, offset + 1))
        found = {queue: joined(spans) for queue, spans in by_queue.items()}
        # Each change writes all spans of the group, and a snapshot repeats them.
        if sum(map(len, found.values())) > limits.DEAD_LETTER_SPANS_MAX:
            raise OverLimit(
                f"group {group!r} has more than {limits.DEAD_LETTER_SPANS_MAX} gaps among its dead letters: resend or "
                "delete the oldest ones first"
            )
        return self._kept.changed([(group, {queue: spans for queue, spans in found.items() if spans})])

    def forget(self, group: str) -> None:
        """Forget a group whose dead letters have been deleted with their topic."""
        if group in self._kept.values:
            self._kept.put([(group, None)])


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the same positions as disjoint spans in order.

    >>> joined([(4, 5), (1, 2), (2, 3)])
    [(1, 3), (4, 5)]
    """
    found: list[Span] = []
    # Neighbours become one: resends go through a queue in order, and leave one span behind them.
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
