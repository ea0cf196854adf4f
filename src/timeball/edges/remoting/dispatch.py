"""Route each request to its handler and send the answer.

The table of handlers joins the tables of all handler classes. A request code without a handler is answered with
REQUEST_CODE_NOT_SUPPORTED, which every client can handle. Every request gets exactly one answer, unless it is one-way.
If a handler fails because of a fault in the broker, the client gets SYSTEM_ERROR and the log gets the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable

from timeball.edges.remoting.calls import (
    Call,
    Handler,
    Handlers,
    Reply,
    refuse_unsupported_fields,
    response_code,
)
from timeball.edges.remoting.codec import frame as codec
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, Frame
from timeball.edges.remoting.connection import CALLS_MAX, Connection
from timeball.edges.shared.error_codes import log_failure, sentence

logger = logging.getLogger(__name__)


class Dispatch:
    """Maps request codes to handlers. Belongs to the event loop."""

    def __init__(self, handler_tables: Iterable[Handlers]) -> None:
        self._handlers: dict[int, Handler] = {}
        for handlers in handler_tables:
            duplicates = self._handlers.keys() & handlers.keys()
            assert not duplicates, f"two handlers for the request codes {duplicates}"
            self._handlers |= handlers
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, connection: Connection, frame: Frame) -> None:
        """Handle one frame: a request of the client, or its answer to a request of the broker. Raises BadFrame."""
        command = codec.decode(frame)
        if command.is_response:
            connection.receive_answer(command)
        else:
            self.handle(connection, command)

    def has_handler(self, code: int) -> bool:
        """Return whether there is a handler for this request code."""
        return code in self._handlers

    def refuse(self, connection: Connection, command: Command, error: Exception) -> None:
        """Answer a request with an error. Its handler is not called."""
        call = Call(connection, command)
        self._reply(call, answer_failure(call, error))

    def handle(self, connection: Connection, command: Command) -> None:
        """Call the handler of a request, and send its answer now or when it is ready."""
        call = Call(connection, command)
        handler = self._handlers.get(command.code)
        if handler is None:
            self._reply(call, _answer_not_supported(call))
            return
        if connection.calls >= CALLS_MAX:
            remark = f"{CALLS_MAX} requests of this connection are pending"
            self._reply(call, call.answer(ResponseCode.SYSTEM_BUSY, remark))
            return
        if connection.flow.is_full:
            remark = "too many answers to this address are unread: read them before you send more requests"
            self._reply(call, call.answer(ResponseCode.SYSTEM_BUSY, remark))
            return
        try:
            refuse_unsupported_fields(command)
            reply = handler(call)
        except Exception as error:  # any exception: the client gets an error answer, and the broker continues
            self._reply(call, answer_failure(call, error))
            return
        if reply is None or isinstance(reply, Command):
            self._reply(call, reply)
            return
        connection.calls += 1
        call.counted_bytes = connection.flow.count_request(len(command.body))
        task = asyncio.ensure_future(self._answer_later(call, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_later(self, call: Call, reply: Awaitable[Reply]) -> None:
        """Wait for the reply of a handler, send it, and stop counting the request."""
        try:
            self._reply(call, await reply)
        except Exception as error:  # any exception, as in `handle`
            self._reply(call, answer_failure(call, error))
        finally:
            call.connection.calls -= 1
            call.connection.flow.release_request(call.counted_bytes)

    @staticmethod
    def _reply(call: Call, reply: Reply) -> None:
        if reply is not None and not call.command.is_one_way:
            call.connection.send(reply)

    async def close(self) -> None:
        """Cancel the pending requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def answer_failure(call: Call, error: Exception) -> Command:
    """Create the answer to a request that failed. An internal fault is logged."""
    log_failure(logger, str(call.command.code), error)
    return call.answer(response_code(error), sentence(error))


def _answer_not_supported(call: Call) -> Command:
    """Create the answer to a request code without a handler."""
    code = call.command.code
    name = RequestCode(code).name if code in set(RequestCode) else "unknown"
    return call.answer(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"request code {code} ({name}) is not supported by Timeball"
    )
