"""Which groups consume a topic by POP: what an administrator has said, as RocketMQ keeps it (messageRequestMode.json).

A group that nobody has said anything about pulls. Rarely written and small, so it is saved before the answer.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from timeball import documents, limits
from timeball.broker.parts import Parts, in_thread
from timeball.broker.registry.topics import check_name, check_topic
from timeball.errors import OverLimit

NAME = "request_modes.json"

Name = Literal["PULL", "POP"]


class RequestMode(msgspec.Struct, frozen=True, rename="camel"):
    """How a group consumes a topic. `pop_share_queue_num` 0: each client pops from all queues."""

    topic: str
    consumer_group: str
    mode: Name = "PULL"
    pop_share_queue_num: int = 0


class RequestModes:
    """See the module. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        kept = documents.load(parts.files, NAME, list[RequestMode]) or []
        self._modes = {(mode.topic, mode.consumer_group): mode for mode in kept}

    def get(self, topic: str, group: str) -> RequestMode:
        """What is said of this group, or that it pulls."""
        return self._modes.get((topic, group)) or RequestMode(topic, group)

    async def set(self, mode: RequestMode) -> None:
        """Durable on return; raises InvalidMessage, OverLimit."""
        check_topic(mode.topic)
        check_name(mode.consumer_group, limits.GROUP_BYTES_MAX, "group")
        key = (mode.topic, mode.consumer_group)
        if key not in self._modes and len(self._modes) >= limits.GROUPS_MAX:
            raise OverLimit(f"the modes of {limits.GROUPS_MAX} groups are set")
        self._modes[key] = mode
        data = documents.encode(list(self._modes.values()))
        await in_thread(self._parts.reader_thread, self._parts.files.replace, NAME, data)
