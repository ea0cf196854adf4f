"""Protection against repeated sends: idempotency keys, and positions of external sources such as Kafka topics.

An idempotency key is text that a client chooses for one send. A send with a known key is not executed again: the key
leads to the messages of its first send. Its row is in the same frame as the messages, so both are on disk or neither
is. The log and the snapshots contain a hash of the key and the account, never the key.

A key stays known for some time after its send, and for the same time after the due time of its last message, even if
that message was rescheduled. So a pending message cannot be sent a second time with its key.

A source has a position for each partition, up to which its records were sent. The new position is in the same frame as
the messages, too. Unlike a key it never expires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

import msgspec

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.model import limits
from timeball.model.errors import Conflict, OverLimit
from timeball.model.message import SEND_COLUMNS, SEND_NAMES, SendBatch
from timeball.model.send_options import UniqueKey
from timeball.model.trace_context import without_context
from timeball.model.wire import SourceStep

# ---- positions of sources ------------------------------------------------------------------------------------
# A program that forwards the records names with each batch the begin and end positions in the source. A batch with
# another begin is refused: it was sent before, or another process forwards the same source.


class SourceState(msgspec.Struct, frozen=True, array_like=True):
    """The value of a source's META row."""

    name: str  # stored for people: the key is a hash
    positions: dict[int, int]  # partition -> position of the next record to send


class SourcePositions:
    """The known sources. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "source", SourceState)

    def __len__(self) -> int:
        """The number of known sources."""
        return len(self._table.values)

    def of(self, caller: str, source: str) -> dict[int, int]:
        """Find the next position of an account's source in each partition. Empty for an unknown source."""
        state = self._table.values.get(_key(caller, source))
        return {} if state is None else dict(state.positions)

    def moved(self, caller: str, step: SourceStep) -> Change:
        """Build the row with a source's positions after this step, for the frame of its messages.

        Raises Conflict if the step does not begin at the current positions, OverLimit for too many sources or
        partitions.
        """
        current = self.of(caller, step.source)
        for partition, begin in step.begin.items():
            # A partition that is new here may begin anywhere.
            expected = current.get(partition, begin)
            if expected != begin:
                raise Conflict(
                    f"source {step.source!r} stands at {expected} in partition {partition}, "
                    f"this batch begins at {begin}: "
                    "it was sent before, or another process sends for this source; ask for the positions, go on there"
                )
        # Partitions that are not in this step keep their positions.
        key, positions = _key(caller, step.source), {**current, **step.end}
        if len(positions) > limits.SOURCE_PARTITIONS_MAX:
            raise OverLimit(
                f"source {step.source!r}: at most {limits.SOURCE_PARTITIONS_MAX} partitions; use a source for each part"
            )
        # Positions never expire, so their number needs a bound.
        if key not in self._table.values and len(self) >= limits.SOURCES_MAX:
            raise OverLimit(
                f"{limits.SOURCES_MAX} sources are known, and no more are taken: use one of their names"
            )
        return self._table.build_change([(key, SourceState(step.source, positions))])


def _key(caller: str, source: str) -> str:
    """Build the name of the META row of an account's source."""
    # Hashed with the account, so that no account can move the positions of another account.
    return hashlib.blake2b(msgspec.msgpack.encode([caller, source]), digest_size=_HASH_BYTES).hexdigest()


# ---- idempotency keys ----------------------------------------------------------------------------------------

DROPPED_AT_ONCE_MAX = 10_000  # expired keys deleted in one frame
_HASH_BYTES = 16
# The columns that make up the content. Address and time stamp may differ in a repeated send, and so may the trace
# context, which `key_use` removes from the properties.
_CONTENT = [name for name in SEND_COLUMNS if name not in ("born_ms", "born_host")]
# The heap `_expiry_heap` is rebuilt when it has more entries than twice the number of keys, and this many more.
STALE_MAX = 1_000

# (first seq, number of messages) -> the latest due time in ms to which one of these messages was rescheduled.
LastDue = Callable[[int, int], int]


class KeyedSend(msgspec.Struct, frozen=True, array_like=True):
    """The value of a key's META row: the send that used it first."""

    first_seq: int  # of its messages, whose sequence numbers are consecutive
    rows: int
    store_ms: int
    content: str  # hash of the messages
    attempt: str = ""  # hash of the text that names the client's attempt
    # The latest due time of its messages as they were sent. 0: none is scheduled. -1: not known, in a row of an older
    # format.
    last_due_ms: int = -1

    @property
    def last_ms(self) -> int:
        """The later of the time of the send and the latest due time of its messages."""
        return max(self.store_ms, self.last_due_ms)

    def check_same(self, use: KeyUse) -> None:
        """Raise Conflict if a later send uses the key for other messages."""
        check_same(self.content, use)


class KeyUse(NamedTuple):
    """The use of a key by one send."""

    name: str  # hash of caller and key
    content: str  # hash of the messages
    rows: int
    attempt: str = ""  # hash of the text that names the client's attempt, "" without one
    # Whether the client asks to send again once nothing of the earlier send is pending.
    is_anew: bool = False
    due_ms: int = 0  # the latest due time, 0 if there is none
    delay_ms: int = 0  # the longest delay
    unique: UniqueKey | None = None  # of the message, if it has one

    def sent(self, first_seq: int, store_ms: int) -> KeyedSend:
        """Build the value of the key's row, for messages with the sequence numbers from `first_seq` on."""
        last_due_ms = max(self.due_ms, store_ms + self.delay_ms if self.delay_ms else 0)
        return KeyedSend(first_seq, self.rows, store_ms, self.content, self.attempt, last_due_ms)


def key_use(caller: str, key: str, sends: SendBatch, attempt: str = "", *, anew: bool = False) -> KeyUse:
    """Describe the use of a key by a send. `caller` is the name of the account.

    `sends`: the messages, as rows (SEND_NAMES) or as a batch of SEND_COLUMNS. `attempt`: text by which the client names
    its attempt. `anew`: the client asks to send again if no message is pending.
    """
    # As lists of values, so that the same messages have the same hash as rows, as slices or with dictionaries.
    if isinstance(sends, list):
        count = len(sends)
        values_of = dict(zip(SEND_NAMES, map(list, zip(*sends, strict=True)), strict=True))
    else:
        count, names = sends.num_rows, sends.schema.names
        values_of = {name: sends.column(name).to_pylist() for name in _CONTENT if name in names}
    values_of["properties"] = [without_context(text) for text in values_of.get("properties", ())]
    columns = [values_of.get(name) for name in _CONTENT]
    # A column of nulls counts as a missing column.
    columns = [
        column if column and any(value is not None for value in column) else None for column in columns
    ]
    return KeyUse(
        name=_hash([caller, key]),
        content=_hash(columns),
        rows=count,
        attempt=_hash([caller, key, attempt]) if attempt else "",
        is_anew=anew,
        due_ms=_largest(values_of.get("due_ms")),
        delay_ms=_largest(values_of.get("delay_ms")),
    )


def _largest(values: Sequence[int | None] | None) -> int:
    """Find the largest value. 0 if there is none."""
    return max((value for value in values or () if value is not None), default=0)


def check_same(content: str, use: KeyUse) -> None:
    """Raise Conflict if the key's earlier send had another `content` than this use."""
    if content != use.content:
        raise Conflict(
            "this idempotency key has been used for a send of other messages; use a new key for each send, or ask "
            "to send again once no message of the earlier send is pending"
        )


def _hash(values: Sequence[object]) -> str:
    """Hash a list of values, as hexadecimal text."""
    return hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=_HASH_BYTES).hexdigest()


class IdempotencyKeys:
    """The known keys, in the order of their sends. Belongs to the event loop.

    A key is deleted when there are IDEMPOTENCY_KEYS_MAX newer ones, or when its send and the due times of its messages
    lie before a time that the caller names.
    """

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "once", KeyedSend)
        # A heap of (last_ms, name): the keys that expire next. It has an entry for each known key, and maybe entries of
        # deleted keys and of earlier uses. None after a start, until the first `drop` builds it from `_table`.
        self._expiry_heap: list[tuple[int, str]] | None = None

    def __len__(self) -> int:
        """The number of known keys, including expired keys that are not deleted yet."""
        return len(self._table.values)

    def get(self, name: str, after_ms: int, last_due_ms: LastDue) -> KeyedSend | None:
        """Find the send that used a key. None if it and all due times of its messages are at or before `after_ms`.

        `last_due_ms` finds the latest due time to which one of these messages was rescheduled.
        """
        send = self._table.values.get(name)
        # The key's row does not contain due times of reschedules, so they are looked up, but only if it would expire.
        if send is None or send.last_ms > after_ms:
            return send
        return send if last_due_ms(send.first_seq, send.rows) > after_ms else None

    def build_change(self, sends: Iterable[tuple[str, KeyedSend]]) -> Change:
        """Build the rows of keys that are used now, and of the oldest keys, which are deleted beyond the limit.

        `sends`: the name of each key, and the send that uses it.
        """
        new_values: dict[str, KeyedSend | None] = dict(sends)
        values = self._table.values
        # A key that is used again is deleted first, so that it moves to the end, after older keys.
        deletions = dict.fromkeys(name for name in new_values if name in values)
        surplus = len(values) - len(deletions) + len(new_values) - limits.IDEMPOTENCY_KEYS_MAX
        oldest_first = (name for name in values if name not in deletions)
        deletions |= dict.fromkeys(islice(oldest_first, max(0, surplus)))
        changed = self._table.build_change([*deletions.items(), *new_values.items()])

        def apply_with_heap() -> None:
            """Apply the change in memory, and add the new keys to the heap, if it exists."""
            changed.apply()
            for name, send in new_values.items():
                if send is not None and self._expiry_heap is not None:
                    heappush(self._expiry_heap, (send.last_ms, name))

        return changed._replace(apply=apply_with_heap)

    def drop(self, before_ms: int, last_due_ms: LastDue) -> int:
        """Delete keys whose sends and due times are not after `before_ms`. Returns the number of deleted keys.

        `last_due_ms`: as for `get`. One call deletes at most DROPPED_AT_ONCE_MAX keys.
        """
        values, expiry_heap = self._table.values, self._expiry_heap
        # After a flood of keys, most entries of the heap are of deleted keys.
        if expiry_heap is None or len(expiry_heap) > 2 * len(values) + STALE_MAX:
            expiry_heap = self._expiry_heap = [(send.last_ms, name) for name, send in values.items()]
            heapify(expiry_heap)
        expired_names: list[str] = []
        while expiry_heap and expiry_heap[0][0] <= before_ms and len(expired_names) < DROPPED_AT_ONCE_MAX:
            end_ms, name = heappop(expiry_heap)
            send = values.get(name)
            # A stale entry: the key was deleted, or a newer send has used it, which has another entry.
            if send is None or send.last_ms > end_ms:
                continue
            rescheduled_ms = last_due_ms(send.first_seq, send.rows)
            # A message was rescheduled, so the key is checked again after its new due time.
            if rescheduled_ms > before_ms:
                heappush(expiry_heap, (rescheduled_ms, name))
            else:
                expired_names.append(name)
        self._table.put((name, None) for name in dict.fromkeys(expired_names))
        return len(expired_names)
