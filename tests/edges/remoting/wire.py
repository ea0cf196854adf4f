"""A minimal RocketMQ client: sends commands over a real socket, and reads the answers.

Beside the stock clients (tests/interop) this one can be wrong on purpose.
"""

from __future__ import annotations

import itertools
import socket
from types import TracebackType
from typing import Any, Self

import msgspec
from tests.node_fixture import BOUND_S, RunningNode

from timeball.edges.remoting.codec.codes import CommandFlag, ResponseCode
from timeball.edges.remoting.codec.frame import JSON, Command, Splitter, decode, encode


class Wire:
    """One connection. Answers are matched by opaque. Requests from the broker are kept in `pushed`."""

    def __init__(self, port: int, serialisation: int = JSON, source: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection(
            ("127.0.0.1", port), timeout=BOUND_S, source_address=(source, 0)
        )
        self._splitter = Splitter()
        self._opaques = itertools.count(1)
        self._answers: dict[int, Command] = {}
        self.serialisation = serialisation
        self.pushed: list[Command] = []

    @classmethod
    def to(cls, node: RunningNode, serialisation: int = JSON, source: str = "127.0.0.1") -> Wire:
        return cls(node.node.remoting_port, serialisation, source)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ask(self, code: int, body: Any = b"", **ext: object) -> Command:
        """Send a request and wait for its answer."""
        return self.answer_to(self.send(code, body, **ext))

    def ask_ok(self, code: int, body: Any = b"", **ext: object) -> Command:
        """Send a request and assert that the answer is SUCCESS."""
        answer = self.ask(code, body, **ext)
        assert answer.code == ResponseCode.SUCCESS, (answer.code, answer.remark)
        return answer

    def send(self, code: int, body: Any = b"", *, one_way: bool = False, **ext: object) -> int:
        """Send a request and return its opaque. A body that is not bytes is encoded as JSON."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        command = Command(
            code=code,
            opaque=next(self._opaques),
            flag=CommandFlag.ONE_WAY if one_way else 0,
            ext={name: _text(value) for name, value in ext.items() if value is not None},
            body=data,
            version=409,
            serialisation=self.serialisation,
        )
        self.send_bytes(encode(command))
        return command.opaque

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def reply(self, request: Command, code: int = 0, **ext: str) -> None:
        """Answer a request from the broker."""
        self.send_bytes(
            encode(Command(code=code, opaque=request.opaque, flag=CommandFlag.RESPONSE, ext=dict(ext)))
        )

    def answer_to(self, opaque: int) -> Command:
        """Wait for the answer to a request, and return it once."""
        while opaque not in self._answers:
            self.read()
        return self._answers.pop(opaque)

    def read(self) -> None:
        """Read the commands that arrive next. Raises EOFError if the broker has closed."""
        data = self._socket.recv(1 << 20)
        if not data:
            raise EOFError
        for frame in self._splitter.feed(data):
            command = decode(frame)
            if command.is_response:
                self._answers[command.opaque] = command
            else:
                self.pushed.append(command)

    def next_pushed(self) -> Command:
        """Return the next request from the broker."""
        while not self.pushed:
            self.read()
        return self.pushed.pop(0)

    def is_closed(self) -> bool:
        """Wait until the broker closes the connection."""
        try:
            while True:
                self.read()
        except (EOFError, ConnectionError):
            return True


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def json_body(command: Command) -> Any:
    """Return the JSON document in the body of a command."""
    return msgspec.json.decode(command.body)
