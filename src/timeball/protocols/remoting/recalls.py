"""RECALL_MESSAGE: a producer takes a message back that waits, by the handle it got when it sent it.

RocketMQ answers "success" for a second message that will delete the first one, if that exists and nothing goes
wrong. Here success means that the message is settled and will not be delivered; what is too late or was
never there is refused, and the sentence says which. To recall twice is to succeed twice.
"""

from __future__ import annotations

import msgspec

from timeball.broker.recall_handle import decode_handle
from timeball.errors import InvalidMessage
from timeball.protocols.remoting.calls import Call, Handlers, Refused, Reply
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.site import Site

SETTLED = ("cancelled", "already_cancelled")


class _Recall(msgspec.Struct, rename="camel"):
    topic: str
    recall_handle: str
    producer_group: str | None = None


class Recalls:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {RequestCode.RECALL_MESSAGE: self._recall}

    async def _recall(self, call: Call) -> Reply:
        fields = call.fields(_Recall)
        if self._site.broker.parts.topics.find(fields.topic) is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{fields.topic}] not exist")
        try:
            handle = decode_handle(fields.recall_handle)
        except InvalidMessage as error:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, str(error)) from error
        if handle.topic != fields.topic:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall handle is of another topic")
        if handle.broker_name != self._site.broker_name:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall handle is of another broker")
        verdicts = await self._site.broker.cancel(ids=[handle.unique_key], topic=handle.topic)
        if all(verdict.verdict in SETTLED for verdict in verdicts):
            return call.answer(ext={"msgId": handle.unique_key})
        late = [verdict for verdict in verdicts if verdict.verdict == "released"]
        raise Refused(
            ResponseCode.ILLEGAL_OPERATION,
            f"too late, the message was delivered at {late[0].at_ms}"
            if late
            else "no such message waits here",
        )
