"""RECALL_MESSAGE: a producer takes a message back that waits, by the handle it got when it sent it.

What success means is decided in broker/revoking/recall.py; here are the codes of RocketMQ for it. A refusal is
ILLEGAL_OPERATION, and its sentence says which: too late, unknown, no longer known, or not a handle of this topic and
broker.
"""

from __future__ import annotations

import msgspec

from timeball.broker.revoking.recall import RecallRefused
from timeball.errors import InvalidMessage, NotFound
from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.codec.send_reply import TRACED
from timeball.protocols.remoting.site import Site


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
        try:
            unique_key = await self._site.broker.recall(fields.topic, fields.recall_handle, call.caller)
        except NotFound as error:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, str(error)) from error
        except (InvalidMessage, RecallRefused) as error:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, str(error)) from error
        return call.answer(ext={"msgId": unique_key, **TRACED})
