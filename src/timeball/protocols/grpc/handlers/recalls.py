"""RecallMessage: a producer takes a delayed message back by the handle it got when it sent it.

What success means is decided in broker/revoking/recall.py; here are RocketMQ's codes for it.

    OK                                    settled: it will not be delivered
    NOT_FOUND                             too late, unknown, or no longer known; the sentence says which
    INTERNAL_SERVER_ERROR                 too late, with --recall-answers rocketmq: its proxy says so
    BAD_REQUEST                           no handle, or one of another topic or broker
    TOPIC_NOT_FOUND, MESSAGE_PROPERTY_CONFLICT_WITH_TYPE    no topic, or none for delayed messages

Not MESSAGE_NOT_FOUND: to clients that is an empty poll, and RocketMQ's Python client would take it for success.
"""

from __future__ import annotations

from timeball.broker.revoking.recall import RecallRefused
from timeball.errors import NotFound
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code, MessageType
from timeball.protocols.grpc._generated.service_pb2 import RecallMessageRequest, RecallMessageResponse
from timeball.protocols.grpc.calls import Call, Handlers
from timeball.protocols.grpc.codec.names import topic_name
from timeball.protocols.grpc.codec.statuses import ok
from timeball.protocols.grpc.handlers.message_types import check_type
from timeball.protocols.grpc.site import Site


class Recalls:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def handlers(self) -> Handlers:
        """The calls answered here."""
        return {"RecallMessage": self._recall}

    async def _recall(self, call: Call, request: RecallMessageRequest) -> RecallMessageResponse:
        topic, broker, settings = topic_name(request.topic), self._site.broker, self._site.settings
        if settings.check_message_types:
            check_type(broker.parts.topics.find(topic), topic, MessageType.DELAY)
        try:
            message_id = await broker.recall(topic, request.recall_handle, call.caller)
        except NotFound as error:
            raise Refused(Code.TOPIC_NOT_FOUND, str(error)) from error
        except RecallRefused as error:
            as_rocketmq = settings.recall_answers == "rocketmq"
            code = Code.INTERNAL_SERVER_ERROR if as_rocketmq else Code.NOT_FOUND
            raise Refused(code, error.sentence) from error
        return RecallMessageResponse(status=ok(), message_id=message_id)
