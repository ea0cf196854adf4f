"""Sends over the HTTP API: one request for a message, and one for each batch of a `send_many` of dicts.

A request that no broker has received, or that a stopping broker refused, is repeated. A request whose answer was lost
is repeated only with `retry=True`, by which it has an idempotency key: the topic and the id of its first message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from timeball.client.http_calls import HttpCalls
from timeball.client.http_codec import SentRows, decode_sent, send_request
from timeball.client.receipts import IfSettled, Outcomes, Receipt, SendKeys, SendSummary, build_receipt
from timeball.client.rows import Outgoing, build_row_message
from timeball.client.tracing import current_context
from timeball.model import limits
from timeball.model.answers import UniqueMessage
from timeball.model.errors import InvalidMessage, TimeballError

ROWS_MAX = 10_000  # of one request
BATCH_ROWS = 1_024  # rows of a batch of a generator
BATCH_BYTES = limits.BODY_BYTES_MAX


class HttpSender:
    """Sends messages for a client. Thread safe."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls

    async def send(self, message: Outgoing, *, retry: bool, if_settled: IfSettled) -> Receipt:
        """Send a message. It is on the broker's disk on return. Raises the broker's refusal, or Unavailable."""
        sent = await self._send([message], SendKeys(if_settled, is_used=retry))
        # The id in the answer, because the broker may have kept another message with the same unique key.
        receipt = build_receipt(sent.id, sent.ack, sent.due_ms, sent.past_ms)
        if sent.replaced is None:
            return receipt
        return msgspec.structs.replace(
            receipt, replaced=UniqueMessage(sent.replaced.id, sent.replaced.seq, sent.replaced.due_ms)
        )

    async def send_many(
        self,
        rows: Iterable[Mapping[str, Any]],
        topic: str | None,
        batch_rows: int | None,
        collect: bool,
        retry: bool,
        if_settled: IfSettled,
    ) -> SendSummary:
        """Send dicts in batches, one after another. Timeball.send_many documents the arguments."""
        if isinstance(rows, (str, bytes, Mapping)):
            raise InvalidMessage("send_many takes a table, a record batch or a list of dicts")
        keys, outcomes, ids = SendKeys(if_settled, is_used=retry), Outcomes(collect=collect), list[str]()
        try:
            list_rows = min(batch_rows or ROWS_MAX, ROWS_MAX)
            for batch in _batches(rows, topic, list_rows=list_rows, rows_max=batch_rows or BATCH_ROWS):
                first_row = outcomes.add_rows(len(batch))
                ids += [message.id for message in batch]
                try:
                    sent = await self._send(batch, keys)
                except TimeballError as error:
                    outcomes.fail(first_row, len(batch), error)
                else:
                    outcomes.accept(first_row, sent.ack, sent.past_rows, sent.past_ms)
        except TimeballError as error:
            raise outcomes.error(error, ids) from error
        return outcomes.summary(ids)

    async def _send(self, messages: list[Outgoing], keys: SendKeys) -> SentRows:
        """Send messages of one topic in one request. Raises the broker's refusal, or Unavailable."""
        key = keys.key_for(messages[0].topic, messages[0].id)
        return await self._calls.ask_async(
            send_request(messages, key, current_context().items()),
            lambda data: decode_sent(data, len(messages)),
            is_repeatable=key is not None,
        )


def _batches(
    rows: Iterable[Mapping[str, Any]], topic: str | None, *, list_rows: int, rows_max: int
) -> Iterator[list[Outgoing]]:
    """Yield batches of consecutive rows with one topic. A batch has at most BATCH_BYTES, or a single row.

    `topic`: that of rows that name none. Raises InvalidMessage and InvalidDelay.

    A list of at most `list_rows` rows is one batch, if its topic and its size allow it. Batches of a longer list and of
    a generator, which may be slow, have at most `rows_max` rows.
    """
    is_short_list = isinstance(rows, (list, tuple)) and len(rows) <= list_rows
    batch_rows = list_rows if is_short_list else min(rows_max, list_rows)
    remaining, row_number = iter(rows), 0
    while chunk := list(islice(remaining, batch_rows)):
        batch, size_bytes = list[Outgoing](), 0
        for row in chunk:
            message = build_row_message(row, row_number, topic)
            row_number += 1
            row_bytes = len(message.body) + len(message.properties or "")
            if batch and (message.topic != batch[0].topic or size_bytes + row_bytes > BATCH_BYTES):
                yield batch
                batch, size_bytes = [], 0
            batch.append(message)
            size_bytes += row_bytes
        yield batch
