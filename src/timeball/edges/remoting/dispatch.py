"""Call the handler of each request and send its answer.

The table of handlers joins the tables of all handler classes. A code without a handler is answered with
REQUEST_CODE_NOT_SUPPORTED, which every client survives. Every request gets exactly one answer, unless it is one-way. If
a handler fails because of a fault in the broker, the client gets SYSTEM_ERROR and the log gets the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable

from timeball.edges.remoting.calls import Call, Handler, Handlers, Reply, check_new_fields, response_code
from timeball.edges.remoting.codec import frame as codec
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, Frame
from timeball.edges.remoting.connection import CALLS_MAX, Connection
from timeball.edges.shared.error_codes import log_failure, sentence

logger = logging.getLogger(__name__)


class Dispatch:
    """Calls the handler of each request, and sends its answer."""

    def __init__(self, rooms: Iterable[Handlers]) -> None:
        self._handlers: dict[int, Handler] = {}
        for handlers in rooms:
            twice = self._handlers.keys() & handlers.keys()
            assert not twice, f"two rooms offer {twice}"
            self._handlers |= handlers
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, connection: Connection, frame: Frame) -> None:
        """Handle one frame. Raises BadFrame if it contains no command."""
        command = codec.decode(frame)
        if command.is_response:
            connection.answered(command)
        else:
            self.handle(connection, command)

    def offers(self, code: int) -> bool:
        """Return whether there is a handler for this code."""
        return code in self._handlers

    def refuse(self, connection: Connection, command: Command, error: Exception) -> None:
        """Answer a request with an error, without a call of its handler."""
        call = Call(connection, command)
        self._reply(call, failure(call, error))

    def handle(self, connection: Connection, command: Command) -> None:
        """Call the handler of a request, and send its answer now or when it is ready."""
        call = Call(connection, command)
        handler = self._handlers.get(command.code)
        if handler is None:
            self._reply(call, _not_supported(call))
            return
        if connection.calls >= CALLS_MAX:
            remark = f"{CALLS_MAX} requests of this connection wait for their answers"
            self._reply(call, call.answer(ResponseCode.SYSTEM_BUSY, remark))
            return
        if connection.flow.is_full:
            remark = "too many answers to this address are not read yet: read them, then ask on"
            self._reply(call, call.answer(ResponseCode.SYSTEM_BUSY, remark))
            return
        try:
            check_new_fields(command)
            reply = handler(call)
        except Exception as error:  # any exception: the client gets an error answer, and the broker continues
            self._reply(call, failure(call, error))
            return
        if reply is None or isinstance(reply, Command):
            self._reply(call, reply)
            return
        connection.calls += 1
        call.counted_bytes = connection.flow.begins(len(command.body))
        task = asyncio.ensure_future(self._finish(call, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, call: Call, pending: Awaitable[Reply]) -> None:
        try:
            self._reply(call, await pending)
        except Exception as error:  # any exception, as in `handle`
            self._reply(call, failure(call, error))
        finally:
            call.connection.calls -= 1
            call.connection.flow.ends(call.counted_bytes)

    @staticmethod
    def _reply(call: Call, reply: Reply) -> None:
        if reply is not None and not call.command.is_one_way:
            call.connection.send(reply)

    async def close(self) -> None:
        """Cancel the requests that still wait for an answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def failure(call: Call, error: Exception) -> Command:
    """Return the answer to a request that failed, and log the failure."""
    log_failure(logger, str(call.command.code), error)
    return call.answer(response_code(error), sentence(error))


def _not_supported(call: Call) -> Command:
    code = call.command.code
    name = RequestCode(code).name if code in set(RequestCode) else "unknown"
    return call.answer(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"request code {code} ({name}) is not supported by Timeball"
    )
