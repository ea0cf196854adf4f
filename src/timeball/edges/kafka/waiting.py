"""The bridge's topic in Timeball. Its single queue receives the bridge's messages at their due times.

One queue is enough, because a queue of Timeball has no rate limit. With one queue, the position is a single number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from timeball.client.calls import Calls
from timeball.model import limits, wire
from timeball.model.errors import SetupError

QUEUE = 0


class BridgeQueue:
    """Accesses the bridge's topic in Timeball. Thread safe.

    Each call is repeated while Timeball cannot be reached.
    """

    def __init__(self, calls: Calls, topic: str) -> None:
        self._calls, self.topic = calls, topic

    def ensure(self) -> None:
        """Create the topic. Raises SetupError if it exists and has more than one queue."""
        self._calls.action("create_topic", wire.CreateTopic(topic=self.topic, queues=1), dict[str, Any])
        queues = self._queues()
        if len(queues) != 1:
            raise SetupError(
                f"--name: Timeball's topic {self.topic!r} has {len(queues)} queues, a bridge's one: choose another name"
            )

    def span(self) -> wire.QueueRange:
        """Ask for the offset of the first stored message (`min`) and the next offset to be assigned (`max`)."""
        return self._queues()[QUEUE]

    def pull(self, offset: int, rows: int, wait_ms: int) -> pa.RecordBatch:
        """Read at most `rows` visible messages from `offset` on. Waits up to `wait_ms` for the first one.

        Raises OutOfRange if `offset` is before the first stored message or after the end of the queue.
        """
        ticket = wire.Pull(topic=self.topic, offsets={QUEUE: offset}, rows=rows, wait_ms=wait_ms)
        return self._calls.rows(ticket, wait_ms)

    def cancel(self, keys: Sequence[str]) -> int:
        """Cancel all pending messages with these keys. The result is the number of cancelled messages."""
        cancelled_count = 0
        for start in range(0, len(keys), limits.CANCELS_PER_REQUEST_MAX):
            request = wire.Cancel(keys=list(keys[start : start + limits.CANCELS_PER_REQUEST_MAX]))
            verdicts = self._calls.action("cancel", request, dict[str, list[wire.Verdict]])["verdicts"]
            cancelled_count += sum(verdict.verdict == "cancelled" for verdict in verdicts)
        return cancelled_count

    def _queues(self) -> dict[int, wire.QueueRange]:
        request = wire.Queues(topic=self.topic)
        return self._calls.action("queues", request, dict[str, dict[int, wire.QueueRange]])["queues"]
