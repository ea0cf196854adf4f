"""The bridge's topic in Timeball: one queue, in which its messages become visible at their due times.

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


class WaitingQueue:
    """The messages in Timeball that are pending for Kafka. Thread safe.

    Each call is repeated while Timeball is away.
    """

    def __init__(self, calls: Calls, topic: str) -> None:
        self._calls, self.topic = calls, topic

    def ensure(self) -> None:
        """Create the topic. Raises SetupError if it exists and has more than one queue."""
        self._calls.action("create_topic", wire.CreateTopic(topic=self.topic, queues=1), dict[str, Any])
        found = self._queues()
        if len(found) != 1:
            raise SetupError(
                f"--name: Timeball's topic {self.topic!r} has {len(found)} queues, a bridge's one: choose another name"
            )

    def span(self) -> wire.QueueRange:
        """Read the first offset that the queue keeps, and the next one to be assigned."""
        return self._queues()[QUEUE]

    def pull(self, offset: int, rows: int, wait_ms: int) -> pa.RecordBatch:
        """Read visible messages from an offset on, and wait up to `wait_ms` for the first. Raises OutOfRange."""
        ticket = wire.Pull(topic=self.topic, offsets={QUEUE: offset}, rows=rows, wait_ms=wait_ms)
        return self._calls.rows(ticket, wait_ms)

    def cancel(self, keys: Sequence[str]) -> int:
        """Cancel all pending messages with these keys, and return the number of messages cancelled."""
        count = 0
        for start in range(0, len(keys), limits.CANCELS_PER_REQUEST_MAX):
            body = wire.Cancel(keys=list(keys[start : start + limits.CANCELS_PER_REQUEST_MAX]))
            verdicts = self._calls.action("cancel", body, dict[str, list[wire.Verdict]])["verdicts"]
            count += sum(verdict.verdict == "cancelled" for verdict in verdicts)
        return count

    def _queues(self) -> dict[int, wire.QueueRange]:
        body = wire.Queues(topic=self.topic)
        return self._calls.action("queues", body, dict[str, dict[int, wire.QueueRange]])["queues"]
