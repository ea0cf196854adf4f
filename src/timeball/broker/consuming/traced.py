"""The consuming engine with tracing: a span for each message that a group receives, acknowledges or gives up.

A separate class, so that the engine without tracing has no overhead. Changes of invisible times have no spans, because
workers that renew their leases would make most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from timeball.broker.accepting.tracing import Tracing
from timeball.broker.consuming.engine import Consuming
from timeball.broker.consuming.requests import AnyReceipt, PositionReceipt, Received, ReceiveRequest


class TracedConsuming(Consuming):
    """The operations of consumers, recorded in the broker's traces."""

    def __init__(self, *args: Any, traces: Tracing, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._traces = traces

    async def receive(
        self, request: ReceiveRequest, wait_ms: int, on_wait: Callable[[], None] = lambda: None
    ) -> Received:
        """Receive messages, and record the messages that were handed out."""
        received = await super().receive(request, wait_ms, on_wait)
        # A long poll that ended without messages is no event of any message.
        if received.receipts:
            self._traces.received(request.group, received.rows, received.receipts)
        return received

    def acknowledge_positions(self, receipts: Sequence[PositionReceipt]) -> list[bool]:
        """End leases kept in memory, and record it."""
        # Read before the call, so that the span includes the time of the log.
        begin_ns = self._traces.now_ns()
        valid = super().acknowledge_positions(receipts)
        self._traces.settled("ack", receipts, valid, begin_ns)
        return valid

    async def acknowledge(self, receipts: Sequence[AnyReceipt]) -> list[bool]:
        """End leases, and record it."""
        begin_ns = self._traces.now_ns()
        valid = await super().acknowledge(receipts)
        self._traces.settled("ack", receipts, valid, begin_ns)
        return valid

    async def dead_letter(self, receipt: AnyReceipt, reason: str = "") -> bool:
        """Move a message to the dead letters, and record it."""
        begin_ns = self._traces.now_ns()
        is_valid = await super().dead_letter(receipt, reason)
        self._traces.settled("dead_letter", [receipt], [is_valid], begin_ns)
        return is_valid
