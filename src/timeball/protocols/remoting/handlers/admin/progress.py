"""How far queues and groups have come, for tools: offsets, when the last message came, and what is still to be read.

The tables have queues as keys, in fastjson's manner (codec/tables.py). Times are read from the messages
themselves, in the reader thread; a message that retention has let go in between has none any more and counts as 0.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from timeball.broker.parts import in_thread
from timeball.broker.rates import Stat, of_group
from timeball.broker.registry.topics import Topic
from timeball.errors import OutOfRange
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.codec import tables
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.site import Site

Wanted = list[tuple[QueueIndex, int]]  # whose store time: a queue and an offset


class _Topic(msgspec.Struct):
    topic: str


class _Stats(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str | None = None


class _Span(msgspec.Struct):
    topic: str
    group: str


class Progress:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site, self._broker = site, site.broker

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {
            RequestCode.GET_TOPIC_STATS_INFO: self._topic_stats,
            RequestCode.GET_CONSUME_STATS: self._consume_stats,
            RequestCode.GET_BROKER_CONSUME_STATS: self._all_consume_stats,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self._time_spans,
        }

    async def _topic_stats(self, call: Call) -> Reply:
        topic = self._topic(call.fields(_Topic).topic)
        ranges = [(q.index.min_offset, q.index.max_offset) for q in topic.queues]
        times = await self._store_times(
            [(queue.index, high - 1) for queue, (_, high) in zip(topic.queues, ranges, strict=True)]
        )
        return call.answer_json(
            {
                "offsetTable": tables.by_object(
                    (
                        self._queue(topic, queue),
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
        for name in [asked.topic] if asked.topic else self._topics_of(asked.consumer_group):
            topic = self._broker.parts.topics.find(name)
            if topic is not None:
                entries += await self._progress(asked.consumer_group, topic)
                tps += self._per_second(Stat.GROUP_GET_NUMS, of_group(name, asked.consumer_group))
        return call.answer_json({"consumeTps": tps, "offsetTable": tables.by_object(entries)})

    async def _all_consume_stats(self, call: Call) -> Reply:
        """Every group's progress, by topic."""
        found: list[dict[str, list[Any]]] = []
        behind = 0
        for group in self._broker.parts.groups.all():
            stats = []
            for name in self._topics_of(group.group_name):
                topic = self._broker.parts.topics.find(name)
                entries = await self._progress(group.group_name, topic) if topic is not None else []
                behind += sum(value["brokerOffset"] - value["consumerOffset"] for _, value in entries)
                tps = self._per_second(Stat.GROUP_GET_NUMS, of_group(name, group.group_name))
                stats.append({"consumeTps": tps, "offsetTable": tables.by_object(entries)})
            if stats:
                found.append({group.group_name: stats})
        return call.answer_json(
            {
                "brokerAddr": self._site.address(call.connection),
                "consumeStatsList": found,
                "totalDiff": behind,
                "totalInflightDiff": 0,
            }
        )

    async def _time_spans(self, call: Call) -> Reply:
        """Of each queue: when its first and last messages were stored, and the last one that a group has read."""
        asked = call.fields(_Span)
        topic = self._topic(asked.topic)
        stored, now_ms = self._broker.offsets(asked.group, topic.name), self._broker.parts.clock.now_ms()
        spans = []
        for at, queue in enumerate(topic.queues[: topic.write_queues]):
            index, offset = queue.index, stored.get(at, 0)
            ends = [(index, index.min_offset), (index, index.max_offset - 1)]
            first_ms, last_ms, read_ms, next_ms = await self._store_times(
                [*ends, (index, offset - 1), (index, offset)]
            )
            spans.append(
                {
                    "messageQueue": self._queue(topic, at),
                    "minTimeStamp": first_ms,
                    "maxTimeStamp": last_ms,
                    "consumeTimeStamp": read_ms or first_ms,
                    "delayTime": now_ms - next_ms if next_ms else 0,
                }
            )
        return call.answer_json({"consumeTimeSpanSet": spans})

    def _topic(self, name: str) -> Topic:
        topic = self._broker.parts.topics.find(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return topic

    def _per_second(self, stat: str, key: str) -> float:
        rates = self._broker.parts.rates
        found = rates.rate(stat, key, rates.minute, self._site.monotonic_ms())
        return 0.0 if found is None else found.per_second

    def _topics_of(self, group: str) -> list[str]:
        """What the group reads now, or has read before."""
        reads = self._site.clients.consumers(group)
        now = list(reads.subscriptions) if reads is not None else []
        return sorted({*now, *self._broker.parts.offsets.topics_of(group)})

    async def _progress(self, group: str, topic: Topic) -> list[tuple[Any, Any]]:
        stored = self._broker.offsets(group, topic.name)
        queues = topic.queues[: topic.read_queues]
        # A group that has not come yet is behind by all that is there.
        offsets = [stored.get(at, queue.index.min_offset) for at, queue in enumerate(queues)]
        ends = [queue.index.max_offset for queue in queues]
        times = await self._store_times(
            [(queue.index, offset - 1) for queue, offset in zip(queues, offsets, strict=True)]
        )
        return [
            (
                self._queue(topic, at),
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
        parts = self._broker.parts
        return await in_thread(parts.reader_thread, store_times, parts.reader, wanted)

    def _queue(self, topic: Topic, queue: int) -> dict[str, Any]:
        return {"brokerName": self._site.broker_name, "queueId": queue, "topic": topic.name}


def store_times(reader: LogReader, wanted: Wanted) -> list[int]:
    """When each of these messages was stored; 0 where there is none (reader thread)."""
    found = []
    for index, offset in wanted:
        try:
            seqs = index.read(offset, 1)["seq"].astype(np.int64)
            found.append(int(reader.take(seqs).column("store_ms")[0].as_py()) if len(seqs) else 0)
        except OutOfRange:  # an empty queue, or one whose messages retention has just let go
            found.append(0)
    return found
