"""Forward requests of administration tools to a consumer, and its answer to the tool.

A request names the consumer by group and client id. The consumer has `ANSWER_TIMEOUT_S` to answer. Tools wait about as
long.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    decode_object_keys,
    encode_with_object_keys,
)
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, encode
from timeball.edges.remoting.codec.records import parse_offset_msg_id
from timeball.edges.remoting.connection import Connection, Member
from timeball.edges.remoting.handlers.queries import stored_message
from timeball.edges.shared.error_codes import Refused
from timeball.model.errors import Unavailable

ANSWER_TIMEOUT_S = 10.0  # RocketMQ's, for a request to one consumer
STATUS_TIMEOUT_S = 5.0  # RocketMQ's, for the offsets of a group's members


class _ConsumerFields(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: str


class _ConsumeFields(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: str
    msg_id: str


class _StatusFields(msgspec.Struct, rename="camel"):
    topic: str
    group: str
    client_addr: str = ""  # a client id, in spite of its name


class ClientForwarding:
    """Serves the requests that are forwarded to consumers."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self.handlers: Handlers = {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self._consumer_status,
        }

    async def _running_info(self, call: Call) -> Reply:
        return await self._forward(call, call.fields(_ConsumerFields))

    async def _consume_directly(self, call: Call) -> Reply:
        """Have a consumer process one message. This changes no offset."""
        fields = call.fields(_ConsumeFields)
        _, seq = parse_offset_msg_id(fields.msg_id)
        consumer = _ConsumerFields(fields.consumer_group, fields.client_id)
        self._find_connection(consumer)  # fails early, before the message is read
        body = await stored_message(self._context, call, seq)
        return await self._forward(call, consumer, body, brokerName=self._context.broker_name)

    async def _consumer_status(self, call: Call) -> Reply:
        """Ask the members of a group, or one of them, for their offsets in a topic."""
        fields = call.fields(_StatusFields)
        group = self._context.sessions.group(fields.group)
        if group is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{fields.group}]"
            )
        members = [member for member in group.members if fields.client_addr in ("", member.client_id)]
        answers = await asyncio.gather(*(_read_offsets(member, fields) for member in members))
        # As in RocketMQ, the result does not contain members that do not answer or refuse.
        offsets_by_client = {
            member.client_id: table
            for member, table in zip(members, answers, strict=True)
            if table is not None
        }
        return call.answer_json({"consumerTable": offsets_by_client, "messageQueueTable": {}})

    async def _forward(
        self, call: Call, consumer: _ConsumerFields, body: bytes = b"", **extra_fields: str
    ) -> Reply:
        """Forward the tool's request to a consumer, and convert its answer. Raises Refused, Unavailable."""
        connection = self._find_connection(consumer)
        # All fields are forwarded unchanged. Some are only for the consumer, for example whether to send a stack trace.
        command = Command(call.command.code, ext={**call.command.ext, **extra_fields}, body=body)
        consumer_answer = await connection.request(command, ANSWER_TIMEOUT_S)
        answer = call.answer(
            consumer_answer.code, consumer_answer.remark, ext=consumer_answer.ext, body=consumer_answer.body
        )
        try:
            encode(answer)
        except (ValueError, struct.error) as error:
            # The consumer answered in JSON, but the tool uses the binary header, which limits numbers and names more.
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"the answer of <{consumer.client_id}> cannot be forwarded: {error}",
            ) from error
        return answer

    def _find_connection(self, consumer: _ConsumerFields) -> Connection:
        """Find the connection of a consumer. Raises Refused if it is not connected."""
        group = self._context.sessions.group(consumer.consumer_group)
        for member in group.members if group is not None else ():
            if member.client_id == consumer.client_id and member.connection.is_open:
                return member.connection
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"The Consumer <{consumer.consumer_group}> <{consumer.client_id}> not online",
        )


async def _read_offsets(member: Member, fields: _StatusFields) -> msgspec.Raw | None:
    """Ask a consumer for its own offsets by queue. Returns None if it does not answer or refuses."""
    ext = {"topic": fields.topic, "group": fields.group}
    command = Command(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, ext=ext)
    try:
        answer = await member.connection.request(command, STATUS_TIMEOUT_S)
    except Unavailable:
        return None
    if answer.code != ResponseCode.SUCCESS:
        return None
    return encode_with_object_keys(decode_object_keys(answer.body, "messageQueueTable"))
