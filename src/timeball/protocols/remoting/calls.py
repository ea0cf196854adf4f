"""One request of a client and what may be answered: the vocabulary that all rooms of this edge share.

A handler takes a `Call` and returns its answer, now or as a coroutine; None means that no answer is due, or that
it has been sent already. What it raises becomes an answer too (error_codes.py), so no handler translates errors
itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from timeball.access import Caller
from timeball.protocols.error_codes import Refused, codes_of
from timeball.protocols.remoting.codec.codes import BROKER_VERSION, CommandFlag, ResponseCode
from timeball.protocols.remoting.codec.frame import BadHeader, Command

if TYPE_CHECKING:
    from timeball.protocols.remoting.connection import Connection

T = TypeVar("T")

Reply = Command | None


class Call:
    """A request, the connection it came by, and typed access to what is in it."""

    __slots__ = ("caller", "command", "connection", "counted_bytes")

    def __init__(self, connection: Connection, command: Command) -> None:
        self.connection, self.command = connection, command
        self.caller: Caller = (
            connection.caller
        )  # who has signed it: the connection's next request may be another's
        self.counted_bytes = 0  # of a large body: see flow.py

    def fields(self, kind: type[T]) -> T:
        """The extFields as a msgspec Struct; unknown ones are ignored. Raises Refused."""
        try:
            return msgspec.convert(self.command.ext, kind, strict=False)
        except msgspec.ValidationError as error:
            raise Refused(
                ResponseCode.INVALID_PARAMETER, f"code {self.command.code}: a field of the header: {error}"
            ) from error

    def body(self, kind: type[T]) -> T:
        """The JSON body as a msgspec Struct; numbers may be text and the other way round. Raises Refused."""
        try:
            return msgspec.json.decode(self.command.body, type=kind, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(
                ResponseCode.INVALID_PARAMETER, f"code {self.command.code}: the body: {error}"
            ) from error

    def answer(
        self,
        code: int = ResponseCode.SUCCESS,
        remark: str | None = None,
        *,
        ext: dict[str, str] | None = None,
        body: bytes = b"",
    ) -> Command:
        """A response to this request. `ext` is never absent on the wire: Java reads from it without a look."""
        return Command(
            code=code,
            opaque=self.command.opaque,
            flag=CommandFlag.RESPONSE,
            ext=ext or {},
            body=body,
            remark=remark,
            version=BROKER_VERSION,
            serialisation=self.command.serialisation,
        )

    def answer_json(self, value: Any) -> Command:
        """A response whose body is JSON."""
        return self.answer(body=msgspec.json.encode(value))


Handler = Callable[[Call], Reply | Awaitable[Reply]]
Handlers = dict[int, Handler]


def response_code(error: BaseException) -> int:
    """RocketMQ's code for an error; SYSTEM_ERROR for what it has no word for."""
    if isinstance(error, Refused):
        return error.protocol_code
    if isinstance(error, BadHeader):
        return error.response_code
    return ResponseCode[codes_of(error).remoting]
