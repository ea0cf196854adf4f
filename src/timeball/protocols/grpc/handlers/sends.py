"""SendMessage: checked here, batched with the sends of others by broker/ingress.py.

A call is one piece: its messages are taken together or refused together, with the code of the first that is wrong, so
its entries never differ (RocketMQ's MULTIPLE_RESULTS). Messages of a transaction go to a batcher of their own, whose
batches no consumer sees before the transaction is committed (transactions.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from timeball.broker.appending import Accepted
from timeball.broker.ingress import Ingress, settle
from timeball.broker.policy import queues_to_write
from timeball.broker.registry.topics import Topic
from timeball.broker.revoking import recall_handle
from timeball.broker.send_rows import NAMES, Piece, Row
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code, Message, MessageType, Resource
from timeball.protocols.grpc._generated.service_pb2 import (
    SendMessageRequest,
    SendMessageResponse,
    SendResultEntry,
)
from timeball.protocols.grpc.calls import Call, Handlers
from timeball.protocols.grpc.codec.messages_in import TRANSACTION, row_of, type_of
from timeball.protocols.grpc.codec.names import topic_name
from timeball.protocols.grpc.codec.statuses import ok
from timeball.protocols.grpc.codec.transaction_ids import transaction_id
from timeball.protocols.grpc.handlers.message_types import accepted_types, check_type
from timeball.protocols.grpc.site import Site

MESSAGES_MAX = 1_024  # of one call: they are checked without a pause, while everybody else waits

_UNIQUE_KEY, _DUE_MS, _BODY, _PROPERTIES = (
    NAMES.index(name) for name in ("unique_key", "due_ms", "body", "properties")
)
_OK = ok()


class Destination(NamedTuple):
    """A topic as a sender needs it."""

    name: str
    topic: Topic | None  # not made yet: the broker makes it for the first message that is taken
    queues: int
    types: frozenset[MessageType]


class Placed(NamedTuple):
    """Where the messages of one call stand: first_seq, first_seq + 1, …; an offset for those that are in a queue."""

    first_seq: int
    offsets: list[int | None]


class _Piece(Piece, gc=False):
    placed: Any  # a future of Placed


class Sends:
    """See the module. Belongs to the event loop."""

    def __init__(self, site: Site) -> None:
        self._site, self._broker, self._topics = site, site.broker, site.broker.parts.topics
        # By namespace and name, at this version of the topics: asked for with every message.
        self._destinations: dict[tuple[str, str], Destination] = {}
        self._version = -1

    def handlers(self) -> Handlers:
        """The calls answered here."""
        return {"SendMessage": self._send}

    async def _send(self, call: Call, request: SendMessageRequest) -> SendMessageResponse:
        messages = request.messages
        if not 0 < len(messages) <= MESSAGES_MAX:
            raise Refused(Code.BAD_REQUEST, f"{len(messages)} messages in one call: 1 to {MESSAGES_MAX}")
        to = self._destination(messages[0].topic)
        kinds = [type_of(message.system_properties) for message in messages]
        self._check(messages, set(kinds), to)
        parts = self._site.broker.parts
        now_ms, delay_ms_max = parts.clock.now_ms(), parts.settings.delay_ms_max
        rows = [
            row_of(message, kind, to.name, to.queues, now_ms, delay_ms_max, call.peer)
            for message, kind in zip(messages, kinds, strict=True)
        ]
        if to.topic is None:  # made for this caller, and not for all whose messages share its batch
            self._site.broker.policy.admit([to.name], caller=call.caller)
        is_transaction = TRANSACTION in kinds
        placed = await self._put(self._broker.halves if is_transaction else self._broker.sends, rows)
        return self._response(to, rows, placed, is_transaction=is_transaction)

    # -- an Edge of broker/ingress.py ------------------------------------------------------------------------

    def _put(self, ingress: Ingress, rows: list[Row]) -> asyncio.Future[Placed]:
        """Return where the messages of a call stand, when they are durable."""
        placed: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        size_bytes = sum(len(row[_BODY]) + len(row[_PROPERTIES]) for row in rows)
        ingress.put(_Piece(self, rows, len(rows), size_bytes, 0, None, placed))
        return placed

    def answer(self, pieces: list[_Piece], accepted: Accepted) -> None:
        """Tell each call where its messages stand."""
        offsets = accepted.kept.column("queue_offset").to_pylist()
        for piece in pieces:
            at = piece.first_row
            settle(piece.placed, Placed(accepted.first_seq + at, offsets[at : at + piece.count]))

    def refuse(self, pieces: list[_Piece], error: BaseException) -> None:
        """Tell each call why its messages were not taken."""
        for piece in pieces:
            settle(piece.placed, error)

    def _check(self, messages: Sequence[Message], kinds: set[MessageType], to: Destination) -> None:
        """What the messages of one call have in common; raises Refused."""
        if len(messages) > 1:
            first = messages[0].topic
            if any(message.topic != first for message in messages):
                raise Refused(Code.BAD_REQUEST, "messages of several topics: send those of each in a call")
            if len(kinds) > 1 and TRANSACTION in kinds:
                raise Refused(Code.BAD_REQUEST, "messages of a transaction and others: send them apart")
        if not kinds <= to.types:
            for kind in kinds:
                check_type(to.topic, to.name, kind)

    def _destination(self, resource: Resource) -> Destination:
        """Where messages of this topic go. Raises what the policy raises."""
        if self._topics.version != self._version:
            self._destinations.clear()
        key = (resource.resource_namespace, resource.name)
        found = self._destinations.get(key)
        if found is None:
            found = self._look_up(topic_name(resource))
            if found.topic is not None:
                self._version = self._topics.version
                self._destinations[key] = found
        return found

    def _look_up(self, name: str) -> Destination:
        settings = self._site.settings
        topic = self._site.broker.policy.destination(name)
        if topic is None:
            return Destination(name, None, settings.queues_per_topic, frozenset(accepted_types(None)))
        types = accepted_types(topic if settings.check_message_types else None)
        return Destination(name, topic, queues_to_write(topic), frozenset(types))

    def _response(
        self, to: Destination, rows: list[Row], placed: Placed, *, is_transaction: bool
    ) -> SendMessageResponse:
        entries = []
        for at, (row, offset) in enumerate(zip(rows, placed.offsets, strict=True)):
            message_id, due_ms = row[_UNIQUE_KEY], row[_DUE_MS]
            entry = SendResultEntry(status=_OK, message_id=message_id, offset=offset or 0)
            if is_transaction:
                entry.transaction_id = transaction_id(placed.first_seq + at, to.name, message_id)
            else:
                entry.transaction_id = message_id  # as RocketMQ's proxy has it; it names no transaction
            if due_ms is not None:
                broker_name = self._site.settings.broker_name
                entry.recall_handle = recall_handle.encode_handle(to.name, broker_name, due_ms, message_id)
            entries.append(entry)
        return SendMessageResponse(status=_OK, entries=entries)
