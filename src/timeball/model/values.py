"""Single values of a message: its keys, labels and properties, their rules and stored forms. Needs no Arrow.

A client without pyarrow uses these functions. `message.py` and `rules.py`, which are for columns, re-export them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from timeball.model.errors import InvalidMessage

Keys: TypeAlias = str | Iterable[str]
CatchUp = Literal["latest", "all", "none"]  # the missed occurrences of a schedule that are delivered
Overlap = Literal["allow", "skip"]  # an occurrence while a group has not finished the previous one

# ---- properties -----------------------------------------------------------------------------------------------

# NACK_TIME: when the last delivery was negatively acknowledged (ms since 1970). The next delivery removes it.
# NACK_REASON: the last reason for a negative acknowledgement or for giving the message up, kept until replaced.
NACK_TIME, NACK_REASON = "NACK_TIME", "NACK_REASON"

PROPERTY_NAME_END = "\x01"

PROPERTY_END = "\x02"


def encode_properties(properties: dict[str, str]) -> str:
    """Encode message properties in RocketMQ's text form (`MessageDecoder.messageProperties2String`)."""
    return "".join(f"{k}{PROPERTY_NAME_END}{v}{PROPERTY_END}" for k, v in properties.items())


def decode_properties(text: str) -> dict[str, str]:
    """Decode properties, inverse of `encode_properties`. Ignores entries without a name separator, as RocketMQ does."""
    properties = {}
    # This is the fastest way to split, and it runs for every message of a RocketMQ client.
    for entry in text.split(PROPERTY_END):
        name, separator, value = entry.partition(PROPERTY_NAME_END)
        if separator:
            properties[name] = value
    return properties


def lateness_ms(due_ms: int, accepted_ms: int | None, store_ms: int) -> int:
    """Compute how late a message became visible at `store_ms`, in ms. A due time before acceptance is not late.

    >>> lateness_ms(1_000, 500, 1_007), lateness_ms(1_000, 5_000, 5_002)
    (7, 2)
    """
    return max(0, store_ms - max(due_ms, accepted_ms or 0))


# ---- keys and labels ------------------------------------------------------------------------------------------

_UNKNOWN_FIELD = re.compile("unknown field `([^`]*)`")


KEY_TEXT = "a key has no blanks and no control characters, because blanks separate keys"


LABEL_TEXT = "text without control characters, and without blanks at its ends"


# Written out for RE2, Java and Python, which do not share character classes.
BLANK = "[\\x20\\x85\\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


CONTROL = re.compile("[\\x00-\\x1f\\x7f]")


NOT_IN_KEY_PATTERN = re.compile(f"{CONTROL.pattern}|{BLANK}")


def size_bytes(text: str | bytes) -> int:
    """Compute the size of a text in UTF-8, in bytes."""
    if isinstance(text, bytes) or text.isascii():
        return len(text)
    return len(text.encode("utf-8", "surrogatepass"))


def check_key(key: object) -> str:
    """Check one key and return it. Raises InvalidMessage for a text that is empty or would be read as several keys."""
    if not isinstance(key, str) or not key or NOT_IN_KEY_PATTERN.search(key):
        raise InvalidMessage(f"key {shown(key)}: {KEY_TEXT}")
    return key


def keys_text(keys: Keys | None) -> str | None:
    """Join keys to one text with blanks between them. Raises InvalidMessage.

    A text is one key. A text with a blank could mean one key or several, so it is refused.
    """
    if keys is None:
        return None
    if isinstance(keys, str):
        if keys and NOT_IN_KEY_PATTERN.search(keys):
            words = keys.split()
            raise InvalidMessage(
                f"keys={shown(keys)}: {KEY_TEXT}; write several keys as a list, {shown(words)}, and one key without "
                f"blanks, as in {shown('-'.join(words))}"
            )
        return keys or None
    value: object = keys  # a caller without a type checker may pass anything
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise InvalidMessage(f"keys={shown(keys)}: a text, or a list of texts")
    return " ".join(map(check_key, keys)) or None


def check_label(name: str, text: str | None) -> str | None:
    """Check a tag or an id and return it. Raises InvalidMessage for control characters, or blanks at its ends.

    A subscription's tags are trimmed, so no consumer could subscribe to a tag with blanks at its ends. U+0001 and
    U+0002 end properties, and RocketMQ's consumers receive tag and id as properties.
    """
    if text is not None and (not isinstance(text, str) or text.strip() != text or CONTROL.search(text)):
        raise InvalidMessage(f"{name} {shown(text)}: {LABEL_TEXT}")
    return text


def valid(given: str, known: Sequence[str]) -> str:
    """List the valid values for an error about an unknown value. Suggests the closest one."""
    if not known:
        return "there are none"
    from difflib import get_close_matches  # slow to import, and only for errors

    close = get_close_matches(given, known, 1)
    return (f"did you mean {close[0]!r}? " if close else "") + "valid: " + ", ".join(known)


def with_valid_fields(text: str, kind: Any) -> str:
    """Append the valid fields to msgspec's error text `text`, if it reports an unknown field of the struct `kind`."""
    unknown = _UNKNOWN_FIELD.search(text)
    fields: Sequence[str] = getattr(kind, "__struct_encode_fields__", ())
    return f"{text}; {valid(unknown.group(1), fields)}" if unknown and fields else text


def shown(value: object) -> str:
    """Format a caller's value for an error, shortened to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def properties_text(properties: Mapping[str, str] | None) -> str | None:
    """Encode properties in their stored form. Raises InvalidMessage."""
    if not properties:
        return None
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name:
            raise InvalidMessage(f"property {name!r}: names and values are text")
        if any(mark in name or mark in value for mark in (PROPERTY_NAME_END, PROPERTY_END)):
            raise InvalidMessage(f"property {name!r}: the characters U+0001 and U+0002 separate properties")
    return encode_properties(dict(properties))
