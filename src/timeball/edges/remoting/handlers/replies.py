"""Request-reply: the broker pushes a consumer's reply to the producer that waits for it.

    producer --- request, REPLY_TO_CLIENT=its id, CORRELATION_ID ---> topic ---> consumer
    producer <------- PUSH_REPLY_MESSAGE_TO_CLIENT (326) ------------ broker <--- SEND_REPLY_MESSAGE (324, 325)

A request is an ordinary message. The broker adds the name of the cluster to it, from which clients derive the reply
topic. A reply is not stored: the broker pushes it to the connected producer. The answer to the consumer states whether
the producer has accepted it. So a reply to a producer that has disconnected is refused at once.
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
PUSH_TIMEOUT_S = 3.0  # for the producer to accept the reply. Producers wait 3 s by default


class Replies:
    """Serves SEND_REPLY_MESSAGE. Belongs to the event loop."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._topic = context, reply_topic(context.cluster_name)
        self.handlers: Handlers = {
            RequestCode.SEND_REPLY_MESSAGE: self._reply_v1,
            RequestCode.SEND_REPLY_MESSAGE_V2: self._reply,
        }

    async def _reply(self, call: Call) -> Reply:
        return await self._push(call, call.fields(SendFields))

    async def _reply_v1(self, call: Call) -> Reply:
        return await self._push(call, cast(SendFields, call.fields(LongFields)))

    async def _push(self, call: Call, fields: SendFields) -> Reply:
        """Push a reply to its producer and answer the consumer. Raises Refused if the producer does not accept it."""
        if fields.topic != self._topic:
            # A client with permission for any other topic must not be able to push messages to every client.
            remark = f"replies go to topic[{self._topic}], not to [{fields.topic}]"
            raise Refused(ResponseCode.INVALID_PARAMETER, remark)
        client_id = decode_properties(fields.properties or "").get(REPLY_TO)
        if client_id is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"reply message properties[{REPLY_TO}] is null")
        pushed = Command(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
            ext=self._reply_header(call, fields),
            body=call.command.body,
        )
        try:
            push_answer = await self._find_producer(client_id).request(pushed, PUSH_TIMEOUT_S)
        except Unavailable as error:
            raise _push_failed(client_id, str(error)) from error
        if push_answer.code != ResponseCode.SUCCESS:
            raise _push_failed(client_id, push_answer.remark or f"code {push_answer.code}")
        # A reply has no queue position, but clients fail if these fields are missing.
        position_fields = {"msgId": "0", "queueId": str(max(0, fields.queue_id or 0)), "queueOffset": "0"}
        return call.answer(ext=position_fields | TRACED)

    def _find_producer(self, client_id: str) -> Connection:
        """Find the connection of a producer by client id. Raises Refused."""
        for member in self._context.sessions.all():
            if member.client_id == client_id and member.produces and member.connection.is_open:
                return member.connection
        remark = f"push reply message fail, channel of <{client_id}> not found."
        raise Refused(ResponseCode.SYSTEM_ERROR, remark)

    def _reply_header(self, call: Call, fields: SendFields) -> dict[str, str]:
        """Build RocketMQ's ReplyMessageRequestHeader: the send's fields with long names, and the broker's fields."""
        fields_by_name: dict[str, Any] = {
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
        return {name: text(value) for name, value in fields_by_name.items() if value is not None}


def _push_failed(client_id: str, why: str) -> Refused:
    return Refused(ResponseCode.SYSTEM_ERROR, f"push reply message to {client_id} fail: {why}")
