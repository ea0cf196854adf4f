"""Tables as RocketMQ's tools read them: keys that are objects, and the version that a whole table has.

    {{"brokerName":"b0","queueId":0,"topic":"t"}:{"maxOffset":7,"minOffset":0},…}

That is what fastjson makes of a Java map with objects as keys: no JSON, and no other reader takes it; but all
of RocketMQ's tools expect it for tables by queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

_encode = msgspec.json.encode


def by_object(entries: Iterable[tuple[Any, Any]]) -> msgspec.Raw:
    """The entries as one value, to stand inside a structure that is encoded as JSON."""
    return msgspec.Raw(
        b"{" + b",".join(_encode(key) + b":" + _encode(value) for key, value in entries) + b"}"
    )


def data_version(counter: int, since_ms: int) -> dict[str, int]:
    """RocketMQ's DataVersion: how often a table has changed since an instant."""
    return {"stateVersion": 0, "timestamp": since_ms, "counter": counter}
