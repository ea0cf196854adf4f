"""Read sends: a plain send in C (plain_sends.pyx) if the build had a compiler, any other by protobuf.

protobuf and the checks of messages_in.py are the reference. For the same bytes, a plain send gives the same row at a
tenth of the cost. `--codec python` forces the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from timeball.edges.grpc._generated.definition_pb2 import MessageType, Resource
from timeball.edges.grpc._generated.service_pb2 import SendMessageRequest
from timeball.model.config import CodecChoice
from timeball.model.message import SendRow

try:
    from timeball.edges.grpc.codec.plain_sends import read_plain  # type: ignore[import-not-found]
except ImportError:  # The build had no compiler.
    read_plain = None


class PlainSend(Protocol):
    """One message with nothing unusual: only its topic, its due time and its caller are still to be checked."""

    topic: tuple[str, str]  # namespace and name
    kind: MessageType  # NORMAL, or DELAY with a due time
    due_ms: int | None
    needs_now: bool  # it has a due time, or no time of birth
    size_bytes: int  # of body and properties

    def row(self, topic: str, now_ms: int, peer: str) -> SendRow:
        """Return the values of SEND_NAMES; `now_ms` and `peer` replace values that the producer did not set."""


def decode_compiled(data: bytes) -> Any:
    """Return a PlainSend or a SendMessageRequest. Raises DecodeError."""
    plain = read_plain(data)
    return SendMessageRequest.FromString(data) if plain is None else plain


def decoder_of(choice: CodecChoice) -> Callable[[bytes], Any]:
    """Return the decoder of sends for this setting."""
    return decode_compiled if read_plain is not None and choice == "auto" else SendMessageRequest.FromString


def topics_of(request: Any) -> list[Resource]:
    """Return the topics of a send: one, or several in a call that is refused later."""
    if isinstance(request, SendMessageRequest):
        found = {(each.topic.resource_namespace, each.topic.name): each.topic for each in request.messages}
        return list(found.values())
    namespace, name = request.topic
    return [Resource(resource_namespace=namespace, name=name)]
