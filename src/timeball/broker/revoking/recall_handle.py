"""Recall handles: what a producer gets for a message that waits, and gives back to take it out again.

    base64url( "v1" topic broker-name timestamp-ms unique-key )   single blanks between, with padding

The format is RocketMQ's, because its remoting clients decode a handle to find the broker it came from; only
gRPC clients pass it on unread. A decoder must ignore items behind the fifth. The timestamp is the due instant
itself (RocketMQ adds one, so that its wheel rounds it into the right slot; we name the promise by its key).
"""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from timeball.errors import InvalidMessage

VERSION = "v1"
ITEMS = 5
HANDLE_CHARACTERS_MAX = 2_048


class Handle(NamedTuple):
    """What a recall handle names."""

    topic: str
    broker_name: str
    timestamp_ms: int
    unique_key: str


def encode_handle(topic: str, broker_name: str, due_ms: int, unique_key: str) -> str:
    """The handle of a waiting message; empty when none can name it, for a blank would cut its key short."""
    items = [VERSION, topic, broker_name, str(due_ms), unique_key]
    if any(not item or " " in item for item in items):
        return ""
    return base64.urlsafe_b64encode(" ".join(items).encode()).decode()


def decode_handle(text: str) -> Handle:
    """Inverse of `encode_handle`, with or without padding; raises InvalidMessage."""
    if len(text) > HANDLE_CHARACTERS_MAX:
        raise InvalidMessage(
            f"a recall handle of {len(text)} characters; {HANDLE_CHARACTERS_MAX} is the most"
        )
    padding = "=" * (-len(text) % 4)
    try:
        items = base64.b64decode(text + padding, altchars=b"-_", validate=True).decode().split(" ")
        version, topic, broker_name, timestamp, unique_key = items[:ITEMS]
        if version != VERSION or not timestamp.isascii() or not timestamp.isdigit():
            raise ValueError
    except (ValueError, binascii.Error) as error:  # also text that is no UTF-8, or too few items
        raise InvalidMessage(f"recall handle {text[:64]!r} is invalid") from error
    return Handle(topic, broker_name, int(timestamp), unique_key)
