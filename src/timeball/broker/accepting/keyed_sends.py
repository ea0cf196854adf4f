"""Sends that may be repeated without doubles: with an idempotency key, or from a source such as a Kafka topic.

With a key, the first send is appended, and a repetition gets the states of its messages:

    put -> the key is new        -> batch -> in the log, with the row of its key -> answer: created
        -> its send is under way -> wait for the outcome of that send            -> answer: exists
        -> its send is known     -> look up the states of its messages           -> answer: exists

A repeated send with other messages is refused. If a send is refused, the repetitions that wait for it are refused too,
and may try again: only a send that is in the log uses its key.

A client may add an attempt: a text that it chooses once and repeats if the answer is lost. A repetition with the
attempt of the send in the log is answered "created", like the first send.

With an attempt, a client may also ask to send anew. If no message of the earlier send is pending any more, the messages
are appended, and from then on the key refers to the new send. A repetition of that attempt appends nothing. A message
that is no longer pending never becomes pending again: before the append, the messages that a selection has cancelled
are cancelled for good. So an await between the look-up and the append cannot cause a second pending message.

A source has a position for each partition. A batch must begin at this position, and its rows move it:

    put -> the batch begins at the source's position -> rows and the new position, in one frame -> answer
        -> it begins elsewhere                       -> Conflict
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from timeball.broker.accepting.appender import Accepted, Appender, MakeChange, Sent
from timeball.broker.accepting.ingress import (
    BATCH_ROWS_MAX,
    Batcher,
    BegunBatch,
    Piece,
    answer,
    joined,
    refuse,
)
from timeball.broker.accepting.tracing import Tracing, traced
from timeball.broker.policy import Policy
from timeball.broker.registry.idempotency import (
    IdempotencyKeys,
    KeyedSend,
    KeyUse,
    SourcePositions,
    check_same,
    key_use,
)
from timeball.broker.registry.meta import Change
from timeball.io.clock import SchedulerClock
from timeball.log.writer import CommitLog, LogWriter
from timeball.model.access import Caller, Verb
from timeball.model.answers import CREATED, EXISTS, KEPT, SentState
from timeball.model.config import Settings
from timeball.model.errors import Conflict, InvalidMessage, TimeballError, Unavailable
from timeball.model.message import SEND_NAMES, SendBatch, build_rows, codes_of
from timeball.model.rules import check_idempotency_key
from timeball.model.send_options import UniqueKey
from timeball.model.wire import SourceStep
from timeball.schedule.outcomes import Outcomes

# Stands for the rows of a repeated send, which are not read again: its edge returns only their numbers.
_NOT_READ = build_rows(0)
_TOPIC = SEND_NAMES.index("topic")
_VISIBLE, _EXPIRED = SentState("visible"), SentState("expired")

# Finds the states of scheduled messages by their numbers, in the same order (revoking/find_message.py).
FindStates = Callable[[Sequence[int]], Awaitable[list[SentState]]]
# Cancels for good the messages with these numbers that selections have cancelled.
EndSelected = Callable[[Sequence[int], Caller], Awaitable[None]]


class PutUnique(Protocol):
    """Puts a send with a unique key (`UniqueSends.put` in revoking/unique_sends.py)."""

    def __call__(
        self,
        piece: Piece,
        unique: UniqueKey,
        caller: Caller,
        *,
        change: MakeChange,
        on_answer: Callable[[Accepted], None],
        on_refusal: Callable[[BaseException], None],
    ) -> None:
        """Add the piece. `change` builds the row of its key, and one of the two callbacks gets the outcome."""


class _FirstSend(msgspec.Struct):
    """The first send with a key, while it is under way, and the repetitions that have arrived meanwhile."""

    piece: Piece
    use: KeyUse
    repeats: list[tuple[Piece, KeyUse]] = []


def _topics_of(sends: SendBatch) -> Iterable[str]:
    """Find the distinct topics of sends."""
    if isinstance(sends, list):
        return {row[_TOPIC] for row in sends}
    return codes_of(sends.column("topic"))[1]


class KeyedSends:
    """Sends with an idempotency key, from all edges. Belongs to the event loop."""

    def __init__(
        self,
        appender: Appender,
        policy: Policy,
        find_states: FindStates,
        end_selected: EndSelected,
        put_unique: PutUnique,
        *,
        settings: Settings,
        clock: SchedulerClock,
        log: CommitLog,
        idempotency_keys: IdempotencyKeys,
        outcomes: Outcomes,
        traces: Tracing | None,
    ) -> None:
        self._policy, self._send = policy, traced(appender.send_with, traces)
        self._settings, self._clock, self._log = settings, clock, log
        self._idempotency_keys, self._outcomes = idempotency_keys, outcomes
        self._find_states, self._end_selected, self._put_unique = find_states, end_selected, put_unique
        self._under_way: dict[str, _FirstSend] = {}
        self._answer_tasks: set[asyncio.Task[None]] = set()
        self._batcher: Batcher[_FirstSend] = Batcher(self._begin, self._answer, self._refuse)

    def put(
        self,
        piece: Piece,
        key: str,
        attempt: str = "",
        *,
        anew: bool = False,
        unique: UniqueKey | None = None,
    ) -> None:
        """Add a piece of rows or of SEND_COLUMNS under an idempotency key. Its edge receives the outcome later.

        With `anew`, the piece is appended although an earlier send used the key, if no message of that send is pending.
        `unique` is the message's unique key, which decides if the messages are appended. Raises InvalidMessage,
        Forbidden, Conflict if an earlier send with the key had other messages, and OverLimit.
        """
        check_idempotency_key(key, attempt, anew=anew)
        if piece.count > BATCH_ROWS_MAX:
            raise InvalidMessage(
                f"{piece.count} messages under one idempotency key; at most {BATCH_ROWS_MAX}"
            )
        use = key_use(piece.caller.name, key, piece.rows, attempt, anew=anew)
        self._put(piece, use if unique is None else use._replace(unique=unique))

    def _put(self, piece: Piece, use: KeyUse) -> None:
        """Append the first send with a key. Answer a repetition, now or when the first send has ended."""
        first_send = self._under_way.get(use.name)
        if first_send is not None:
            check_same(first_send.use.content, use)
            first_send.repeats.append((piece, use))
            return
        earlier = self._find_earlier(use)
        if earlier is not None:
            is_anew = use.is_anew and use.attempt != earlier.attempt
            if not is_anew:
                earlier.check_same(use)
            # Permissions may have changed since the first send. Only the permission to send is checked: a repetition
            # creates no topic, and a group that was drained (closed to sends) still answers it.
            for topic in _topics_of(piece.rows):
                self._policy.allow(piece.caller, Verb.SEND, topic=topic)
            self._start_task(
                self._send_anew(piece, use, earlier) if is_anew else self._repeat(piece, use, earlier)
            )
            return
        self._put_first(piece, use)

    def _put_first(self, piece: Piece, use: KeyUse) -> None:
        """Put the first send with a key into a batch, or pass it to the sends with a unique key."""
        first_send = self._under_way[use.name] = _FirstSend(piece, use)
        try:
            if use.unique is None:
                schema = None if isinstance(piece.rows, list) else piece.rows.schema
                self._batcher.put(first_send, piece.count, piece.size_bytes, (schema, piece.caller))
            else:
                # A send with a unique key takes turns with other sends of this unique key, so it shares no batch.
                self._put_unique(
                    piece, use.unique, piece.caller, change=partial(self._build_key_row, use),
                    on_answer=partial(self._answer_unique, first_send),
                    on_refusal=lambda error: self._refuse([first_send], error),
                )  # fmt: skip
        except TimeballError:
            del self._under_way[use.name]
            raise

    def _build_key_row(self, use: KeyUse, first_seq: int, store_ms: int) -> Change:
        """Build the row of an idempotency key, for the frame of its send."""
        return self._idempotency_keys.build_change([(use.name, use.sent(first_seq, store_ms))])

    def _answer_unique(self, first_send: _FirstSend, accepted: Accepted) -> None:
        """Answer a first send with a unique key, and its repetitions."""
        if accepted.sent is None or accepted.sent.outcome != KEPT:
            self._answer([first_send], accepted)
            return
        # Nothing was written, so the idempotency key is still free, and each repetition is put again.
        self._take_ended([first_send])
        answer([first_send.piece], accepted)
        for piece, use in first_send.repeats:
            try:
                self._put(piece, use)
            except TimeballError as error:
                refuse([piece], error)

    def _find_earlier(self, use: KeyUse) -> KeyedSend | None:
        """Find the send in the log that used the key and is not expired."""
        after_ms = self._clock.now_ms() - self._settings.idempotency_ms
        return self._idempotency_keys.get(use.name, after_ms, self._outcomes.moved.last_due_ms)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task. The task is stored, because the loop holds only weak references to tasks."""
        self._answer_tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._answer_tasks.discard)

    async def _repeat(self, piece: Piece, use: KeyUse, earlier: KeyedSend) -> None:
        """Answer a repetition with the states of the messages of the earlier send."""
        try:
            states = await self._earlier_states(earlier)
        except Exception as error:  # any error: the client waits for an outcome
            refuse([piece], error)
        else:
            self._answer_repetition(piece, use, earlier, states)

    async def _send_anew(self, piece: Piece, use: KeyUse, earlier: KeyedSend) -> None:
        """Append the piece if no message of the earlier send is pending. Otherwise answer as for a repetition."""
        try:
            states = await self._earlier_states(earlier)
            # A message that was moved to another group of the cluster may be pending there, so it counts as pending.
            pending_count = sum(not state.is_settled for state in states)
            if not pending_count:
                # Messages that a selection has cancelled are cancelled for good. Otherwise an undo of the selection
                # would make them pending beside the new messages.
                numbers = range(earlier.first_seq, earlier.first_seq + earlier.rows)
                await self._end_selected(numbers, piece.caller)
                if use.name not in self._under_way and self._find_earlier(use) is earlier:
                    self._put_first(piece, use)
                else:
                    self._put(piece, use)  # another send with this key began or ended during the look-up
                return
            if use.content != earlier.content:
                raise Conflict(
                    f"{pending_count} messages of an earlier send with this idempotency key, from number "
                    f"{earlier.first_seq} on, still wait, and this send has other messages; "
                    "cancel or reschedule those, or use a new key"
                )
        except Exception as error:  # any error: the client waits for an outcome
            refuse([piece], error)
        else:
            self._answer_repetition(piece, use, earlier, states)

    async def _earlier_states(self, earlier: KeyedSend) -> list[SentState]:
        """Find the states of the messages of a send, in their order."""
        # The row of the key may be in the log, but not on disk yet.
        await self._log.writer.flushed()
        numbers = range(earlier.first_seq, earlier.first_seq + earlier.rows)
        if earlier.last_due_ms == 0:  # none of the messages was scheduled
            first_seq = self._log.reader.first_seq
            return [_VISIBLE if number >= first_seq else _EXPIRED for number in numbers]
        return await self._find_states(numbers)

    @staticmethod
    def _answer_repetition(piece: Piece, use: KeyUse, earlier: KeyedSend, states: list[SentState]) -> None:
        """Answer a repetition with the numbers and states of the earlier send."""
        # An edge adds `first_row` to the `first_seq` of a batch, but this is the number of the send's own first row.
        piece.first_row = 0
        is_same_attempt = bool(use.attempt) and use.attempt == earlier.attempt
        sent = Sent(CREATED if is_same_attempt else EXISTS, states)
        answer([piece], Accepted(earlier.first_seq, earlier.rows, earlier.store_ms, _NOT_READ, sent))

    def _begin(self, first_sends: list[_FirstSend]) -> BegunBatch:
        """Append a batch of first sends, with the rows of their keys in the same frame."""
        pieces = [first_send.piece for first_send in first_sends]

        def build_key_rows(first_seq: int, store_ms: int) -> Change:
            """Build the rows of the keys. The first row of the batch has the number `first_seq`."""
            keyed_sends = []
            # The batch has the rows in this order.
            for use in (first_send.use for first_send in first_sends):
                keyed_sends.append((use.name, use.sent(first_seq, store_ms)))
                first_seq += use.rows
            return self._idempotency_keys.build_change(keyed_sends)

        return self._send(joined(pieces), build_key_rows, pieces[0].caller)

    def _answer(self, first_sends: list[_FirstSend], accepted: Accepted) -> None:
        """Answer first sends that are durable, and their repetitions."""
        ended = self._take_ended(first_sends)
        answer([first_send.piece for first_send in ended], accepted)
        for first_send in ended:
            # After the answer to the first send, because looking up the states for repetitions must not delay it.
            earlier = first_send.use.sent(accepted.first_seq + first_send.piece.first_row, accepted.store_ms)
            for piece, repeated in first_send.repeats:
                self._start_task(self._repeat(piece, repeated, earlier))

    def _refuse(self, first_sends: list[_FirstSend], error: BaseException) -> None:
        """Refuse first sends and their repetitions."""
        ended = self._take_ended(first_sends)
        refuse(
            [first_send.piece for first_send in ended]
            + [piece for first_send in ended for piece, _ in first_send.repeats],
            error,
        )

    def _take_ended(self, first_sends: list[_FirstSend]) -> list[_FirstSend]:
        """Remove sends that have ended from `_under_way`. Returns the sends that were still there."""
        # `_refuse` may be called after `_answer` was interrupted by an error, and each send has one outcome.
        return [
            first_send
            for first_send in first_sends
            if self._under_way.pop(first_send.use.name, None) is not None
        ]


# ---- sends from a source -------------------------------------------------------------------------------------
# Unlike other sends, these do not share batches (ingress.py), because a bridge sends large batches. The position moves
# with the append, on the event loop. So several batches of one source may be under way, one after the other.


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
        """Find the positions of the caller's source with the name `source`, by partition."""
        return self._source_positions.of(caller.name, source)

    def put(self, piece: Piece, step: SourceStep) -> None:
        """Append a piece of SEND_COLUMNS and move the position of its source by `step`, in one frame.

        The piece may be empty. Its edge receives the outcome later. Raises Conflict if `step` does not begin at the
        source's position, and the errors of a send.
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
            # The source's records produced no message. Its position still moves past them.
            self._writer.check_admission()
            change = positions.moved(caller.name, step)
            store_ms, rows = self._clock.now_ms(), build_rows(0)
            first_seq, durable = self._writer.append(change.rows)
            change.apply()
            accepted = Accepted(first_seq, 0, store_ms, rows)
        piece.first_row = 0  # no other piece shares its batch
        durable.add_done_callback(partial(_answer_edge, piece, accepted))


def _answer_edge(piece: Piece, accepted: Accepted, durable: asyncio.Future[int]) -> None:
    """Let the edge answer its client, or report the error, when `durable` is done."""
    failure = Unavailable("the broker is stopping") if durable.cancelled() else durable.exception()
    if failure is not None:
        refuse([piece], failure)
    else:
        answer([piece], accepted)
