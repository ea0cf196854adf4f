"""One connection of RocketMQ's remoting protocol, for what work needs beside its load: topics, offsets, and what stands
in the queues. Both brokers are asked the same.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from benchmarks.remoting import pull_request
from benchmarks.stored_message import StoredMessage, decode_stored
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, Splitter, decode, encode

BOUND_S = 60.0
READ_BYTES = 1 << 20
PULL_ROWS = 32


class Link:
    """A connection with one request in flight."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=BOUND_S)
        self._splitter = Splitter(1 << 26)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def is_registered(self) -> bool:
        """Return whether the broker has what it needs to take a message: its runtime information can be asked for."""
        return self._ask(RequestCode.GET_BROKER_RUNTIME_INFO).code == ResponseCode.SUCCESS

    def create_topic(self, topic: str, queues: int) -> None:
        """Make a topic, as mqadmin does."""
        self._checked(
            RequestCode.UPDATE_AND_CREATE_TOPIC, topic=topic, defaultTopic="TBW102", readQueueNums=queues,
            writeQueueNums=queues, perm=6, topicFilterType="SINGLE_TAG", topicSysFlag=0, order="false",
        )  # fmt: skip

    def create_group(self, group: str) -> None:
        """Make a consumer group, as mqadmin does."""
        config = {
            "groupName": group,
            "consumeEnable": True,
            "consumeBroadcastEnable": True,
            "retryQueueNums": 1,
        }
        self._checked(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, json.dumps(config).encode())

    def ends(self, topic: str, queues: int) -> list[int]:
        """Return the offset behind the last message of each queue."""
        answers = [self._checked(RequestCode.GET_MAX_OFFSET, topic=topic, queueId=q) for q in range(queues)]
        return [int(answer.ext["offset"]) for answer in answers]

    def stored(self, queue: int, begin: int, end: int) -> Iterator[StoredMessage]:
        """Read messages of a queue."""
        while begin < end:
            answer = self._send(pull_request(queue, begin, PULL_ROWS))
            if answer.code != ResponseCode.SUCCESS:
                raise RuntimeError(
                    f"a pull at {begin} of queue {queue} is answered {answer.code}: {answer.remark}"
                )
            found = decode_stored(answer.body)
            yield from found
            begin += len(found)

    def _checked(self, code: int, body: bytes = b"", **fields: object) -> Command:
        answer = self._ask(code, body, **fields)
        if answer.code != ResponseCode.SUCCESS:
            raise RuntimeError(f"request {code} is answered {answer.code}: {answer.remark}")
        return answer

    def _ask(self, code: int, body: bytes = b"", **fields: object) -> Command:
        ext = {name: str(value) for name, value in fields.items()}
        return self._send(encode(Command(code=code, opaque=1, ext=ext, body=body, version=409)))

    def _send(self, request: bytes) -> Command:
        self._socket.sendall(request)
        while True:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise RuntimeError("the broker has closed a connection")
            for frame in self._splitter.feed(data):
                return decode(frame)
