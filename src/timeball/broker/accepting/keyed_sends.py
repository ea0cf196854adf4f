"""Sends with an idempotency key: the first one is appended. A repetition receives the current state of its messages.

    put -> the key is new        -> batch -> in the log, with the row of its key -> answer: created
        -> its send is under way -> wait for the outcome of that send            -> answer: exists
        -> its send is known     -> look up the states of its messages           -> answer: exists

A repeated send with other messages is refused. If a send is refused, the repetitions that wait for it are refused too,
and may try again: only a send that is in the log uses its key.

A client may name its attempt. It uses the same text whenever it repeats the attempt because an answer was lost. A
repetition with the same attempt as the send in the log is answered "created", like the first one.

With an attempt a client may also ask to send anew. If no message of the earlier send is pending any more, the messages
are appended, and from then on the key refers to this send. A repetition of that attempt sends nothing. A message that
is no longer pending never becomes pending again, so an await between the look-up and the append cannot cause a second
pending message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from timeball.broker.accepting.appender import Accepted, Appender, Sent
from timeball.broker.accepting.ingress import BATCH_ROWS_MAX, Batcher, Begun, Piece, answer, joined, refuse
from timeball.broker.accepting.tracing import Tracing, traced
from timeball.broker.policy import Policy
from timeball.broker.registry.idempotency import IdempotencyKeys, KeyedSend, KeyUse, check_same, key_use
from timeball.broker.registry.meta import Change
from timeball.io.clock import SchedulerClock
from timeball.log.writer import CommitLog
from timeball.model.access import Verb
from timeball.model.answers import CREATED, EXISTS, SentState
from timeball.model.config import Settings
from timeball.model.errors import Conflict, InvalidMessage, OverLimit
from timeball.model.message import build_rows, codes_of
from timeball.model.rules import check_idempotency_key
from timeball.schedule.outcomes import Outcomes

# The rows of a repeated send are not read again: its edge returns only their numbers.
_NOT_READ = build_rows(0)
_VISIBLE, _EXPIRED = SentState("visible"), SentState("expired")

# Maps numbers of scheduled messages to their states, in the same order (revoking/look_ups.py).
StatesOf = Callable[[Sequence[int]], Awaitable[list[SentState]]]


class _Use(msgspec.Struct):
    """A send that is the first with its key, and the repetitions that arrived while it was under way."""

    piece: Piece
    key: KeyUse
    repeats: list[tuple[Piece, KeyUse]] = []


class KeyedSends:
    """Sends with an idempotency key, from all edges. Belongs to the event loop."""

    def __init__(
        self,
        appender: Appender,
        policy: Policy,
        states_of: StatesOf,
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
        self._states_of = states_of
        self._under_way: dict[str, _Use] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._batcher: Batcher[_Use] = Batcher(self._begin, self._answer, self._refuse)

    def put(self, piece: Piece, key: str, attempt: str = "", *, anew: bool = False) -> None:
        """Add a piece of SEND_COLUMNS. Its edge receives the outcome later.

        `anew` appends it even if an earlier attempt was appended, provided that no message of that attempt is pending.
        Raises InvalidMessage, Conflict, OverLimit.
        """
        check_idempotency_key(key, attempt, anew=anew)
        if piece.count > BATCH_ROWS_MAX:
            raise InvalidMessage(
                f"{piece.count} messages under one idempotency key; at most {BATCH_ROWS_MAX}"
            )
        self._put(piece, key_use(piece.caller.name, key, piece.rows, attempt, anew=anew))

    def _put(self, piece: Piece, use: KeyUse) -> None:
        first = self._under_way.get(use.name)
        if first is not None:
            check_same(first.key.content, use)
            first.repeats.append((piece, use))
            return
        known = self._known(use)
        if known is not None:
            is_anew = use.is_anew and use.attempt != known.attempt
            if not is_anew:
                known.check_same(use)
            # Permissions may have changed since the first send. Only `allow` is checked: a repetition creates no topic,
            # and a drained group also answers it.
            for topic in codes_of(piece.rows.column("topic"))[1]:
                self._policy.allow(piece.caller, Verb.SEND, topic=topic)
            self._begin_task(
                self._send_anew(piece, use, known) if is_anew else self._repeat(piece, use, known)
            )
            return
        self._start(piece, use)

    def _start(self, piece: Piece, use: KeyUse) -> None:
        own = self._under_way[use.name] = _Use(piece, use)
        try:
            self._batcher.put(own, piece.count, piece.size_bytes, (piece.rows.schema, piece.caller))
        except OverLimit:
            del self._under_way[use.name]
            raise

    def _known(self, use: KeyUse) -> KeyedSend | None:
        after_ms = self._clock.now_ms() - self._settings.idempotency_ms
        return self._idempotency_keys.get(use.name, after_ms, self._outcomes.moved.last_due_ms)

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._answering.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._answering.discard)

    async def _repeat(self, piece: Piece, use: KeyUse, known: KeyedSend) -> None:
        """Answer a send that was sent before with the states of its messages."""
        try:
            states = await self._states(known)
        except Exception as error:  # any error: the client waits for an outcome
            refuse([piece], error)
        else:
            self._exists(piece, use, known, states)

    async def _send_anew(self, piece: Piece, use: KeyUse, known: KeyedSend) -> None:
        """Send anew if no message of the earlier send is pending. Otherwise answer as for a repetition."""
        try:
            states = await self._states(known)
            # A message that was handed over to another group may be pending there, so it counts as pending.
            waiting = sum(not state.is_settled for state in states)
            if not waiting:
                if use.name not in self._under_way and self._known(use) is known:
                    self._start(piece, use)
                else:
                    self._put(piece, use)  # another send with this key began during the look-up
                return
            if use.content != known.content:
                raise Conflict(
                    f"{waiting} messages of an earlier send with this idempotency key, from number {known.first_seq} "
                    "on, still wait, and this send has other messages; cancel or reschedule those, or use a new key"
                )
        except Exception as error:  # any error: the client waits for an outcome
            refuse([piece], error)
        else:
            self._exists(piece, use, known, states)

    async def _states(self, known: KeyedSend) -> list[SentState]:
        # The row of the key may be in the log, but not on disk yet.
        await self._log.writer.flushed()
        numbers = range(known.first_seq, known.first_seq + known.rows)
        if known.last_due_ms == 0:  # none of the messages was scheduled
            first_seq = self._log.reader.first_seq
            return [_VISIBLE if number >= first_seq else _EXPIRED for number in numbers]
        return await self._states_of(numbers)

    @staticmethod
    def _exists(piece: Piece, use: KeyUse, known: KeyedSend, states: list[SentState]) -> None:
        # The numbers are those of the first send, whose rows share no batch with other pieces here.
        piece.first_row = 0
        is_own = bool(use.attempt) and use.attempt == known.attempt
        sent = Sent(CREATED if is_own else EXISTS, states)
        answer([piece], Accepted(known.first_seq, known.rows, known.store_ms, _NOT_READ, sent))

    def _begin(self, uses: list[_Use]) -> Begun:
        pieces = [use.piece for use in uses]

        def keys(first_seq: int, store_ms: int) -> Change:
            sends = []
            for key in (use.key for use in uses):  # the rows of the uses are in this order in the batch
                sends.append((key.name, key.sent(first_seq, store_ms)))
                first_seq += key.rows
            return self._idempotency_keys.changed(sends)

        return self._send(joined(pieces), keys, pieces[0].caller)

    def _answer(self, uses: list[_Use], accepted: Accepted) -> None:
        ended = self._ended(uses)
        answer([use.piece for use in ended], accepted)
        for use in ended:
            # After the answer to the first send, which the look-ups for its repetitions must not delay.
            known = use.key.sent(accepted.first_seq + use.piece.first_row, accepted.store_ms)
            for piece, repeated in use.repeats:
                self._begin_task(self._repeat(piece, repeated, known))

    def _refuse(self, uses: list[_Use], error: BaseException) -> None:
        ended = self._ended(uses)
        refuse([use.piece for use in ended] + [piece for use in ended for piece, _ in use.repeats], error)

    def _ended(self, uses: list[_Use]) -> list[_Use]:
        """Remove the ended sends from `_under_way`, and list each once."""
        # A send is absent if an error has interrupted the answers of its batch.
        return [use for use in uses if self._under_way.pop(use.key.name, None) is not None]
