"""Sends with an idempotency key: the first one is appended, and those that repeat it get its answer.

    put -> the key is new        -> batch -> in the log, with the row of its key -> answer, also to those that wait
        -> its send is under way -> wait for the outcome of that one
        -> its send is known     -> answer, once the log is durable up to here

A repeated send with other messages is refused. One that repeats a refused send is refused with it, and may try again:
a key is used by a send that is in the log, and by no other.
"""

from __future__ import annotations

import asyncio

import msgspec

from timeball.access import Caller
from timeball.broker.appender import Accepted, Appender
from timeball.broker.components import Components
from timeball.broker.ingress import BATCH_ROWS_MAX, Batcher, Begun, Piece, answer, joined, refuse
from timeball.broker.policy import Policy
from timeball.broker.registry.idempotency import KeyedSend, KeyUse, check_same, key_use
from timeball.broker.registry.meta import Change
from timeball.errors import InvalidMessage, OverLimit
from timeball.message import build_rows, codes_of
from timeball.rules import check_idempotency_key

# Of a send that is repeated its rows are not read again: its edge says where they stand, and no more.
_NOT_READ = build_rows(0)


class _Use(msgspec.Struct):
    """A send that is the first with its key, and those that came with the same key meanwhile."""

    piece: Piece
    key: KeyUse
    repeats: list[Piece] = []


class KeyedSends:
    """The sends of all edges that have an idempotency key. Belongs to the event loop."""

    def __init__(self, parts: Components, appender: Appender, policy: Policy) -> None:
        self._parts, self._policy, self._send = parts, policy, parts.traced(appender.send_with)
        self._under_way: dict[str, _Use] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._batcher: Batcher[_Use] = Batcher(self._begin, self._answer, self._refuse)

    def put(self, piece: Piece, key: str) -> None:
        """Add a piece of SEND_COLUMNS; its edge is told the outcome. Raises InvalidMessage, Conflict, OverLimit."""
        check_idempotency_key(key)
        if piece.count > BATCH_ROWS_MAX:
            raise InvalidMessage(
                f"{piece.count} messages under one idempotency key; at most {BATCH_ROWS_MAX}"
            )
        caller: Caller = piece.caller
        use = key_use(caller.name, key, piece.rows)
        first = self._under_way.get(use.name)
        if first is not None:
            check_same(first.key.content, use)
            first.repeats.append(piece)
            return
        parts = self._parts
        known = parts.idempotency_keys.get(use.name, parts.clock.now_ms() - parts.settings.idempotency_ms)
        if known is not None:
            known.check_same(use)
            # Permissions may have changed since.
            self._policy.admit(codes_of(piece.rows.column("topic"))[1], caller)
            self._answering.add(task := asyncio.ensure_future(self._repeat(piece, known)))
            task.add_done_callback(self._answering.discard)
            return
        own = self._under_way[use.name] = _Use(piece, use)
        try:
            self._batcher.put(own, piece.count, piece.size_bytes, (piece.rows.schema, caller))
        except OverLimit:
            del self._under_way[use.name]
            raise

    async def _repeat(self, piece: Piece, known: KeyedSend) -> None:
        # The row of the key may be in the log, and not on disk yet.
        try:
            await self._parts.writer.flushed()
        except Exception as error:  # of any kind: the client waits for an outcome
            refuse([piece], error)
            return
        piece.first_row = 0
        answer([piece], Accepted(known.first_seq, known.rows, known.store_ms, _NOT_READ))

    def _begin(self, uses: list[_Use]) -> Begun:
        pieces = [use.piece for use in uses]

        def keys(first_seq: int, store_ms: int) -> Change:
            sends = []
            for key in (use.key for use in uses):  # their rows stand side by side in the batch
                sends.append((key.name, KeyedSend(first_seq, key.rows, store_ms, key.content)))
                first_seq += key.rows
            return self._parts.idempotency_keys.changed(sends)

        return self._send(joined(pieces), keys, pieces[0].caller)

    def _answer(self, uses: list[_Use], accepted: Accepted) -> None:
        answer(self._ended(uses), accepted)

    def _refuse(self, uses: list[_Use], error: BaseException) -> None:
        refuse(self._ended(uses), error)

    def _ended(self, uses: list[_Use]) -> list[Piece]:
        """Return the pieces of sends that have ended, and those that repeat them."""
        pieces: list[Piece] = []
        for use in uses:
            # Absent when the answers of a batch have failed half way.
            if self._under_way.pop(use.key.name, None) is not None:
                for piece in use.repeats:
                    piece.first_row = use.piece.first_row
                pieces += [use.piece, *use.repeats]
        return pieces
