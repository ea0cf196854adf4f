"""Sends from a source (for example a Kafka topic): each record of the source is in the log once, despite repetitions.

    put -> the batch begins at the source's position -> rows and the new position, in one frame -> answer
        -> it begins elsewhere                       -> Conflict

Unlike other sends, these do not share batches (ingress.py), because a bridge sends large batches. The position moves
with the append, on the event loop. So several batches of one source may be under way, one after the other.
"""

from __future__ import annotations

import asyncio
from functools import partial

from timeball.broker.accepting.appender import Accepted, Appender
from timeball.broker.accepting.ingress import Piece, answer, refuse
from timeball.broker.accepting.tracing import Tracing, traced
from timeball.broker.registry.source_positions import SourcePositions
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model.access import Caller
from timeball.model.errors import Unavailable
from timeball.model.message import build_rows
from timeball.model.wire import SourceStep


class SourcedSends:
    """The sends of sources. Belongs to the event loop."""

    def __init__(
        self,
        appender: Appender,
        *,
        clock: SchedulerClock,
        writer: LogWriter,
        source_positions: SourcePositions,
        traces: Tracing | None,
    ) -> None:
        self._send = traced(appender.send_with, traces)
        self._clock, self._writer, self._source_positions = clock, writer, source_positions

    def positions(self, source: str, caller: Caller) -> dict[int, int]:
        """Find the positions of the caller's source of this name, by partition."""
        return self._source_positions.of(caller.name, source)

    def put(self, piece: Piece, step: SourceStep) -> None:
        """Append a piece of SEND_COLUMNS and move the position of its source. Its edge receives the outcome later.

        The piece may be empty. Raises Conflict if it does not begin at the source's position, and the errors of a send.
        """
        caller = piece.caller
        positions = self._source_positions
        if piece.count:
            # The row of the position is in the same frame as the messages, so a crash cannot separate them.
            move_position = positions.moved
            accepted, durable = self._send(
                piece.rows, lambda first_seq, store_ms: move_position(caller.name, step), caller
            )
        else:
            # The records produced no message. The source still moves past them.
            self._writer.check_admission()
            change = positions.moved(caller.name, step)
            store_ms, rows = self._clock.now_ms(), build_rows(0)
            first_seq, durable = self._writer.append(change.rows)
            change.keep()
            accepted = Accepted(first_seq, 0, store_ms, rows)
        piece.first_row = 0  # no other piece shares its batch
        durable.add_done_callback(partial(_answer_edge, piece, accepted))


def _answer_edge(piece: Piece, accepted: Accepted, durable: asyncio.Future[int]) -> None:
    failure = Unavailable("the broker is stopping") if durable.cancelled() else durable.exception()
    if failure is not None:
        refuse([piece], failure)
    else:
        answer([piece], accepted)
