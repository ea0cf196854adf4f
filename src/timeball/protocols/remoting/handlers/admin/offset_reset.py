"""Resetting a group's offsets to an instant: `mqadmin resetOffsetByTime` and the consoles.

The offsets are worked out and stored here, and the group's members are told (220): each drops what it has
pulled, goes on from there and stores its own offsets from then on. Without `isForce` a group only goes back, never
forward over messages it has not seen. A group nobody is a member of is answered as RocketMQ does, so that the
tool then sets the offsets by itself.
"""

from __future__ import annotations

import msgspec

from timeball.broker import searching
from timeball.broker.parts import in_thread
from timeball.broker.registry.topics import Topic
from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.clients import Group
from timeball.protocols.remoting.codec import tables
from timeball.protocols.remoting.codec.codes import BROKER_VERSION, Language, RequestCode, ResponseCode
from timeball.protocols.remoting.codec.frame import Command
from timeball.protocols.remoting.site import Site


class _Reset(msgspec.Struct, rename="camel"):
    topic: str
    group: str
    timestamp: int
    is_force: bool = False


class Resets:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site, self._broker = site, site.broker

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self._reset}

    async def _reset(self, call: Call) -> Reply:
        said = call.fields(_Reset)
        topic = self._broker.parts.topics.find(said.topic)
        if topic is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"[reset-offset] reset offset failed, no topic in this broker. topic={said.topic}",
            )
        group = self._site.clients.consumers(said.group)
        if group is None:
            raise Refused(
                ResponseCode.CONSUMER_NOT_ONLINE,
                "Consumer not online, so can not reset offset, "
                f"Group: {said.group} Topic: {said.topic} Timestamp: {said.timestamp}",
            )
        offsets = await self._offsets(topic, said)
        await self._broker.commit_offsets(said.group, said.topic, offsets)
        self._tell(group, said, offsets)
        return call.answer(body=self._table(said.topic, offsets))

    async def _offsets(self, topic: Topic, said: _Reset) -> dict[int, int]:
        parts, stored = self._broker.parts, self._broker.offsets(said.group, said.topic)
        offsets = {}
        for at, queue in enumerate(topic.queues[: topic.read_queues]):
            if said.timestamp < 0:
                found = queue.index.max_offset  # RocketMQ's -1: to the end
            else:
                found = await in_thread(
                    parts.reader_thread, searching.offset_at, parts.reader, queue.index, said.timestamp
                )
            offsets[at] = found if said.is_force else min(found, stored.get(at, found))
        return offsets

    def _tell(self, group: Group, said: _Reset, offsets: dict[int, int]) -> None:
        for member in group.members.values():
            # The C++ client reads JSON and no more, so RocketMQ has a form of its own for it.
            is_cpp = member.language == Language.CPP
            body = self._list(said.topic, offsets) if is_cpp else self._table(said.topic, offsets)
            member.connection.push(
                Command(
                    RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
                    ext={
                        "topic": said.topic,
                        "group": said.group,
                        "timestamp": str(said.timestamp),
                        "isForce": "true" if said.is_force else "false",
                    },
                    body=body,
                    version=BROKER_VERSION,
                )
            )

    def _table(self, topic: str, offsets: dict[int, int]) -> bytes:
        name = self._site.broker_name
        return msgspec.json.encode(
            {
                "offsetTable": tables.by_object(
                    ({"brokerName": name, "queueId": queue, "topic": topic}, offset)
                    for queue, offset in offsets.items()
                )
            }
        )

    def _list(self, topic: str, offsets: dict[int, int]) -> bytes:
        name = self._site.broker_name
        return msgspec.json.encode(
            {
                "offsetTable": [
                    {"brokerName": name, "queueId": queue, "topic": topic, "offset": offset}
                    for queue, offset in offsets.items()
                ]
            }
        )
