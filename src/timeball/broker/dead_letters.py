"""Dead letters: the messages that a group has given up, browsed, sent to it again, or put aside for good.

A dead letter is a row of the topic `%DLQ%<group>`, where RocketMQ's tools see all there ever were. An operator sees
those that are left: a resend and a delete say in the log that a position is dealt with (registry/dead_letters.py).

    resend    a copy for the group alone, with all its attempts ahead, in one frame with the row that says so
    delete    that row alone: the message stays where it is until retention removes it

The copy goes where the group gets its other attempts from: its retry topic, which no other group reads. A group that
consumes in order reads no such topic; the copy goes to the end of its topic, where other groups see it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.access import Caller, Verb
from timeball.answers import DeadLetterPage, DeadLetterRow, Resolved
from timeball.broker.appender import Appender
from timeball.broker.components import Components, in_thread
from timeball.broker.consuming import retry
from timeball.broker.consuming.redelivery_rows import (
    FIRST_POP_TIME,
    POP_CK,
    retry_topic,
)
from timeball.broker.policy import Policy
from timeball.broker.registry.dead_letters import Position
from timeball.broker.registry.topic import Topic
from timeball.errors import InvalidMessage
from timeball.message import (
    NACK_REASON,
    NACK_TIME,
    ORIGIN_GROUP,
    READ_SCHEMA,
    RETRY_TOPIC,
    SEND_COLUMNS,
    Int64Array,
    decode_properties,
    encode_properties,
)

RESENT_AT_ONCE = 1_000  # share a frame

# A copy is a first attempt: nothing of the earlier ones may act again.
_DROPPED = retry.SPENT | {POP_CK, FIRST_POP_TIME, NACK_TIME, NACK_REASON}
_COPIED = ("body", "tag", "keys", "unique_key", "born_ms", "born_host", "flag", "sys_flag")


class DeadLetters:
    """The verbs on dead letters. Belongs to the event loop."""

    def __init__(self, parts: Components, appender: Appender, policy: Policy) -> None:
        self._parts, self._appender, self._policy = parts, appender, policy

    def count(self, group: str) -> int:
        """Return how many are left."""
        topic = self._topic(group)
        return 0 if topic is None else sum(end - begin for _, begin, end in self._open(group, topic))

    async def page(self, group: str, rows: int, after: str | None, caller: Caller) -> DeadLetterPage:
        """Return up to `rows` that are left, behind a handle; raise Forbidden, InvalidMessage."""
        # As for the messages themselves: the page shows bodies.
        self._policy.allow(caller, Verb.RECEIVE, group=group)
        topic = self._topic(group)
        if topic is None:
            return DeadLetterPage([])
        begin = (0, 0) if after is None else _next(position_of(after))
        # One more than is shown says whether there is a next page.
        positions = list(islice(self._positions(group, topic, begin), rows + 1))
        shown = positions[:rows]
        found = await self._read(topic, shown)
        letters = [_letter(at, row) for at, row in zip(shown, found.to_pylist(), strict=True)]
        return DeadLetterPage(letters, handle_of(shown[-1]) if len(positions) > rows else None)

    async def resend(self, group: str, handles: Sequence[str] | None, caller: Caller) -> Resolved:
        """Send these, or all that are left, to the group again; durable on return. Raise Forbidden, InvalidMessage."""
        return await self._resolve(group, handles, caller, is_resend=True)

    async def delete(self, group: str, handles: Sequence[str] | None, caller: Caller) -> Resolved:
        """Put these, or all that are left, aside for good; durable on return. Raise Forbidden, InvalidMessage."""
        return await self._resolve(group, handles, caller, is_resend=False)

    async def _resolve(
        self, group: str, handles: Sequence[str] | None, caller: Caller, *, is_resend: bool
    ) -> Resolved:
        self._policy.allow(caller, Verb.ADMIN)
        # A handle may stand there twice; its letter is sent once.
        named = None if handles is None else dict.fromkeys(map(position_of, handles))
        topic, count, done = self._topic(group), 0, set[Position]()
        if topic is not None:
            # Read on while they are dealt with: letters that come meanwhile in the queue at hand are taken along.
            wanted = self._positions(group, topic, (0, 0)) if named is None else iter(named)
            while some := list(islice(wanted, RESENT_AT_ONCE)):
                resolved = await self._resolve_some(group, topic, some, is_resend=is_resend)
                count += len(resolved)
                if named is not None:
                    done.update(resolved)
        return Resolved(count, [] if handles is None else [position_of(each) in done for each in handles])

    async def _resolve_some(
        self, group: str, topic: Topic, some: list[Position], *, is_resend: bool
    ) -> list[Position]:
        some = [position for position in some if self._is_open(group, topic, position)]
        rows = await self._read(topic, some) if is_resend else None
        # Another operator may have been quicker meanwhile; from here on nothing gives up the loop before the append.
        still = [self._is_open(group, topic, position) for position in some]
        some = [position for position, is_open in zip(some, still, strict=True) if is_open]
        if not some:
            return []
        # Retention never gives a position back, so spans before it need not be known.
        kept_from = {number: queue.index.min_offset for number, queue in enumerate(topic.queues)}
        resolved = self._parts.resolved_dead_letters
        if rows is None:
            change = resolved.changed(group, some, kept_from)
            self._parts.writer.append(change.rows)
            change.keep()  # behind the append, which may refuse
            await self._parts.writer.flushed()
        else:
            copies = self._copies(group, rows.filter(pa.array(still)))
            _, durable = self._appender.send_with(copies, lambda *_: resolved.changed(group, some, kept_from))
            await durable
        return some

    def _copies(self, group: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        config = self._parts.groups.find_group(group)
        in_order = config is not None and config.consume_message_orderly
        topics, texts = [], []  # a group may have given up messages of many topics
        for text, name in zip(
            *(rows.column(name).to_pylist() for name in ("properties", "topic")), strict=True
        ):
            properties = decode_properties(text or "")
            origin = properties.get(RETRY_TOPIC, name)
            if in_order:
                topics.append(origin)
            elif ORIGIN_GROUP in properties:
                # The engine redelivers by a topic of group and origin.
                topics.append(retry_topic(group, origin))
            else:
                # Handed back by a client that gets its attempts from the topic of the group.
                topics.append(retry.retry_topic(group))
            texts.append(encode_properties({n: v for n, v in properties.items() if n not in _DROPPED}))
        columns = {"topic": topics, "properties": texts, "reconsume_times": [0] * rows.num_rows}
        columns |= {name: rows.column(name) for name in _COPIED}
        return pa.RecordBatch.from_pydict(
            columns, schema=pa.schema([(name, SEND_COLUMNS[name]) for name in columns])
        )

    # -- positions ----------------------------------------------------------------------------------------------

    def _topic(self, group: str) -> Topic | None:
        return self._parts.topics.find_topic(retry.dead_letter_topic(group))

    def _open(self, group: str, topic: Topic, first: Position = (0, 0)) -> Iterator[tuple[int, int, int]]:
        """Yield (queue, begin, end) of open positions, from a position on."""
        for number in range(first[0], len(topic.queues)):
            index = topic.queues[number].index
            begin = max(index.min_offset, first[1] if number == first[0] else 0)
            for span in self._parts.resolved_dead_letters.open_spans(group, number, begin, index.max_offset):
                yield number, *span

    def _positions(self, group: str, topic: Topic, first: Position) -> Iterator[Position]:
        for queue, begin, end in self._open(group, topic, first):
            for offset in range(begin, end):
                yield queue, offset

    def _is_open(self, group: str, topic: Topic, position: Position) -> bool:
        found = next(self._open(group, topic, position), None)
        return found is not None and found[:2] == position

    async def _read(self, topic: Topic, positions: Sequence[Position]) -> pa.RecordBatch:
        """Return the rows at these positions, in READ_SCHEMA."""
        if not positions:
            return pa.RecordBatch.from_pylist([], READ_SCHEMA)
        seqs = np.empty(len(positions), np.int64)
        queues = np.array([queue for queue, _ in positions])
        offsets: Int64Array = np.array([offset for _, offset in positions], dtype=np.int64)
        for queue in set(queues.tolist()):
            mine = queues == queue
            seqs[mine] = topic.queues[queue].index.at(offsets[mine])["seq"]
        return await in_thread(self._parts.reader_thread, self._parts.reader.read_rows, seqs)


def handle_of(position: Position) -> str:
    """Return the text that names a dead letter of a group: its queue and its offset there."""
    return f"{position[0]}-{position[1]}"


def position_of(handle: str) -> Position:
    """Return the position that a handle names; raise InvalidMessage."""
    queue, dash, offset = handle.partition("-")
    is_one = dash and handle.isascii() and queue.isdecimal() and offset.isdecimal()
    if not is_one or len(handle) > limits.DEAD_LETTER_HANDLE_CHARACTERS_MAX:
        raise InvalidMessage(f"dead letter {handle[:40]!r}: use what the list of them says, as in '0-15'")
    return int(queue), int(offset)


def _next(position: Position) -> Position:
    return position[0], position[1] + 1


def _letter(position: Position, row: dict[str, Any]) -> DeadLetterRow:
    properties, body = decode_properties(row["properties"] or ""), row["body"] or b""
    return DeadLetterRow(
        dead_letter=handle_of(position),
        id=row["unique_key"],
        topic=properties.get(RETRY_TOPIC, row["topic"]),
        died_ms=row["store_ms"],
        attempts=row["reconsume_times"] or 0,
        body=body[: limits.SHOWN_BODY_BYTES_MAX],
        size_bytes=len(body),
        tag=row["tag"],
        keys=(row["keys"] or "").split(),
        properties=properties,
        # Where it names no group a client has written the properties, and none of the broker's stands there.
        reason=properties.get(NACK_REASON) if ORIGIN_GROUP in properties else None,
    )
