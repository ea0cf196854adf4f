"""Forward tools' questions to a consumer, and return its answers.

The consumer is found by its group and client id. It has `ANSWER_S` to answer. A tool waits about as long.
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
    by_object,
    entries_by_object,
)
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, encode
from timeball.edges.remoting.codec.records import parse_offset_msg_id
from timeball.edges.remoting.connection import Connection, Member
from timeball.edges.remoting.handlers.queries import stored_message
from timeball.edges.shared.error_codes import Refused
from timeball.model.errors import Unavailable

ANSWER_S = 10.0  # RocketMQ's, for a question to one consumer
STATUS_S = 5.0  # RocketMQ's, for the offsets of a group's members


class _Consumer(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: str


class _Direct(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: str
    msg_id: str


class _Status(msgspec.Struct, rename="camel"):
    topic: str
    group: str
    client_addr: str = ""  # a client id, in spite of its name


class ClientForwarding:
    """Forwards tools' requests to consumers."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self.handlers: Handlers = {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self._consumer_status,
        }

    async def _running_info(self, call: Call) -> Reply:
        return await self._relay(call, call.fields(_Consumer))

    async def _consume_directly(self, call: Call) -> Reply:
        """Hand one message to one consumer's listener. The result changes no offset."""
        asked = call.fields(_Direct)
        _, seq = parse_offset_msg_id(asked.msg_id)
        consumer = _Consumer(asked.consumer_group, asked.client_id)
        self._find(consumer)  # before the message is read for it
        body = await stored_message(self._context, call, seq)
        return await self._relay(call, consumer, body, brokerName=self._context.broker_name)

    async def _consumer_status(self, call: Call) -> Reply:
        """Ask the members of a group, or one of them, for their offsets in a topic."""
        asked = call.fields(_Status)
        group = self._context.sessions.group(asked.group)
        if group is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{asked.group}]"
            )
        members = [member for member in group.members if asked.client_addr in ("", member.client_id)]
        answers = await asyncio.gather(*(_status(member, asked) for member in members))
        # A member that does not answer, or refuses, is left out, as in RocketMQ.
        told = {m.client_id: table for m, table in zip(members, answers, strict=True) if table is not None}
        return call.answer_json({"consumerTable": told, "messageQueueTable": {}})

    async def _relay(self, call: Call, asked: _Consumer, body: bytes = b"", **more: str) -> Reply:
        connection = self._find(asked)
        # All fields are forwarded unchanged: whether a stack trace is wanted is between the tool and the consumer.
        command = Command(call.command.code, ext={**call.command.ext, **more}, body=body)
        said = await connection.request(command, ANSWER_S)
        answer = call.answer(said.code, said.remark, ext=said.ext, body=said.body)
        try:
            encode(answer)
        except (ValueError, struct.error) as error:
            # The consumer answered in JSON and the tool asked in the binary form, whose numbers and names are shorter.
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"what <{asked.client_id}> has answered cannot be passed on: {error}",
            ) from error
        return answer

    def _find(self, asked: _Consumer) -> Connection:
        group = self._context.sessions.group(asked.consumer_group)
        for member in group.members if group is not None else ():
            if member.client_id == asked.client_id and member.connection.is_open:
                return member.connection
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"The Consumer <{asked.consumer_group}> <{asked.client_id}> not online",
        )


async def _status(member: Member, asked: _Status) -> msgspec.Raw | None:
    """Return a consumer's own offsets by queue, or None if it does not answer or refuses."""
    ext = {"topic": asked.topic, "group": asked.group}
    command = Command(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, ext=ext)
    try:
        said = await member.connection.request(command, STATUS_S)
    except Unavailable:
        return None
    if said.code != ResponseCode.SUCCESS:
        return None
    return by_object(entries_by_object(said.body, "messageQueueTable"))
