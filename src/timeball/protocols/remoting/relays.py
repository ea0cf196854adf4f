"""Questions to a consumer that tools ask through the broker: it passes them on and hands back what is said.

The consumer is found by its group and client id. It has `ANSWER_S` to answer; a tool waits about as long.
"""

from __future__ import annotations

import struct

import msgspec

from timeball.protocols.remoting.calls import Call, Handlers, Refused, Reply
from timeball.protocols.remoting.codec.codes import BROKER_VERSION, RequestCode, ResponseCode
from timeball.protocols.remoting.codec.frame import Command, encode
from timeball.protocols.remoting.connection import Connection
from timeball.protocols.remoting.site import Site

ANSWER_S = 10.0  # RocketMQ's, for a consumer's own running info


class _Consumer(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: str


class Relays:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info}

    async def _running_info(self, call: Call) -> Reply:
        asked = call.fields(_Consumer)
        connection = self._find(asked)
        # Its fields go on as they are: whether a stack trace is wanted is between the tool and the consumer.
        command = Command(call.command.code, ext=dict(call.command.ext), version=BROKER_VERSION)
        said = await connection.request(command, ANSWER_S)
        answer = call.answer(said.code, said.remark, ext=said.ext, body=said.body)
        try:
            encode(answer)
        except (ValueError, struct.error) as error:
            # Said in JSON, and asked for in the binary form, whose numbers and names are shorter.
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"what <{asked.client_id}> has answered cannot be passed on: {error}",
            ) from error
        return answer

    def _find(self, asked: _Consumer) -> Connection:
        group = self._site.clients.consumers(asked.consumer_group)
        for member in group.members.values() if group is not None else ():
            if member.client_id == asked.client_id and member.connection.is_open:
                return member.connection
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"The Consumer <{asked.consumer_group}> <{asked.client_id}> not online",
        )
