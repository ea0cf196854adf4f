"""Idempotency keys: which sends have been asked for once, and where their messages stand.

A key is text that a client chooses for one send. Its row stands in the frame of the messages, so both are on disk or
neither is. The log and the snapshots hold a hash of the key and of who used it, never the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
import pyarrow as pa

from timeball import limits
from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.errors import Conflict
from timeball.message import SEND_COLUMNS
from timeball.trace_context import without_context

DROPPED_AT_ONCE_MAX = 10_000  # expired keys; their rows share a frame
_HASH_BYTES = 16
# A client that sends again may have another address, may stamp the message anew, and may be in another span.
_CONTENT = [name for name in SEND_COLUMNS if name not in ("born_ms", "born_host")]


class KeyUse(NamedTuple):
    """A key as one send uses it."""

    name: str  # hash of caller and key
    content: str  # hash of the messages
    rows: int


class KeyedSend(msgspec.Struct, frozen=True, array_like=True):
    """The value of a key's META row: the send that used it first."""

    first_seq: int  # of its messages, which stand side by side
    rows: int
    store_ms: int
    content: str

    def check_same(self, use: KeyUse) -> None:
        """Raise Conflict when a later send has the key, and other messages."""
        check_same(self.content, use)


def key_use(caller: str, key: str, batch: pa.RecordBatch) -> KeyUse:
    """Return how a send of SEND_COLUMNS uses a key; `caller` is the name of the account."""
    # By rows, so that neither slices nor dictionaries of the same messages make a difference.
    columns = [batch.column(name).to_pylist() if name in batch.schema.names else None for name in _CONTENT]
    at = _CONTENT.index("properties")
    columns[at] = [without_context(text) for text in columns[at] or ()]
    columns = [
        column if column and any(value is not None for value in column) else None for column in columns
    ]
    return KeyUse(_hash([caller, key]), _hash(columns), batch.num_rows)


def check_same(content: str, use: KeyUse) -> None:
    """Raise Conflict when a send with the key of another has not its messages."""
    if content != use.content:
        raise Conflict(
            "this idempotency key has been used for a send of other messages; use a new key for each send"
        )


def _hash(values: Sequence[object]) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=_HASH_BYTES).hexdigest()


class IdempotencyKeys:
    """The keys that count, oldest first. Belongs to the event loop.

    A key gives way when IDEMPOTENCY_KEYS_MAX newer ones have come, or when it is older than the caller says.
    """

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "once", KeyedSend)

    def __len__(self) -> int:
        """Return how many are known, some of which may have expired."""
        return len(self._kept.values)

    def get(self, name: str, after_ms: int) -> KeyedSend | None:
        """Return the send that has used a key after an instant."""
        found = self._kept.values.get(name)
        return found if found is not None and found.store_ms > after_ms else None

    def changed(self, sends: Iterable[tuple[str, KeyedSend]]) -> Change:
        """Return the rows of keys that are used now, and of the oldest ones, which give way to them."""
        added: dict[str, KeyedSend | None] = dict(sends)
        surplus = len(self._kept.values) + len(added) - limits.IDEMPOTENCY_KEYS_MAX
        gone = dict.fromkeys(islice(self._kept.values, max(0, surplus)))
        # A key that has expired, and is used again: deleted first, so that it stands at the end like other new ones.
        gone |= dict.fromkeys(name for name in added if name in self._kept.values)
        return self._kept.changed([*gone.items(), *added.items()])

    def drop(self, before_ms: int) -> int:
        """Delete keys used up to an instant, DROPPED_AT_ONCE_MAX of them at most; return how many."""
        expired: list[str] = []
        for name, send in self._kept.values.items():
            # In the order of their use; a clock that was set back lets some live longer.
            if send.store_ms > before_ms or len(expired) >= DROPPED_AT_ONCE_MAX:
                break
            expired.append(name)
        self._kept.put((name, None) for name in expired)
        return len(expired)
