"""Options of a send: their values, their checks, and the properties and keys by which the rows of the log have them.

Clients of RocketMQ give an option as a user property. Needs no Arrow, because the Python client uses these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Literal, NamedTuple, get_args

from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.values import check_key, shown, size_bytes

PREFIX = "TIMEBALL_"  # of each property that is an option
DIGITS_MAX = len(str(limits.INSTANT_MS_MAX))  # of a time or duration in ms

# ---- unique keys ----------------------------------------------------------------------------------------------

OnPending = Literal[
    "reject", "keep", "replace"
]  # the action of a send if a message with its unique key is pending
# A message with a unique key has this prefix and the key among its keys. So the indexes of keys lead to it.
UNIQUE_PREFIX = "unique:"
# The properties by which a client of RocketMQ chooses them.
UNIQUE_KEY, ON_PENDING = f"{PREFIX}UNIQUE_KEY", f"{PREFIX}ON_PENDING"
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


def without_unique_key(keys: str | None) -> str | None:
    """Remove a unique key from the stored form of a message's keys."""
    return " ".join(key for key in (keys or "").split() if not key.startswith(UNIQUE_PREFIX)) or None


# ---- expiry ---------------------------------------------------------------------------------------------------

OnExpiry = Literal["cancel", "move"]  # what happens to an expired message
ON_EXPIRY_VALUES: tuple[OnExpiry, ...] = get_args(OnExpiry)
# The stored form, and that of RocketMQ's clients: properties. The first two begin with EXPIRES, which is searched for.
EXPIRES = f"{PREFIX}EXPIRES_"
EXPIRES_MS, EXPIRES_AFTER_MS = f"{EXPIRES}MS", f"{EXPIRES}AFTER_MS"  # since 1970, or after the due time
ON_EXPIRY = f"{PREFIX}ON_EXPIRY"
EXPIRY_NAMES = frozenset({EXPIRES_MS, EXPIRES_AFTER_MS, ON_EXPIRY})
EXPIRED_PREFIX = "%EXPIRED%"  # of the topic to which expired messages may be moved


def check_expiry(properties: Mapping[str, str], due_ms: int | None = None) -> None:
    """Raise InvalidDelay for properties that name no valid expiry of a message. `due_ms`: its due time, if known."""
    at, after = properties.get(EXPIRES_MS), properties.get(EXPIRES_AFTER_MS)
    if at is not None and after is not None:
        raise InvalidDelay("a message that expires at two times: give one")
    if at is None and after is None:
        raise InvalidDelay(f"{ON_EXPIRY} without a time at which the message expires")
    text = at if after is None else after
    if text is None or not _is_number(text):
        raise InvalidDelay(f"expiry {shown(text)}: a whole number of milliseconds")
    if after is not None and int(after) > limits.DELAY_MS_MAX:
        raise InvalidDelay(f"expires {after} ms after the due time: at most {limits.DELAY_MS_MAX}")
    if at is not None and int(at) < limits.DUE_MS_MIN:
        raise InvalidDelay(f"expires at {at}: {limits.NOT_MILLISECONDS_TEXT}")
    if at is not None and due_ms is not None and int(at) < due_ms:
        raise InvalidDelay(f"expires at {at}, and is due later, at {due_ms}")
    if (on_expiry := properties.get(ON_EXPIRY)) is not None and on_expiry not in ON_EXPIRY_VALUES:
        raise InvalidDelay(f"on_expiry {shown(on_expiry)}: {', '.join(ON_EXPIRY_VALUES)}")


def expiry_properties(
    at_ms: int | None, after_ms: int | None, on_expiry: OnExpiry | None, due_ms: int | None = None
) -> dict[str, str]:
    """Build and check the properties of an expiry. Raises InvalidDelay."""
    values = {EXPIRES_MS: at_ms, EXPIRES_AFTER_MS: after_ms, ON_EXPIRY: on_expiry}
    properties = {name: str(value) for name, value in values.items() if value is not None}
    check_expiry(properties, due_ms)
    return properties


# ---- delivery windows -----------------------------------------------------------------------------------------

Spread = Literal["even", "level"]  # how the broker chooses the due time in a window
_GUARD_MS, _GUARD_SHARE = limits.SECOND_MS, 10


def last_offset_ms(window_ms: int) -> int:
    """Compute the latest due time in a window, in ms after its begin.

    It leaves the last tenth of the window free, at most a second, so that the release is also in the window.
    """
    return window_ms - min(_GUARD_MS, window_ms // _GUARD_SHARE)


def even_offset_ms(message_id: str, window_ms: int) -> int:
    """Choose the due time of a message in a window by its id, in ms after the begin of the window."""
    digest = blake2b(message_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (last_offset_ms(window_ms) + 1)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX
