"""Waiting receives: consumers that have found no message, and get one in the pass that follows a commit.

Consumers that wait for the same messages form a line. A commit marks the lines of its topics, and one pass serves them
in turn: it selects for the first consumer of a line, then for the next one while messages are left. So a consumer that
gets nothing is not woken: a thousand consumers of one group cost a message as much as one consumer.

A pass works in slices, because a topic may have a thousand lines. After each slice, the consumers that it has served
read, encode and write their messages, and all other tasks have their turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.consuming.selection import Selection
from timeball.model import limits
from timeball.model.errors import OverLimit

# Selections of one slice, and queues that they may examine: with the answers, about two milliseconds.
SERVED_AT_ONCE, QUEUES_AT_ONCE = 16, 2_048


@dataclass(slots=True, eq=False)
class _Line:
    """The consumers with equal requests, the first one first."""

    request: ReceiveRequest
    topics: Collection[str]
    consumers: dict[asyncio.Future[Selection | None], None] = field(default_factory=dict)
    is_marked: bool = False  # its topics may have new messages


class WaitingReceives:
    """The lines of waiting consumers. Belongs to the event loop.

    `select` leases messages for a request. `give_up` gives a selection back whose consumer has gone.
    """

    def __init__(
        self, select: Callable[[ReceiveRequest], Selection], give_up: Callable[[Selection], None]
    ) -> None:
        self._select, self._give_up = select, give_up
        self._loop = asyncio.get_running_loop()
        self._lines: dict[ReceiveRequest, _Line] = {}
        self._by_topic: dict[str, dict[_Line, None]] = {}
        self._marked: deque[_Line] = deque()  # if not empty, a slice is scheduled
        self.length = 0  # of all lines

    @property
    def topics(self) -> Container[str]:
        """The topics for which consumers wait now."""
        return self._by_topic

    async def wait(
        self, request: ReceiveRequest, topics: Collection[str], deadline_s: float
    ) -> Selection | None:
        """Wait until a pass has leased messages for this request. Returns None at `deadline_s` on the loop's clock.

        A change of one of `topics` starts a pass (`mark`). The selection may be empty if its queues have entries that
        were not searched yet. Raises OverLimit, and the errors of `select`.
        """
        # The limit covers all lines, because each waiting consumer holds a task and a connection.
        if self.length >= limits.PULLS_WAITING_MAX:
            raise OverLimit(f"{self.length} consumers wait already; ask without waiting, or try again")
        line = self._lines.get(request) or self._begin_line(request, topics)
        served: asyncio.Future[Selection | None] = self._loop.create_future()
        line.consumers[served] = None
        self.length += 1
        # Not `asyncio.timeout_at`, which cancels a task and costs three times as much.
        timer = self._loop.call_at(deadline_s, _end, served)
        try:
            return await served
        except asyncio.CancelledError:
            if served.done() and not served.cancelled() and served.exception() is None:
                selection = served.result()
                if selection is not None:  # served in the turn in which its consumer has gone
                    self._give_up(selection)
            raise
        finally:
            timer.cancel()
            self.length -= 1
            line.consumers.pop(served, None)
            if not line.consumers:
                self._end_line(line)

    @property
    def is_serving(self) -> bool:
        """True while consumers of a marked topic are still to be served."""
        return bool(self._marked)

    def mark(self, topic: str) -> None:
        """Serve the consumers that wait for this topic soon, because it has new messages or was deleted.

        It may also be the name of ends of leases (`lease_ends`).
        """
        self._mark(self._by_topic.get(topic, ()))

    def mark_all(self) -> None:
        """Serve all waiting consumers soon, because leases are possible again after the limit was reached."""
        self._mark(self._lines.values())

    def _mark(self, lines: Collection[_Line]) -> None:
        """Add these lines to the marked ones, and schedule a slice if none is scheduled."""
        if lines and not self._marked:
            self._loop.call_soon(self._serve_slice)
        for line in lines:
            if not line.is_marked:
                line.is_marked = True
                self._marked.append(line)

    def _serve_slice(self) -> None:
        """Serve the marked lines in turn, up to SERVED_AT_ONCE consumers. Schedule the next slice if lines remain."""
        examined_queues = 0
        for _ in range(SERVED_AT_ONCE):
            # A selection without a message is expensive too if it examines many queues.
            if not self._marked or examined_queues >= QUEUES_AT_ONCE:
                break
            line = self._marked.popleft()
            has_more, queues = self._serve_first(line)
            examined_queues += queues
            if has_more:
                self._marked.append(line)  # lines take turns
            else:
                line.is_marked = False
        if self._marked:
            self._loop.call_soon(self._serve_slice)

    def _serve_first(self, line: _Line) -> tuple[bool, int]:
        """Serve the first consumer of a line. Returns (has_more, number of queues that were examined for it).

        `has_more` is False if there is nothing for the next consumer of the line, or no next consumer.
        """
        served = next((consumer for consumer in line.consumers if not consumer.done()), None)
        if served is None:
            return False, 0
        has_more, examined_queues = True, 0
        try:
            selection = self._select(line.request)
        # The topic was deleted, or a limit is reached. The consumer's task raises the error.
        except Exception as error:
            served.set_exception(error)
        else:
            examined_queues = selection.examined_queues
            if not (selection.leased or selection.has_unsearched):
                return False, examined_queues
            served.set_result(selection)
            has_more = selection.has_more or selection.has_unsearched
        del line.consumers[served]
        # The next change begins with another line: lines of one group differ in their requests and share its messages.
        for topic in line.topics:
            lines = self._by_topic.get(topic, {})
            if len(lines) > 1 and line in lines:
                lines[line] = lines.pop(line)
        return has_more and bool(line.consumers), examined_queues

    def _begin_line(self, request: ReceiveRequest, topics: Collection[str]) -> _Line:
        """Create the line of a request, without consumers."""
        line = self._lines[request] = _Line(request, topics)
        for topic in topics:
            self._by_topic.setdefault(topic, {})[line] = None
        return line

    def _end_line(self, line: _Line) -> None:
        """Remove a line without consumers, unless that was done before."""
        # Requests contain names that clients choose, so lines must not stay in memory.
        if self._lines.get(line.request) is not line:
            return
        del self._lines[line.request]
        for topic in line.topics:
            lines = self._by_topic[topic]
            del lines[line]
            if not lines:
                del self._by_topic[topic]


def _end(served: asyncio.Future[Selection | None]) -> None:
    """End the wait of a consumer whose time is up."""
    if not served.done():
        served.set_result(None)
