"""Which groups consume a topic by POP: what an administrator has said, as RocketMQ keeps it (messageRequestMode.json).

A group of which nothing is said pulls.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from timeball import limits
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.broker.registry.topics import check_name, check_topic
from timeball.errors import OverLimit

Name = Literal["PULL", "POP"]


class RequestMode(msgspec.Struct, frozen=True, rename="camel"):
    """How a group consumes a topic. `pop_share_queue_num` 0: each client pops from all queues."""

    topic: str
    consumer_group: str
    mode: Name = "PULL"
    pop_share_queue_num: int = 0


class RequestModes:
    """The modes that have been set. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._modes = MetaTable(meta, "mode", RequestMode)

    def get(self, topic: str, group: str) -> RequestMode:
        """Return what is said of this group, or that it pulls."""
        return self._modes.values.get(f"{topic}@{group}") or RequestMode(topic, group)

    def set(self, mode: RequestMode) -> None:
        """Change a group's mode; raises InvalidName, OverLimit."""
        check_topic(mode.topic)
        check_name(mode.consumer_group, limits.GROUP_BYTES_MAX, "group")
        key = f"{mode.topic}@{mode.consumer_group}"
        if key not in self._modes.values and len(self._modes.values) >= limits.GROUPS_MAX:
            raise OverLimit(f"the modes of {limits.GROUPS_MAX} groups are set")
        self._modes.put([(key, mode)])
