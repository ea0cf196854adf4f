"""Calls about the queues of a topic, and the offsets that groups have committed in them."""

from __future__ import annotations

from typing import Any

from timeball.client.messages import Actions
from timeball.model import wire
from timeball.model.wire import QueueRange


def queues(calls: Actions, topic: str) -> dict[int, QueueRange]:
    """List the first and the next offset of each queue of a topic. Raises NotFound for an unknown topic."""
    answer = calls.action("queues", wire.Queues(topic=topic), dict[str, dict[int, QueueRange]])
    return answer["queues"]


def offsets(calls: Actions, group: str, topic: str) -> dict[int, int]:
    """Read the offsets that a group has committed in a topic, by queue."""
    answer = calls.action("offsets", wire.GetOffsets(group=group, topic=topic), dict[str, dict[int, int]])
    return answer["offsets"]


def commit(calls: Actions, group: str, topic: str, next_offsets: dict[int, int]) -> None:
    """Store these offsets of a group at the broker, by queue."""
    body = wire.Commit(group=group, topic=topic, offsets=dict(next_offsets))
    calls.action("commit", body, dict[str, Any])
