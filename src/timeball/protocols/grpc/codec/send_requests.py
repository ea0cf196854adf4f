"""A send as it comes: a plain one is read in C (plain_sends.pyx) where the build had a compiler, any other by protobuf.

protobuf and the checks of messages_in.py are the reference: a plain send is the row that they make of the same bytes,
at a tenth of their cost. `--codec python` forces the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from timeball.config import CodecChoice
from timeball.message import SendRow
from timeball.protocols.grpc._generated.definition_pb2 import MessageType, Resource
from timeball.protocols.grpc._generated.service_pb2 import SendMessageRequest

try:
    from timeball.protocols.grpc.codec.plain_sends import read_plain  # type: ignore[import-not-found]
except ImportError:  # built without a compiler
    read_plain = None


class PlainSend(Protocol):
    """One message with nothing unusual: only its topic, its instant and its caller are left to decide about."""

    topic: tuple[str, str]  # namespace and name
    kind: MessageType  # NORMAL, or DELAY with an instant
    due_ms: int | None
    needs_now: bool  # it has an instant, or does not say when it was born
    size_bytes: int  # of body and properties

    def row(self, topic: str, now_ms: int, peer: str) -> SendRow:
        """Return the values of SEND_NAMES; `now_ms` and `peer` stand for what its producer did not say."""


def decode_compiled(data: bytes) -> Any:
    """Return a PlainSend, or a SendMessageRequest; raise DecodeError."""
    plain = read_plain(data)
    return SendMessageRequest.FromString(data) if plain is None else plain


def decoder_of(choice: CodecChoice) -> Callable[[bytes], Any]:
    """Return what reads a send with this setting."""
    return decode_compiled if read_plain is not None and choice == "auto" else SendMessageRequest.FromString


def topics_of(request: Any) -> list[Resource]:
    """Return the topics of a send. One call has one; of two the first is refused or the second is, and it with them."""
    if isinstance(request, SendMessageRequest):
        found = {(each.topic.resource_namespace, each.topic.name): each.topic for each in request.messages}
        return list(found.values())
    namespace, name = request.topic
    return [Resource(resource_namespace=namespace, name=name)]
