"""Administration of offsets: the progress of queues and groups, and resets of a group's offsets.

The tables in the answers have queues as keys, as fastjson writes them (calls.py). Times are read from the messages
themselves, in the reader thread. The time of a message that retention has deleted meanwhile is 0.

A reset (`mqadmin resetOffsetByTime` and the consoles) sets a group's offsets to those of a given time, in all queues or
in one queue, or sets one queue to an offset (`resetOffsetByQueueId`). As in RocketMQ 5, the broker commits the offsets
whether or not the group has members. Members are notified (request 220). Each discards the messages that it has pulled
and continues at the new offsets. Without `isForce`, a reset to a time moves a group only backward, never forward over
unread messages.
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
    encode_with_object_keys,
    illegal_queue_error,
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

QueuePositions = list[tuple[QueueIndex, int]]  # queue and offset of each message


class _Topic(msgspec.Struct):
    topic: str


class _Stats(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str | None = None
    topic_list: str = ""  # of 5.x tools: separated by semicolons. It overrides `topic`


class _Span(msgspec.Struct):
    topic: str
    group: str


class _Reset(msgspec.Struct, rename="camel"):
    topic: str
    group: str
    timestamp: int = 0
    is_force: bool = False
    queue_id: int = -1  # of 5.x tools: only this queue
    offset: int | None = None  # for that queue. None or -1: the offset at `timestamp`


class Progress:
    """Serves the requests that read or reset the progress of groups."""

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
        """Serve GET_TOPIC_STATS_INFO: offsets and last store time of each queue of a topic."""
        topic = self._find_topic(call.fields(_Topic).topic)
        ranges = [(queue.index.min_offset, queue.index.max_offset) for queue in topic.queues]
        times = await self._store_times(
            [(queue.index, high - 1) for queue, (_, high) in zip(topic.queues, ranges, strict=True)]
        )
        return call.answer_json(
            {
                "offsetTable": encode_with_object_keys(
                    (
                        self._message_queue(topic.name, queue),
                        {"lastUpdateTimestamp": last_ms, "maxOffset": high, "minOffset": low},
                    )
                    for queue, ((low, high), last_ms) in enumerate(zip(ranges, times, strict=True))
                ),
                "topicPutTps": self._rate_per_second(Stat.TOPIC_PUT_NUMS, topic.name),
            }
        )

    async def _consume_stats(self, call: Call) -> Reply:
        """Serve GET_CONSUME_STATS: the progress of a group in the named topics, or in all of its topics."""
        fields = call.fields(_Stats)
        entries: list[tuple[Any, Any]] = []
        tps = 0.0
        names = [name for name in fields.topic_list.split(";") if name]
        for name in names or ([fields.topic] if fields.topic else self._topics_of(fields.consumer_group)):
            topic = self._broker.tables.topics.find_topic(name)
            if topic is not None:
                entries += await self._progress_entries(fields.consumer_group, topic, call.caller)
                tps += self._rate_per_second(Stat.GROUP_GET_NUMS, of_group(name, fields.consumer_group))
        return call.answer_json({"consumeTps": tps, "offsetTable": encode_with_object_keys(entries)})

    async def _all_consume_stats(self, call: Call) -> Reply:
        """Serve GET_BROKER_CONSUME_STATS: the progress of every group in each of its topics."""
        stats_list: list[msgspec.Raw] = []
        total_lag = 0
        for group in self._broker.tables.groups.all():
            stats = []
            for name in self._topics_of(group.group_name):
                topic = self._broker.tables.topics.find_topic(name)
                entries = (
                    []
                    if topic is None
                    else await self._progress_entries(group.group_name, topic, call.caller)
                )
                total_lag += sum(value["brokerOffset"] - value["consumerOffset"] for _, value in entries)
                tps = self._rate_per_second(Stat.GROUP_GET_NUMS, of_group(name, group.group_name))
                stats.append({"consumeTps": tps, "offsetTable": encode_with_object_keys(entries)})
            if stats:
                # Each group is encoded here. Encoding all groups at the end would block the event loop.
                stats_list.append(msgspec.Raw(msgspec.json.encode({group.group_name: stats})))
        return call.answer_json(
            {
                "brokerAddr": address(self._context, call.connection),
                "consumeStatsList": stats_list,
                "totalDiff": total_lag,
                "totalInflightDiff": 0,
            }
        )

    async def _time_spans(self, call: Call) -> Reply:
        """Serve QUERY_CONSUME_TIME_SPAN: store times of each queue's first, last and last consumed message."""
        fields = call.fields(_Span)
        topic = self._find_topic(fields.topic)
        offsets = self._broker.offsets(fields.group, topic.name, call.caller)
        now_ms = self._broker.clock.now_ms()
        spans = []
        for queue_id, queue in enumerate(topic.queues[: topic.write_queues]):
            index, offset = queue.index, offsets.get(queue_id, 0)
            # Of the first and the last message, the last consumed one, and the first one that is not consumed.
            message_offsets = (index.min_offset, index.max_offset - 1, offset - 1, offset)
            first_ms, last_ms, read_ms, next_ms = await self._store_times(
                [(index, message_offset) for message_offset in message_offsets]
            )
            spans.append(
                {
                    "messageQueue": self._message_queue(topic.name, queue_id),
                    "minTimeStamp": first_ms,
                    "maxTimeStamp": last_ms,
                    "consumeTimeStamp": read_ms or first_ms,
                    "delayTime": now_ms - next_ms if next_ms else 0,
                }
            )
        return call.answer_json({"consumeTimeSpanSet": spans})

    # -- resetting -----------------------------------------------------------------------------------------------

    async def _reset(self, call: Call) -> Reply:
        """Serve INVOKE_BROKER_TO_RESET_OFFSET: set a group's offsets, and notify its members.

        Raises GroupNotFound, Refused, OutOfRange, NotFound and Forbidden.
        """
        fields = call.fields(_Reset)
        topic = self._find_topic(fields.topic)
        group = self._context.sessions.group(fields.group)
        if group is None and not self._broker.is_group(fields.group):
            raise GroupNotFound(f"Group {fields.group} does not exist")
        offsets = await self._offsets_at(topic, fields, call.caller)
        await self._broker.commit_offsets(fields.group, fields.topic, offsets, call.caller)
        if group is not None:
            self._notify_members(group, fields, offsets)
        return call.answer(body=self._encode_table(fields.topic, offsets))

    async def _offsets_at(self, topic: Topic, fields: _Reset, caller: Caller) -> dict[int, int]:
        """Compute the offsets that a reset sets, by queue. Raises Refused if the queue or the offset does not exist."""
        committed_offsets = self._broker.offsets(fields.group, fields.topic, caller)
        if fields.queue_id >= topic.read_queues:
            raise illegal_queue_error(ResponseCode.INVALID_PARAMETER, fields.queue_id, topic)
        if fields.queue_id >= 0 and fields.offset is not None and fields.offset != -1:
            index = topic.queues[fields.queue_id].index
            if not index.min_offset <= fields.offset <= index.max_offset:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,  # RocketMQ's code and text
                    f"Target offset {fields.offset} not in consume queue range [{index.min_offset}-{index.max_offset}]",
                )
            return {fields.queue_id: fields.offset}
        # A timestamp of -1 means the end.
        offsets_at_time = await self._broker.offsets_at(fields.topic, fields.timestamp, caller)
        queue_ids = [fields.queue_id] if fields.queue_id >= 0 else range(topic.read_queues)
        new_offsets = {queue_id: offsets_at_time[queue_id] for queue_id in queue_ids}
        if fields.is_force:
            return new_offsets
        # Without force, a group moves only backward.
        return {
            queue_id: min(offset, committed_offsets.get(queue_id, offset))
            for queue_id, offset in new_offsets.items()
        }

    def _notify_members(self, group: Group[Member], fields: _Reset, offsets: dict[int, int]) -> None:
        """Send the new offsets to each member of a group (request 220)."""
        for member in group.members:
            # The C++ client cannot parse objects as keys, so RocketMQ sends it a list of queues.
            encode = self._encode_list if member.language == Language.CPP else self._encode_table
            member.connection.push(
                Command(
                    RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
                    ext={
                        "topic": fields.topic,
                        "group": fields.group,
                        "timestamp": str(fields.timestamp),
                        "isForce": text(fields.is_force),
                    },
                    body=encode(fields.topic, offsets),
                )
            )

    def _encode_table(self, topic: str, offsets: dict[int, int]) -> bytes:
        """Encode the offsets by queue as a table with object keys."""
        table = encode_with_object_keys(
            (self._message_queue(topic, queue), offset) for queue, offset in offsets.items()
        )
        return msgspec.json.encode({"offsetTable": table})

    def _encode_list(self, topic: str, offsets: dict[int, int]) -> bytes:
        """Encode the offsets by queue as a list, for the C++ client."""
        table = [self._message_queue(topic, queue) | {"offset": offset} for queue, offset in offsets.items()]
        return msgspec.json.encode({"offsetTable": table})

    # -- shared --------------------------------------------------------------------------------------------------

    def _find_topic(self, name: str) -> Topic:
        """Find a topic. Raises Refused if it does not exist."""
        topic = self._broker.tables.topics.find_topic(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return topic

    def _rate_per_second(self, stat: str, key: str) -> float:
        rates = self._broker.rates
        rate = rates.rate(stat, key, rates.minute, self._context.monotonic_ms())
        return 0.0 if rate is None else rate.per_second

    def _topics_of(self, group: str) -> list[str]:
        """Return the topics to which the group subscribes, and those in which it has offsets."""
        group_members = self._context.sessions.group(group)
        subscribed_topics = list(group_members.subscriptions) if group_members is not None else []
        return sorted({*subscribed_topics, *self._broker.tables.offsets.topics_of(group)})

    async def _progress_entries(self, group: str, topic: Topic, caller: Caller) -> list[tuple[Any, Any]]:
        """Create the entries of RocketMQ's ConsumeStats for one group and topic: each queue, and its offsets."""
        committed_offsets = self._broker.offsets(group, topic.name, caller)
        queues = topic.queues[: topic.read_queues]
        # Without an offset, all messages of the queue count as unread.
        offsets = [
            committed_offsets.get(queue_id, queue.index.min_offset) for queue_id, queue in enumerate(queues)
        ]
        max_offsets = [queue.index.max_offset for queue in queues]
        times = await self._store_times(
            [(queue.index, offset - 1) for queue, offset in zip(queues, offsets, strict=True)]
        )
        return [
            (
                self._message_queue(topic.name, queue_id),
                {
                    "brokerOffset": max_offset,
                    "consumerOffset": offset,
                    "pullOffset": offset,
                    "lastTimestamp": last_ms,
                },
            )
            for queue_id, (max_offset, offset, last_ms) in enumerate(
                zip(max_offsets, offsets, times, strict=True)
            )
        ]

    async def _store_times(self, positions: QueuePositions) -> list[int]:
        return await in_thread(self._broker.threads.reader, store_times, self._broker.log.reader, positions)

    def _message_queue(self, topic: str, queue: int) -> dict[str, Any]:
        return {"brokerName": self._context.broker_name, "queueId": queue, "topic": topic}


def store_times(reader: LogReader, positions: QueuePositions) -> list[int]:
    """Read the store times of messages in ms, 0 for a message that does not exist (reader thread)."""
    times_ms = []
    for index, offset in positions:
        try:
            seqs = index.read(offset, 1)["seq"].astype(np.int64)
            times_ms.append(int(reader.read_rows(seqs).column("store_ms")[0].as_py()) if len(seqs) else 0)
        except OutOfRange:  # an empty queue, or retention has deleted the message just now
            times_ms.append(0)
    return times_ms
