"""Request and reply: a consumer's answer goes straight to the producer that waits for it.

    producer --- request, REPLY_TO_CLIENT=its id, CORRELATION_ID ---> topic ---> consumer
    producer <------- PUSH_REPLY_MESSAGE_TO_CLIENT (326) ------------ broker <--- SEND_REPLY_MESSAGE (324, 325)

A request is an ordinary message, to which the broker adds the cluster's name. From that name clients derive the topic
that replies are sent to. A reply is not stored: the broker pushes it to a connected client, under the name of that
topic. The consumer's answer states whether the client took it. So a reply to a producer that has gone is refused at
once.
"""

from __future__ import annotations

from typing import Any, cast

from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply, address
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, text
from timeball.edges.remoting.codec.sends import TRACED, LongFields, SendFields
from timeball.edges.remoting.connection import Connection
from timeball.edges.shared.error_codes import Refused
from timeball.model.errors import Unavailable
from timeball.model.message import decode_properties
from timeball.model.reserved_topics import reply_topic

REPLY_TO = "REPLY_TO_CLIENT"
PUSH_S = 3.0  # a live client takes a reply sooner. Producers wait 3 s by default


class Replies:
    """Hands replies to the producers that wait for them. Belongs to the event loop."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._topic = context, reply_topic(context.cluster_name)
        self.handlers: Handlers = {
            RequestCode.SEND_REPLY_MESSAGE: self._reply_of_old_clients,
            RequestCode.SEND_REPLY_MESSAGE_V2: self._reply,
        }

    async def _reply(self, call: Call) -> Reply:
        return await self._push(call, call.fields(SendFields))

    async def _reply_of_old_clients(self, call: Call) -> Reply:
        return await self._push(call, cast(SendFields, call.fields(LongFields)))

    async def _push(self, call: Call, fields: SendFields) -> Reply:
        if fields.topic != self._topic:
            # Permission to send to some topic must not allow messages to every client.
            remark = f"replies go to topic[{self._topic}], not to [{fields.topic}]"
            raise Refused(ResponseCode.INVALID_PARAMETER, remark)
        client_id = decode_properties(fields.properties or "").get(REPLY_TO)
        if client_id is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"reply message properties[{REPLY_TO}] is null")
        pushed = Command(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
            ext=self._header(call, fields),
            body=call.command.body,
        )
        try:
            taken = await self._producer(client_id).request(pushed, PUSH_S)
        except Unavailable as error:
            raise _not_taken(client_id, str(error)) from error
        if taken.code != ResponseCode.SUCCESS:
            raise _not_taken(client_id, taken.remark or f"code {taken.code}")
        # A reply has no position in a queue, but clients fail without one.
        place = {"msgId": "0", "queueId": str(max(0, fields.queue_id or 0)), "queueOffset": "0"}
        return call.answer(ext=place | TRACED)

    def _producer(self, client_id: str) -> Connection:
        for member in self._context.sessions.all():
            if member.client_id == client_id and member.produces and member.connection.is_open:
                return member.connection
        remark = f"push reply message fail, channel of <{client_id}> not found."
        raise Refused(ResponseCode.SYSTEM_ERROR, remark)

    def _header(self, call: Call, fields: SendFields) -> dict[str, str]:
        """Return RocketMQ's ReplyMessageRequestHeader: a send's header in words, with the broker's fields."""
        named: dict[str, Any] = {
            "producerGroup": fields.group,
            "topic": fields.topic,
            "defaultTopic": fields.default_topic,
            "defaultTopicQueueNums": fields.default_queues,
            "queueId": fields.queue_id or 0,
            "sysFlag": fields.sys_flag or 0,
            "bornTimestamp": fields.born_ms or 0,
            "flag": fields.flag or 0,
            "properties": fields.properties,
            "reconsumeTimes": fields.reconsume_times or 0,
            "unitMode": bool(fields.unit_mode),
            "bornHost": call.connection.name,
            "storeHost": address(self._context, call.connection),
            "storeTimestamp": self._context.broker.clock.now_ms(),
        }
        return {name: text(value) for name, value in named.items() if value is not None}


def _not_taken(client_id: str, why: str) -> Refused:
    return Refused(ResponseCode.SYSTEM_ERROR, f"push reply message to {client_id} fail: {why}")
