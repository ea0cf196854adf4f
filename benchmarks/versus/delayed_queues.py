"""Clients of the brokers that are compared at the consumer, each over one connection.

A producer sends messages with a due time. A consumer receives due messages, and acknowledges each. The clients are
written on sockets, so that each costs about the same and leaves the cores to the brokers.

    Redis        a sorted set by due time. A Lua script moves due members to a set by deadline, as Celery, arq and rq
                 do. An acknowledgement removes the member from that set. The consumer polls every 2 ms.
    beanstalkd   put with a delay in whole seconds, reserve, delete
    NATS         JetStream with scheduled messages (a stream with `allow_msg_schedules`), pull consumer, explicit ack
    Timeball     HTTP: send, receive with a lease, ack; or a stream with credit in place of the receives. Python: the
                 Python client over HTTP. Remoting: RocketMQ's requests
"""

from __future__ import annotations

import json
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from benchmarks.pop import points
from benchmarks.stored_message import decode_stored
from timeball import Timeball
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, Splitter
from timeball.edges.remoting.codec.frame import decode as decode_frame
from timeball.edges.remoting.codec.frame import encode as encode_frame
from timeball.model.message import encode_properties

TOPIC, GROUP = "delivery", "workers"
LEASE_MS = 60_000
POLL_S = 0.002
Received = tuple[bytes, Any]  # the body, and what acknowledges it


class DelayedQueue(ABC):
    """One connection to a queue of delayed messages, with acknowledgements."""

    @abstractmethod
    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Send messages (due_ms, body) in one call. They are accepted on return."""

    @abstractmethod
    def receive(self, rows_max: int, wait_s: float) -> list[Received]:
        """Receive due messages, at least one unless `wait_s` passes."""

    @abstractmethod
    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """End these deliveries. None of the messages comes again."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


class Connection:
    """A TCP connection that is read by lines and by sizes."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb", buffering=1 << 16)

    def write(self, data: bytes) -> None:
        """Write all of it."""
        self._socket.sendall(data)

    def line(self) -> bytes:
        """Read a line without its end."""
        line: bytes = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the broker closed the connection")
        return line[:-2]

    def exactly(self, size_bytes: int) -> bytes:
        """Read this many bytes."""
        data: bytes = self._file.read(size_bytes)
        if len(data) != size_bytes:
            raise ConnectionError("the broker closed the connection")
        return data

    def close(self) -> None:
        """Close it."""
        self._file.close()
        self._socket.close()


# ---- Redis -------------------------------------------------------------------------------------------------------

_MOVE = b"""\
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
if #due > 0 then
  redis.call('ZREM', KEYS[1], unpack(due))
  local leased = {}
  for _, member in ipairs(due) do leased[#leased + 1] = ARGV[3]; leased[#leased + 1] = member end
  redis.call('ZADD', KEYS[2], unpack(leased))
end
return due
"""


class RedisQueue(DelayedQueue):
    """See the module."""

    def __init__(self, address: str) -> None:
        self._link = Connection(address)
        self._script: bytes = self._ask(b"SCRIPT", b"LOAD", _MOVE)

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """See DelayedQueue."""
        words = [b"ZADD", b"delayed"]
        for due_ms, body in messages:
            words += (b"%d" % due_ms, body)
        if self._ask(*words) != len(messages):
            raise RuntimeError("Redis: the members are not unique")

    def receive(self, rows_max: int, wait_s: float) -> list[Received]:
        """See DelayedQueue."""
        until_s = time.monotonic() + wait_s
        while True:
            now_ms = time.time_ns() // 1_000_000
            found = self._ask(
                b"EVALSHA", self._script, b"2", b"delayed", b"leased", b"%d" % now_ms, b"%d" % rows_max,
                b"%d" % (now_ms + LEASE_MS),
            )  # fmt: skip
            if found or time.monotonic() >= until_s:
                return [(body, body) for body in found]
            time.sleep(POLL_S)

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """See DelayedQueue."""
        if self._ask(b"ZREM", b"leased", *tokens) != len(tokens):
            raise RuntimeError("Redis: an acknowledged message was not leased")

    def close(self) -> None:
        """See DelayedQueue."""
        self._link.close()

    def _ask(self, *words: bytes) -> Any:
        parts = [b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)]
        self._link.write(b"".join(parts))
        return self._answer()

    def _answer(self) -> Any:
        line = self._link.line()
        kind, text = line[:1], line[1:]
        if kind == b"-":
            raise RuntimeError(f"Redis: {text.decode()}")
        if kind == b":":
            return int(text)
        if kind == b"$":
            return self._link.exactly(int(text) + 2)[:-2] if int(text) >= 0 else None
        if kind == b"*":
            return [self._answer() for _ in range(int(text))]
        return text


# ---- beanstalkd --------------------------------------------------------------------------------------------------


class BeanstalkQueue(DelayedQueue):
    """See the module. Calls are pipelined: the protocol has no call for several jobs."""

    def __init__(self, address: str) -> None:
        self._link = Connection(address)

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """See DelayedQueue. The delay is rounded up: a message must not be early."""
        now_ms = time.time_ns() // 1_000_000
        self._link.write(
            b"".join(
                b"put 0 %d %d %d\r\n%b\r\n"
                % (-(-max(0, due_ms - now_ms) // 1000), LEASE_MS // 1000, len(body), body)
                for due_ms, body in messages
            )
        )
        for _ in messages:
            self._expect(b"INSERTED")

    def receive(self, rows_max: int, wait_s: float) -> list[Received]:
        """See DelayedQueue."""
        # One waits for the first job. The others take the jobs that are ready already.
        self._link.write(b"reserve-with-timeout %d\r\n" % max(1, int(wait_s)))
        first = self._reserved()
        if first is None:
            return []
        found = [first]
        self._link.write(b"reserve-with-timeout 0\r\n" * (rows_max - 1))
        found += [one for one in (self._reserved() for _ in range(rows_max - 1)) if one is not None]
        return found

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """See DelayedQueue."""
        self._link.write(b"".join(b"delete %b\r\n" % token for token in tokens))
        for _ in tokens:
            self._expect(b"DELETED")

    def close(self) -> None:
        """See DelayedQueue."""
        self._link.close()

    def _reserved(self) -> Received | None:
        line = self._link.line()
        if line == b"TIMED_OUT":
            return None
        word, job, size = line.split(b" ")
        if word != b"RESERVED":
            raise RuntimeError(f"beanstalkd: {line.decode()}")
        return self._link.exactly(int(size) + 2)[:-2], job

    def _expect(self, word: bytes) -> None:
        line = self._link.line()
        if not line.startswith(word):
            raise RuntimeError(f"beanstalkd: {line.decode()}")


# ---- NATS --------------------------------------------------------------------------------------------------------


class NatsQueue(DelayedQueue):
    """See the module. Publishes wait for the acknowledgement of the stream."""

    def __init__(self, address: str) -> None:
        self._link = Connection(address)
        self._link.line()  # INFO
        self._inbox = b"_INBOX.%d" % time.monotonic_ns()
        options = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        self._link.write(b"CONNECT %b\r\nSUB %b.* 1\r\n" % (json.dumps(options).encode(), self._inbox))
        self._number = 0
        stream = {
            "name": "delivery", "subjects": ["delivery.>"], "storage": "file", "allow_msg_schedules": True,
            "retention": "limits",
        }  # fmt: skip
        self._api("STREAM.CREATE.delivery", stream)
        consumer = {
            "stream_name": "delivery",
            "config": {
                "durable_name": GROUP, "ack_policy": "explicit", "filter_subject": "delivery.due",
                "max_ack_pending": 200_000, "ack_wait": LEASE_MS * 1_000_000,
            },
        }  # fmt: skip
        self._api(f"CONSUMER.CREATE.delivery.{GROUP}", consumer)

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """See DelayedQueue."""
        for due_ms, body in messages:
            self._number += 1
            due = (
                datetime.fromtimestamp(due_ms / 1000, UTC)
                .isoformat(timespec="milliseconds")
                .replace("+00:00", "Z")
            )
            head = (
                f"NATS/1.0\r\nNats-Schedule: @at {due}\r\nNats-Schedule-Target: delivery.due\r\n\r\n".encode()
            )
            # A schedule is kept under its own subject.
            self._link.write(
                b"HPUB delivery.at.%d.%d %b.%d %d %d\r\n%b%b\r\n"
                % (
                    due_ms,
                    self._number,
                    self._inbox,
                    self._number,
                    len(head),
                    len(head) + len(body),
                    head,
                    body,
                )
            )
        for _ in messages:
            _, _, answer = self._message(60.0)
            if b'"error"' in answer or b'"seq"' not in answer:
                raise RuntimeError(f"NATS: {answer.decode()}")

    def receive(self, rows_max: int, wait_s: float) -> list[Received]:
        """See DelayedQueue."""
        self._number += 1
        wanted = json.dumps({"batch": rows_max, "no_wait": True}).encode()
        until_s = time.monotonic() + wait_s
        while True:
            self._request(b"$JS.API.CONSUMER.MSG.NEXT.delivery.%b" % GROUP.encode(), wanted)
            found: list[Received] = []
            while len(found) < rows_max:
                reply, status, body = self._message(60.0)
                if status:  # 404: no more messages, 408: the request has ended
                    break
                found.append((body, reply))
            if found or time.monotonic() >= until_s:
                return found
            # As Redis: a pull that waits returns a single message, and then each message costs a request.
            time.sleep(POLL_S)

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """See DelayedQueue."""
        self._link.write(b"".join(b"PUB %b 4\r\n+ACK\r\n" % token for token in tokens))

    def close(self) -> None:
        """See DelayedQueue."""
        self._link.close()

    def _api(self, verb: str, request: dict[str, Any]) -> None:
        self._request(f"$JS.API.{verb}".encode(), json.dumps(request).encode())
        _, _, answer = self._message(10.0)
        error = json.loads(answer).get("error")
        if error and error.get("err_code") not in (10058, 10148):  # the stream, the consumer: already there
            raise RuntimeError(f"NATS: {error}")

    def _request(self, subject: bytes, payload: bytes) -> None:
        self._number += 1
        self._link.write(
            b"PUB %b %b.%d %d\r\n%b\r\n" % (subject, self._inbox, self._number, len(payload), payload)
        )

    def _message(self, wait_s: float) -> tuple[bytes, bytes, bytes]:
        """Read a message: its reply subject, its status (empty for an ordinary one) and its payload."""
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s:
            words = self._link.line().split(b" ")
            if words[0] == b"PING":
                self._link.write(b"PONG\r\n")
            elif words[0] == b"MSG":
                return (
                    (words[3] if len(words) == 5 else b""),
                    b"",
                    self._link.exactly(int(words[-1]) + 2)[:-2],
                )
            elif words[0] == b"HMSG":
                head_bytes, size_bytes = int(words[-2]), int(words[-1])
                data = self._link.exactly(size_bytes + 2)[:-2]
                status = data[8:head_bytes].split(b"\r\n", 1)[0].strip()
                return (words[3] if len(words) == 6 else b""), status, data[head_bytes:]
            elif words[0] == b"-ERR":
                raise RuntimeError(f"NATS: {b' '.join(words).decode()}")
        raise TimeoutError("NATS does not answer")


# ---- Timeball ----------------------------------------------------------------------------------------------------


class HttpQueue(DelayedQueue):
    """See the module."""

    def __init__(self, address: str) -> None:
        self._link = Connection(address)
        self._host = address.encode()

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """See DelayedQueue."""
        rows = [{"body": body.decode(), "at": _text_of(due_ms)} for due_ms, body in messages]
        self._ask(b"/v1/topics/%b/messages" % TOPIC.encode(), json.dumps(rows).encode())

    def send_now(self, body: bytes) -> None:
        """Send one message that is visible at once."""
        self._ask(b"/v1/topics/%b/messages" % TOPIC.encode(), json.dumps({"body": body.decode()}).encode())

    def receive(self, rows_max: int, wait_s: float) -> list[Received]:
        """See DelayedQueue."""
        path = f"/v1/topics/{TOPIC}/receive?group={GROUP}&max={rows_max}&wait={int(wait_s * 1000)}ms"
        found = self._ask(path.encode(), b"")["messages"]
        return [(each["body"].encode(), each["receipt"]) for each in found]

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """See DelayedQueue."""
        body = json.dumps({"receipts": list(tokens)}).encode()
        results = self._ask(f"/v1/topics/{TOPIC}/ack?group={GROUP}".encode(), body)["results"]
        if not all(each["valid"] for each in results):
            raise RuntimeError("Timeball: an acknowledged message was not leased")

    def close(self) -> None:
        """See DelayedQueue."""
        self._link.close()

    def _ask(self, path: bytes, body: bytes) -> Any:
        kind = b"content-type: application/json\r\n" if body else b""
        self._link.write(
            b"POST %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n%b"
            % (path, self._host, kind, len(body), body)
        )
        status = self._link.line()
        size_bytes = 0
        while line := self._link.line():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                size_bytes = int(value)
        answer = self._link.exactly(size_bytes)
        if status.split(b" ")[1][:1] != b"2":
            raise RuntimeError(f"Timeball: {answer.decode()}")
        return json.loads(answer)


class HttpStreamQueue(HttpQueue):
    """Receives from a stream with credit. Sends and acknowledgements are those of HttpQueue."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._address = address
        self._stream: socket.socket | None = None
        self._data = bytearray()  # read from the stream, and not a complete chunk yet

    def receive(self, rows_max: int, wait_s: float) -> list[Received]:
        """See DelayedQueue. The first call opens the stream, with `rows_max` as its credit."""
        if self._stream is None:
            self._stream = self._opened(rows_max)
        until_s = time.monotonic() + wait_s
        while True:
            found = [json.loads(line) for line in self._chunk().splitlines() if line]
            if found:
                return [(each["body"].encode(), each["receipt"]) for each in found]
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._stream], [], [], left_s)[0]:
                return []
            data = self._stream.recv(1 << 18)
            if not data:
                raise ConnectionError("the broker closed the stream")
            self._data += data

    def close(self) -> None:
        """See DelayedQueue."""
        super().close()
        if self._stream is not None:
            self._stream.close()

    def _opened(self, credit: int) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        stream = socket.create_connection((host, int(port)), timeout=60)
        path = f"/v1/topics/{TOPIC}/stream?group={GROUP}&credit={credit}"
        stream.sendall(b"POST %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (path.encode(), self._host))
        while b"\r\n\r\n" not in self._data:
            self._data += stream.recv(1 << 16)
        head, _, rest = bytes(self._data).partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"Timeball: {head!r}")
        self._data = bytearray(rest)
        return stream

    def _chunk(self) -> bytes:
        """Take the complete chunks out of what was read (HTTP's chunked coding)."""
        found = b""
        while (end := self._data.find(b"\r\n")) >= 0:
            size_bytes = int(self._data[:end], 16)
            if len(self._data) < end + size_bytes + 4:
                break
            found += bytes(self._data[end + 2 : end + 2 + size_bytes])
            del self._data[: end + size_bytes + 4]
        return found


class PythonQueue(DelayedQueue):
    """See the module."""

    def __init__(self, endpoint: str) -> None:
        self._ball = Timeball(endpoint)

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """See DelayedQueue."""
        self._ball.send_many(
            [{"body": body, "at": datetime.fromtimestamp(due_ms / 1000, UTC)} for due_ms, body in messages],
            topic=TOPIC,
        )

    def receive(self, rows_max: int, wait_s: float) -> list[Received]:
        """See DelayedQueue."""
        found = self._ball.pull(TOPIC, GROUP, max_messages=rows_max, wait=f"{int(wait_s * 1000)}ms")
        return [(each.body, each) for each in found]

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """See DelayedQueue."""
        if self._ball.ack(tokens) != len(tokens):
            raise RuntimeError("Timeball: an acknowledged message was not leased")

    def close(self) -> None:
        """See DelayedQueue."""
        self._ball.close()


class RemotingQueue(DelayedQueue):
    """RocketMQ's protocol: single sends with TIMER_DELIVER_MS in one write, POP, and an ACK for each message."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._splitter = Splitter(1 << 26)

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """See DelayedQueue."""
        fields = {
            "a": "producers",
            "b": TOPIC,
            "c": "TBW102",
            "d": "8",
            "g": "0",
            "h": "0",
            "k": "false",
            "m": "false",
        }
        requests = []
        for number, (due_ms, body) in enumerate(messages):
            properties = encode_properties({"UNIQ_KEY": uuid4().hex, "TIMER_DELIVER_MS": str(due_ms)})
            more = {"e": str(number % 8), "f": "0", "i": properties, "j": "0"}
            requests.append(Command(code=RequestCode.SEND_MESSAGE_V2, opaque=1, ext=fields | more, body=body))
        self._ask(requests)

    def receive(self, rows_max: int, wait_s: float) -> list[Received]:
        """See DelayedQueue."""
        now_ms = time.time_ns() // 1_000_000
        (popped,) = self._ask(
            [
                _request(
                    RequestCode.POP_MESSAGE, queueId=-1, maxMsgNums=min(rows_max, 32), pollTime=int(wait_s * 1000),
                    invisibleTime=LEASE_MS, bornTime=now_ms, initMode=0,
                )
            ],
            {ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND, ResponseCode.POLLING_TIMEOUT},
        )  # fmt: skip
        if popped.code != ResponseCode.SUCCESS:
            return []
        bodies = [message.body for message in decode_stored(popped.body)]
        return list(zip(bodies, points(popped.ext), strict=True))

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        """See DelayedQueue."""
        self._ask(
            [
                _request(
                    RequestCode.ACK_MESSAGE,
                    queueId=token.queue_id,
                    offset=token.offset,
                    extraInfo=token.encode(),
                )
                for token in tokens
            ]
        )

    def close(self) -> None:
        """See DelayedQueue."""
        self._socket.close()

    def _ask(
        self, requests: Sequence[Command], known: Container[int] = frozenset({ResponseCode.SUCCESS})
    ) -> list[Command]:
        self._socket.sendall(b"".join(map(encode_frame, requests)))
        answers: list[Command] = []
        while len(answers) < len(requests):
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionError("the broker closed the connection")
            answers += map(decode_frame, self._splitter.feed(data))
        if wrong := [answer for answer in answers if answer.code not in known]:
            raise RuntimeError(f"Timeball: {wrong[0].code} {wrong[0].remark}")
        return answers


def _request(code: int, **fields: object) -> Command:
    ext = {"consumerGroup": GROUP, "topic": TOPIC, **{name: str(value) for name, value in fields.items()}}
    return Command(code=code, opaque=1, ext=ext, version=409)


def _text_of(due_ms: int) -> str:
    return (
        datetime.fromtimestamp(due_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


CLIENTS: dict[str, Callable[[str], DelayedQueue]] = {
    "redis": RedisQueue, "beanstalkd": BeanstalkQueue, "nats": NatsQueue, "http": HttpQueue,
    "http stream": HttpStreamQueue, "python": PythonQueue, "remoting": RemotingQueue,
}  # fmt: skip
