"""The interface through which the broker records traces, and the wrapper that traces sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import pyarrow as pa

from timeball.broker.accepting.admission import ParsedSends, as_batch
from timeball.model.message import SendBatch

P = ParamSpec("P")
R = TypeVar("R")
# The result of a send, and a future that is done when its rows are durable.
Accepting = tuple[R, "asyncio.Future[int]"]


class Tracing(Protocol):
    """Spans of the broker's operations on messages (monitoring/traces.py). Belongs to the event loop."""

    counts: dict[str, int]  # spans by outcome: recorded, exported, failed
    left_out: dict[str, int]  # messages that have a trace context but got no span, by operation

    def send(self, batch: SendBatch, accept: Callable[[SendBatch], Accepting[R]]) -> Accepting[R]:
        """Call `accept` with a batch, and record a span for each traced message.

        Some messages first receive a trace context.
        """

    def released(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> None:
        """Record the releases of READ_SCHEMA rows that are durable now."""

    def received(self, group: str, rows: pa.RecordBatch, receipts: Sequence[tuple[object, ...]]) -> None:
        """Record that a group received READ_SCHEMA rows."""

    def now_ns(self) -> int:
        """Read the clock in ns, for the argument `begin_ns` of `settled`."""

    def settled(
        self, operation: str, receipts: Sequence[tuple[object, ...]], valid: Sequence[bool], begin_ns: int
    ) -> None:
        """Record the ends of leases (`operation`: ack or dead_letter). `valid` states which receipts were valid."""

    async def close(self) -> None:
        """Export the remaining spans, within a short time limit."""


def traced(
    accept: Callable[Concatenate[ParsedSends, P], Accepting[R]], traces: Tracing | None
) -> Callable[Concatenate[ParsedSends, P], Accepting[R]]:
    """Wrap `accept` so that it traces the messages. Without tracing, return it unchanged."""
    if traces is None:
        return accept

    def accept_traced(sends: ParsedSends, /, *args: P.args, **kwargs: P.kwargs) -> Accepting[R]:
        return traces.send(as_batch(sends), lambda rows: accept(rows, *args, **kwargs))

    return accept_traced
