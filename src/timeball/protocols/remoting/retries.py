"""Messages that come back: a consumer hands one back (36), or its client sends it to %RETRY% by itself.

What is to become of it is decided in broker/retry.py; here the message is read again from the log and sent on.
The client names it by the number it was handed as the message's physical offset, and nothing else of what it
says about the message is believed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker import retry
from timeball.broker.admission import SEND_COLUMNS
from timeball.broker.parts import in_thread
from timeball.errors import OutOfRange
from timeball.message import READ_SCHEMA, Kind, decode_properties, encode_properties
from timeball.protocols.remoting.calls import Call, Handlers, Refused, Reply
from timeball.protocols.remoting.codec import delays
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.codec.records import offset_msg_id
from timeball.protocols.remoting.site import Site

HAS_TIMES_MAX_VERSION = 121  # MQVersion.V3_4_9: older clients send no maxReconsumeTimes
PERM_WRITE = 2
VISIBLE = [Kind.MESSAGE, Kind.RELEASE]
# Taken over from the row that comes back.
KEPT = ("body", "tag", "keys", "unique_key", "born_ms", "born_host", "flag", "sys_flag")


class _SendBack(msgspec.Struct):
    offset: int
    group: str
    delayLevel: int = 0  # noqa: N815
    maxReconsumeTimes: int | None = None  # noqa: N815


class Retries:
    """See the module. `is_orderly` tells whether a group's queues are locked, as only orderly consumers do."""

    def __init__(self, site: Site, is_orderly: Callable[[str], bool] = lambda group: False) -> None:
        self._site, self._is_orderly = site, is_orderly

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.hand_back}

    async def hand_back(self, call: Call) -> Reply:
        """CONSUMER_SEND_MSG_BACK: the message at `offset` again, later, or as a dead letter."""
        asked = call.fields(_SendBack)
        queues, most = self._group(asked.group, call.command.version, asked.maxReconsumeTimes)
        if queues <= 0:
            # RocketMQ's word for a group that wants no retries: nothing is kept, and the consumer goes on.
            return call.answer()
        row = await self._read(asked.offset)
        found = row.to_pylist()[0]
        then = retry.hand_back(
            asked.group,
            topic=found["topic"],
            properties=decode_properties(found["properties"] or ""),
            reconsume_times=found["reconsume_times"] or 0,
            message_id=offset_msg_id(self._site.store_host(call.connection), asked.offset),
            delay_level=asked.delayLevel,
            times_max=most,
        )
        self._make_topic(then, queues)
        await self._site.broker.send(_copy(row, then))
        return call.answer()

    def redirect(
        self,
        topic: str,
        properties: dict[str, str],
        reconsume_times: int | None,
        max_reconsume_times: int | None,
        version: int,
    ) -> retry.Next:
        """Where a client's own message to `topic`, a %RETRY%…, really goes; raises Refused.

        The numbers are those of the send's header; where it has none, the properties may have them.
        """
        group = retry.group_of(topic)
        if max_reconsume_times is None:
            max_reconsume_times = _number(properties, "MAX_RECONSUME_TIMES")
        queues, most = self._group(group, version, max_reconsume_times)
        then = retry.resend(
            group,
            properties=properties,
            delay_level=_number(properties, delays.LEVEL) or 0,
            reconsume_times=reconsume_times or _number(properties, "RECONSUME_TIME") or 0,
            times_max=most,
            in_order=self._is_orderly(group),
        )
        self._make_topic(then, max(1, queues))
        return then

    def _group(self, name: str, version: int, of_client: int | None) -> tuple[int, int]:
        """A group's number of retry queues, and how often it tries; raises Refused."""
        config = self._site.broker.parts.groups.find(name)
        if config is None:
            raise Refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group not exist, {name[: limits.GROUP_BYTES_MAX]}",
            )
        given = of_client if version >= HAS_TIMES_MAX_VERSION else None
        return config.retry_queue_nums, retry.times_max(config.retry_max_times, given)

    def _make_topic(self, then: retry.Next, queues: int) -> None:
        topic = self._site.broker.parts.topics.ensure(then.topic, 1 if then.is_dead_letter else queues)
        if not topic.perm & PERM_WRITE:
            raise Refused(ResponseCode.NO_PERMISSION, f"the topic[{then.topic}] sending message is forbidden")

    async def _read(self, seq: int) -> pa.RecordBatch:
        """The message with this number, one row; raises Refused unless a consumer can have been handed it."""
        broker = self._site.broker
        reader = broker.parts.reader
        if reader.first_seq <= seq < reader.next_seq:
            try:
                rows = await in_thread(
                    broker.parts.reader_thread, reader.take, np.array([seq], dtype=np.int64)
                )
                if rows.column("kind")[0].as_py() in VISIBLE:
                    return rows
            except OutOfRange:
                pass  # a number that was set aside, or a segment let go since
        raise Refused(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {seq}")


def _copy(row: pa.RecordBatch, then: retry.Next) -> pa.RecordBatch:
    """What the broker is sent: the row, changed where `then` says so."""
    changed = {
        "topic": then.topic,
        "properties": encode_properties(then.properties),
        "reconsume_times": then.reconsume_times,
    }
    if then.delay_level:
        changed["delay_level"] = then.delay_level
    columns = {name: row.column(READ_SCHEMA.get_field_index(name)) for name in KEPT}
    columns |= {name: pa.array([value], SEND_COLUMNS[name]) for name, value in changed.items()}
    return pa.RecordBatch.from_pydict(columns)


def _number(properties: dict[str, str], name: str) -> int | None:
    """A property that counts something; None when it is missing or no number."""
    try:
        return int(properties[name])
    except (KeyError, ValueError):
        return None
