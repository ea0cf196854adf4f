"""Options of a send: their values, their checks, and the properties and keys by which the rows of the log have them.

Clients of RocketMQ give an option as a user property. Needs no Arrow, because the Python client uses these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from timeball.model import limits
from timeball.model.errors import InvalidMessage
from timeball.model.values import check_key, shown, size_bytes

# ---- unique keys ----------------------------------------------------------------------------------------------

OnPending = Literal[
    "reject", "keep", "replace"
]  # what a send does if a message with its unique key is pending
# A message with a unique key has this prefix and the key among its keys. So the indexes of keys lead to it.
UNIQUE_PREFIX = "unique:"
# The properties by which a client of RocketMQ chooses them.
UNIQUE_KEY, ON_PENDING = "TIMEBALL_UNIQUE_KEY", "TIMEBALL_ON_PENDING"
ON_PENDING_VALUES: tuple[OnPending, ...] = get_args(OnPending)


class UniqueKey(NamedTuple):
    """The unique key of a send, with its prefix. `on_pending` None: as the topic says."""

    key: str
    on_pending: OnPending | None = None


def unique_key(key: str, on_pending: str | None = None) -> UniqueKey:
    """Check the unique key of a send. Raises InvalidMessage."""
    check_key(key)
    # A cancel names the key together with its prefix.
    bytes_max = limits.UNIQUE_KEY_BYTES_MAX - len(UNIQUE_PREFIX)
    if size_bytes(key) > bytes_max:
        raise InvalidMessage(f"a unique key of {size_bytes(key)} bytes: at most {bytes_max}")
    if on_pending is not None and on_pending not in ON_PENDING_VALUES:
        raise InvalidMessage(f"on_pending {shown(on_pending)}: {', '.join(ON_PENDING_VALUES)}")
    return UniqueKey(UNIQUE_PREFIX + key, on_pending)


def unique_key_in(properties: Mapping[str, str]) -> UniqueKey | None:
    """Read the unique key of a send from the properties of a RocketMQ message. Raises InvalidMessage."""
    key, on_pending = properties.get(UNIQUE_KEY), properties.get(ON_PENDING)
    if key is None:
        if on_pending is not None:
            raise InvalidMessage(f"property {ON_PENDING} without {UNIQUE_KEY}: give both")
        return None
    return unique_key(key, on_pending)


def with_unique_key(keys: str | None, unique: UniqueKey) -> str:
    """Add a unique key to the stored form of a message's keys."""
    return f"{keys} {unique.key}" if keys else unique.key
