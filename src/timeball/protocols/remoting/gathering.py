"""Sends that wait for the disk together: one batch, one commit, an answer each.

    columns -> (the commit before is on disk) -> one batch -> broker -> durable -> answers

There is no timer: while one batch is on its way to the disk the next one gathers, so a lone producer waits for
one commit and a thousand share it. If the broker refuses a whole batch for something that was not foreseen when its
sends were checked, they are handed over one by one.

Invariant: every send taken is answered once, unless it was one-way, whatever happens to the broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from timeball import limits
from timeball.broker.revoking import recall_handle
from timeball.broker.service import Accepted
from timeball.errors import OverLimit, RequestError, TimeballError, Unavailable
from timeball.protocols.remoting.calls import response_code
from timeball.protocols.remoting.codec.codes import BROKER_VERSION, CommandFlag
from timeball.protocols.remoting.codec.frame import Command
from timeball.protocols.remoting.codec.send_columns import SendColumns, Ticket
from timeball.protocols.remoting.codec.send_reply import encode_reply, host_digits
from timeball.protocols.remoting.codec.unique_keys import UniqueKeys
from timeball.protocols.remoting.connection import Connection
from timeball.protocols.remoting.site import Site

logger = logging.getLogger(__name__)

GATHER_BYTES_MAX = 32 * 1024 * 1024  # a batch this large does not wait for the commit before it
GATHER_ROWS_MAX = limits.ROWS_PER_REQUEST_MAX // 2

Accept = Callable[[pa.RecordBatch], tuple[Accepted, asyncio.Future[int]]]


class Gathering:
    """Sends on their way to one verb of the broker, `accept`; `recallable`: a delayed one can be taken back."""

    def __init__(self, site: Site, keys: UniqueKeys, accept: Accept, *, recallable: bool = True) -> None:
        self._site, self._accept, self._recallable = site, accept, recallable
        settings = site.broker.parts.settings
        self.columns = SendColumns(keys, settings.delay_ms_max, settings.timing_zone, site.cluster_name)
        self._loop = asyncio.get_running_loop()
        self._committing = 0
        self._scheduled = False

    def fed(self) -> None:
        """Something has been put into the columns; it is answered when its commit is durable."""
        if not (self._scheduled or self._committing) or self._is_full():
            self._schedule()

    def _is_full(self) -> bool:
        return self.columns.size_bytes >= GATHER_BYTES_MAX or len(self.columns) >= GATHER_ROWS_MAX

    def _schedule(self) -> None:
        if self._is_full():
            self._drain()
        else:
            self._scheduled = True
            # The end of this turn of the loop: whatever other connections have sent meanwhile comes along.
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if not len(self.columns):
            return
        tickets = self.columns.tickets
        try:
            batch, _ = self.columns.take()
        except Exception as error:  # no check has foreseen it: these are told, the next get their turn
            self._refuse(tickets, error)
            _end(tickets)
        else:
            self._hand_over(batch, tickets)

    def _hand_over(self, batch: pa.RecordBatch, tickets: list[Ticket]) -> None:
        try:
            accepted, durable = self._accept(batch)
        except (RequestError, OverLimit) as error:  # of one send, it may be
            if len(tickets) == 1:
                self._refuse(tickets, error)
                _end(tickets)
                return
            for ticket in tickets:
                part = batch.slice(ticket.first_row, ticket.rows)
                ticket.first_row = 0
                self._hand_over(part, [ticket])
        except Exception as error:  # whatever it is, these sends get an answer and the next ones their turn
            self._refuse(tickets, error)
            _end(tickets)
        else:
            self._committing += 1
            durable.add_done_callback(partial(self._committed, tickets, accepted))

    def _committed(self, tickets: list[Ticket], accepted: Accepted, durable: asyncio.Future[int]) -> None:
        self._committing -= 1
        failure = Unavailable("the broker is stopping") if durable.cancelled() else durable.exception()
        if failure is not None:
            self._refuse(tickets, failure)
        else:
            try:
                self._answer(tickets, accepted)
            except Exception as error:
                # Whatever it is: nothing has been written yet, and nobody may wait for ever.
                logger.exception("sends not answered sends=%d reason=%s", len(tickets), error)
                self._refuse(tickets, error)
        _end(tickets)
        if len(self.columns) and not (self._committing or self._scheduled):
            # Not at once: what has arrived while we were at it is read first, and comes along. The loop is what
            # there is too little of, not the disk, and a batch costs it the same for one row as for fifty.
            self._scheduled = True
            self._loop.call_soon(self._loop.call_soon, self._drain)

    def _answer(self, tickets: list[Ticket], accepted: Accepted) -> None:
        """One write a connection, however many of its sends the commit held."""
        queue_ids = accepted.kept.column("queue_id").to_pylist()
        offsets = accepted.kept.column("queue_offset").to_pylist()
        answers: dict[Connection, tuple[str, list[bytes]]] = {}
        for ticket in tickets:
            if ticket.is_one_way:
                continue
            at = ticket.first_row
            known = answers.get(ticket.origin)
            if known is None:
                known = answers[ticket.origin] = (host_digits(self._site.store_host(ticket.origin)), [])
            host, parts = known
            queue_id = ticket.queue_id if ticket.queue_id >= 0 else max(0, queue_ids[at])
            first = accepted.first_seq + at
            parts.append(
                encode_reply(
                    ticket.opaque, ticket.serialisation, queue_id, offsets[at] or 0,
                    f"{host}{first:016X}" if ticket.rows == 1 else _msg_ids(host, first, ticket.rows),
                    ticket.unique_key, "" if ticket.due_ms is None else self._handle(ticket),
                )
            )  # fmt: skip
        for connection, (_, parts) in answers.items():
            connection.write(b"".join(parts))

    def _handle(self, ticket: Ticket) -> str:
        if ticket.due_ms is None or not self._recallable:
            return ""
        return recall_handle.encode_handle(
            ticket.topic, self._site.broker_name, ticket.due_ms, ticket.unique_key
        )

    def _refuse(self, tickets: list[Ticket], error: BaseException) -> None:
        for ticket in tickets:
            if not ticket.is_one_way:
                ticket.origin.send(refusal(error, ticket.opaque, ticket.serialisation))


def _end(tickets: list[Ticket]) -> None:
    """These are on their way no more: what was counted for large ones is free."""
    for ticket in tickets:
        if ticket.counted_bytes:
            ticket.origin.flow.ends(ticket.counted_bytes)


def _msg_ids(host: str, first_seq: int, rows: int) -> str:
    return ",".join(f"{host}{seq:016X}" for seq in range(first_seq, first_seq + rows))


def refusal(error: BaseException, opaque: int, serialisation: int) -> Command:
    """The answer to a send that was not taken."""
    text = str(error) if isinstance(error, TimeballError) else f"internal error: {type(error).__name__}"
    return Command(
        code=response_code(error),
        opaque=opaque,
        flag=CommandFlag.RESPONSE,
        remark=text,
        version=BROKER_VERSION,
        serialisation=serialisation,
    )
