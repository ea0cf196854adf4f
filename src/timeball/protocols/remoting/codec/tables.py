"""Tables as RocketMQ's tools read them: keys that are objects, and the version that a whole table has.

    {{"brokerName":"b0","queueId":0,"topic":"t"}:{"maxOffset":7,"minOffset":0},…}

That is what fastjson makes of a Java map with objects as keys: no JSON, and no other reader takes it; but all
of RocketMQ's tools expect it for tables by queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

_encode = msgspec.json.encode
_ENTRY = re.compile(rb"\s*(\{[^{}]*\})\s*:\s*(-?[0-9]{1,19})\s*,?")


def by_object(entries: Iterable[tuple[Any, Any]]) -> msgspec.Raw:
    """The entries as one value, to stand inside a structure that is encoded as JSON."""
    return msgspec.Raw(
        b"{" + b",".join(_encode(key) + b":" + _encode(value) for key, value in entries) + b"}"
    )


def entries_by_object(body: bytes, name: str) -> Iterator[tuple[Any, int]]:
    """Yield key and number of a table with objects as keys, `name` in a structure; nothing where there is none.

    Clients answer with such tables. What stands behind an entry of another shape is not read.
    """
    begin = re.search(rb'"%s"\s*:\s*\{' % re.escape(name.encode()), body)
    at = begin.end() if begin else len(body)
    while (entry := _ENTRY.match(body, at)) is not None:
        try:
            key = msgspec.json.decode(entry[1])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        yield key, int(entry[2])
        at = entry.end()


def data_version(counter: int, since_ms: int) -> dict[str, int]:
    """RocketMQ's DataVersion: how often a table has changed since an instant."""
    return {"stateVersion": 0, "timestamp": since_ms, "counter": counter}
