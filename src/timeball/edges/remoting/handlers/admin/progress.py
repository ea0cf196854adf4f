"""The progress of queues and groups, for tools: offsets, times of last messages, unread messages, and resets.

The tables have queues as keys, as fastjson writes them (calls.py). Times are read from the messages themselves, in the
reader thread. The time of a message that retention has deleted meanwhile is 0.

A reset (`mqadmin resetOffsetByTime` and the consoles) sets a group's offsets to those of a given time, in all queues or
in one, or sets one queue to an offset (`resetOffsetByQueueId`). The offsets are stored here whether or not the group
has members, as in RocketMQ 5. Members are notified (request 220). Each drops the messages it has pulled, continues at
the new offsets and stores its own offsets from then on. Without `isForce`, a time moves a group only backward, never
forward over unread messages.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from timeball.broker.registry.rates import Stat, of_group
from timeball.broker.registry.topics import Topic
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    address,
    by_object,
    illegal_queue,
)
from timeball.edges.remoting.codec.codes import Language, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, text
from timeball.edges.remoting.connection import Member
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import Group
from timeball.io.threads import in_thread
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.model.access import Caller
from timeball.model.errors import GroupNotFound, OutOfRange

Wanted = list[tuple[QueueIndex, int]]  # the messages to read the store time of: queue and offset


class _Topic(msgspec.Struct):
    topic: str


class _Stats(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str | None = None
    topic_list: str = ""  # from 5.x tools, separated by semicolons, preferred to `topic`


class _Span(msgspec.Struct):
    topic: str
    group: str


class _Reset(msgspec.Struct, rename="camel"):
    topic: str
    group: str
    timestamp: int = 0
    is_force: bool = False
    queue_id: int = -1  # from 5.x tools: only this queue
    offset: int | None = None  # of that queue. None or -1: the one at `timestamp`


class Progress:
    """Serves the requests about progress, and those that reset offsets."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._broker = context, context.broker
        self.handlers: Handlers = {
            RequestCode.GET_TOPIC_STATS_INFO: self._topic_stats,
            RequestCode.GET_CONSUME_STATS: self._consume_stats,
            RequestCode.GET_BROKER_CONSUME_STATS: self._all_consume_stats,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self._time_spans,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self._reset,
        }

    async def _topic_stats(self, call: Call) -> Reply:
        topic = self._topic(call.fields(_Topic).topic)
        ranges = [(q.index.min_offset, q.index.max_offset) for q in topic.queues]
        times = await self._store_times(
            [(queue.index, high - 1) for queue, (_, high) in zip(topic.queues, ranges, strict=True)]
        )
        return call.answer_json(
            {
                "offsetTable": by_object(
                    (
                        self._queue(topic.name, queue),
                        {"lastUpdateTimestamp": last_ms, "maxOffset": high, "minOffset": low},
                    )
                    for queue, ((low, high), last_ms) in enumerate(zip(ranges, times, strict=True))
                ),
                "topicPutTps": self._per_second(Stat.TOPIC_PUT_NUMS, topic.name),
            }
        )

    async def _consume_stats(self, call: Call) -> Reply:
        asked = call.fields(_Stats)
        entries: list[tuple[Any, Any]] = []
        tps = 0.0
        names = [name for name in asked.topic_list.split(";") if name]
        for name in names or ([asked.topic] if asked.topic else self._topics_of(asked.consumer_group)):
            topic = self._broker.tables.topics.find_topic(name)
            if topic is not None:
                entries += await self._progress(asked.consumer_group, topic, call.caller)
                tps += self._per_second(Stat.GROUP_GET_NUMS, of_group(name, asked.consumer_group))
        return call.answer_json({"consumeTps": tps, "offsetTable": by_object(entries)})

    async def _all_consume_stats(self, call: Call) -> Reply:
        """Serve GET_BROKER_CONSUME_STATS: the progress of every group, by topic."""
        found: list[msgspec.Raw] = []
        behind = 0
        for group in self._broker.tables.groups.all():
            stats = []
            for name in self._topics_of(group.group_name):
                topic = self._broker.tables.topics.find_topic(name)
                entries = [] if topic is None else await self._progress(group.group_name, topic, call.caller)
                behind += sum(value["brokerOffset"] - value["consumerOffset"] for _, value in entries)
                tps = self._per_second(Stat.GROUP_GET_NUMS, of_group(name, group.group_name))
                stats.append({"consumeTps": tps, "offsetTable": by_object(entries)})
            if stats:
                # Encoded one by one, because to encode all groups at the end would block the event loop.
                found.append(msgspec.Raw(msgspec.json.encode({group.group_name: stats})))
        return call.answer_json(
            {
                "brokerAddr": address(self._context, call.connection),
                "consumeStatsList": found,
                "totalDiff": behind,
                "totalInflightDiff": 0,
            }
        )

    async def _time_spans(self, call: Call) -> Reply:
        """Return for each queue when its first, its last, and the group's last read message were stored."""
        asked = call.fields(_Span)
        topic = self._topic(asked.topic)
        stored = self._broker.offsets(asked.group, topic.name, call.caller)
        now_ms = self._broker.clock.now_ms()
        spans = []
        for at, queue in enumerate(topic.queues[: topic.write_queues]):
            index, offset = queue.index, stored.get(at, 0)
            ends = [(index, index.min_offset), (index, index.max_offset - 1)]
            first_ms, last_ms, read_ms, next_ms = await self._store_times(
                [*ends, (index, offset - 1), (index, offset)]
            )
            spans.append(
                {
                    "messageQueue": self._queue(topic.name, at),
                    "minTimeStamp": first_ms,
                    "maxTimeStamp": last_ms,
                    "consumeTimeStamp": read_ms or first_ms,
                    "delayTime": now_ms - next_ms if next_ms else 0,
                }
            )
        return call.answer_json({"consumeTimeSpanSet": spans})

    # -- resetting -----------------------------------------------------------------------------------------------

    async def _reset(self, call: Call) -> Reply:
        said = call.fields(_Reset)
        topic = self._topic(said.topic)
        group = self._context.sessions.group(said.group)
        if group is None and not self._broker.is_group(said.group):
            raise GroupNotFound(f"Group {said.group} does not exist")
        offsets = await self._offsets_at(topic, said, call.caller)
        await self._broker.commit_offsets(said.group, said.topic, offsets, call.caller)
        if group is not None:
            self._tell(group, said, offsets)
        return call.answer(body=self._table(said.topic, offsets))

    async def _offsets_at(self, topic: Topic, said: _Reset, caller: Caller) -> dict[int, int]:
        """Return the offsets that a reset sets, by queue."""
        stored = self._broker.offsets(said.group, said.topic, caller)
        if said.queue_id >= topic.read_queues:
            raise illegal_queue(ResponseCode.INVALID_PARAMETER, said.queue_id, topic)
        if said.queue_id >= 0 and said.offset is not None and said.offset != -1:
            index = topic.queues[said.queue_id].index
            if not index.min_offset <= said.offset <= index.max_offset:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,  # RocketMQ's code and sentence
                    f"Target offset {said.offset} not in consume queue range [{index.min_offset}-{index.max_offset}]",
                )
            return {said.queue_id: said.offset}
        found = await self._broker.offsets_at(said.topic, said.timestamp, caller)  # RocketMQ's -1: to the end
        return {
            at: found[at] if said.is_force else min(found[at], stored.get(at, found[at]))
            for at in ([said.queue_id] if said.queue_id >= 0 else range(topic.read_queues))
        }

    def _tell(self, group: Group[Member], said: _Reset, offsets: dict[int, int]) -> None:
        for member in group.members:
            # The C++ client can only parse plain JSON, so RocketMQ sends it a different form.
            is_cpp = member.language == Language.CPP
            body = self._list(said.topic, offsets) if is_cpp else self._table(said.topic, offsets)
            member.connection.push(
                Command(
                    RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
                    ext={
                        "topic": said.topic,
                        "group": said.group,
                        "timestamp": str(said.timestamp),
                        "isForce": text(said.is_force),
                    },
                    body=body,
                )
            )

    def _table(self, topic: str, offsets: dict[int, int]) -> bytes:
        table = by_object((self._queue(topic, queue), offset) for queue, offset in offsets.items())
        return msgspec.json.encode({"offsetTable": table})

    def _list(self, topic: str, offsets: dict[int, int]) -> bytes:
        table = [self._queue(topic, queue) | {"offset": offset} for queue, offset in offsets.items()]
        return msgspec.json.encode({"offsetTable": table})

    # -- shared --------------------------------------------------------------------------------------------------

    def _topic(self, name: str) -> Topic:
        topic = self._broker.tables.topics.find_topic(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return topic

    def _per_second(self, stat: str, key: str) -> float:
        rates = self._broker.rates
        found = rates.rate(stat, key, rates.minute, self._context.monotonic_ms())
        return 0.0 if found is None else found.per_second

    def _topics_of(self, group: str) -> list[str]:
        """Return the topics that the group reads now, or has read before."""
        reads = self._context.sessions.group(group)
        now = list(reads.subscriptions) if reads is not None else []
        return sorted({*now, *self._broker.tables.offsets.topics_of(group)})

    async def _progress(self, group: str, topic: Topic, caller: Caller) -> list[tuple[Any, Any]]:
        stored = self._broker.offsets(group, topic.name, caller)
        queues = topic.queues[: topic.read_queues]
        # A group without an offset is behind by all messages of the queue.
        offsets = [stored.get(at, queue.index.min_offset) for at, queue in enumerate(queues)]
        ends = [queue.index.max_offset for queue in queues]
        times = await self._store_times(
            [(queue.index, offset - 1) for queue, offset in zip(queues, offsets, strict=True)]
        )
        return [
            (
                self._queue(topic.name, at),
                {
                    "brokerOffset": end,
                    "consumerOffset": offset,
                    "pullOffset": offset,
                    "lastTimestamp": last_ms,
                },
            )
            for at, (end, offset, last_ms) in enumerate(zip(ends, offsets, times, strict=True))
        ]

    async def _store_times(self, wanted: Wanted) -> list[int]:
        return await in_thread(self._broker.threads.reader, store_times, self._broker.log.reader, wanted)

    def _queue(self, topic: str, queue: int) -> dict[str, Any]:
        return {"brokerName": self._context.broker_name, "queueId": queue, "topic": topic}


def store_times(reader: LogReader, wanted: Wanted) -> list[int]:
    """Return when each of these messages was stored, 0 for a missing message (reader thread)."""
    found = []
    for index, offset in wanted:
        try:
            seqs = index.read(offset, 1)["seq"].astype(np.int64)
            found.append(int(reader.read_rows(seqs).column("store_ms")[0].as_py()) if len(seqs) else 0)
        except OutOfRange:  # an empty queue, or retention has deleted the message just now
            found.append(0)
    return found
