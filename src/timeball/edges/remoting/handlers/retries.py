"""Failed messages: a consumer hands one back (request 36), or its client sends it to a %RETRY% topic itself.

broker/consuming/retry.py decides where the message goes. This module reads it again from the log and sends it on. The
client identifies it by the number that it got as the message's physical offset. Nothing else that the client states
about the message is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.accepting.ingress import AsyncBatcher
from timeball.broker.consuming import retry
from timeball.broker.registry.groups import times_max
from timeball.broker.registry.rates import Stat, of_group
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply, store_host
from timeball.edges.remoting.codec import delays
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Int32
from timeball.edges.remoting.codec.records import Host, offset_msg_id
from timeball.edges.shared.error_codes import Refused
from timeball.io.threads import in_thread
from timeball.model import limits
from timeball.model.access import Verb
from timeball.model.errors import OutOfRange, TimeballError
from timeball.model.message import SEND_COLUMNS, Kind, decode_properties, encode_properties

HAS_TIMES_MAX_VERSION = 121  # MQVersion.V3_4_9: older clients send no maxReconsumeTimes
VISIBLE = [Kind.MESSAGE, Kind.RELEASE]
# This many of the largest messages fit into one request. A larger turn would be refused as a whole, together with the
# messages of other clients in it.
RETURNS_PER_TURN = limits.REQUEST_BYTES_MAX // (limits.BODY_BYTES_MAX + 64 * 1024)
_DECIDING = ["kind", "topic", "properties", "reconsume_times"]
# Copied from the row that comes back.
KEPT = ("body", "tag", "keys", "unique_key", "born_ms", "born_host", "flag", "sys_flag")


class _SendBack(msgspec.Struct):
    offset: int
    group: str
    delayLevel: Int32 = 0  # noqa: N815  RocketMQ's names
    maxReconsumeTimes: Int32 | None = None  # noqa: N815


class _Returned(NamedTuple):
    """One message that has come back, with the trusted part of its request."""

    call: Call
    asked: _SendBack
    queues: int
    times_max: int
    store_host: Host


class Retries:
    """Serves CONSUMER_SEND_MSG_BACK. `is_orderly`: whether a group's queues are locked, as for orderly consumers."""

    def __init__(
        self, context: RemotingContext, is_orderly: Callable[[str], bool] = lambda group: False
    ) -> None:
        self._context, self._is_orderly = context, is_orderly
        self._turns: AsyncBatcher[_Returned, None] = AsyncBatcher(self._send_on, RETURNS_PER_TURN)
        self.handlers: Handlers = {RequestCode.CONSUMER_SEND_MSG_BACK: self.hand_back}

    async def hand_back(self, call: Call) -> Reply:
        """Serve CONSUMER_SEND_MSG_BACK: deliver the message at `offset` again, later, or as a dead letter."""
        asked = call.fields(_SendBack)
        queues, most = self._group(asked.group, call.command.version, asked.maxReconsumeTimes)
        if queues <= 0:
            # In RocketMQ, a group without retry queues wants no retries: no copy is kept, and the consumer goes on.
            return call.answer()
        host = store_host(self._context, call.connection)
        await self._turns.put(_Returned(call, asked, queues, most, host))
        return call.answer()

    async def _send_on(self, returned: list[_Returned]) -> list[TimeballError | None]:
        """Read the messages again, decide about each, and send them as one batch."""
        outcomes: list[TimeballError | None] = [None] * len(returned)
        rows = await self._read([each.asked.offset for each in returned])
        thens = []
        for at, (row, each) in enumerate(zip(rows.select(_DECIDING).to_pylist(), returned, strict=True)):
            if row["kind"] not in VISIBLE:
                outcomes[at] = _not_found(each.asked.offset)
                continue
            then = _next(row, each)
            try:
                # The number may belong to any row. A client must not read a row without permission by handing it back.
                self._context.broker.policy.allow(each.call.caller, Verb.RECEIVE, topic=row["topic"])
                self._context.broker.policy.returning(then.topic, 1 if then.is_dead_letter else each.queues)
            except TimeballError as error:
                outcomes[at] = error
            else:
                thens.append(then)
        if thens:
            good = rows.filter(pa.array([outcome is None for outcome in outcomes]))
            await self._context.broker.send_again(_copies(good, thens))
            self._count(good, [each for each, o in zip(returned, outcomes, strict=True) if o is None])
        return outcomes

    def _count(self, rows: pa.RecordBatch, returned: list[_Returned]) -> None:
        for topic, each in zip(rows.column("topic").to_pylist(), returned, strict=True):
            key = of_group(topic, each.asked.group)
            self._context.broker.rates.add(Stat.SNDBCK_PUT_NUMS, key, 1)

    def redirect(
        self,
        topic: str,
        properties: dict[str, str],
        reconsume_times: int | None,
        max_reconsume_times: int | None,
        version: int,
    ) -> retry.Next:
        """Return the real destination of a client's message to `topic`, a %RETRY%…. Raises GroupNotFound, Forbidden.

        The numbers come from the send's header. A number missing there may be in the properties.
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
        self._context.broker.policy.returning(then.topic, 1 if then.is_dead_letter else queues)
        return then

    def _group(self, name: str, version: int, of_client: int | None) -> tuple[int, int]:
        """Return a group's number of retry queues, and its maximum number of attempts. Raises GroupNotFound."""
        config = self._context.broker.tables.groups.get(name)
        given = of_client if version >= HAS_TIMES_MAX_VERSION else None
        return config.retry_queue_nums, times_max(config.retry_max_times, given)

    async def _read(self, seqs: list[int]) -> pa.RecordBatch:
        """Read the rows with these numbers, one for each. Raises Refused if one of them is missing."""
        outside = [
            seq
            for seq in seqs
            if not self._context.broker.log.reader.first_seq <= seq < self._context.broker.log.reader.next_seq
        ]
        if outside:
            raise _not_found(outside[0])
        try:
            wanted = np.array(seqs, dtype=np.int64)
            return await in_thread(
                self._context.broker.threads.reader, self._context.broker.log.reader.read_rows, wanted
            )
        except OutOfRange as error:  # a reserved number, or a segment that retention has deleted since
            raise _not_found(seqs[0]) from error


def _not_found(seq: int) -> Refused:
    return Refused(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {seq}")


def _next(row: dict[str, Any], returned: _Returned) -> retry.Next:
    asked = returned.asked
    return retry.hand_back(
        asked.group,
        topic=row["topic"],
        properties=decode_properties(row["properties"] or ""),
        reconsume_times=row["reconsume_times"] or 0,
        message_id=offset_msg_id(returned.store_host, asked.offset),
        delay_level=asked.delayLevel,
        times_max=returned.times_max,
    )


def _copies(rows: pa.RecordBatch, thens: list[retry.Next]) -> pa.RecordBatch:
    """Return the batch for the broker: the rows, with the changes from `thens`."""
    changed = {
        "topic": [then.topic for then in thens],
        "properties": [encode_properties(then.properties) for then in thens],
        "reconsume_times": [then.reconsume_times for then in thens],
        "delay_level": [then.delay_level or None for then in thens],
    }
    columns = {name: rows.column(name) for name in KEPT}
    columns |= {name: pa.array(values, SEND_COLUMNS[name]) for name, values in changed.items()}
    return pa.RecordBatch.from_pydict(columns)


def _number(properties: dict[str, str], name: str) -> int | None:
    """Return a numeric property, or None if it is missing or no number."""
    try:
        return int(properties[name])
    except (KeyError, ValueError):
        return None
