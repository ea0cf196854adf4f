"""The three edges as a soak run uses them: each sends messages one by one or together, receives, and acknowledges."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import grpc
from google.protobuf.message import Message

from benchmarks.harness import Server
from benchmarks.stored_message import decode_stored
from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc._generated import service_pb2 as s
from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.edges.remoting.codec.codes import PullFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, Splitter, decode, encode
from timeball.edges.remoting.codec.records import BatchRecord, CheckPoint, encode_batch
from timeball.model.message import encode_properties

BOUND_S = 60.0
INVISIBLE_MS = 300_000  # longer than a busy machine keeps a client from its acknowledgement
POLL_MS = 500
ROWS = 32
QUEUES = 8


class Parcel(NamedTuple):
    """A body, and when it is due; None: at once."""

    body: bytes
    due_ms: int | None


class Client(Protocol):
    """One connection of one edge; belongs to one thread."""

    delays_together: bool

    def send(self, topic: str, parcel: Parcel) -> None:
        """Send one message; returns when it is acknowledged."""

    def send_together(self, topic: str, parcels: Sequence[Parcel]) -> None:
        """Send messages in one request."""

    def receive(self, topic: str, group: str) -> list[bytes]:
        """Bodies of messages that have come, waiting for the first a while; acknowledged when this returns."""

    def close(self) -> None:
        """End the connection."""


class FlightClient:
    """Timeball's own client."""

    delays_together = True

    def __init__(self, server: Server) -> None:
        self._ball = server.client()

    def send(self, topic: str, parcel: Parcel) -> None:
        """See Client."""
        at = None if parcel.due_ms is None else datetime.fromtimestamp(parcel.due_ms / 1000, UTC)
        self._ball.send(topic, parcel.body, at=at)

    def send_together(self, topic: str, parcels: Sequence[Parcel]) -> None:
        """See Client."""
        rows: list[dict[str, object]] = [
            {"body": parcel.body} | ({} if parcel.due_ms is None else {"due_ms": parcel.due_ms})
            for parcel in parcels
        ]
        self._ball.send_many(rows, topic=topic)

    def receive(self, topic: str, group: str) -> list[bytes]:
        """See Client."""
        batch = self._ball.browse_batch(topic, group, max_messages=1_024, wait=f"{POLL_MS}ms")
        if batch.num_rows:
            self._ball.commit(topic, group)
        found: list[bytes] = batch.column("body").to_pylist()
        return found

    def close(self) -> None:
        """See Client."""
        self._ball.close()


class RemotingClient:
    """RocketMQ's frames: sends, and POP with an acknowledgement of each message."""

    delays_together = False  # RocketMQ's batches are for messages that are due at once

    def __init__(self, server: Server) -> None:
        host, _, port = server.remoting.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=BOUND_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._splitter, self._opaques = Splitter(), itertools.count(1)
        self._queues = itertools.count()

    def send(self, topic: str, parcel: Parcel) -> None:
        """See Client."""
        delay = {} if parcel.due_ms is None else {"TIMER_DELIVER_MS": str(parcel.due_ms)}
        fields = self._fields(topic, batch=False) | {"i": _properties(**delay)}
        self._ask(RequestCode.SEND_MESSAGE_V2, fields, parcel.body)

    def send_together(self, topic: str, parcels: Sequence[Parcel]) -> None:
        """See Client."""
        body = encode_batch([BatchRecord(0, parcel.body, _properties()) for parcel in parcels])
        self._ask(RequestCode.SEND_BATCH_MESSAGE, self._fields(topic, batch=True), body)

    def receive(self, topic: str, group: str) -> list[bytes]:
        """See Client."""
        fields = {
            "consumerGroup": group, "topic": topic, "queueId": -1, "maxMsgNums": ROWS, "pollTime": POLL_MS,
            "invisibleTime": INVISIBLE_MS, "bornTime": 0, "initMode": 0,
        }  # fmt: skip
        answer = self._exchange(RequestCode.POP_MESSAGE, fields, b"")
        if answer.code != ResponseCode.SUCCESS:
            return []
        for point in _check_points(answer.ext):
            fields = {
                "consumerGroup": group, "topic": topic, "queueId": point.queue_id, "offset": point.offset,
                "extraInfo": point.encode(),
            }  # fmt: skip
            self._ask(RequestCode.ACK_MESSAGE, fields, b"")
        return [message.body for message in decode_stored(answer.body)]

    def close(self) -> None:
        """See Client."""
        self._socket.close()

    def _fields(self, topic: str, *, batch: bool) -> dict[str, object]:
        return {
            "a": "soakers", "b": topic, "c": "TBW102", "d": QUEUES, "e": next(self._queues) % QUEUES, "f": 0,
            "g": 1_761_000_000_000, "h": 0, "i": "", "j": 0, "k": "false", "l": 16,
            "m": str(batch).lower(), "n": "timeball",
        }  # fmt: skip

    def _ask(self, code: int, fields: dict[str, object], body: bytes) -> Command:
        answer = self._exchange(code, fields, body)
        if answer.code != ResponseCode.SUCCESS:
            raise RuntimeError(f"remoting code {code}: {answer.code} {answer.remark}")
        return answer

    def _exchange(self, code: int, fields: dict[str, object], body: bytes) -> Command:
        ext = {name: str(value) for name, value in fields.items()}
        opaque = next(self._opaques)
        self._socket.sendall(encode(Command(code=code, opaque=opaque, ext=ext, body=body, version=453)))
        while True:
            data = self._socket.recv(1 << 18)
            if not data:
                raise RuntimeError("the broker has closed the connection")
            for frame in self._splitter.feed(data):
                command = decode(frame)
                if command.is_response and command.opaque == opaque:
                    return command


class PullingClient(RemotingClient):
    """RocketMQ's consumers of old: each queue pulled from an offset on, and the offset stored with the next pull."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._offsets = [0] * QUEUES

    def receive(self, topic: str, group: str) -> list[bytes]:
        """See Client."""
        found: list[bytes] = []
        for queue in range(QUEUES):
            fields = {
                "consumerGroup": group, "topic": topic, "queueId": queue, "queueOffset": self._offsets[queue],
                "maxMsgNums": ROWS, "sysFlag": int(PullFlag.SUBSCRIPTION | PullFlag.COMMIT_OFFSET),
                "commitOffset": self._offsets[queue], "suspendTimeoutMillis": 0, "subscription": "*",
                "subVersion": 0, "expressionType": "TAG",
            }  # fmt: skip
            answer = self._exchange(RequestCode.PULL_MESSAGE, fields, b"")
            if answer.code == ResponseCode.SUCCESS:
                found += [message.body for message in decode_stored(answer.body)]
                self._offsets[queue] = int(answer.ext["nextBeginOffset"])
        if not found:
            time.sleep(POLL_MS / 1000)
        return found


class GrpcClient:
    """RocketMQ 5's calls: sends, ReceiveMessage and AckMessage."""

    delays_together = True

    def __init__(self, server: Server) -> None:
        self._channel = grpc.insecure_channel(server.grpc)
        self._metadata = (("x-mq-client-id", f"soak@{os.getpid()}@{id(self)}"),)
        self._send = self._call("SendMessage", s.SendMessageResponse)
        self._ack = self._call("AckMessage", s.AckMessageResponse)
        self._receive = self._channel.unary_stream(
            f"/{SERVICE_NAME}/ReceiveMessage",
            request_serializer=s.ReceiveMessageRequest.SerializeToString,
            response_deserializer=s.ReceiveMessageResponse.FromString,
        )

    def send(self, topic: str, parcel: Parcel) -> None:
        """See Client."""
        self.send_together(topic, [parcel])

    def send_together(self, topic: str, parcels: Sequence[Parcel]) -> None:
        """See Client."""
        request = s.SendMessageRequest()
        for parcel in parcels:
            message = request.messages.add()
            message.topic.name, message.body = topic, parcel.body
            system = message.system_properties
            system.message_id, system.body_encoding = f"01{os.urandom(16).hex().upper()}", d.Encoding.IDENTITY
            system.born_timestamp.seconds, system.born_host = 1_761_000_000, "client.example"
            system.message_type = d.MessageType.NORMAL if parcel.due_ms is None else d.MessageType.DELAY
            if parcel.due_ms is not None:
                system.delivery_timestamp.FromMilliseconds(parcel.due_ms)
        _check("SendMessage", self._send(request, metadata=self._metadata, timeout=BOUND_S).status)

    def receive(self, topic: str, group: str) -> list[bytes]:
        """See Client."""
        group_name, topic_name = d.Resource(name=group), d.Resource(name=topic)
        asking = s.ReceiveMessageRequest(
            group=group_name, message_queue=d.MessageQueue(topic=topic_name, id=-1), batch_size=ROWS,
            filter_expression=d.FilterExpression(type=d.FilterType.TAG, expression="*"),
        )  # fmt: skip
        asking.invisible_duration.FromMilliseconds(INVISIBLE_MS)
        asking.long_polling_timeout.FromMilliseconds(POLL_MS)
        answers = list(self._receive(asking, metadata=self._metadata, timeout=BOUND_S))
        found = [answer.message for answer in answers if answer.HasField("message")]
        if found:
            entries = [
                s.AckMessageEntry(
                    message_id=message.system_properties.message_id,
                    receipt_handle=message.system_properties.receipt_handle,
                )
                for message in found
            ]
            acks = s.AckMessageRequest(group=group_name, topic=topic_name, entries=entries)
            _check("AckMessage", self._ack(acks, metadata=self._metadata, timeout=BOUND_S).status)
        return [message.body for message in found]

    def close(self) -> None:
        """See Client."""
        self._channel.close()

    def _call(self, name: str, response: type[Message]) -> grpc.UnaryUnaryMultiCallable:
        return self._channel.unary_unary(
            f"/{SERVICE_NAME}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )


Edge = Callable[[Server], Client]
EDGES: dict[str, Edge] = {
    "flight": FlightClient,
    "remoting": RemotingClient,
    "grpc": GrpcClient,
}


def _check(call: str, status: d.Status) -> None:
    if status.code != d.Code.OK:
        raise RuntimeError(f"{call}: {status.code} {status.message}")


def _properties(**more: str) -> str:
    return encode_properties({"UNIQ_KEY": os.urandom(16).hex().upper(), "WAIT": "true", **more})


def _check_points(ext: dict[str, str]) -> list[CheckPoint]:
    """What a client makes of the header of a POP's answer."""
    firsts = dict(part.rsplit(" ", 1) for part in ext["startOffsetInfo"].split(";"))
    return [
        CheckPoint(
            int(firsts[queue]), int(ext["popTime"]), int(ext["invisibleTime"]), int(ext["reviveQid"]),
            queue.split()[0], "timeball", int(queue.split()[1]), int(offset),
        )
        for queue, offsets in (part.rsplit(" ", 1) for part in ext["msgOffsetInfo"].split(";"))
        for offset in offsets.split(",")
    ]  # fmt: skip
