"""Serve the send requests, RECALL_MESSAGE, and the end of transactions, and send checks of transactions.

`Ingress` batches the sends of all clients. A send is answered when its batch is durable. A send that breaks a rule is
refused at once and does not enter a batch. Two kinds of sends are redirected. A message for a %RETRY% topic goes to the
topic that broker/consuming/retry.py decides. A half message goes to an ingress of its own (`Broker.halves`), so that no
consumer sees it before the commit.

    Sends           checks sends, passes them to an ingress, and answers them
    SendRows        converts a send to rows of a batch
    Transactions    END_TRANSACTION (37) from producers, and CHECK_TRANSACTION_STATE (39) to them
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from random import choice
from typing import Any

import msgspec
import pyarrow as pa

from timeball.broker.accepting import transacting as core
from timeball.broker.accepting.admission import ROWS_MAX as FEW_ROWS_MAX
from timeball.broker.accepting.admission import ParsedSends, SmallBatch
from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import Ingress, Piece
from timeball.broker.accepting.transacting import Half, Outcome
from timeball.broker.registry.queue_offsets import QueueOffsets, tag_number
from timeball.broker.registry.topics import Topic
from timeball.broker.revoking.cancel import RecallRefused, encode_handle
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    response_code,
    store_host,
)
from timeball.edges.remoting.codec import delays
from timeball.edges.remoting.codec.codes import (
    BROKER_VERSION,
    CommandFlag,
    MessageFlag,
    RequestCode,
    ResponseCode,
)
from timeball.edges.remoting.codec.frame import Command, Frame
from timeball.edges.remoting.codec.implementation import PYTHON, Codec, SendRun
from timeball.edges.remoting.codec.records import UniqueKeys, decode_batch, encode_stored, offset_msg_id
from timeball.edges.remoting.codec.sends import (
    TRACED,
    SendFields,
    SendHeader,
    encode_reply,
    host_digits,
    read_send,
)
from timeball.edges.remoting.connection import LARGE_BYTES, Connection
from timeball.edges.remoting.handlers.retries import Retries
from timeball.edges.shared.error_codes import Refused, sentence
from timeball.log.row_encoder import EncodedRows
from timeball.model import limits, rules
from timeball.model.access import Caller, Verb
from timeball.model.answers import KEPT, UniqueMessage
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, TimeballError
from timeball.model.message import (
    DLQ_PREFIX,
    LITE_TOPIC,
    PRIORITY,
    READ_SCHEMA,
    RETRY_PREFIX,
    SEND_NAMES,
    SendBatch,
    SendRow,
    decode_properties,
    encode_properties,
)
from timeball.model.send_options import (
    EXPIRY_NAMES,
    ON_PENDING,
    check_expiry,
    unique_key_in,
    with_unique_key,
)
from timeball.model.send_options import UNIQUE_KEY as UNIQUE_KEY_PROPERTY

# ---- send requests and recalls -------------------------------------------------------------------------------

# Plain numbers: arithmetic with an IntFlag creates an object per result.
TRANSACTION_BITS = int(MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT)


INT32_DIGITS = 10
_RETURN_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX)
_SPECIAL_NAMES = delays.NAMES | {UNIQUE_KEY_PROPERTY, ON_PENDING} | EXPIRY_NAMES
# The priority of a message with one of these properties is ignored, because the message is of another type.
_NO_PRIORITY = frozenset(
    {"TRAN_MSG", "__SHARDINGKEY", delays.LEVEL, delays.TIMER_SECONDS, delays.TIMER_MS, delays.TIMER_INSTANT}
)


class _Recall(msgspec.Struct, rename="camel"):
    topic: str
    recall_handle: str
    producer_group: str | None = None


class Sends:
    """Serves the send requests and RECALL_MESSAGE. Belongs to the event loop."""

    def __init__(self, context: RemotingContext, retries: Retries, codec: Codec = PYTHON) -> None:
        self._context, self._retries, self._codec = context, retries, codec
        self._broker, self._policy = context.broker, context.broker.policy
        settings, self._clock = context.broker.settings, context.broker.clock
        self._broker_name = context.broker_name
        unique_keys = UniqueKeys(b"", os.getpid(), self._clock.now_ms())
        self._user_names = settings.delay_names
        self._rows = SendRows(unique_keys, settings.delay_ms_max, self._user_names, context.cluster_name)
        self._batch_count = itertools.count()  # distributes batches over the queues
        self.handlers: Handlers = {RequestCode.RECALL_MESSAGE: self._recall}

    def put(self, connection: Connection, header: SendHeader, frame: Frame) -> None:
        """Check a send and pass it to its ingress. A refusal is answered at once. `header` was read from `frame`."""
        try:
            ingress, ticket = self._create_ticket(connection, header, frame)
            size_bytes = len(frame.body)
            if size_bytes >= LARGE_BYTES:
                ticket.counted_bytes = connection.flow.count_request(size_bytes)
            try:
                if ticket.unique is None:
                    ingress.put(ticket)
                else:
                    self._broker.unique_sends.put(ticket, ticket.unique, connection.caller)
            except TimeballError:
                _release_memory([ticket])
                raise
        except TimeballError as error:
            if not header.flag & ONE_WAY:
                connection.send(refusal(error, header.opaque, frame.serialisation))

    def _create_ticket(
        self, connection: Connection, header: SendHeader, frame: Frame
    ) -> tuple[Ingress, Ticket]:
        """Choose the ingress and the queue of a send, and create its ticket. Raises the TimeballError of a refusal.

        If the send is redirected, the fields in `header` are replaced.
        """
        fields, ingress = header.fields, self._broker.sends
        if (fields.sys_flag or 0) & TRANSACTION_BITS or fields.topic.startswith(RETRY_PREFIX):
            ingress = self._redirect(header)
            fields = header.fields
        queue_count = self._queue_count(fields, connection.caller)
        # -1: the broker chooses the queue.
        queue_id = -1 if fields.queue_id is None or fields.queue_id < 0 else fields.queue_id
        if queue_id >= queue_count:
            raise _no_such_queue(fields.topic, queue_id, queue_count)
        if queue_id < 0 and (header.code == BATCH or fields.batch):
            # One queue for the whole batch, since the answer has one queue and offset.
            queue_id = next(self._batch_count) % queue_count
        elif PRIORITY in (fields.properties or ""):
            queue_id = self._queue_by_priority(fields, queue_id)
        body, serialisation, now_ms = frame.body, frame.serialisation, self._clock.now_ms()
        ticket = self._rows.ticket(
            self, connection, header, body, serialisation, connection.name, queue_id, now_ms
        )
        if ingress is self._broker.halves:
            ticket.due_ms = None  # the delay begins with the commit, so the answer has no recall handle
            if ticket.unique is not None:
                raise InvalidMessage(f"property {UNIQUE_KEY_PROPERTY}: not for messages of a transaction")
        return ingress, ticket

    def _queue_by_priority(self, fields: SendFields, queue_id: int) -> int:
        """Choose the queue by the PRIORITY property, as RocketMQ does. Returns `queue_id` without a valid priority."""
        properties = decode_properties(fields.properties or "")
        priority = properties.get(PRIORITY, "")
        has_valid_type = _NO_PRIORITY.isdisjoint(properties) and not fields.topic.startswith(RETRY_PREFIX)
        if not (
            has_valid_type and priority.isascii() and priority.isdigit() and len(priority) <= INT32_DIGITS
        ):
            return queue_id
        topic = self._broker.tables.topics.get(fields.topic)
        return rules.queue_of_priority(int(priority), max(1, topic.write_queues))

    def put_run(self, connection: Connection, run: SendRun) -> None:
        """Pass a run of plain sends to the ingress, as one piece if all of them can be accepted.

        Otherwise each send is checked and answered alone (`put`): a topic must be created first, a queue does not
        exist, or a topic, a delay or the whole run is refused.
        """
        try:
            for topic_name, queue_id in run.destinations:
                topic = self._policy.find_destination(topic_name, connection.caller)
                if topic is None or queue_id >= max(topic.read_queues, topic.write_queues):
                    break
            else:
                settings, count = self._context.settings, len(run)
                # now_ms() reads three clocks, which takes as long as all other steps of a single send up to here.
                now_ms = self._clock.now_ms() if run.needs_time else 0
                run.plan(connection.name.encode(), now_ms, settings.delay_ms_max, self._user_names)
                size_bytes = run.size_bytes + OVERHEAD_BYTES * count
                ticket = RunTicket(
                    self, run, count, size_bytes, 0, None, connection, self._codec, now_ms, self._create_tickets
                )  # fmt: skip
                self._broker.sends.put(ticket)
                return
        except TimeballError:
            pass  # `put` below answers each send
        for frame in run.frames():
            header = read_send(frame)
            assert header is not None, "a run contains only sends"
            self.put(connection, header, frame)

    def _create_tickets(self, ticket: RunTicket) -> list[Ticket]:
        """Create one ticket per send of a run. `put_run` has made every check that could refuse one of them."""
        tickets, origin, now_ms = [], ticket.origin, ticket.now_ms or self._clock.now_ms()
        for frame in ticket.rows.frames():
            header = read_send(frame)
            assert header is not None, "a run contains only sends"
            requested_queue_id = header.fields.queue_id
            queue_id = -1 if requested_queue_id is None or requested_queue_id < 0 else requested_queue_id
            body, serialisation = frame.body, frame.serialisation
            tickets.append(
                self._rows.ticket(self, origin, header, body, serialisation, origin.name, queue_id, now_ms)
            )
        return tickets

    def _redirect(self, header: SendHeader) -> Ingress:
        """Choose the ingress of a send to a retry topic or with transaction bits, and replace the fields in its header.

        Raises InvalidMessage for a batch and for a half message with a group name that is too long. Also raises the
        errors of `Retries.redirect`.
        """
        fields = header.fields
        if header.code == BATCH or fields.batch:
            raise InvalidMessage("a batch takes ordinary messages only; send these one by one")
        if fields.topic.startswith(RETRY_PREFIX):
            header.fields = self._redirect_retry(header, fields)
        elif (fields.sys_flag or 0) & TRANSACTION_BITS == MessageFlag.TRANSACTION_PREPARED:
            properties = add_half_properties(fields.properties or "", fields.group)
            header.fields = msgspec.structs.replace(fields, properties=properties)
            return self._broker.halves
        return self._broker.sends

    def _redirect_retry(self, header: SendHeader, fields: SendFields) -> SendFields:
        """Return the fields of a send to a %RETRY% topic, with the destination that `Retries.redirect` decides."""
        destination = self._retries.redirect(
            fields.topic,
            decode_properties(fields.properties or ""),
            fields.reconsume_times,
            fields.max_reconsume_times,
            header.version,
        )
        properties = destination.properties
        if not self._user_names.isdisjoint(properties):
            # The user's delay properties applied to the first delivery. Only the delay level of the retry applies now.
            properties = {name: value for name, value in properties.items() if name not in self._user_names}
        return msgspec.structs.replace(
            fields,
            topic=destination.topic,
            queue_id=-1 if destination.is_dead_letter else fields.queue_id,
            properties=encode_properties(properties),
            reconsume_times=destination.reconsume_times,
            # A message from a transaction still has these bits when it is retried, but it is not a half message.
            sys_flag=(fields.sys_flag or 0) & ~TRANSACTION_BITS,
        )

    def _queue_count(self, fields: SendFields, caller: Caller) -> int:
        """Return the number of queues of a topic, which is created if it is missing.

        Raises InvalidName, Forbidden, NotFound and OverLimit.
        """
        topic = self._policy.find_destination(fields.topic, caller)
        if topic is None:
            self._policy.ensure_topics([fields.topic], caller, fields.default_queues)
            topic = self._broker.tables.topics.get(fields.topic)
        return max(topic.read_queues, topic.write_queues)

    async def _recall(self, call: Call) -> Reply:
        """Recall a pending message by its handle. broker/revoking/cancel.py defines success.

        A refusal is ILLEGAL_OPERATION. Its text states the reason: too late, unknown, no longer known, or not a handle
        of this topic and broker.
        """
        fields = call.fields(_Recall)
        try:
            unique_key = await self._broker.recall(fields.topic, fields.recall_handle, call.caller)
        except NotFound as error:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, str(error)) from error
        except (InvalidMessage, RecallRefused) as error:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, str(error)) from error
        return call.answer(ext={"msgId": unique_key, **TRACED})

    # -- the interface `Edge` of broker/accepting/ingress.py -----------------------------------------------------------

    def answer(self, pieces: list[Ticket | RunTicket], accepted: Accepted) -> None:
        """Answer the sends of a durable batch, with one write per connection.

        `accepted` has the sequence number, queue and offset of each row of the batch.
        """
        _release_memory(pieces)
        if accepted.sent is not None and accepted.sent.outcome == KEPT:
            _answer_with_pending(pieces, accepted.sent.pending)
        queue_ids, row_offsets = accepted.queues_and_offsets()
        offsets = [offset or 0 for offset in row_offsets]  # a scheduled message has no offset yet
        answers: dict[Connection, list[bytes]] = {}
        first_seq, handle = accepted.first_seq, self._recall_handle
        for ticket in pieces:
            row, connection = ticket.first_row, ticket.origin
            host = connection.id_prefix or self._id_prefix(connection)
            if isinstance(ticket, RunTicket):
                encode = ticket.codec.encode_replies
                answer = encode(ticket.rows, host.encode(), first_seq, row, queue_ids, offsets, handle)
            elif ticket.is_one_way:
                continue
            else:
                answer = self._encode_answer(ticket, host, first_seq + row, queue_ids[row], offsets[row])
            answers.setdefault(connection, []).append(answer)
        for connection, encoded in answers.items():
            data = b"".join(encoded)
            if data:  # empty if all sends were one-way
                connection.write(data)

    def _encode_answer(self, ticket: Ticket, host: str, first_seq: int, queue_id: int, offset: int) -> bytes:
        """Encode the answer to one send as a frame.

        `host` is the first part of the message ids. `first_seq`, `queue_id` and `offset` are of the first message.
        """
        due_ms, key = ticket.due_ms, ticket.unique_key
        return encode_reply(
            ticket.opaque, ticket.serialisation,
            ticket.queue_id if ticket.queue_id >= 0 else max(0, queue_id), offset,
            f"{host}{first_seq:016X}" if ticket.count == 1 else _msg_ids(host, first_seq, ticket.count),
            key, "" if due_ms is None else self._recall_handle(ticket.topic, due_ms, key),
        )  # fmt: skip

    def _id_prefix(self, connection: Connection) -> str:
        """Compute the first part of the message ids for a connection, and cache it there."""
        connection.id_prefix = host_digits(store_host(self._context, connection))
        return connection.id_prefix

    def refuse(self, pieces: list[Ticket | RunTicket], error: BaseException) -> None:
        """Answer these sends with an error."""
        for ticket in pieces:
            for opaque, serialisation in ticket.requests():
                ticket.origin.send(refusal(error, opaque, serialisation))
        _release_memory(pieces)

    def _recall_handle(self, topic: str, due_ms: int, unique_key: str) -> str:
        return encode_handle(topic, self._broker_name, due_ms, unique_key)


def _answer_with_pending(pieces: list[Ticket | RunTicket], pending: UniqueMessage | None) -> None:
    """Put the id and the due time of the pending message into the answers to sends that kept it (by a unique key)."""
    for ticket in pieces:
        if isinstance(ticket, Ticket) and pending is not None:
            ticket.unique_key, ticket.due_ms = pending.id, pending.due_ms


def _no_such_queue(topic: str, queue_id: int, queue_count: int) -> Refused:
    """Create the error for a send to a queue that the topic does not have."""
    return Refused(
        ResponseCode.INVALID_PARAMETER,
        f"request queueId[{queue_id}] is illegal, topic {topic} has {queue_count} queues",
    )


def _release_memory(tickets: Sequence[Ticket | RunTicket]) -> None:
    """Release the counted bytes of large sends, which are no longer pending."""
    for ticket in tickets:
        if isinstance(ticket, Ticket) and ticket.counted_bytes:
            ticket.origin.flow.release_request(ticket.counted_bytes)
            ticket.counted_bytes = 0  # only once, even if an answer fails and the send is refused afterwards


def _msg_ids(host: str, first_seq: int, rows: int) -> str:
    return ",".join(f"{host}{seq:016X}" for seq in range(first_seq, first_seq + rows))


def refusal(error: BaseException, opaque: int, serialisation: int) -> Command:
    """Create the answer to a send that was not accepted."""
    return Command(
        code=response_code(error),
        opaque=opaque,
        flag=CommandFlag.RESPONSE,
        remark=sentence(error),
        version=BROKER_VERSION,
        serialisation=serialisation,
    )


# ---- from sends to rows of a batch, with the fields that their answers need ----------------------------------
# `SendRows` converts a single send to a `Ticket`. The compiled codec splits received bytes into runs of sends, and each
# run is a `RunTicket`. Both give the same rows. If a batch has pieces of both kinds, its runs are converted to rows
# too.

BATCH = int(RequestCode.SEND_BATCH_MESSAGE)
ONE_WAY = int(CommandFlag.ONE_WAY)
# A limit, because the header of the answer contains an id of about 66 characters per message, which clients must parse.
BATCH_ROWS_MAX = 8_192
_BODY_SAFE, _PROPERTIES_SAFE = rules.SAFE_LENGTHS["body"], rules.SAFE_LENGTHS["properties"]
_SHORT_CHARACTERS = 60  # a shorter text is within all limits, in any encoding
OVERHEAD_BYTES = 256  # approximate size of a row without its body and texts
_UNIQUE_KEY, _DUE_MS = (SEND_NAMES.index(name) for name in ("unique_key", "due_ms"))


class Ticket(Piece, gc=False):
    """One pending send: its rows, and the fields that its answer repeats."""

    origin: Connection
    opaque: int
    serialisation: int
    is_one_way: bool
    topic: str
    queue_id: int  # as requested, -1 for none. The answer to a scheduled message repeats it
    unique_key: str
    due_ms: int | None
    counted_bytes: int = 0  # of a large body, counted by the connection's Flow until the answer
    unique: Any = None  # UniqueKey of a single message, or None

    def requests(self) -> list[tuple[int, int]]:
        """Return opaque and serialisation of the request. Empty for a one-way request."""
        return [] if self.is_one_way else [(self.opaque, self.serialisation)]


class RunTicket(Piece, gc=False):
    """A pending run of plain sends. `rows` is the run."""

    origin: Connection
    codec: Codec
    now_ms: int  # when the run was received: delays count from here. 0 if no send needs the time
    create_tickets: Callable[[RunTicket], list[Ticket]]  # one per send

    def requests(self) -> list[tuple[int, int]]:
        """Return opaque and serialisation of each request that is not one-way."""
        run: SendRun = self.rows
        return run.requests()

    def join(self, pieces: Sequence[Piece]) -> ParsedSends:
        """Join pieces of a batch: as runs if all of them are runs, otherwise as rows."""
        runs = [piece.rows for piece in pieces]
        if all(type(piece) is RunTicket for piece in pieces):
            return Runs(self.codec, runs)
        return [row for run in runs for row in run]

    def apart(self) -> Sequence[Piece]:
        """Split the run into one ticket for each send."""
        return (self,) if self.count == 1 else self.create_tickets(self)


class Runs:
    """The runs of one batch. Iterates over their rows. Implements SendRuns (broker/accepting/admission.py)."""

    def __init__(self, codec: Codec, runs: list[SendRun]) -> None:
        self._codec, self._runs = codec, runs
        self.topics = {name for run in runs for name, _ in run.destinations}

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def __iter__(self) -> Iterator[SendRow]:
        return chain.from_iterable(self._runs)

    def batch(self) -> SendBatch:
        """Convert the sends to rows, or to columns if there are more than FEW_ROWS_MAX."""
        return list(self) if len(self) <= FEW_ROWS_MAX else self._codec.join(self._runs)

    def log_rows(
        self, topics: Mapping[str, Topic], now_ms: int, last_ms: int, host: str
    ) -> SmallBatch | None:
        """Encode the sends as rows of the log, in C.

        Returns None, without any effect, if a send has a delay level, a due time before 0 or after `last_ms`, or a
        dead-letter topic, or if the texts of a column are too long for one frame.
        """
        encoded = self._codec.log_rows(self._runs, topics, tag_number, now_ms, last_ms, host)
        if encoded is None:
            return None
        message, queue_ids, offsets, queues, turns, pending, pending_bytes = encoded
        queue_offsets = QueueOffsets.chosen(queues, turns) if queues else None
        return SmallBatch(EncodedRows(message, queue_ids, offsets), queue_offsets, pending, pending_bytes)


class SendRows:
    """Creates the tickets of single sends. `keys` creates unique keys for messages that have none."""

    def __init__(
        self,
        keys: UniqueKeys,
        delay_ms_max: int,
        user_names: frozenset[str],
        cluster_name: str,
    ) -> None:
        self._keys, self._delay_ms_max, self._user_names = keys, delay_ms_max, user_names
        self._cluster_name = cluster_name

    def ticket(
        self,
        edge: Any,
        origin: Any,
        header: SendHeader,
        body: bytes,
        serialisation: int,
        born_host: str,
        queue_id: int,
        now_ms: int,
    ) -> Ticket:
        """Create the ticket of one send. Raises InvalidMessage or InvalidDelay.

        `edge` will answer the ticket to `origin`, the connection of the send. `serialisation` is that of the frame.
        `queue_id` -1: the broker chooses the queue. Delays count from `now_ms`.
        """
        fields, unique = header.fields, None
        if header.code == BATCH or fields.batch:
            rows, unique_key = self._batch(fields, body, born_host, queue_id, now_ms)
            due_ms = None
        else:
            properties = fields.properties or ""
            row = self._row(fields, fields.flag or 0, body, properties, born_host, queue_id, now_ms)
            rows, unique_key, due_ms = [row], row[_UNIQUE_KEY], row[_DUE_MS]
            if UNIQUE_KEY_PROPERTY in properties and not fields.topic.startswith(_RETURN_PREFIXES):
                unique = unique_key_in(decode_properties(properties))
        # In characters instead of bytes, which is close enough here. The properties of a batch are in its body.
        size_bytes = len(body) + len(fields.properties or "") + OVERHEAD_BYTES * len(rows)
        return Ticket(
            edge, rows, len(rows), size_bytes, 0, None, origin, header.opaque, serialisation,
            header.flag & ONE_WAY != 0, fields.topic, queue_id, unique_key, due_ms, 0, unique,
        )  # fmt: skip

    def _row(
        self, fields: SendFields, flag: int, body: bytes, properties: str, born_host: str, queue_id: int, now_ms: int
    ) -> SendRow:  # fmt: skip
        """Convert one message to a row: check limits, plan the delay, and add missing properties.

        Raises InvalidMessage or InvalidDelay.
        """
        # Only long values can exceed a limit. The two calls would take 0.2 us for each send.
        if len(body) > _BODY_SAFE or len(properties) > _PROPERTIES_SAFE:
            rules.check("body", body)
            rules.check("properties", properties)
        parsed = decode_properties(properties)
        if LITE_TOPIC in parsed:
            raise InvalidMessage(f"{parsed[LITE_TOPIC][:64]!r}: Timeball has no lite topics; send to a topic")
        level, due_ms = 0, None
        tag, keys, unique_key = (
            parsed.get("TAGS"),
            parsed.get("KEYS"),
            parsed.get("UNIQ_KEY"),
        )
        if not _SPECIAL_NAMES.isdisjoint(parsed):
            level, due_ms = delays.plan(parsed, now_ms, self._delay_ms_max, self._user_names)
            # A message on its way back to its group has been sent before: its options have no effect.
            if not fields.topic.startswith(_RETURN_PREFIXES):
                if (unique := unique_key_in(parsed)) is not None:
                    keys = with_unique_key(keys, unique)
                if not EXPIRY_NAMES.isdisjoint(parsed):
                    check_expiry(parsed, due_ms)
        if not unique_key:
            unique_key = self._keys.next(now_ms)
            properties = with_property(properties, "UNIQ_KEY", unique_key)
        if "REPLY_TO_CLIENT" in parsed and "CLUSTER" not in parsed:
            # This message expects a reply (retries.py). Consumers derive the reply topic from the cluster's name.
            properties = with_property(properties, "CLUSTER", self._cluster_name)
        if (  # short values are within all limits, so most sends need no check
            keys is not None
            or len(unique_key) >= _SHORT_CHARACTERS
            or (tag is not None and len(tag) >= _SHORT_CHARACTERS)
        ):
            for name, text in (("tag", tag), ("keys", keys), ("unique_key", unique_key)):
                if text is not None:
                    rules.check(name, text)
        return (
            fields.topic, body, tag, keys, unique_key, properties, queue_id, fields.born_ms or now_ms, born_host, flag,
            fields.sys_flag or 0, fields.reconsume_times or 0, due_ms, level or None,
        )  # fmt: skip

    def _batch(
        self, fields: SendFields, body: bytes, born_host: str, queue_id: int, now_ms: int
    ) -> tuple[list[SendRow], str]:
        """Convert the body of a SEND_BATCH_MESSAGE to rows. Raises InvalidMessage or InvalidDelay.

        Returns the rows, and their unique keys joined with commas.
        """
        rules.check("body", body)
        records = decode_batch(body, BATCH_ROWS_MAX)
        if not records:
            raise InvalidMessage("a batch without messages")
        # The answer has one offset for all messages, so none may be delayed. The MessageBatch has properties, too.
        for properties in (fields.properties or "", *(record.properties for record in records)):
            parsed = decode_properties(properties)
            if UNIQUE_KEY_PROPERTY in parsed:
                raise InvalidMessage("a batch takes no messages with a unique key; send them one by one")
            if not delays.NAMES.isdisjoint(parsed) and delays.names_delay(parsed, self._user_names):
                raise InvalidDelay("a batch takes no delayed messages; send them one by one")
        rows = [
            self._row(fields, record.flag, record.body, record.properties, born_host, queue_id, now_ms)
            for record in records
        ]
        return rows, ",".join(row[_UNIQUE_KEY] for row in rows)


def with_property(properties: str, name: str, value: str) -> str:
    """Append a property to encoded properties."""
    end = "" if not properties or properties.endswith("\x02") else "\x02"
    return f"{properties}{end}{name}\x01{value}\x02"


# ---- transactions --------------------------------------------------------------------------------------------
# Half messages arrive as sends. A client ends a transaction with the sequence number that it got as the message's
# physical offset, nearly always in a one-way request. broker/accepting/transacting.py decides when to check a
# transaction that was not ended. `Transactions` then pushes the half message to a producer of the group, which answers
# with another END_TRANSACTION.

PREPARED, GROUP = "TRAN_MSG", core.GROUP
TRANSACTION_ID, UNIQUE_KEY = "__transactionId__", "UNIQ_KEY"
CHECK_TIMES = "TRANSACTION_CHECK_TIMES"


class _End(msgspec.Struct):
    producerGroup: str  # noqa: N815  RocketMQ's names
    commitLogOffset: int  # noqa: N815
    commitOrRollback: int  # noqa: N815


def add_half_properties(properties: str, group: str | None) -> str:
    """Add the properties of a half message that a later check and consumers need. Raises InvalidMessage."""
    parsed = decode_properties(properties)
    producer_group = parsed.get(GROUP) or group or ""
    if len(producer_group) > limits.GROUP_BYTES_MAX:
        # The name is kept in memory for each open half message, and there may be many.
        raise InvalidMessage(
            f"the producer group has {len(producer_group)} characters; at most {limits.GROUP_BYTES_MAX}"
        )
    added = {PREPARED: "true", GROUP: producer_group}
    if parsed.get(UNIQUE_KEY):
        added[TRANSACTION_ID] = parsed[UNIQUE_KEY]  # consumers read it
    if added.items() <= parsed.items():
        return properties
    return encode_properties({**parsed, **added})


class Transactions:
    """Serves END_TRANSACTION, and sends the checks of broker/accepting/transacting.py to producers."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self._core = context.broker.transactions
        self._user_names = context.broker.settings.delay_names
        context.broker.transaction_checks.askers.append(self)
        self.handlers: Handlers = {RequestCode.END_TRANSACTION: self.end}

    async def end(self, call: Call) -> Reply:
        """Serve END_TRANSACTION: commit or roll back the half message at `commitLogOffset`.

        Raises Refused if there is no such half message, or if the transaction was ended with the opposite outcome
        before. Raises Forbidden, and the errors of a commit: of `_delay` and of the admission.
        """
        fields = call.fields(_End)
        is_commit = fields.commitOrRollback == MessageFlag.TRANSACTION_COMMIT
        if not is_commit and fields.commitOrRollback != MessageFlag.TRANSACTION_ROLLBACK:
            return call.answer()  # the producer does not know the state: it is checked again later
        half = self._core.find_half(fields.commitLogOffset)
        if half is not None:
            self._context.broker.policy.allow(call.caller, Verb.SEND, topic=half.topic)
        outcome = await self._core.end(
            fields.commitLogOffset, fields.producerGroup, commit=is_commit, delay=self._delay
        )
        if outcome is Outcome.NOT_FOUND:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"Find prepared transaction message failed: {fields.commitLogOffset} of group "
                f"{fields.producerGroup[: limits.GROUP_BYTES_MAX]}",
            )
        opposite_outcome = Outcome.ROLLED_BACK if is_commit else Outcome.COMMITTED
        if outcome is opposite_outcome:
            raise Refused(
                ResponseCode.ILLEGAL_OPERATION,
                f"the transaction at {fields.commitLogOffset} was {outcome.value} before",
            )
        return call.answer()

    def _delay(self, properties: dict[str, str]) -> dict[str, int]:
        """Compute the delay of a half message that is committed now, as the column `delay_level` or `due_ms`.

        Empty if it has no delay. Raises InvalidDelay.
        """
        settings = self._context.broker.settings
        level, due_ms = delays.plan(
            properties,
            self._context.broker.clock.now_ms(),
            settings.delay_ms_max,
            self._user_names,
        )
        if level:
            return {"delay_level": level}
        return {} if due_ms is None else {"due_ms": due_ms}

    # -- checks ----------------------------------------------------------------------------------------------

    def has_producer(self, half: Half) -> bool:
        """Return whether a producer of the half message's group is connected."""
        return bool(self._permitted_producers(half))

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Push the half message to a random producer of its group. Returns the size in bytes, 0 without a producer."""
        producers = self._permitted_producers(half)
        if not producers:
            return 0
        connection = choice(producers)
        host, key = store_host(self._context, connection), half.unique_key or ""
        command = Command(
            code=RequestCode.CHECK_TRANSACTION_STATE,
            ext={
                "topic": half.topic,
                "commitLogOffset": str(half.seq),
                "tranStateTableOffset": "0",
                "offsetMsgId": offset_msg_id(host, half.seq),
                "msgId": key,
                "transactionId": key,
                "bname": self._context.broker_name,
            },
            body=encode_stored(_row_for_check(row, half), store_host=host, born_host=host),
        )
        connection.push(command)
        return len(command.body)

    def _permitted_producers(self, half: Half) -> list[Connection]:
        """Return the connected producers of the group that may send to the topic.

        Permission is checked because any client can claim to be a producer of a group.
        """
        return [
            member.connection
            for member in self._context.sessions.producers(half.group)
            if member.connection.is_open
            and self._context.broker.policy.allows(member.connection.caller, Verb.SEND, topic=half.topic)
        ]


def _row_for_check(row: pa.RecordBatch, half: Half) -> pa.RecordBatch:
    """Add the properties that a producer expects in a check to the row of a half message."""
    properties = decode_properties(row.column("properties")[0].as_py() or "")
    properties[CHECK_TIMES] = str(half.checks + 1)
    if half.unique_key is not None:
        properties.setdefault(UNIQUE_KEY, half.unique_key)
        properties[TRANSACTION_ID] = half.unique_key
    column_index = READ_SCHEMA.get_field_index("properties")
    return row.set_column(
        column_index, READ_SCHEMA.field(column_index), pa.array([encode_properties(properties)])
    )
